"""The images of a setting, its initial network, and its training, done once for all columns."""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from provenance import made_by
from torch import Tensor, nn

import palimpsest as pal
from palimpsest.datasets import DataSet
from palimpsest.datasets.base import ENVIRONMENT, SOURCES, Part
from palimpsest.files.storage import load_tensors, save_tensors, write_atomically
from published.recipes import Precision, Setting

TUNING = 11  # the seed on which our own settings are tried; it shares no image with any other
SMALL = 1e-4  # the first layer's initial size
TRUNCATED = 0.87962566103423978  # standard deviation of N(0, 1) cut off at ±2
RECORDS = 200


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def dtype_of(precision: Precision) -> torch.dtype:
    return torch.float64 if precision == "float64" else torch.float32


# --- images ---------------------------------------------------------------------------------------


def load(setting: Setting, seed: int) -> DataSet:
    """Training and held-out images. Seed 1 has the first of each class in the order of the file, as the authors have.

    Seeds 2, 3, … have others, all different. The tuning seed has the last, of CIFAR-10's test file or of MNIST.
    """
    root = os.environ.get(ENVIRONMENT)
    name = "cifar10-test" if seed == TUNING and setting.data == "cifar10" else setting.data
    source = SOURCES[name](Path(root).expanduser() if root else None)
    if setting.task == "binary":
        assert source.positive is not None
        labels = np.where(np.isin(source.labels, list(source.positive)), 1, -1)
        classes: tuple[str, ...] = source.sides
    else:
        labels, classes = source.labels, source.classes
    rows = [_rows(np.flatnonzero(labels == label), setting.per_class, seed) for label in np.unique(labels)]
    train, held_out = (
        Part(_unit(source.images[r]), torch.from_numpy(labels[r].astype(np.int64)))
        for r in map(np.concatenate, zip(*rows, strict=True))
    )
    mean = train.images.double().mean(0)
    if setting.mean == "channel":
        mean = mean.mean((1, 2), keepdim=True).expand_as(mean)
    return DataSet(setting.data, train, held_out, mean.contiguous(), classes)


def _rows(of_class: np.ndarray, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows to train on and rows held out."""
    both = 2 * count
    if seed == TUNING:
        of_class = of_class[-both:]
    elif seed > 1:
        of_class = np.random.default_rng(0).permutation(of_class[both:-both])[both * (seed - 2) :]
    if len(of_class) < both:
        raise ValueError(f"there are too few images for seed {seed}")
    return of_class[:count], of_class[count:both]


def _unit(images: np.ndarray) -> Tensor:
    scale = 255 if images.dtype == np.uint8 else 1
    return torch.from_numpy(images.astype(np.float32) / np.float32(scale))


# --- the network ----------------------------------------------------------------------------------


def network(setting: Setting, image_shape: tuple[int, ...], seed: int) -> nn.Module:
    """The network before training, in float64."""
    outputs = 1 if setting.task == "binary" else setting.classes
    lecun = setting.start == "lecun"
    model = pal.networks.MLP(image_shape, setting.hidden, outputs, bias="all" if lecun else "first").double()
    torch.manual_seed(seed)
    with torch.no_grad():
        for number, layer in enumerate(model.layers):
            assert isinstance(layer, nn.Linear)
            if lecun:
                std = 1 / math.sqrt(layer.in_features) / TRUNCATED
                nn.init.trunc_normal_(layer.weight, 0.0, std, -2 * std, 2 * std)
            elif number == 0:
                layer.weight.normal_().mul_(SMALL)
                layer.bias.normal_().mul_(SMALL)
            else:
                bound = 1 / math.sqrt(layer.in_features)  # PyTorch's default
                layer.weight.uniform_(-bound, bound)
    return model


@dataclass(frozen=True)
class Trained:
    """The network after training, its initial weights, and facts about the training."""

    model: nn.Module
    initial: dict[str, Tensor]
    facts: dict[str, Any]


def trained(setting: Setting, seed: int, precision: Precision, scratch: Path, results: Path) -> Trained:
    """The trained network, from its file if there is one."""
    data = load(setting, seed)
    start = network(setting, data.image_shape, seed).to(device(), dtype_of(precision))
    initial = {name: t.clone() for name, t in start.state_dict().items()}
    file = scratch / setting.name / f"network-seed{seed}-{precision}.safetensors"
    file.parent.mkdir(parents=True, exist_ok=True)
    wanted = json.loads(json.dumps(asdict(setting)))
    wanted = {name: wanted[name] for name in wanted if name not in ("runs", "candidates", "steps", "differs")}
    if file.exists():
        final, description = load_tensors(file)
        if description["asked"] != wanted:
            raise ValueError(f"{file} holds a network of other settings; delete it")
        start.load_state_dict(final)
        return Trained(start, initial, description["facts"])
    began = time.perf_counter()
    fit = pal.train(
        start,
        data.centred(data.train.images.double()),
        data.train.labels,
        loss=setting.loss,
        steps=setting.training_steps,
        learning_rate=setting.learning_rate,
        momentum=setting.momentum,
        weight_decay=setting.weight_decay,
        plain=True,
        tolerance=setting.stop,
        record_every=max(1, setting.training_steps // RECORDS),
        callback=lambda entry: _tell(setting, seed, precision, entry, began),
        execution=pal.Execution(tf32=precision == "tf32"),
        checkpoint=file.with_suffix(".checkpoint"),
    )
    facts = {
        "precision": precision,
        "summary": fit.summary,
        "steps": int(fit.history[-1]["step"]),
        "seconds": round(time.perf_counter() - began, 1),
        "loss": fit.loss,
        "accuracy": fit.accuracy,
        "margin": fit.margin,
        "normalised margin": fit.normalised_margin,
        "kkt residual": fit.kkt_residual,
        "norm": math.sqrt(sum(float(p.detach().double().square().sum()) for p in fit.model.parameters())),
        "weights": fingerprint(fit.model),
    }
    save_tensors(file, fit.model.state_dict(), {"asked": wanted, "facts": facts})
    command = f"python experiments/published --setting {setting.name} --seed {seed} --precision {precision}"
    history = [{name: float(f"{value:.6g}") for name, value in entry.items()} for entry in fit.history]
    write_json(results / f"training-seed{seed}-{precision}.json", made_by(command) | facts | {"history": history})
    return Trained(fit.model, initial, facts)


def _tell(setting: Setting, seed: int, precision: str, entry: dict[str, float], began: float) -> None:
    if entry["step"] % max(1, setting.training_steps // 10) == 0:
        numbers = ", ".join(f"{name} {entry[name]:.4g}" for name in ("loss", "margin", "kkt_residual") if name in entry)
        seconds = time.perf_counter() - began
        print(
            f"{setting.name} seed {seed} {precision}: step {entry['step']:.0f}, {numbers}, {seconds:.0f} s", flush=True
        )


def fingerprint(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.cpu().numpy().tobytes())
    return digest.hexdigest()[:12]


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (json.dumps(content, separators=(",", ":")) + "\n").encode())
