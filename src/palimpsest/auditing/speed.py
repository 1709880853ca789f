"""How much an audit can do in its time: the speed of a reconstruction step and of a training step, measured."""

import time
from contextlib import suppress
from functools import partial

from palimpsest.auditing.case import Case
from palimpsest.auditing.controls import control_images
from palimpsest.auditing.floor import ITERATIONS
from palimpsest.auditing.plan import MARGIN, RECORD_EVERY, Budget, Plan
from palimpsest.auditing.reading import posed
from palimpsest.errors import PalimpsestError
from palimpsest.execution import Execution
from palimpsest.execution.workers import completed
from palimpsest.objectives import Objective
from palimpsest.objectives.spaces import Everywhere, Space
from palimpsest.solver.loop import Solver
from palimpsest.solver.settings import Settings
from palimpsest.training import train

MEASURED_SECONDS = 1.5  # of a reconstruction
LONG = 15.0  # seconds after which the first steps alone have to serve
WARM_UP_STEPS, MEASURED_STEPS = 2, 20  # of training: the first steps of a process also prepare the later ones


def measured_budget(case: Case, plan: Plan) -> Budget:
    """The time for this rung, and the speed of this machine or, if there are workers, of one of them."""
    [(_, measured)] = completed({"speed": partial(_speed, case.sent, plan)}, case.executor, seconds=case.patience)
    rate, training_rate, preparation = measured()
    rate *= max(1, len(plan.at))  # as if with one tangent point
    floor = 0.0 if case.truth is None else ITERATIONS * len(case.truth.images) / plan.candidates
    return Budget(MARGIN * case.share * case.clock.seconds_left, rate, training_rate, preparation, floor)


def _speed(case: Case, plan: Plan) -> tuple[float, float, float]:
    """Steps per second of a reconstruction and of a training, and the seconds before a reconstruction begins."""
    began = time.monotonic()
    problem, space = posed(case.subject, plan)
    preparation = time.monotonic() - began
    rate = _reconstruction_rate(problem.to(case.device), space, case.subject.image_shape, plan.candidates)
    return rate, _training_rate(case, plan) if case.options.controls else 1.0, preparation


def _reconstruction_rate(
    problem: Objective, space: Space | None, image_shape: tuple[int, ...], candidates: int
) -> float:
    """Steps of a reconstruction per second."""
    mode = Execution().resolved(problem.device)  # hardly any plan has steps enough to compile for
    settings = Settings(candidates=candidates, steps=10**6, record_every=RECORD_EVERY)
    searched = Everywhere(image_shape) if space is None else space.shaped(image_shape).to(problem.device, problem.dtype)
    solver = Solver(problem, searched, settings, Execution(mode=mode))
    with solver.execution.matrix_precision(problem.device):
        began = time.monotonic()
        state = solver.step(solver.init())  # the first steps also prepare the later ones
        if (seconds := time.monotonic() - began) > LONG:
            return state.step / seconds
        began, first = time.monotonic(), state.step
        while state.step == first or time.monotonic() - began < MEASURED_SECONDS:
            state = solver.step(state)  # recording waits for the device, so the clock is right
    return (state.step - first) / (time.monotonic() - began)


def _training_rate(case: Case, plan: Plan) -> float:
    """Training steps of the positive control per second."""
    public = control_images(case, plan)

    def seconds(steps: int) -> float:
        began = time.monotonic()
        with suppress(PalimpsestError):
            model = case.subject.fresh().to(case.device)
            train(model, public.images, public.labels, steps=steps, tolerance=1e-9)
        return time.monotonic() - began

    first = seconds(WARM_UP_STEPS)
    return WARM_UP_STEPS / first if first > LONG else MEASURED_STEPS / seconds(MEASURED_STEPS)
