"""Every planned reconstruction: of the network, of the negative and of the positive control, as time allows."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from palimpsest.auditing.agreement import Run
from palimpsest.auditing.case import Case, OutOfTimeError
from palimpsest.auditing.controls import positive_control, shuffled
from palimpsest.auditing.plan import CONTROL_RUNS, Plan
from palimpsest.auditing.stages import Contents, cached_tensors
from palimpsest.errors import DivergenceError, InvalidInputError, NoGradientError, TrainingDivergedError
from palimpsest.files.storage import digest
from palimpsest.objectives import Objective
from palimpsest.runs import problems
from palimpsest.runs.journal import note
from palimpsest.solver.merging import contributions
from palimpsest.solver.priors import Box, TotalVariation
from palimpsest.solver.reconstruction import reconstruct

SHARP = 200.0  # β at which contributions are measured, the last one of a reconstruction
UNTRAINABLE = (TrainingDivergedError, NoGradientError, InvalidInputError)  # why there may be no positive control


def objective(model: nn.Module, initial: Mapping[str, Tensor] | None, plan: Plan) -> Objective:
    """The planned method on these weights, each layer's equations weighted by how far they can be trusted."""
    at = plan.at[0] if len(plan.at) == 1 else plan.at
    return problems.problem(plan.method, model, initial if plan.method == "ntk" else None, at=at)[0]


def read_all(case: Case, plan: Plan) -> tuple[dict[str, list[Run]], bool]:
    """The reconstructions of each role, and whether there was time for all. A repeated audit does the rest."""
    runs: dict[str, list[Run]] = {"subject": [], "negative": [], "positive": []}
    finished, trainable = True, True
    for role, number in plan.runs(controls=case.options.controls):
        run = None
        try:
            if role != "positive" or trainable:
                run = _read_once(case, plan, role, number)
        except OutOfTimeError as stopped:
            if finished:
                note(f"out of time in {role} {number + 1}")
            finished = False
            if role == "subject" and len(runs[role]) < CONTROL_RUNS:
                (state,) = stopped.args  # the reconstruction as far as it came
                problem = _problem(case, plan, role)
                run = Run.of(*candidates(problem, state.x, state.multipliers, state.labels))
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


def _read_once(case: Case, plan: Plan, role: str, number: int) -> Run:
    """One reconstruction. It does not have any candidates if the numbers diverged."""
    path = case.folder / "runs" / f"{role}-{number}.safetensors"
    checkpoint = path.with_suffix(".checkpoint")

    def compute() -> Contents:
        if role != "subject":  # a report shows something of the subject even without time
            case.clock.check()
        note(f"reading: {role}, restart {number + 1} of {plan.restarts if role == 'subject' else CONTROL_RUNS}")
        problem, shape = _problem(case, plan, role), case.subject.image_shape
        try:
            rec = reconstruct(
                problem,
                image_shape=shape,
                candidates=plan.candidates,
                steps=plan.steps,
                priors=(Box(), TotalVariation(weight=plan.total_variation)),
                record_every=plan.record_every,
                seed=1000 * plan.seed + number,
                checkpoint=checkpoint,
                callbacks=[case.clock],
            )
        except DivergenceError:
            return {"images": torch.zeros(0, *shape), "contributions": torch.zeros(0)}, {"loss": 1.0}
        return candidates(problem, rec.images, rec.multipliers, rec.labels)

    run = cached_tensors(path, digest(case.owner, role, number), compute, Run.of)
    checkpoint.unlink(missing_ok=True)
    return run


def _problem(case: Case, plan: Plan, role: str) -> Objective:
    """The planned objective on the weights of a role."""
    model, initial = case.subject.model, case.subject.initial
    if role == "negative":
        model = shuffled(case.subject, plan.method, seed=plan.seed)
    elif role == "positive":
        model, initial = positive_control(case, plan)
    return objective(model, initial, plan).to(case.device)


def candidates(problem: Objective, x: Tensor, multipliers: Tensor, labels: Tensor | None) -> Contents:
    """Candidates, the contribution ‖λ_i f(x_i)‖² / ‖T‖² of each, and the loss of all together."""
    problem.sharpness = SHARP
    T2 = problem.target_norm_squared
    loss = float(problem.loss(x, multipliers, labels) / T2)
    shares = contributions(problem, x, multipliers, labels).square() / T2
    return {"images": x.cpu(), "contributions": shares.cpu()}, {"loss": loss}
