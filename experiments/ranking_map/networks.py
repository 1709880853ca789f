"""Which networks the map is fitted on, and which ones it is tried on.

Validation has other seeds, and kinds that the fit does not have: a residual network, and a convolutional network on
colour images.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

import palimpsest as pal
from palimpsest.auditing.options import RungName
from palimpsest.datasets import DataSet

Training = Literal["momentum", "mini-batches", "adam", "decay", "palimpsest", "noise"]


@dataclass(frozen=True, kw_only=True)
class Network:
    """A network, how it is trained, and what the audit that reads it may know."""

    data: str
    per_class: int
    seed: int
    architecture: Literal["mlp", "cnn", "resnet"] = "mlp"
    width: int = 300
    classes: bool = False
    """Whether there is an output for each class of the data; one output otherwise."""
    training: Training = "momentum"
    loss: pal.training.LossName = "squared"
    epochs: int = 600
    rungs: tuple[RungName, ...] = ("W0",)
    steps: int = 600
    """Of each reconstruction."""
    tangents: Literal[1, 2] = 1
    restarts: int = 3
    permuted: bool = False
    """Whether the change of the weights is put in disorder before it is read, so that there is nothing to read."""

    @property
    def name(self) -> str:
        outputs = "classes" if self.classes else "binary"
        how = f"{self.training}-{self.loss}-{self.epochs}-{'+'.join(self.rungs)}-{self.steps}-{self.tangents}"
        how += "-permuted" if self.permuted else ""
        return f"{self.data}-{self.per_class}-{outputs}-{self.architecture}{self.width}-{how}-seed{self.seed}"

    def images(self) -> DataSet:
        task: Literal["classes", "binary"] = "classes" if self.classes else "binary"
        return pal.datasets.load(self.data, per_class=self.per_class, seed=self.seed, task=task)

    def made(self, data: DataSet) -> nn.Module:
        outputs = len(data.classes) if self.classes else 1
        if self.architecture == "mlp":
            # A small first layer forgets its start, as the methods for the final weights need it.
            scale = 0.1 if "W" in self.rungs else 1.0
            hidden = (self.width, self.width)
            return pal.networks.MLP(data.image_shape, hidden, outputs, scale=(scale, 1.0, 1.0))
        make = convolutional if self.architecture == "cnn" else Residual
        return make(data.image_shape, self.width, outputs)


def convolutional(image_shape: tuple[int, ...], width: int, outputs: int) -> nn.Module:
    """Two convolutions and two dense layers, with He's start."""
    side = (image_shape[1] + 3) // 4  # after two strides of two
    model = nn.Sequential(
        nn.Conv2d(image_shape[0], width, 5, 2, 2), nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, 2, 1), nn.ReLU(),
        nn.Flatten(), nn.Linear(2 * width * side**2, 8 * width), nn.ReLU(), nn.Linear(8 * width, outputs),
    )  # fmt: skip
    return start_as_he(model)


