"""The images of a setting, its initial network, and its training, done once for all columns."""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from provenance import made_by
from torch import Tensor, nn

import palimpsest as pal
from palimpsest.datasets import DataSet
from palimpsest.datasets.base import ENVIRONMENT, SOURCES, Part
from palimpsest.execution.precision import matrix_products
from palimpsest.files.storage import load_tensors, save_tensors, write_atomically
from palimpsest.training.problem import TrainingProblem
from published.descent import Descent, put_into
from published.recipes import Precision, Setting

TUNING = 11  # the seed on which our own settings are tried; it shares no image with any other
SMALL = 1e-4  # the first layer's initial size
TRUNCATED = 0.87962566103423978  # standard deviation of N(0, 1) cut off at ±2
RECORDS = 200
EARLY = (50, 100, 150, *range(200, 1_601, 100), 2_000, 2_400, 3_200, 4_000)
CHECKPOINTS = (*EARLY, 5_000, 6_400, 9_000, 12_800, 18_000, 30_000, 200_000)  # steps whose weights are kept too


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
    """The network after training, its initial weights, facts about the training, and weights on the way by step."""

    model: nn.Module
    initial: dict[str, Tensor]
    facts: dict[str, Any]
    checkpoints: Mapping[int, dict[str, Tensor]] = field(default_factory=dict)


def train(setting: Setting, seeds: Sequence[int], precision: Precision, scratch: Path, results: Path) -> None:
    """Train the networks of these seeds at once, those that have no file yet."""
    seeds = [seed for seed in seeds if not network_file(setting, seed, precision, scratch).exists()]
    if not seeds:
        return
    data = [load(setting, seed) for seed in seeds]
    images = [each.centred(each.train.images.double()) for each in data]
    descent = Descent(
        [network(setting, each.image_shape, seed).to(device()) for each, seed in zip(data, seeds, strict=True)],
        images,
        [each.train.labels for each in data],
        setting.loss,
        setting.learning_rate,
        momentum=setting.momentum,
        decay=setting.weight_decay,
        stop=setting.stop,
        dtype=dtype_of(precision),
    )
    began, history = time.perf_counter(), list[tuple[int, list[float]]]()

    def tell(step: int, losses: list[float]) -> None:
        history.append((step, [float(f"{loss:.5g}") for loss in losses]))
        for number, seed in enumerate(seeds if step in CHECKPOINTS else ()):
            if losses[number] <= setting.stop:  # its weights are those at the end
                continue
            file = checkpoint_file(setting, seed, precision, scratch, step)
            save_tensors(file, {name: t.float() for name, t in descent.changes(number).items()}, {})
        if step % record_every == 0 and step % max(1, setting.training_steps // 20) < record_every:
            seconds = time.perf_counter() - began
            print(
                f"{setting.name} {precision} seeds {seeds}: step {step}, losses {history[-1][1]}, {seconds:.0f} s",
                flush=True,
            )

    record_every = max(1, setting.training_steps // RECORDS)
    folder = network_file(setting, seeds[0], precision, scratch).parent
    folder.mkdir(parents=True, exist_ok=True)
    half_way = folder / f"training-{precision}-{'-'.join(map(str, seeds))}.checkpoint"
    with matrix_products(tf32=precision == "tf32", device=device()):
        descent.train(
            setting.training_steps, record_every=record_every, tell=tell, also=CHECKPOINTS, checkpoint=half_way
        )
    seconds = time.perf_counter() - began
    for number, seed in enumerate(seeds):
        steps = next((step for step, losses in history if losses[number] <= setting.stop), descent.step)
        facts = {"precision": precision, "steps": steps, "seconds": round(seconds, 1), "at once": len(seeds)}
        shrinkage = decayed(setting, steps)
        kept = {name: t.to(dtype_of(precision)) for name, t in descent.changes(number).items()}
        facts |= _described(setting, data[number], built(setting, seed, data[number], kept, shrinkage))
        description = {"asked": _asked(setting), "facts": facts, "shrinkage": shrinkage}
        save_tensors(network_file(setting, seed, precision, scratch), kept, description)
        command = f"python experiments/published --setting {setting.name} --seed {seed} --precision {precision}"
        curve = [[step, losses[number]] for step, losses in history if step <= steps]
        write_json(results / f"training-seed{seed}-{precision}.json", made_by(command) | facts | {"history": curve})
        print(f"{setting.name} seed {seed}: {facts}", flush=True)
    half_way.unlink(missing_ok=True)


def trained(setting: Setting, seed: int, precision: Precision, scratch: Path, results: Path) -> Trained:
    """The trained network of a seed, from its file if there is one."""
    train(setting, [seed], precision, scratch, results)
    file, data = network_file(setting, seed, precision, scratch), load(setting, seed)
    kept, description = load_tensors(file)
    if description["asked"] != _asked(setting):
        raise ValueError(f"{file} holds a network of other settings; delete it")
    model = built(setting, seed, data, kept, description["shrinkage"]).to(dtype_of(precision))
    start = network(setting, data.image_shape, seed).to(device(), dtype_of(precision))
    files = {step: checkpoint_file(setting, seed, precision, scratch, step) for step in CHECKPOINTS}
    between = {
        step: built(setting, seed, data, load_tensors(file)[0], decayed(setting, step)).state_dict()
        for step, file in files.items()
        if file.exists()
    }
    return Trained(model, start.state_dict(), description["facts"], between)


def checkpoint_file(setting: Setting, seed: int, precision: Precision, scratch: Path, step: int) -> Path:
    return network_file(setting, seed, precision, scratch).with_suffix(f".step{step}.safetensors")


def decayed(setting: Setting, steps: int) -> float:
    """By how much weight decay shrank the weights that the images do not move."""
    return (1 - setting.learning_rate * setting.weight_decay) ** steps


def network_file(setting: Setting, seed: int, precision: Precision, scratch: Path) -> Path:
    return scratch / setting.name / f"network-seed{seed}-{precision}.safetensors"


def built(setting: Setting, seed: int, data: DataSet, kept: dict[str, Tensor], shrinkage: float) -> nn.Module:
    """The network with the weights of a file, in float64."""
    model = network(setting, data.image_shape, seed).to(device())
    put_into(model, data.centred(data.train.images.double()), kept, shrinkage=shrinkage)
    return model


def _asked(setting: Setting) -> dict[str, Any]:
    """What of a setting its training depends on."""
    asked: dict[str, Any] = json.loads(json.dumps(asdict(setting)))
    return {name: asked[name] for name in asked if name not in ("runs", "candidates", "steps", "own_steps", "differs")}


def _described(setting: Setting, data: DataSet, model: nn.Module) -> dict[str, Any]:
    """How converged the network is, computed in float64."""
    images = data.centred(data.train.images.double()).to(device())
    problem = TrainingProblem(model, images, data.train.labels, setting.loss, 0.0)
    θ = problem.start
    numbers, degree = problem.evaluate(θ).numbers, problem.degree(θ)
    norm, margin = float(numbers.norm), float(numbers.margin)
    return {
        "loss": math.exp(min(float(numbers.log_loss), 700.0)),
        "accuracy": problem.accuracy(θ),
        "margin": margin,
        "normalised margin": None if degree is None else margin / norm**degree,
        "kkt residual": None if setting.loss == "squared" else float(numbers.kkt_residual),
        "norm": norm,
        "weights": fingerprint(model),
    }


def fingerprint(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.cpu().numpy().tobytes())
    return digest.hexdigest()[:12]


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (json.dumps(content, separators=(",", ":")) + "\n").encode())
