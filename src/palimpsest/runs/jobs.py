"""The jobs behind the command line: train, reconstruct, report. Each fills in its part of a run folder.

One dataclass describes a job to the command line, to Python and in the folder's config.json; the same description and
seed give the same numbers by any of these ways.
"""

from __future__ import annotations

import hashlib
import json
import math
import reprlib
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

import palimpsest as pal
from palimpsest.datasets import DataSet
from palimpsest.errors import CheckpointError, DataError, InvalidInputError, RunFolderError
from palimpsest.objectives import Objective
from palimpsest.objectives.spaces import Subspace
from palimpsest.report import Content, Snapshot, Variant, render
from palimpsest.report.pictures import strip
from palimpsest.runs import estimates
from palimpsest.runs.folder import RunFolder, Snapshots, variant
from palimpsest.runs.journal import Journal, Pulse, note
from palimpsest.scoring import Score
from palimpsest.solver.callbacks import Callback
from palimpsest.solver.checks import is_count, is_number
from palimpsest.training import Fit

METHODS = {"squared": "ntk", "logistic": "kkt", "cross_entropy": "multiclass"}
VARIANTS = {"without": "without splitting", "with": "with splitting"}


@dataclass(frozen=True)
class Training:
    """Which network to train on which images."""

    data: str = "faces"
    """Dataset: faces, digits, mnist, cifar10, a folder with a sub-folder per class, or an .npz file."""
    per_class: int = 20
    """Training images per class."""
    task: Literal["binary", "classes"] | None = None
    """binary: one output and labels ±1. classes: one output per class. If omitted: the one that fits the data."""
    data_root: Path | None = None
    """Folder of the MNIST and CIFAR-10 files. If omitted: $PALIMPSEST_DATA; if that is not set, they are downloaded."""
    hidden: tuple[int, ...] = (500, 500)
    """Widths of the hidden layers."""
    loss: Literal["squared", "logistic", "cross_entropy"] = "squared"
    """Training loss."""
    steps: int = 10_000
    """Maximum number of gradient descent steps."""
    weight_decay: float = 0.0
    """Weight decay of the training."""
    seed: int = 0
    """Seed of the image sample and the initial weights."""

    def check(self) -> None:
        """Refuse what cannot be, in the words of the command line, before any work."""
        _whole("--per-class", self.per_class, least=1)
        _whole("--steps", self.steps, least=1)
        _whole("--seed", self.seed, least=0)
        _widths("--hidden", self.hidden)
        if not isinstance(self.data, str) or not isinstance(self.data_root, str | Path | None):
            raise InvalidInputError("--data and --data-root must be names; give a data set and a folder")
        _one_of("--task", self.task, (None, "binary", "classes"))
        _one_of("--loss", self.loss, tuple(METHODS))
        if not is_number(self.weight_decay) or self.weight_decay < 0:
            raise InvalidInputError(f"--weight-decay is {self.weight_decay}; give a number that is not negative")

    def load(self) -> DataSet:
        return pal.datasets.load(
            self.data, per_class=self.per_class, seed=self.seed, task=self.task, data_root=self.data_root
        )

    def outputs(self, data: DataSet) -> int:
        """One for labels ±1, else one per class; refused where the loss wants another number."""
        outputs = 1 if bool((data.train.labels < 0).any()) else len(data.classes)
        if outputs == 1 and self.loss == "cross_entropy":
            raise InvalidInputError(
                "cross_entropy needs one output per class; add --task classes, or use --loss logistic"
            )
        if outputs > 1 and self.loss == "logistic":
            raise InvalidInputError(
                f"logistic loss tells two sides apart, not {outputs} classes; use --loss cross_entropy"
            )
        return outputs

    def network(self, data: DataSet) -> pal.networks.MLP:
        outputs = self.outputs(data)
        with torch.random.fork_rng(devices=[]):  # the caller's random numbers stay what they are
            torch.default_generator.manual_seed(self.seed)
            return pal.networks.MLP(data.image_shape, hidden=self.hidden, outputs=outputs)


