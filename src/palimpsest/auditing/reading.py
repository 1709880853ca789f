"""Every planned reconstruction: of the network, of the negative and of the positive control, as time allows."""

import copy
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from palimpsest.auditing.agreement import Run
from palimpsest.auditing.case import Case, OutOfTimeError
from palimpsest.auditing.controls import positive_control, shuffled
from palimpsest.auditing.plan import NEEDED_RUNS, Plan
from palimpsest.auditing.stages import Contents, cached_tensors
from palimpsest.auditing.subject import Subject
from palimpsest.errors import (
    DivergenceError,
    InvalidInputError,
    NoGradientError,
    TrainingDivergedError,
    UnsupportedNetworkError,
)
from palimpsest.files.storage import digest
from palimpsest.objectives import Objective
from palimpsest.objectives.spaces import Cosines, Space
from palimpsest.runs import problems
from palimpsest.runs.journal import note
from palimpsest.solver.merging import contributions
from palimpsest.solver.priors import Box, TotalVariation
from palimpsest.solver.reconstruction import reconstruct
from palimpsest.solver.state import State

SHARP = 200.0  # β at which contributions are measured, the last one of a reconstruction
CHECKPOINT = ".checkpoint"  # the suffix of an unfinished reconstruction
# why there may be no positive control
UNTRAINABLE = (TrainingDivergedError, NoGradientError, InvalidInputError, UnsupportedNetworkError)


@dataclass(frozen=True)
class AuditEffort:
    """The reconstructions behind a verdict, and the time they took."""

    restarts: int
    seconds: float
    control_runs: int
    control_seconds: float
    devices: tuple[str, ...]

    @classmethod
    def of(cls, runs: Mapping[str, Sequence[Run]]) -> Self:
        ours, others = list(runs["subject"]), [*runs["negative"], *runs["positive"]]
        spent = (sum(run.seconds for run in group) for group in (ours, others))
        devices = {run.device for run in (*ours, *others) if run.device}
        return cls(len(ours), next(spent), len(others), next(spent), tuple(sorted(devices)))


def posed(subject: Subject, plan: Plan) -> tuple[Objective, Space | None]:
    """The planned method on these weights, each layer's equations weighted by how far they can be trusted.

    The second value is the space to search; None stands for all images, pixel by pixel. If the plan searches a span,
    and these weights do not show one, that is all images, too.
    """
    initial, at = subject.initial if plan.method == "ntk" else None, plan.at[0] if len(plan.at) == 1 else plan.at
    objective, subspace = problems.problem(
        plan.method,
        subject.model,
        initial,
        checkpoints=subject.segments or None,
        gradient=subject.moment,
        image_shape=subject.image_shape,
        at=at or 0.5,
        within=None if plan.within == "span" else "everywhere",
        whitening=plan.whitening,
        rule=plan.rule,
        continues=subject.continues,
        live=plan.live,
    )
    return objective, Cosines.of(subject.image_shape) if plan.cosines else subspace


class PosedByRole:
    """The planned objective on the weights of each role, and its space. The negative control has that of the subject.

    Posing takes as long as many steps, and a role is read several times in a row. So the last problem is kept.
    """

    def __init__(self, case: Case, plan: Plan) -> None:
        self.case, self.plan = case, plan
        self._kept: dict[str, tuple[Objective, Space | None]] = {}
        self._of_subject: tuple[float, Space | None] | None = None  # its whitening and its space

    def release(self) -> None:
        """Free the memory of the last problem: a device may not have it for two."""
        self._kept.clear()

    def of(self, role: str) -> tuple[Objective, Space | None]:
        if role not in self._kept:
            self.release()
            problem, space = self._posed(role)
            self._kept[role] = problem.to(self.case.device), space
        return self._kept[role]

    def _posed(self, role: str) -> tuple[Objective, Space | None]:
        subject, plan = self.case.subject, self.plan
        if role == "subject" or self._of_subject is None:
            problem, space = posed(subject, plan)
            self._of_subject = problem.whitening, space
            if role == "subject":
                return problem, space
        whitening, space = self._of_subject
        if role == "positive":  # a span is easier to search
            plan = replace(plan, within="everywhere") if space is None else plan
            return posed(positive_control(self.case, plan), plan)
        problem = posed(shuffled(subject, plan.method, seed=plan.seed), plan)[0]
        problem.whitening = whitening
        return problem, space


