"""Runs the parts of an experiment, each once, and keeps what comes of them."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import palimpsest as pal
from palimpsest import fusion
from palimpsest.callbacks import Callback
from palimpsest.datasets import DataSet
from palimpsest.errors import InvalidInputError
from palimpsest.parametrisation import Subspace
from palimpsest.reconstruction import Reconstruction
from palimpsest.reproduce import soundness
from palimpsest.reproduce.experiment import PLAIN, TUNING_SEEDS, VARIANTS, Experiment
from palimpsest.scoring import Score, matching, metrics
from palimpsest.state import State
from palimpsest.storage import load_tensors, parse_json, save_tensors, write_atomically
from palimpsest.training import Fit

POINTS = 40  # of a curve
DIGITS = 5  # of a figure, in what is kept
AS_MUCH_AS_SPLITTING = ("final-k", "equal-compute")  # as many candidates, or as much work
PICTURED = ("none", "splitting", "merging")  # variants whose images are kept, for the first seed


@dataclass(frozen=True)
class Part:
    """One reconstruction of an experiment."""

    column: str
    variant: str
    candidates: int
    seed: int

    @property
    def name(self) -> str:
        return f"{self.column}-{self.variant}-k{self.candidates}-seed{self.seed}"


Result = dict[str, Any]  # what came of a part
Results = dict[Part, Result]


@dataclass(frozen=True)
class Selection:
    """Which parts: those with these values, any where none are given."""

    column: Collection[str] = ()
    variant: Collection[str] = ()
    candidates: Collection[int] = ()
    seed: Collection[int] = ()

    def __contains__(self, part: Part) -> bool:
        return all(not wanted or getattr(part, name) in wanted for name, wanted in vars(self).items())


class Curve(Callback):
    """Follows the scores of a run, those of single images too, and knows how long that took."""

    def __init__(self, data: DataSet, every: int, within: Subspace | None = None) -> None:
        self.images, self.mean, self.every = data.train.images, data.mean, every
        self.within = within and within.shaped(data.image_shape)
        self.points: list[dict[str, float]] = []
        self.trajectories: dict[str, list[list[float]]] = {"ssim": [], "l2": []}
        self.seconds = 0.0

    def on_record(self, state: State, entry: dict[str, Any]) -> None:
        if "loss" not in entry or (self.points and state.step < self.points[-1]["step"] + self.every):
            return
        _wait(state.x.device)
        began = time.perf_counter()
        scores = self._scores(state.x)
        means = {name: float(values.mean()) for name, values in scores.items()}
        self.points.append({name: entry[name] for name in ("step", "loss", "candidates")} | means)
        for name, values in scores.items():
            self.trajectories[name].append([round(value, 3) for value in values.tolist()])
        self.seconds += time.perf_counter() - began

    def _scores(self, x: Tensor) -> dict[str, Tensor]:
        """(n,) SSIM and L2 as `pal.score` has them, without what a verdict takes besides."""
        images, mean = self.images.to(x), self.mean.to(x)
        x = x if self.within is None else self.within.to(x.device, x.dtype).images(x)
        index = matching.match(metrics.pairwise_ncc(images - mean, x))
        shown = metrics.minmax(x[index] + mean)
        return {"ssim": metrics.ssim(shown, images), "l2": metrics.l2(shown, images)}


class Runner:
    """One experiment in one folder: `networks/`, `pictures/`, and a JSON file for each part.

    ``known`` are results from elsewhere, which stand for parts that the folder lacks.
    """

    def __init__(
        self,
        experiment: Experiment,
        folder: Path,
        *,
        tuning: bool = False,
        data_root: Path | None = None,
        known: Results | None = None,
    ) -> None:
        self.experiment, self.folder, self.data_root, self.known = experiment, folder, data_root, known or {}
        self.apart_from = experiment.seeds if tuning else ()
        self.seeds = TUNING_SEEDS if tuning else experiment.seeds
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        # One run may be too short to be worth compiling for, but there are many, and compiled code serves them all.
        compiles = self.device.type == "cuda" and fusion.available(self.device)
        self.execution = pal.Execution(mode="compiled-graph" if compiles else "auto")
        self.data = lru_cache(maxsize=None)(self._data)
        self.network = lru_cache(maxsize=None)(self._network)

    # --- which parts there are, and which are done -----------------------------------------------

    def parts(self, selection: Selection | None = None) -> list[Part]:
        """The parts of the experiment: with and without splitting first, for all seeds, then the controls."""
        return [part for part in self._all() if selection is None or part in selection]

    def _all(self) -> Iterator[Part]:
        for variant in VARIANTS:
            for seed in self.seeds:
                for name, column in self.experiment.columns.items():
                    if variant in column.variants:
                        yield from (Part(name, variant, k, seed) for k in column.candidates)

    def done(self, part: Part) -> Result | None:
        """What came of a part, or None if it was not run, or was run as the experiment's file no longer asks."""
        asked = self._asked(part)
        for result in (self._in_folder(part, asked), self.known.get(part)):
            if result is not None and result.get("asked") == asked:
                return result
        return None

    def _in_folder(self, part: Part, asked: str) -> Result | None:
        path = self.folder / f"{part.name}.json"
        if not path.is_file():
            return None
        with _refusing_what_is_not_ours(path):
            result = parse_json(path.read_bytes())
            if result.get("asked") == asked:
                soundness.check_result(result, self.experiment.training.images)
            return result

    def results(self) -> Results:
        """What came of all parts that are done."""
        return {part: result for part in self.parts() if (result := self.done(part)) is not None}

    def result(self, part: Part) -> dict[str, Any]:
        """What came of a part, which is run if it was not."""
        return self.done(part) or self._run(part)

    def _asked(self, part: Part) -> str:
        """The fingerprint of everything that a part depends on."""
        silent = {"variants", "candidates"}  # they say which parts there are, and nothing of any one
        silent |= {"splitting"} if part.variant in PLAIN else set()
        silent |= {"merging"} if part.variant != "merging" else set()
        column = asdict(self.experiment.columns[part.column])
        asked = {
            "training": asdict(self.experiment.training),
            "apart from": self.apart_from,
            "column": {name: value for name, value in column.items() if name not in silent},
            "part": asdict(part),
            "effort": self._effort(part),
        }
        same = json.loads(json.dumps(asked), parse_int=float)  # whether 1 was written, or 1.0
        return _fingerprint(json.dumps(same, sort_keys=True).encode())

    def _effort(self, part: Part) -> dict[str, int] | None:
        """Candidates and steps; two controls take as much of either as splitting did, None if it was not run."""
        effort = {"candidates": part.candidates, "steps": self.experiment.columns[part.column].steps}
        if part.variant in AS_MUCH_AS_SPLITTING:
            split = self.done(replace(part, variant="splitting"))
            if split is None:
                return None
            if part.variant == "final-k":
                effort["candidates"] = split["final candidates"]
            else:
                effort["steps"] = round(split["candidate-steps"] / part.candidates)
        return effort

    # --- data and networks -----------------------------------------------------------------------

    def _data(self, seed: int) -> DataSet:
        return self.experiment.training.load(seed, apart_from=self.apart_from, data_root=self.data_root)

    def _network(self, seed: int) -> tuple[nn.Module, dict[str, Tensor], dict[str, Any]]:
        """The trained network, its initial weights, and how training went; trained once for all columns."""
        path, training = self.folder / "networks" / f"seed{seed}.safetensors", self.experiment.training
        asked = json.loads(json.dumps([asdict(training), self.apart_from]))
        model = training.network(self.data(seed), seed)
        initial = {name: t.to(self.device, copy=True) for name, t in model.state_dict().items()}
        if path.exists():
            final, description = load_tensors(path)
            if description.get("asked") == asked:
                facts: dict[str, Any] = description.get("facts", {})
                with _refusing_what_is_not_ours(path):
                    soundness.check_training(facts)
                    model.load_state_dict(final)
                return model.to(self.device), initial, facts
        fit, facts = self._train(model.to(self.device), seed)
        save_tensors(path, fit.model.state_dict(), {"asked": asked, "facts": facts})
        return fit.model, initial, facts

    def _train(self, model: nn.Module, seed: int) -> tuple[Fit, dict[str, Any]]:
        data, training = self.data(seed), self.experiment.training
        began = time.perf_counter()
        fit = pal.train(
            model,
            data.centred(data.train.images),
            data.train.labels,
            loss=training.loss,
            steps=training.steps,
            momentum=training.momentum,
        )
        facts = {"summary": fit.summary, "seconds": round(time.perf_counter() - began, 1)}
        facts |= {"kkt residual": fit.kkt_residual, "normalised margin": fit.normalised_margin}
        facts["images by the span"] = pal.span(fit.model, fit.initial).samples
        # Devices round differently, and what is compared should be read from the same weights.
        facts["weights"] = _fingerprint(*(t.cpu().numpy().tobytes() for t in fit.model.state_dict().values()))
        print(f"  seed {seed}: {fit.summary}", flush=True)
        return fit, facts

    def _refuse_other_weights(self, seed: int, weights: str) -> None:
        known = {result["training"]["weights"] for part, result in self.known.items() if part.seed == seed}
        if known and weights not in known:
            raise InvalidInputError(
                f"training of seed {seed} does not end here with the weights that known parts were read from, and what"
                " is read from other weights is not compared; run all parts, without --missing"
            )

    # --- one part --------------------------------------------------------------------------------

    def _run(self, part: Part) -> dict[str, Any]:
        column, data = self.experiment.columns[part.column], self.data(part.seed)
        for name in ("networks", "pictures"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        model, initial, facts = self.network(part.seed)
        self._refuse_other_weights(part.seed, facts["weights"])
        objective = column.objective(model, initial, self.experiment.training.loss)
        if part.variant in AS_MUCH_AS_SPLITTING:
            self.result(replace(part, variant="splitting"))
        effort = self._effort(part)
        assert effort is not None  # splitting was run
        within = column.subspace(model, initial)
        curve = Curve(data, effort["steps"] // POINTS, within)
        _wait(self.device)
        began = time.perf_counter()
        rec = pal.reconstruct(
            objective,
            image_shape=data.image_shape,
            within=within,
            seed=part.seed,
            execution=self.execution,
            callbacks=[curve],
            progress=False,
            candidates=effort["candidates"],
            steps=effort["steps"],
            **column.settings(data.mean),
            **column.policy(part.variant),
        )
        _wait(self.device)
        seconds = time.perf_counter() - began - curve.seconds
        score = pal.score(rec, data.train.images, held_out=data.held_out.images, mean=data.mean)
        asked, software = self._asked(part), f"palimpsest {pal.__version__}, torch {torch.__version__}"
        made = {"asked": asked, "device": _device_name(self.device), "software": software, "training": facts}
        result: dict[str, Any] = (
            made | effort | {"seconds": round(seconds, 2)} | _account(rec, effort["steps"]) | _scores(score)
        )
        result["curve"] = [_rounded(point) for point in curve.points]
        if part.seed == self.seeds[0] and part.variant in PICTURED:
            result["trajectories"] = curve.trajectories[self.experiment.metric]
            shown = rec.images[score.match] + data.mean.to(rec.images)
            pictures = {"truth": _bytes(data.train.images), "shown": _bytes(metrics.minmax(shown))}
            save_tensors(self._pictures_file(part), pictures, {"asked": asked})
        write_atomically(self.folder / f"{part.name}.json", json.dumps(result).encode())
        return result

    def pictures(self, part: Part) -> dict[str, Tensor] | None:
        """The images of a part, if they are kept: training images ("truth"), and what is "shown" of each."""
        path = self._pictures_file(part)
        tensors, description = load_tensors(path) if path.exists() else ({}, {})
        if description.get("asked") != self._asked(part):
            return None
        with _refusing_what_is_not_ours(path):
            soundness.check_pictures(tensors, self.experiment.training.images)
        return tensors

    def _pictures_file(self, part: Part) -> Path:
        return self.folder / "pictures" / f"{part.name}.safetensors"


@contextmanager
def _refusing_what_is_not_ours(path: Path) -> Iterator[None]:
    try:
        yield
    except (ValueError, OSError, RuntimeError) as error:  # torch raises the last for weights that do not fit
        told = " ".join(str(error).split())
        raise InvalidInputError(f"{path} is not what a run writes ({told}); delete it, and run it again") from error


def _account(rec: Reconstruction, steps: int) -> dict[str, Any]:
    """What a run came to; its candidate-steps are what it would have cost one candidate at a time."""
    records = [entry["candidates"] for entry in rec.history if "loss" in entry]
    kept = ("step", "split", "eta", "before", "after", "merged", "merging", "among", "images")
    return {
        "loss": float(f"{rec.loss:.{DIGITS}g}"),
        "final candidates": len(rec.images),
        "candidate-steps": round(steps * sum(records) / len(records)),
        "splits": [{name: entry[name] for name in kept if name in entry} for entry in rec.history if "split" in entry],
    }


def _scores(score: Score) -> dict[str, Any]:
    assert score.held_out is not None
    tensors = {"ssim": score.ssim, "l2": score.l2}
    tensors |= {"held-out ssim": score.held_out.ssim, "held-out l2": score.held_out.l2}
    lists = {name: [round(value, DIGITS) for value in t.tolist()] for name, t in tensors.items()}
    return lists | {"recovered": score.verdict.recovered, "verdict": score.verdict.outcome.value}


def _rounded(point: dict[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value for name, value in point.items()}


def _bytes(images: Tensor) -> Tensor:
    return (255 * images.detach().cpu().clamp(0, 1)).round().to(torch.uint8)


def _fingerprint(*pieces: bytes) -> str:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()[:12]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
