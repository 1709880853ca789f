"""Runs the parts of an experiment, each once."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from provenance import made_by
from torch import Tensor, nn

import palimpsest as pal
from palimpsest.datasets import DataSet
from palimpsest.errors import InvalidInputError
from palimpsest.execution import fusion
from palimpsest.files.storage import load_tensors, save_tensors
from palimpsest.objectives.spaces import Subspace
from palimpsest.scoring import Score, matching, metrics
from palimpsest.solver.callbacks import Callback
from palimpsest.solver.reconstruction import Reconstruction
from palimpsest.solver.state import State
from reproduce import parts
from reproduce.experiment import Experiment
from reproduce.parts import PICTURED, Part, Result

POINTS = 40  # of a curve
DIGITS = 5  # of a number in the files


class Curve(Callback):
    """Records loss and scores during a run, and the seconds that this takes."""

    def __init__(self, data: DataSet, every: int, within: Subspace | None = None) -> None:
        self.images, self.mean, self.every = data.train.images, data.mean, every
        self.within = within and within.shaped(data.image_shape)
        self.points: list[dict[str, float]] = []
        self.trajectories: dict[str, list[Tensor]] = {"ssim": [], "l2": []}  # the scores of single images
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
            self.trajectories[name].append(values.cpu())
        self.seconds += time.perf_counter() - began

    def _scores(self, x: Tensor) -> dict[str, Tensor]:
        """(n,) SSIM and L2 as `pal.score` computes them, without a verdict."""
        images, mean = self.images.to(x), self.mean.to(x)
        x = x if self.within is None else self.within.to(x.device, x.dtype).images(x)
        index = matching.match(metrics.pairwise_ncc(images - mean, x))
        shown = metrics.minmax(x[index] + mean)
        return {"ssim": metrics.ssim(shown, images), "l2": metrics.l2(shown, images)}


class Runner:
    """One experiment.

    Args:
        folder: holds the results, one JSON file for each part.
        scratch: holds trained networks and pictures, which git does not keep.
    """

    def __init__(self, experiment: Experiment, folder: Path, scratch: Path, data_root: Path | None = None) -> None:
        self.experiment, self.folder, self.scratch, self.data_root = experiment, folder, scratch, data_root
        self.results = parts.read(folder, experiment)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        # A single run may be too short to pay for compiling, but all parts share the compiled code.
        compiles = self.device.type == "cuda" and fusion.available(self.device)
        self.execution = pal.Execution(mode="compiled-graph" if compiles else "auto")
        self.data = lru_cache(maxsize=None)(self._data)
        self.network = lru_cache(maxsize=None)(self._network)

    def result(self, part: Part) -> Result:
        """The result of a part, which is run if its file is missing."""
        if part not in self.results:
            self.results[part] = self._run(part)
            parts.write(self.folder, part, self.results[part])
        return self.results[part]

    # --- data and networks -----------------------------------------------------------------------

    def _data(self, seed: int) -> DataSet:
        return self.experiment.training.load(seed, apart_from=self.experiment.apart_from, data_root=self.data_root)

    def _network(self, seed: int) -> tuple[nn.Module, dict[str, Tensor], dict[str, Any]]:
        """The trained network, its initial weights, and facts about the training; trained once for all columns."""
        file, training = self.scratch / "networks" / f"seed{seed}.safetensors", self.experiment.training
        wanted = json.loads(json.dumps([asdict(training), self.experiment.apart_from]))
        model: nn.Module = training.network(self.data(seed), seed)
        initial = {name: t.to(self.device, copy=True) for name, t in model.state_dict().items()}
        final, description = load_tensors(file) if file.exists() else ({}, {})
        if description.get("asked") == wanted:
            model.load_state_dict(final)
            facts: dict[str, Any] = description["facts"]
        else:
            model, facts = self._train(model.to(self.device), seed)
            file.parent.mkdir(parents=True, exist_ok=True)
            save_tensors(file, model.state_dict(), {"asked": wanted, "facts": facts})
        known = {result["training"]["weights"] for part, result in self.results.items() if part.seed == seed}
        if known - {facts["weights"]}:
            raise InvalidInputError(
                f"the network of seed {seed} has other weights than the one behind the results in {self.folder}, so"
                " that new parts cannot be compared with them; give another folder (--out)"
            )
        return model.to(self.device), initial, facts

    def _train(self, model: nn.Module, seed: int) -> tuple[nn.Module, dict[str, Any]]:
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
        facts["weights"] = _fingerprint(fit.model)  # devices round differently
        print(f"  seed {seed}: {fit.summary}", flush=True)
        return fit.model, facts

    # --- one part --------------------------------------------------------------------------------

    def _effort(self, part: Part) -> dict[str, int]:
        """Candidates and steps. Two controls take as many candidates, or as much work, as splitting did."""
        steps = self.experiment.columns[part.column].steps
        if part.variant == "final-k":
            return {"candidates": self._splitting(part)["final candidates"], "steps": steps}
        if part.variant == "equal-compute":
            steps = round(self._splitting(part)["candidate-steps"] / part.candidates)
        return {"candidates": part.candidates, "steps": steps}

    def _splitting(self, control: Part) -> Result:
        return self.result(replace(control, variant="splitting"))

    def _run(self, part: Part) -> Result:
        origin = made_by(f"{self.experiment.command} {part.options}")
        column, data = self.experiment.columns[part.column], self.data(part.seed)
        model, initial, facts = self.network(part.seed)
        effort = self._effort(part)
        objective, within = column.problem(model, initial, self.experiment.training.loss)
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
        result: Result = origin | {"device": _device_name(self.device), "training": facts, "steps": effort["steps"]}
        result |= {"seconds": round(seconds, 2)} | _account(rec, effort["steps"]) | _scores(score)
        if part.variant in PICTURED:
            result["curve"] = [_rounded(point) for point in curve.points]
            if part.seed == self.experiment.seeds[0]:
                self._keep_pictures(part, rec.images[score.match], curve)
        return result

    def _keep_pictures(self, part: Part, images: Tensor, curve: Curve) -> None:
        data = self.data(part.seed)
        shown = metrics.minmax(images + data.mean.to(images))
        file = pictures_file(self.scratch, part)
        file.parent.mkdir(parents=True, exist_ok=True)
        trajectories = torch.stack(curve.trajectories[self.experiment.metric])
        save_tensors(
            file, {"truth": _bytes(data.train.images), "shown": _bytes(shown), "trajectories": trajectories}, {}
        )


def pictures_file(scratch: Path, part: Part) -> Path:
    """Training images ("truth"), the reconstruction of each ("shown"), and (points, n) scores ("trajectories")."""
    return scratch / "pictures" / f"{part.name}.safetensors"


def _account(rec: Reconstruction, steps: int) -> dict[str, Any]:
    """Loss, candidates and splits; the candidate-steps are the work, counted in steps of a single candidate."""
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


def _fingerprint(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.cpu().numpy().tobytes())
    return digest.hexdigest()[:12]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
