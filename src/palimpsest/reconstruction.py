"""`pal.reconstruct`: running the solver from random candidates to a result, watched and resumable."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from palimpsest.callbacks import Callback, Checkpoint, Progress
from palimpsest.certificate import Certificate, certify
from palimpsest.errors import DivergenceError, InvalidInputError
from palimpsest.execution import Execution
from palimpsest.objectives import Objective
from palimpsest.parametrisation import Everywhere, Subspace
from palimpsest.solver import Settings, Solver
from palimpsest.state import Outcome, State

KEEP = 'To keep an interrupted run, call pal.reconstruct(…, checkpoint="run.safetensors"); the same call continues it.'


@dataclass(frozen=True, repr=False)
class Reconstruction:
    """What was read out of the weights."""

    images: Tensor
    """(k, *image_shape), in the space the network sees: centred if it was trained on centred images."""
    multipliers: Tensor
    labels: Tensor | None
    ids: Tensor
    parents: Tensor
    """(k,) number of the candidate each one split from, or −1."""
    lineage: Tensor
    """The parent of every candidate that ever was, by number."""
    history: list[dict[str, Any]]
    outcome: Outcome
    loss: float
    """Final L / ‖T‖², at the sharpest network."""
    certify: Callable[..., Certificate]
    """Certificate of the final point for other ε: ``rec.certify(epsilon=1e-6)``."""

    def __repr__(self) -> str:
        count, *shape = self.images.shape
        return f"Reconstruction({count} images of {'×'.join(map(str, shape))}, loss {self.loss:.3g}, {self.outcome})"

    @cached_property
    def certificate(self) -> Certificate:
        """How stationary the final point is; measured when first asked for."""
        return self.certify()

    def ancestors(self, i: int) -> list[int]:
        """The numbers of candidate i and of those it descends from, the youngest first."""
        line = [int(self.ids[i])]
        while (parent := int(self.lineage[line[-1]])) >= 0:
            line.append(parent)
        return line


@torch.inference_mode(False)  # derivatives are needed, whatever mode the caller is in
def reconstruct(
    objective: Objective,
    *,
    image_shape: Sequence[int] | int,
    candidates: int,
    steps: int = 4000,
    within: Subspace | None = None,
    callbacks: Sequence[Callback] = (),
    checkpoint: Path | str | None = None,
    progress: bool | None = None,
    execution: Execution | None = None,
    **settings: Any,
) -> Reconstruction:
    """Read training images out of weights: run the two phases from random candidates to the end.

    Args:
        objective: the method, for example ``pal.NTK(model, initial)``.
        image_shape: shape of one image, for example ``(3, 32, 32)``.
        candidates, steps, **settings: see :class:`Settings`.
        within: a subspace to search in, for example ``pal.span(model, initial).subspace``; everywhere by default.
        callbacks: objects that are told of the run's progress.
        checkpoint: a file to which the state is saved as the run goes on. If it exists the run continues from it,
            to the same result as if it had never stopped (to the bit on a CPU with as many threads).
        progress: a bar on standard error; by default where that is a terminal and the run takes long enough.
        execution: how the steps are carried out; by default as fast as the device allows.
    """
    if not isinstance(objective, Objective):
        raise InvalidInputError(
            f"the objective is a {type(objective).__name__}; give a method, such as pal.NTK(model, initial)"
        )
    _refuse_unknown(settings)
    image_shape = (image_shape,) if isinstance(image_shape, int) else image_shape
    if within is not None and not isinstance(within, Subspace):
        raise InvalidInputError(f"within is a {type(within).__name__}; give a Subspace, as pal.span(…).subspace")
    space = Everywhere(tuple(image_shape)) if within is None else within.shaped(tuple(image_shape)).to(
        objective.device, objective.dtype
    )  # fmt: skip
    solver = Solver(objective, space, Settings(candidates=candidates, steps=steps, **settings), execution)
    with solver.execution.matrix_precision(objective.device):
        state = solver.init()
        watchers = [*callbacks]
        if checkpoint is not None:
            saver = Checkpoint(Path(checkpoint), solver.fingerprint())
            watchers.insert(0, saver)  # it saves before another callback can fail
            state = saver.resume(state)
        if progress is not False:
            watchers.append(Progress(steps, show=progress))
        try:
            state = _run(solver, state, watchers)
        except KeyboardInterrupt as interrupt:
            if checkpoint is None:
                interrupt.add_note(KEEP)
            raise
        return _result(solver, state)


def _refuse_unknown(settings: Mapping[str, Any]) -> None:
    """Name the nearest keyword that there is, and all settings."""
    known = [setting.name for setting in fields(Settings)]
    for name in settings.keys() - known:
        near = difflib.get_close_matches(name, [*known, *inspect.signature(reconstruct).parameters], n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise InvalidInputError(f"there is no setting {name!r}{hint}; choose among {', '.join(known)}")


def _run(solver: Solver, state: State, callbacks: Sequence[Callback]) -> State:
    """Step until done, telling the callbacks only of states known to be finite."""
    good, started = state, list[Callback]()
    try:
        for callback in callbacks:
            callback.on_start(state)
            started.append(callback)
        while not solver.done(state):
            new = solver.step(state)
            if len(new.history) > len(state.history):  # recording read the loss: this state is finite
                good = state
                for callback in callbacks:
                    callback.on_record(state, new.history[-1])
            state = new
    except BaseException as stop:
        unharmed = not isinstance(stop, DivergenceError) and bool(state.x.isfinite().all())
        last = state if unharmed else good
        with _afterwards([partial(callback.on_stop, last) for callback in started]):
            raise
    with _afterwards([partial(callback.on_end, state) for callback in callbacks]):
        return state


def _afterwards(calls: Sequence[Callable[[], None]]) -> ExitStack:
    """Makes every call when it is left, in this order, even if one raises."""
    stack = ExitStack()
    for call in reversed(calls):  # a stack ends with what it began with
        stack.callback(call)
    return stack


def _result(solver: Solver, state: State) -> Reconstruction:
    solver.prepare(state)
    objective = solver.final()
    point = (state.x, state.multipliers, state.labels)
    return Reconstruction(
        images=solver.space.images(state.x),
        multipliers=state.multipliers,
        labels=state.labels,
        ids=state.ids,
        parents=state.parents,
        lineage=state.lineage,
        history=list(state.history),
        outcome=state.outcome or Outcome.FINISHED,
        loss=float(objective.loss(*point) / objective.target_norm_squared),
        certify=partial(certify, objective, *point),
    )
