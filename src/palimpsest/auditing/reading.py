"""One reconstruction of an audit: the planned objective, run from one seed, stopped by the clock if it must be."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from palimpsest.auditing.plan import Plan
from palimpsest.errors import DivergenceError
from palimpsest.methods import KKT, NTK, MulticlassKKT
from palimpsest.objectives import Objective
from palimpsest.solver.callbacks import Callback
from palimpsest.solver.merging import contributions
from palimpsest.solver.priors import Box, TotalVariation
from palimpsest.solver.reconstruction import reconstruct
from palimpsest.solver.state import State

SHARP = 200.0  # β at which contributions are measured: that with which a reconstruction ends


class OutOfTimeError(Exception):
    """The time is spent; the clock has the state so far, and the checkpoint too."""


class Clock(Callback):
    """Stops a run, at a record, once the deadline has passed."""

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.stopped_at: State | None = None

    def check(self) -> None:
        """Raise unless there is time for another run."""
        self.stopped_at = None
        if time.monotonic() > self.deadline:
            raise OutOfTimeError

    def on_record(self, state: State, entry: dict[str, Any]) -> None:
        if time.monotonic() > self.deadline:
            self.stopped_at = state
            raise OutOfTimeError


def objective(model: nn.Module, initial: Mapping[str, Tensor] | None, plan: Plan) -> Objective:
    """The planned method on these weights, each layer's equations weighted by how far they can be trusted."""
    if plan.method == "ntk":
        assert initial is not None
        at = plan.at[0] if len(plan.at) == 1 else plan.at
        return NTK(model, initial, at=at, weights="auto")
    if plan.method == "multiclass":
        return MulticlassKKT(model, weights="auto")
    return KKT(model, signed=plan.method == "kkt-signed", weights="auto")


def read(
    problem: Objective, image_shape: tuple[int, ...], plan: Plan, *, seed: int, checkpoint: Path, clock: Clock
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Candidates and what each contributes, from one seed; none where the numbers ran away."""
    try:
        rec = reconstruct(
            problem,
            image_shape=image_shape,
            candidates=plan.candidates,
            steps=plan.steps,
            priors=(Box(), TotalVariation(weight=plan.total_variation)),
            record_every=plan.record_every,
            seed=seed,
            checkpoint=checkpoint,
            callbacks=[clock],
        )
    except DivergenceError:
        return {"images": torch.zeros(0, *image_shape), "contributions": torch.zeros(0)}, {"loss": 1.0}
    return candidates(problem, rec.images, rec.multipliers, rec.labels)


def candidates(
    problem: Objective, x: Tensor, multipliers: Tensor, labels: Tensor | None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Candidates with ‖λ_i f(x_i)‖² / ‖T‖², what each contributes, and the loss of all together."""
    problem.sharpness = SHARP
    T2 = problem.target_norm_squared
    loss = float(problem.loss(x, multipliers, labels) / T2)
    shares = contributions(problem, x, multipliers, labels).square() / T2
    return {"images": x.cpu(), "contributions": shares.cpu()}, {"loss": loss}