WHITENING = 0.5
UNTIL = 0.4  # of the steps: splits come early, so that every candidate sharpens slowly


@dataclass(frozen=True)
class Reading:
    """How to reconstruct images from the weights."""

    method: Literal["ntk", "kkt", "multiclass"] | None = None
    """ntk for squared loss, kkt for logistic, multiclass for cross-entropy. If omitted: the one that fits the loss."""
    at: tuple[float, ...] = (0.15, 0.85)
    """Tangent points of the NTK method, between the initial (0) and the final weights (1)."""
    candidates: int = 80
    """Number of candidates at the start. Twice the number of training images is a safe choice."""
    steps: int = 2000
    """Gradient steps, over all phases together."""
    within: Literal["span", "everywhere"] | None = None
    """Search in the span of the first layer's change, or everywhere. If omitted: the span for NTK, if readable."""
    whitening: float | None = None
    """How strongly the directions of the span are balanced, from 0 (not at all) to 1. NTK only. If omitted: 0.5."""
    share: float = 0.25
    """Maximum share of the candidates that split in one round."""
    rounds: int = 2
    """Number of splitting rounds."""
    seed: int = 0
    """Seed of the initial candidates."""

    def check(self) -> None:
        """Refuse what cannot be, in the words of the command line, before any work."""
        for name in ("candidates", "steps", "rounds"):
            _whole(f"--{name}", getattr(self, name), least=1)
        _whole("--seed", self.seed, least=0)
        if not self.at or not all(is_number(t) and 0 <= t <= 1 for t in self.at):
            raise InvalidInputError(f"--at is {self.at}; give points from 0 (initial) to 1 (final weights)")
        if not is_number(self.share) or not 0 < self.share <= 1:
            raise InvalidInputError(f"--share is {self.share}; give a number above 0 and at most 1")
        if self.whitening is not None and not (is_number(self.whitening) and 0 <= self.whitening <= 1):
            raise InvalidInputError(f"--whitening is {self.whitening}; give a number from 0 to 1")

    def problem(self, model: nn.Module, initial: dict[str, Tensor], loss: str) -> tuple[Objective, Subspace | None]:
        """The objective, and the subspace in which images are sought, if not everywhere."""
        fitting = METHODS[loss]
        if self.method not in (None, fitting):
            raise InvalidInputError(f"{self.method} does not fit {loss} loss; use --method {fitting}")
        subspace = self._subspace(model, initial, fitting)
        if self.whitening is not None and (fitting != "ntk" or subspace is None):
            raise InvalidInputError("--whitening means nothing here; it is for the NTK method within the span")
        if fitting == "ntk":
            whitening = WHITENING if self.whitening is None else self.whitening
            whitening = whitening if subspace else 0.0
            return pal.NTK(model, initial, at=self.at, weights="auto", whitening=whitening), subspace
        method = pal.KKT if fitting == "kkt" else pal.MulticlassKKT
        return method(model, initial=initial, weights="auto"), subspace

    @property
    def splitting(self) -> pal.Splitting:
        return pal.Splitting(rounds=self.rounds, share=self.share, until=UNTIL)

    def _subspace(self, model: nn.Module, initial: dict[str, Tensor], method: str) -> Subspace | None:
        if self.within == "everywhere" or (self.within is None and method != "ntk"):
            return None
        found = pal.span(model, initial)
        if found.subspace is None and self.within == "span":
            raise InvalidInputError(f"{found.reason}; leave out --within span")
        return found.subspace


