"""The first job: train a network and keep its weights in a run folder.

The same options and seed give the same numbers from the command line and from Python.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

import palimpsest as pal
from palimpsest.datasets import DataSet
from palimpsest.errors import CheckpointError, InvalidInputError, RunFolderError
from palimpsest.files.schema import Positive, Range, built, check_options
from palimpsest.runs import estimates
from palimpsest.runs.folder import RunFolder
from palimpsest.runs.journal import Pulse, note
from palimpsest.training import Fit, LossName

RecordCallback = Callable[[dict[str, float]], None]


@dataclass(frozen=True)
class TrainOptions:
    """Which network to train on which images."""

    data: str = "faces"
    """Dataset: faces, digits, mnist, cifar10, a folder with a sub-folder per class, or an .npz file."""
    per_class: Positive = 20
    """Training images per class."""
    task: Literal["binary", "classes"] | None = None
    """binary: one output and labels ±1. classes: one output per class. If omitted: the one that fits the data."""
    data_root: Path | None = None
    """Folder of the MNIST and CIFAR-10 files. If omitted: $PALIMPSEST_DATA; if that is not set, they are downloaded."""
    hidden: tuple[Positive, ...] = (500, 500)
    """Widths of the hidden layers."""
    loss: LossName = "squared"
    """Training loss."""
    steps: Positive = 10_000
    """Maximum number of gradient descent steps."""
    weight_decay: Annotated[float, Range(least=0)] = 0.0
    """Weight decay of the training."""
    keep: int = 0
    """Number of weights on the way to keep, as checkpoints/ in the folder. Part of the training runs again for each."""
    seed: int = 0
    """Seed of the image sample and the initial weights."""

    def load(self) -> DataSet:
        return pal.datasets.load(
            self.data, per_class=self.per_class, seed=self.seed, task=self.task, data_root=self.data_root
        )

    def shape(self, data: DataSet) -> NetworkShape:
        """One output for labels ±1, else one per class. The loss must fit."""
        outputs = 1 if bool((data.train.labels < 0).any()) else len(data.classes)
        if outputs == 1 and self.loss == "cross_entropy":
            raise InvalidInputError("cross_entropy needs classes; add --task classes, or use --loss logistic")
        if outputs > 1 and self.loss == "logistic":
            raise InvalidInputError(f"logistic loss needs two classes, not {outputs}; use --loss cross_entropy")
        channels, height, width = data.image_shape
        return NetworkShape((channels, height, width), self.hidden, outputs)

    def network(self, data: DataSet) -> pal.networks.MLP:
        shape = self.shape(data)
        with torch.random.fork_rng(devices=[]):  # the caller's random numbers stay what they are
            torch.default_generator.manual_seed(self.seed)
            return shape.build()


@dataclass(frozen=True)
class NetworkShape:
    """The sizes of a perceptron."""

    image_shape: tuple[Positive, Positive, Positive]
    hidden: tuple[Positive, ...]
    outputs: Positive

    @property
    def widths(self) -> tuple[int, ...]:
        return (math.prod(self.image_shape), *self.hidden, self.outputs)

    def build(self) -> pal.networks.MLP:
        return pal.networks.MLP(self.image_shape, hidden=self.hidden, outputs=self.outputs)


@dataclass(frozen=True)
class TrainingFacts:
    """How a training went."""

    summary: str
    loss: float
    accuracy: float
    normalised_margin: float | None
    kkt_residual: float | None
    seconds: Annotated[float, Range(least=0)]


@dataclass(frozen=True)
class TrainedRun:
    """The content of config.json."""

    training: TrainOptions
    trained: TrainingFacts
    network: NetworkShape
    images: str  # checksum of the images that were trained on and held out
    versions: dict[str, str]
    weights: dict[str, str]  # checksums of the weight files

    @classmethod
    def read(cls, folder: RunFolder) -> TrainedRun:
        config = folder.config
        if "audit" in config:
            raise RunFolderError(f"{folder.path} holds an audit with its own report.html; give a folder made by train")
        try:
            return built(cls, config)
        except ValueError as error:
            raise RunFolderError(f"{folder.path}/config.json is wrong ({error}); train into a new folder") from error

    def model_and_start(self, folder: RunFolder) -> tuple[pal.networks.MLP, dict[str, Tensor]]:
        """The trained network and its initial weights. The images are not needed for it."""
        trained, initial = folder.weights()
        try:
            if estimates.parameters(self.network.widths) != sum(t.numel() for t in trained.values()):
                raise InvalidInputError("the number of weights differs")  # found before memory is taken for them
            model = self.network.build()
            for weights in (initial, trained):
                pal.weights.fit_into(model, weights)
        except InvalidInputError as error:
            raise RunFolderError(f"{folder.path}/config.json is wrong ({error}); train into a new folder") from error
        return model, initial


def train(
    folder: RunFolder,
    options: TrainOptions,
    *,
    device: torch.device,
    callback: RecordCallback | None = None,
    again: bool = False,
) -> Fit:
    """Train a network and write its weights, before and after, into the folder. The images are not kept.

    Another training in the folder, or a reconstruction from this one, is replaced only with ``again``.
    """
    options = check_options(options)
    if not again and (folder.holds_reconstruction() or (folder.holds_weights() and not is_trained(folder, options))):
        raise RunFolderError(f"{folder.path} holds a training already; train into another folder, or add --again")
    data = options.load()
    shape = options.shape(data)
    estimates.check_training(folder.path, shape.widths, len(data.train))
    count, most = len(data.train), options.steps
    note(f"training begins: {count} images of {data.name}, {options.loss} loss, at most {most} steps")
    began = time.monotonic()
    trained = partial(
        pal.train,
        options.network(data).to(device),
        data.centred(data.train.images),
        data.train.labels,
        loss=options.loss,
        weight_decay=options.weight_decay,
    )
    fit = trained(steps=options.steps, callback=_with_notes(callback, options.steps))
    steps = _between(int(fit.history[-1]["step"]), options.keep)
    way = {step: trained(steps=step).model.state_dict() for step in steps}  # the same steps give the same weights
    note(fit.summary, private=True)  # the command line prints it
    seconds = time.monotonic() - began
    facts = TrainingFacts(fit.summary, fit.loss, fit.accuracy, fit.normalised_margin, fit.kkt_residual, seconds)
    config: dict[str, Any] = {"training": asdict(options), "trained": asdict(facts), "network": asdict(shape)}
    folder.write_training(config | {"images": fingerprint(data)}, fit.model.state_dict(), fit.initial)
    folder.forget_reconstructions()
    folder.write_checkpoints(way)
    return fit


def _between(last: int, count: int) -> list[int]:
    """Steps at equal distances between the first and the last.

    >>> _between(100, 3), _between(3, 5)
    ([25, 50, 75], [1, 2])
    """
    steps = {round(j * last / (count + 1)) for j in range(1, count + 1)}
    return sorted(steps - {0, last})


def _with_notes(callback: RecordCallback | None, steps: int) -> RecordCallback:
    """A callback that also notes progress now and then."""
    pulse = Pulse()

    def record(entry: dict[str, float]) -> None:
        pulse.beat(f"step {int(entry['step'])} of {steps}: loss {entry['loss']:.3g}, gap {entry['gap']:.3g}")
        if callback is not None:
            callback(entry)

    return record


def is_trained(folder: RunFolder, options: TrainOptions) -> bool:
    """Whether the folder holds the result of exactly this training."""
    asked = check_options(options)
    try:
        return TrainedRun.read(folder).training == asked and bool(folder.weights())
    except (RunFolderError, CheckpointError):
        return False


def fingerprint(data: DataSet) -> str:
    """Tells whether the images drawn for a report are those that were trained on and held out."""
    digest = hashlib.sha256()
    for part in (data.train, data.held_out):
        digest.update(part.images.numpy().tobytes() + part.labels.numpy().tobytes())
    return digest.hexdigest()