def start_as_he(model: nn.Module) -> nn.Module:
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(layer.weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return model


class Residual(nn.Module):
    """A residual network of two blocks, with batch normalisation whose statistics stay fixed."""

    def __init__(self, image_shape: tuple[int, ...], width: int, outputs: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(image_shape[0], width, 3, 2, 1, bias=False)
        self.convolutions = nn.ModuleList(nn.Conv2d(width, width, 3, 1, 1, bias=False) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(5))
        self.head = nn.Linear(width * ((image_shape[1] + 1) // 2) ** 2, outputs)
        start_as_he(self)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norms[0](self.stem(x)))
        for i in (0, 2):
            inner = torch.relu(self.norms[i + 1](self.convolutions[i](x)))
            x = torch.relu(x + self.norms[i + 2](self.convolutions[i + 1](inner)) / 2)
        return self.head(x.flatten(1))


SMALL = {"data": "digits", "width": 200}
CIFAR = {"data": "cifar10", "width": 300, "steps": 300}
CNN = {"architecture": "cnn", "width": 16, "steps": 400, "restarts": 2}
RESNET = {"architecture": "resnet", "width": 8, "steps": 400, "restarts": 2}
CLASSES = {"classes": True, "loss": "cross_entropy"}
FINAL = {"training": "palimpsest", "rungs": ("W",), "epochs": 5000}
TWICE: tuple[dict, ...] = (  # kinds of which the fit has two networks, and the validation two others
    {"data": "faces", "per_class": 10},
    {"data": "faces", "per_class": 10, "training": "adam"},
    {"data": "mnist", "per_class": 10, "training": "mini-batches"},
    SMALL | CNN | {"per_class": 5},
    SMALL | CLASSES | {"per_class": 2},
    {"data": "faces", "per_class": 10, "training": "mini-batches", "rungs": ("O",), "steps": 400},
    SMALL | {"per_class": 10, "training": "adam", "tangents": 2, "steps": 400},
    CIFAR | {"per_class": 10},
    {"data": "mnist", "per_class": 5, "training": "adam"},
    CLASSES | {"data": "mnist", "per_class": 1, "training": "mini-batches"},
    SMALL | FINAL | {"per_class": 5, "loss": "logistic"},
    SMALL | FINAL | CLASSES | {"per_class": 1},
    {"data": "mnist", "per_class": 5, "training": "adam", "rungs": ("O",), "steps": 400},
    SMALL | CNN | CLASSES | {"per_class": 1},
    {"data": "mnist", "per_class": 1, "classes": True, "training": "adam"},
    CLASSES | {"data": "mnist", "per_class": 2},
    SMALL | {"per_class": 1, "classes": True, "training": "adam"},
    CIFAR | {"per_class": 1, "classes": True, "training": "adam"},
    SMALL | FINAL | CLASSES | {"per_class": 2},
)
ONCE: tuple[dict, ...] = (  # one in the fit, and one in the validation
    {"data": "faces", "per_class": 5, "permuted": True},
    SMALL | {"per_class": 10, "training": "palimpsest"},
    SMALL | {"per_class": 5, "training": "noise"},
    {"data": "faces", "per_class": 5, "tangents": 2, "steps": 400},
    {"data": "faces", "per_class": 20, "training": "decay", "steps": 400},
    FINAL | CLASSES | {"data": "mnist", "per_class": 1},
    SMALL | CNN | {"per_class": 5, "permuted": True},
)
CHECKPOINTS: tuple[dict, ...] = (
    {"data": "faces", "per_class": 10, "training": "mini-batches", "rungs": ("C",), "steps": 400},
    {"data": "mnist", "per_class": 10, "rungs": ("C",), "steps": 400},
    SMALL | {"per_class": 10, "rungs": ("C",), "steps": 400},
    CIFAR | {"per_class": 5, "rungs": ("C",)},
)
UNSEEN: tuple[dict, ...] = (  # kinds that the fit does not have
    SMALL | RESNET | {"per_class": 5},
    CIFAR | CNN | {"per_class": 3, "steps": 300},
)
FIT_SEEDS, VALIDATION_SEEDS = (0, 1, 2, 3), (110, 111, 112, 113)


def _networks(seed: int, *kinds: dict) -> list[Network]:
    return [Network(seed=seed, **kind) for kind in kinds]


def _longer(networks: list[Network]) -> list[Network]:
    """As an audit with more time reads them."""
    return [replace(network, steps=2 * network.steps, restarts=6) for network in networks]


FIT = _networks(0, *TWICE, *ONCE, *CHECKPOINTS) + _networks(1, *TWICE, *CHECKPOINTS)
FIT += _longer(_networks(2, *TWICE, *ONCE, *CHECKPOINTS) + _networks(3, *TWICE, *CHECKPOINTS))
VALIDATION = _networks(110, *UNSEEN, *TWICE, *ONCE, *CHECKPOINTS) + _networks(111, *UNSEEN, *TWICE, *CHECKPOINTS)
VALIDATION += _longer(_networks(112, *UNSEEN, *TWICE, *ONCE, *CHECKPOINTS))
VALIDATION += _longer(_networks(113, *UNSEEN, *TWICE, *CHECKPOINTS))
