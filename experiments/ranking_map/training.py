"""Trains a network by plain torch, and keeps everything that an audit may be given."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import palimpsest as pal
from palimpsest.datasets import DataSet
from ranking_map.networks import Network

BATCH, DECAY, NOISE = 10, 1e-3, 0.05
CLOSE = 0.05  # training ends if no output is off by more than this
RATES = {"momentum": 1e-2, "mini-batches": 1e-2, "adam": 1e-3, "decay": 1e-2}
SEGMENTS = 3


@dataclass(frozen=True)
class Left:
    """What a training left behind. Checkpoints start with the initial weights and end with the final ones."""

    model: nn.Module
    checkpoints: list[dict[str, Tensor]]
    optimiser: dict[str, Any] | None = None


def trained(network: Network, data: DataSet) -> Left:
    torch.manual_seed(network.seed)
    model, x, y = network.made(data).eval(), data.centred(data.train.images), data.train.labels
    start = copy.deepcopy(model.state_dict())
    if network.training == "noise":
        for p in model.parameters():
            p.data += NOISE * p.data.norm() * F.normalize(torch.randn(p.numel()), dim=0).view_as(p)
        return Left(model, [start, model.state_dict()])
    if network.training == "palimpsest":
        fit = pal.train(model, x, y, loss=network.loss, steps=network.epochs)
        return Left(fit.model, [start, fit.model.state_dict()])
    rate = RATES[network.training] / (1 if network.architecture == "mlp" else 10)
    while (left := _tried(model, x, y, network, rate)) is None:
        model.load_state_dict(start)
        rate /= 2
    return left


def _tried(model: nn.Module, x: Tensor, y: Tensor, network: Network, rate: float) -> Left | None:
    """None if the loss exploded."""
    rule, states = _optimiser(model, network, rate), [copy.deepcopy(model.state_dict())]
    batch = BATCH if network.training == "mini-batches" else len(x)
    first = math.nan
    for _ in range(network.epochs):
        for rows in torch.randperm(len(x)).split(batch):
            rule.zero_grad()
            loss = loss_of(model(x[rows]), y[rows], network.loss)
            loss.backward()
            rule.step()
        first = float(loss.detach()) if math.isnan(first) else first
        if not loss.isfinite() or float(loss.detach()) > 10 * (1 + first):
            return None
        if "C" in network.rungs:
            states.append(copy.deepcopy(model.state_dict()))
        if float(loss.detach()) < CLOSE**2 and network.training != "decay":
            break
    way = _equally_far(states) if "C" in network.rungs else [states[0]]
    return Left(model, [*way, copy.deepcopy(model.state_dict())], rule.state_dict())


def _optimiser(model: nn.Module, network: Network, rate: float) -> torch.optim.Optimizer:
    if network.training == "adam":
        return torch.optim.Adam(model.parameters(), lr=rate)
    decay = DECAY if network.training == "decay" else 0.0
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=decay)


def loss_of(outputs: Tensor, y: Tensor, loss: str) -> Tensor:
    if loss == "cross_entropy":
        return F.cross_entropy(outputs, y)
    wanted = y.float() if outputs.shape[1] == 1 else F.one_hot(y, outputs.shape[1]).float()
    outputs = outputs.flatten() if outputs.shape[1] == 1 else outputs
    return F.softplus(-wanted * outputs).mean() if loss == "logistic" else (outputs - wanted).square().mean()


def _equally_far(states: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """The first state, and those that divide the way to the last into equal parts."""
    moved = [sum(float((s[name] - t).square().sum()) for name, t in states[0].items()) ** 0.5 for s in states]
    goals = [moved[-1] * j / SEGMENTS for j in range(1, SEGMENTS)]
    chosen = sorted({min(range(1, len(states) - 1), key=lambda i: abs(moved[i] - goal)) for goal in goals})
    return [states[0], *(states[i] for i in chosen)]
