"""Reads one trained network and scores the result, by our measure and by SimuDy's."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import palimpsest as pal
from networks_in_use.networks import CHANNEL_STD, channel
from networks_in_use.rows import Reading, Row
from networks_in_use.training import Images
from palimpsest.execution import Mode
from palimpsest.objectives import Objective
from palimpsest.objectives.spaces import Subspace
from palimpsest.solver.reconstruction import Reconstruction

DIGITS = 4


class OutOfTimeError(Exception):
    pass


class Deadline(pal.Callback):
    def __init__(self, ends: float) -> None:
        self.ends = ends

    def on_record(self, state: Any, entry: dict[str, Any]) -> None:
        if time.time() > self.ends:
            raise OutOfTimeError(f"out of time at step {state.step}")


def objective_of(
    model: nn.Module, checkpoints: list[dict[str, Tensor]], reading: Reading
) -> tuple[Objective, Subspace | None, dict[str, Any]]:
    """The method, where it searches, and facts about the span."""
    initial = checkpoints[0]
    if reading.method == "kkt-signed":
        return pal.KKT(model, signed=True, weights=reading.weights, initial=initial), None, {}
    options: dict[str, Any] = {"at": reading.at, "weights": reading.weights}
    if reading.method == "adam":
        return pal.AdamPath(model, checkpoints, **options), None, {}
    options["whitening"] = reading.whitening
    if not reading.in_span:
        objective = pal.Path(model, checkpoints, **options)
        return objective.with_live_batch_norm() if reading.live else objective, None, {}
    span = pal.span(model, checkpoints)
    if reading.shrunk:
        options["shrinkage"] = span.shrinkages
    facts = {"images by the span": span.samples, "shrinkage": round(span.shrinkage, 6)}
    return pal.Path(model, checkpoints, **options), span.subspace, facts


def read(
    model: nn.Module,
    checkpoints: list[dict[str, Tensor]],
    row: Row,
    images: Images,
    *,
    seed: int,
    ends: float,
    mode: Mode = "auto",
) -> tuple[Reconstruction, dict[str, Any]]:
    reading = row.reading
    began = time.perf_counter()
    objective, subspace, facts = objective_of(model, checkpoints, reading)
    shape = images.mean.shape
    within = pal.Cosines.of(shape) if reading.cosines else subspace
    rec = pal.reconstruct(
        objective,
        image_shape=shape,
        candidates=round(reading.per_image * row.n),
        steps=reading.steps,
        within=within,
        priors=(
            pal.priors.Box.around(images.mean.to(objective.device)),
            pal.priors.TotalVariation(weight=reading.smoothness),
        ),
        prior_strength=reading.strength,
        optimiser=pal.optimisers.Adam(learning_rate=reading.rate),
        seed=seed,
        execution=pal.Execution(mode=mode),
        callbacks=[Deadline(ends)],
        progress=False,
    )
    return rec, facts | {"mode": mode, "seconds": round(time.perf_counter() - began, 1), "loss": rec.loss}


def scored(found: Tensor, images: Images, *, by_simudy: bool) -> dict[str, Any]:
    found = found.detach().cpu()
    score = pal.score(found, images.train, held_out=images.held_out, mean=images.mean)
    assert score.held_out is not None
    lists = {"ssim": score.ssim, "held-out ssim": score.held_out.ssim, "likeness": score.likeness}
    result: dict[str, Any] = {name: [round(v, DIGITS) for v in t.tolist()] for name, t in lists.items()}
    result |= {"recovered": score.verdict.recovered, "verdict": score.verdict.outcome.value}
    result |= {"sentence": score.verdict.sentence, "auc": score.verdict.auc}
    if by_simudy:
        values = simudy(found, images.train - images.mean)
        result["ssim as SimuDy measures it"] = [round(v, DIGITS) for v in values]
    return result


def simudy(found: Tensor, truth: Tensor) -> list[float]:
    """SimuDy's measure: skimage's SSIM on normalised images, the best pair first, each image and candidate once."""
    from skimage.metrics import structural_similarity

    a, b = ((t / channel(CHANNEL_STD)).double().numpy() for t in (found, truth))
    table = np.empty((len(b), len(a)))
    for i, true in enumerate(b):
        for j, candidate in enumerate(a):
            table[i, j] = structural_similarity(true, candidate, channel_axis=0, data_range=true.max() - true.min())
    values = [0.0] * len(b)
    for _ in range(min(table.shape)):
        i, j = divmod(int(table.argmax()), table.shape[1])
        values[i] = float(table[i, j])
        table[i], table[:, j] = -np.inf, -np.inf
    return values


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