def train(
    folder: RunFolder,
    job: Training,
    *,
    device: torch.device,
    callback: Callable | None = None,
    again: bool = False,
) -> Fit:
    """Train a network and put the weights, before and after, into the folder. The images are not kept.

    What the folder holds of another training, or was read from this one, is replaced only if asked for (``again``).
    """
    job.check()
    if not again and (folder.holds_reading() or (folder.holds_weights() and not is_trained(folder, job))):
        raise RunFolderError(f"{folder.path} holds a training already; train into another folder, or add --again")
    data = job.load()
    widths = (math.prod(data.image_shape), *job.hidden, job.outputs(data))
    estimates.check_training(folder.path, widths, len(data.train))
    model = job.network(data).to(device)
    note(f"training begins: {len(data.train)} images of {data.name}, {job.loss} loss, at most {job.steps} steps")
    began = time.monotonic()
    fit = pal.train(
        model,
        data.centred(data.train.images),
        data.train.labels,
        loss=job.loss,
        steps=job.steps,
        weight_decay=job.weight_decay,
        callback=_watched(callback, job.steps),
    )
    note(fit.summary, private=True)  # the command line prints it
    facts = {
        "summary": fit.summary,
        "loss": fit.loss,
        "accuracy": fit.accuracy,
        "normalised_margin": fit.normalised_margin,
        "kkt_residual": fit.kkt_residual,
        "seconds": time.monotonic() - began,
    }
    network = {"image_shape": list(data.image_shape), "hidden": list(job.hidden), "outputs": _outputs(fit.model)}
    config = {"training": asdict(job), "trained": facts, "network": network, "images": _fingerprint(data)}
    folder.write_training(config, fit.model.state_dict(), fit.initial)
    folder.forget_reconstructions()
    return fit


def _watched(callback: Callable | None, steps: int) -> Callable[[dict[str, float]], None]:
    """A callback that also notes, now and then, how training goes."""
    pulse = Pulse()

    def record(entry: dict[str, float]) -> None:
        pulse.beat(f"step {int(entry['step'])} of {steps}: loss {entry['loss']:.3g}, gap {entry['gap']:.3g}")
        if callback is not None:
            callback(entry)

    return record


def is_trained(folder: RunFolder, job: Training) -> bool:
    """Whether the folder holds the result of just this training."""
    try:
        return _described(_training(folder.config)) == _described(job) and bool(folder.weights())
    except (RunFolderError, CheckpointError):
        return False