def read_all(case: Case, plan: Plan, problems: PosedByRole) -> tuple[dict[str, list[Run]], bool]:
    """The reconstructions of each role, and whether there was time for all. A repeated audit does the rest."""
    runs: dict[str, list[Run]] = {"subject": [], "negative": [], "positive": []}
    finished, trainable = True, True
    for role, number in plan.runs(controls=case.options.controls):
        run = None
        try:
            if role != "positive" or trainable:
                run = read_once(case, plan, role, number, problems)
        except OutOfTimeError as stopped:
            if finished:
                note(f"out of time in {role} {number + 1}")
            finished = False
            if role == "subject" and len(runs[role]) < NEEDED_RUNS:
                run = _unfinished_run(case, problems, *stopped.args)
        except UNTRAINABLE as error:
            if role != "positive":
                raise
            case.subject.fresh()  # a factory that fails is an error of its own, not of the control
            note(f"there is no positive control: {error}")
            trainable = False
        if run is not None and len(run.images):
            runs[role].append(run)
    if not runs["subject"]:
        raise DivergenceError(0, "this method cannot handle these weights or their scale")
    return runs, finished


def file_of(role: str, number: int) -> Path:
    """The file of a finished reconstruction, in the folder of its rung."""
    return Path("runs") / f"{role}-{number}.safetensors"


def read_once(case: Case, plan: Plan, role: str, number: int, problems: PosedByRole) -> Run:
    """One reconstruction. It does not have any candidates if the numbers diverged."""
    path = case.folder / file_of(role, number)
    checkpoint = path.with_suffix(CHECKPOINT)

    def compute() -> Contents:
        if role != "subject":  # a report shows something of the subject even without time
            case.clock.check()
        note(f"reading: {role}, restart {number + 1} of {plan.restarts if role == 'subject' else NEEDED_RUNS}")
        began, shape = case.clock.now(), case.subject.image_shape
        problem, space = problems.of(role)
        try:
            rec = reconstruct(
                problem,
                image_shape=shape,
                within=space,
                candidates=plan.candidates,
                steps=plan.steps,
                priors=(Box(), TotalVariation(weight=plan.total_variation)),
                record_every=plan.record_every,
                seed=1000 * plan.seed + number,
                checkpoint=checkpoint,
                callbacks=[case.clock],
            )
        except DivergenceError:
            made: Contents = {"images": torch.zeros(0, *shape), "contributions": torch.zeros(0)}, {"loss": 1.0}
        else:
            made = candidates(problem, rec.images, rec.multipliers, rec.labels)
        return made[0], {**made[1], "seconds": case.clock.now() - began, "device": _in_words(case.device)}

    run = cached_tensors(path, digest(case.owner, role, number), compute, Run.of)
    checkpoint.unlink(missing_ok=True)
    return run


def _unfinished_run(case: Case, problems: PosedByRole, state: State) -> Run:
    """The reconstruction of the subject that the clock stopped, as far as it came."""
    problem, space = problems.of("subject")
    x, shape = state.x, case.subject.image_shape
    images = x if space is None else space.shaped(shape).to(x.device, x.dtype).images(x)
    return Run.of(*candidates(problem, images, state.multipliers, state.labels))


def candidates(problem: Objective, x: Tensor, multipliers: Tensor, labels: Tensor | None) -> Contents:
    """Candidates, the contribution ‖λ_i f(x_i)‖² / ‖T‖² of each, and the loss of all together."""
    problem = copy.copy(problem)  # the next reconstruction begins at its own sharpness
    problem.sharpness = SHARP
    T2 = problem.target_norm_squared
    loss = float(problem.loss(x, multipliers, labels) / T2)
    # Adam hides the scale of gradients. There, the size of all candidates together stands for that of the target.
    whole = problem.length_squared(problem.represent(x, multipliers, labels)) if not problem.scaled else T2
    shares = contributions(problem, x, multipliers, labels).square() / whole
    return {"images": x.cpu(), "contributions": shares.cpu()}, {"loss": loss}


def _in_words(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{device.type.upper()} ({platform.machine()}, {threads} {'thread' if threads == 1 else 'threads'})"