def reconstruct(
    folder: RunFolder,
    job: Reading,
    *,
    device: torch.device,
    variants: Sequence[str] = ("without", "with"),
    callbacks: Callable[[str], Sequence[Callback]] = lambda variant: (),
    progress: bool | None = None,
    execution: pal.Execution | None = None,
    again: bool = False,
) -> None:
    """Read images out of the folder's weights, each variant in turn; what is finished is not done again.

    What was read with other settings is replaced only if that is asked for (``again``).
    """
    job.check()
    config = folder.config
    model, initial = _network(folder, config)
    image_shape = model.image_shape
    most = math.ceil(job.candidates * (1 + job.share) ** job.rounds)
    widths = (math.prod(image_shape), *_field(config, "network", "hidden"), _outputs(model))
    estimates.check_reconstruction(folder.path, widths, most, tangents=len(job.at), variants=len(variants))
    objective, within = job.problem(model, initial, _training(config).loss)
    objective = objective.to(device)
    show = (lambda x: x) if within is None else within.shaped(image_shape).to(device, objective.dtype).images
    asked = _described(job)
    done = _done(folder, asked, again=again)
    for name in variants:
        if name in done and done[name]["settings"] == asked:
            continue
        snapshots = Snapshots(
            folder, name, owner=folder.owner_of(name, asked), every=8 * max(1, job.steps // 200), images=show
        )
        read = partial(
            pal.reconstruct,
            objective,
            image_shape=image_shape,
            candidates=job.candidates,
            steps=job.steps,
            within=within,
            splitting=job.splitting if name == "with" else None,
            seed=job.seed,
            checkpoint=folder.checkpoint,
            callbacks=[*callbacks(name), Journal(VARIANTS[name], job.steps), snapshots],
            progress=progress,
            execution=execution,
        )
        began = time.monotonic()
        rec = _read(read, folder, again=again)
        done[name] = variant(rec, asked, time.monotonic() - began)
        folder.write_variants(done)
    if other := {name for name, fields in done.items() if fields["settings"] != asked}:
        folder.write_variants({name: fields for name, fields in done.items() if name not in other})


def _read(read: Callable[[], pal.Reconstruction], folder: RunFolder, *, again: bool) -> pal.Reconstruction:
    """Go on from the checkpoint. Start over if it is of no use and may be replaced."""
    try:
        return read()
    except CheckpointError:
        if not again:
            raise
        folder.checkpoint.unlink(missing_ok=True)
        return read()


def _done(folder: RunFolder, asked: dict[str, Any], *, again: bool) -> dict[str, dict[str, Any]]:
    """The finished variants. One with other settings stays until its replacement is there, if that is asked for."""
    try:
        done = folder.variants()
    except CheckpointError:
        if not again:
            raise
        return {}
    for name, fields in done.items():
        if not again and (other := _difference(fields["settings"], asked)):
            raise RunFolderError(
                f"{folder.path} holds a reconstruction {name} splitting, with {other}; add --again to replace it"
            )
    return done


def _difference(before: dict[str, Any], after: dict[str, Any]) -> str:
    """What was other before, in words."""
    if before.keys() != after.keys():
        return "the options of another version"
    changed = {name: value for name, value in before.items() if value != after[name]}
    return ", ".join(f"{name} {'left open' if value is None else value}" for name, value in changed.items())


def _network(folder: RunFolder, config: dict[str, Any]) -> tuple[pal.networks.MLP, dict[str, Tensor]]:
    """The trained network of a folder and its initial weights; the images are not needed for it."""
    shape, hidden, outputs = (_field(config, "network", name) for name in ("image_shape", "hidden", "outputs"))
    trained, initial = folder.weights()
    try:
        _widths("image_shape", shape)
        _widths("hidden", hidden)
        _whole("outputs", outputs, least=1)
        described = estimates.parameters((math.prod(shape), *hidden, outputs))
        if len(shape) != 3 or described != sum(t.numel() for t in trained.values()):
            raise InvalidInputError("there are not as many weights as it describes")
        model = pal.networks.MLP(shape, hidden=hidden, outputs=outputs)
        for weights in (initial, trained):
            pal.weights.fit_into(model, weights)
    except InvalidInputError as error:
        raise RunFolderError(
            f"the weights in {folder.path} do not fit its config.json ({error}); train into a new folder"
        ) from error
    return model, initial


def _whole(name: str, value: Any, *, least: int) -> None:
    if not is_count(value) or value < least:
        raise InvalidInputError(f"{name} is {reprlib.repr(value)}; give a whole number of at least {least}")


def _widths(name: str, values: Any) -> None:
    if not isinstance(values, list | tuple):
        raise InvalidInputError(f"{name} is {reprlib.repr(values)}; give a list of whole numbers")
    for value in values:
        _whole(name, value, least=1)


def _one_of(name: str, value: Any, choices: tuple[str | None, ...]) -> None:
    if value not in choices:
        raise InvalidInputError(f"{name} is {reprlib.repr(value)}; choose one of {', '.join(map(str, choices))}")


def _outputs(model: nn.Module) -> int:
    return list(model.parameters())[-1].shape[0]


def _field(config: dict[str, Any], *names: str) -> Any:
    if isinstance(config, dict) and "audit" in config:
        raise RunFolderError("this is the folder of an audit, which has its own report.html; give one made by train")
    for name in names:
        if not isinstance(config, dict) or name not in config:
            raise RunFolderError(f"config.json lacks {'.'.join(names)!r}; train into a new folder")
        config = config[name]
    return config


def _table(config: dict[str, Any], name: str) -> dict[str, Any]:
    if not isinstance(table := _field(config, name), dict):
        raise RunFolderError(f"config.json holds no table {name!r}; train into a new folder")
    return table


def _fingerprint(data: DataSet) -> str:
    """Tells whether the images drawn for a report are those that were trained on and held out."""
    digest = hashlib.sha256()
    for part in (data.train, data.held_out):
        digest.update(part.images.numpy().tobytes() + part.labels.numpy().tobytes())
    return digest.hexdigest()


def _training(config: dict[str, Any]) -> Training:
    fields = _field(config, "training")
    try:
        job = Training(**_tuples(fields))
        job.check()
    except (TypeError, AttributeError, InvalidInputError) as error:
        raise RunFolderError("config.json describes another training; train into a new folder") from error
    return job


def _tuples(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields as JSON gives them back, as the dataclass has them."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}


def _described(job: Training | Reading) -> dict[str, Any]:
    """A job as JSON gives it back."""
    return json.loads(json.dumps(asdict(job), default=str))


def report(folder: RunFolder, *, title: str | None = None) -> tuple[dict[str, Score], Path]:
    """Score the folder's reconstructions against the images it was trained on, and write the verdict and the report.

    This is the only job that looks at the true images.
    """
    config = folder.config
    job = _training(config)
    folder.weights()  # a report is about the weights that are here
    data = job.load()
    if _fingerprint(data) != _field(config, "images"):
        raise DataError("the images are no longer those that were trained on; restore the data, or train again")
    variants = folder.variants()
    if folder.checkpoint.exists():
        raise RunFolderError(
            f"a reconstruction in {folder.path} is unfinished; go on with it, or delete checkpoint.safetensors"
        )
    if not variants:
        raise RunFolderError(
            f"{folder.path} holds no reconstruction; make one with `palimpsest reconstruct {folder.path}`"
        )

    seconds = _field(config, "trained", "seconds")
    if not is_number(seconds) or seconds < 0:
        raise RunFolderError("config.json does not say how long training took; train into a new folder")
    note("scoring begins")

    def scored(images: Tensor) -> Score:
        held_out, looks = data.held_out.images, len(ordered)
        return pal.score(images.cpu(), data.train.images, held_out=held_out, mean=data.mean, looks=looks)

    ordered = {name: variants[name] for name in VARIANTS if name in variants}
    if len({json.dumps(variant["settings"], sort_keys=True) for variant in ordered.values()}) > 1:
        raise RunFolderError(f"the variants in {folder.path} were made with different settings; reconstruct both again")
    scores = {name: scored(variant["images"]) for name, variant in ordered.items()}
    content = Content(
        title=title or f"{folder.path.name}: what can be read out of the weights",
        variants=[_shown(folder, name, ordered[name], scores[name], scored, data.mean) for name in ordered],
        truth=data.train.images,
        held_out_count=len(data.held_out.images),
        configuration={"training": config["training"]} | {VARIANTS[n]: v["settings"] for n, v in ordered.items()},
        versions=_table(config, "versions"),
        seeds={"training": job.seed, "reconstruction": next(iter(ordered.values()))["settings"]["seed"]},
        training=_table(config, "trained"),
        seconds={"training": seconds} | {VARIANTS[n]: v["seconds"] for n, v in ordered.items()},
    )
    folder.write_scores({name: _score_fields(score) for name, score in scores.items()})
    folder.write("pictures.png", strip(content))
    return scores, folder.write("report.html", render(content).encode())


def _shown(
    folder: RunFolder, name: str, fields: dict[str, Any], score: Score, scored: Callable[[Tensor], Score], mean: Tensor
) -> Variant:
    """A variant as the report shows it: the mean added to its candidates, the scores followed over its snapshots."""
    snapshots = folder.snapshots(name, folder.owner_of(name, fields["settings"]))
    on_the_way = [(s["step"], scored(s["images"])) for s in snapshots]
    return Variant(
        name=VARIANTS[name],
        images=fields["images"] + mean,
        ids=fields["ids"],
        lineage=fields["lineage"],
        history=fields["history"],
        score=score,
        snapshots=[Snapshot(s["step"], s["ids"], s["images"] + mean) for s in snapshots],
        metrics=[{"step": t, "ssim": float(s.ssim.mean()), "recovered": s.verdict.recovered} for t, s in on_the_way],
        seconds=fields["seconds"],
    )


def _score_fields(score: Score) -> dict[str, Any]:
    """The numbers of a score, as JSON has them."""
    tensors = {name: value.tolist() for name, value in vars(score).items() if isinstance(value, Tensor)}
    held_out = {} if score.held_out is None else {name: t.tolist() for name, t in vars(score.held_out).items()}
    return {"verdict": asdict(score.verdict), "matching": score.matching, "images": tensors, "held_out": held_out}
