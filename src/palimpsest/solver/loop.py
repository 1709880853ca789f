"""Algorithm 1, over one explicit state: descend (Phase I), split (Phase II, see `rounds`), descend again."""

import math
import weakref
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from palimpsest.errors import DivergenceError, InvalidInputError
from palimpsest.execution import Execution, Executor, Tensors
from palimpsest.execution.aside import aside
from palimpsest.execution.fusion import Traced, fusible
from palimpsest.execution.processes import Processes
from palimpsest.objectives import Objective
from palimpsest.objectives.base import ONE_BATCH
from palimpsest.objectives.binding import Bound
from palimpsest.objectives.spaces import Parametrisation
from palimpsest.solver import memory, rounds
from palimpsest.solver.fingerprints import digest
from palimpsest.solver.optimisers import Moments, Optimiser, Pace
from palimpsest.solver.priors import Prior, Sum
from palimpsest.solver.settings import Schedule, Scheduled, Settings
from palimpsest.solver.state import Ending, State, moments_of

PIXEL = 0.2  # typical deviation of a pixel from its mean, for images in [0, 1]
START = 0.1  # multipliers start small: candidates first turn towards the images, then grow
PATIENCE = 10  # records over which a plateau is judged
STRETCH = 100  # most steps between two states: an interruption costs no more
DIVERGED = "lower the learning rate, or check the scale of the weights"


class Solver:
    """Algorithm 1 over an explicit state.

    >>> from palimpsest.networks import MLP
    >>> from palimpsest.methods import KKT
    >>> from palimpsest.objectives.spaces import Everywhere
    >>> solver = Solver(KKT(MLP(6, (5,))), Everywhere((6,)), Settings(candidates=4, steps=3))
    >>> state = solver.init()
    >>> while not solver.done(state):
    ...     state = solver.step(state)
    >>> state.step, str(state.outcome)
    (3, 'all steps were done')
    """

    def __init__(
        self, objective: Objective, space: Parametrisation, settings: Settings, execution: Execution | None = None
    ) -> None:
        if objective.live and settings.splitting is not None:
            raise InvalidInputError(ONE_BATCH)
        self.space, self.settings, self.execution = space, settings, execution or Execution()
        self._original, self.processes = objective, Processes(self.execution.processes)
        self.objective = objective.within(space).among(self.processes)  # a copy, whose sharpness the solver sets
        self.schedule = Schedule(settings, objective.sharpness)
        self.T2 = self.objective.target_norm_squared
        self.loss_unit = self.T2 if settings.units is None else torch.ones_like(self.T2)  # L and priors add up in it
        prior = settings.priors if isinstance(settings.priors, Prior) else Sum(settings.priors)
        self.prior = prior.placed(self.T2)
        self._prepared_for = 0  # candidates
        self._bound: Bound | None = None
        self.record_every = settings.record_every or max(1, settings.steps // 200)
        itself = weakref.proxy(self)  # no cycle: captured graphs are freed with their solver
        programs = {
            "step": partial(Solver._advance, itself, watch=False),
            "watched step": partial(Solver._advance, itself, watch=True),
        }
        how = (type(space), self.prior, settings.sharpness, settings.optimiser, settings.splitting is None)
        problem = repr((*self.objective.operations(), *how))
        self._steps = self.execution.executor(programs, objective.device, problem=problem)
        self._derivatives = Traced(partial(Solver._differentiated, itself))

    def init(self) -> State:
        """Fresh candidates, of all processes: pixels and multipliers are random, labels are balanced."""
        k, objective, optimiser = self.settings.candidates, self.first(), self.settings.optimiser
        generator, raw = torch.Generator().manual_seed(self.settings.seed), self.settings.units
        x = torch.randn(k, *self.space.shape, generator=generator, dtype=torch.float64)
        x = ((raw.pixels if raw else PIXEL) * self.space.unit * x).to(objective.device, objective.dtype)
        objective.check_network(x)
        objective.chunk = memory.chunk_size(objective, x, self.execution.memory, self.processes, k)
        shape = (k, *objective.multiplier_shape(x))
        drawn = raw.draw(shape, generator) if raw else torch.rand(shape, generator=generator, dtype=torch.float64)
        noise = drawn.to(x)
        labels = objective.label_kind.balanced(k, objective.outputs(x[:1]).shape[1])
        labels = None if labels is None else labels.to(objective.device)
        unit = 1 / k if raw else self._multiplier_unit(x, noise, labels, generator)
        multipliers = unit * noise if raw else START * unit * (noise - 0.5 if objective.signed else noise)
        multipliers = multipliers * self._scale(multipliers)
        return State(
            x=x,
            multipliers=multipliers,
            labels=labels,
            ids=torch.arange(k, device=objective.device),
            lineage=torch.full((k,), -1, device=objective.device),
            moments={"x": optimiser.init(x), "multipliers": optimiser.init(multipliers)},
            generator=generator.get_state(),
            multiplier_unit=unit,
        )

    def _multiplier_unit(self, x: Tensor, like: Tensor, labels: Tensor | None, generator: torch.Generator) -> float:
        """√(‖T‖² / Σ‖f_i‖²): the multiplier at which candidates, added up with random signs, are as long as T.

        E‖Σ ±f_i‖² = Σ‖f_i‖², so the mean over four backward passes measures it. Multipliers start and move in this
        unit, and gradients are relative to ‖T‖². A run then does not depend on the scale of network, weights and loss.
        """
        signs = [2.0 * torch.randint(2, like.shape, generator=generator).to(like) - 1.0 for _ in range(4)]
        scaled = [s * self._scale(s) for s in signs]
        squares = [self.objective.length_squared(self.objective.represent(x, s, labels)) for s in scaled]
        return float((self.T2 / torch.stack(squares).mean()).sqrt())

    def _scale(self, like: Tensor) -> Tensor | float:
        """‖T_j‖: the size of the multipliers of each target relative to the others; 1 for one target."""
        lengths = self.objective.segments.lengths
        if lengths is None or self.settings.units is not None:
            return 1.0
        return torch.tensor(lengths, dtype=torch.float64).to(like).view(-1, *[1] * (like.ndim - 2))

    def unit(self, state: State) -> Tensor:
        """The natural size of each multiplier, to which it broadcasts."""
        unit = torch.tensor(state.multiplier_unit, dtype=torch.float64).to(state.x)
        return unit * self._scale(state.multipliers)

    def step(self, state: State) -> State:
        """A stretch of gradient steps (Phase I) or, at the end of a phase, one round of splitting (Phase II).

        Each process steps with its share of the candidates. A round of splitting compares all of them.
        """
        ended = self._phase_ended(state)
        if ended is None:  # descend to the next step that is recorded, or to the end of the phase
            recorded = state.step - state.step % self.record_every + self.record_every
            return self.descend(state, min(self.schedule.phase_end(state), state.step + STRETCH, recorded) - state.step)
        whole = self.whole(state)
        if not bool(whole.x.isfinite().all() & whole.multipliers.isfinite().all()):
            raise DivergenceError(state.step, DIVERGED)
        return self.share(rounds.next_round(self, whole, ended))

    def whole(self, state: State) -> State:
        """The state with the candidates of all processes, from each one's share."""
        return state.mapped(lambda t: self.processes.joined(t, len(state.ids)))

    def share(self, whole: State) -> State:
        """The state with this process's share of the candidates, on its device."""
        device = self.objective.device
        mine = whole.mapped(lambda t: self.processes.mine(t).to(device))
        return replace(mine, ids=whole.ids.to(device), lineage=whole.lineage.to(device))

    def done(self, state: State) -> bool:
        return state.outcome is not None

    def first(self, step: int = 0) -> Objective:
        """The objective at the sharpness with which a phase begins at a step, in the candidates' coordinates."""
        return self._at(self.schedule.sharpness(0.0, step))

    def final(self, step: int | None = None) -> Objective:
        """The objective at the sharpness with which a phase ends, the last one if no step is given."""
        return self._at(self.schedule.sharpness(1.0, self.settings.steps if step is None else step))

    def _at(self, β: float | Tensor | None) -> Objective:
        """The objective at sharpness β, unless it keeps its own."""
        if self.settings.sharpness is not None:
            self.objective.sharpness = β
        return self.objective

    def fingerprint(self) -> str:
        """A hash of the problem and the settings. A saved state is resumed only if it carries the same one."""
        own = self.schedule.own_sharpness
        return digest([self.settings, self.space, own, *self._original.identity()]).hex()

    def descend(self, state: State, steps: int) -> State:
        """Take this many gradient steps; the first is recorded if its number is a multiple of ``record_every``."""
        end = state.step + steps
        rows = torch.tensor([self._scheduled(state, step) for step in range(state.step, end)], dtype=torch.float64)
        plan = ["watched step" if state.step % self.record_every == 0 else "step"] + ["step"] * (steps - 1)
        # A graph is captured again when shapes change; by the shape of all ids, every process does so at once.
        given = state.tensors() | {"multiplier_unit": self.unit(state), "ids": state.ids}
        left = self.settings.steps - end
        tensors, seen = self.prepare(state).run(given, plan, rows.to(state.x), left=left)
        history = (*state.history, *(self._record(state, watched) for watched in seen))
        x, λ, moments = tensors["x"], tensors["multipliers"], moments_of(tensors)
        return replace(state, x=x, multipliers=λ, moments=moments, step=end, history=history)

    def prepare(self, state: State) -> Executor:
        """The executor of steps. Each number of candidates gets chunks that are as large as memory allows."""
        if self._prepared_for != (k := len(state.ids)):
            objective = self.first()
            objective.chunk = memory.chunk_size(objective, state.x, self.execution.memory, self.processes, k)
            self._bound = objective.bind(*state.point)
            self._prepared_for = k
        return self._steps

    def _scheduled(self, state: State, step: int) -> Scheduled:
        """The schedule of a step. Priors are means over candidates, so those of a share count in proportion."""
        now = self.schedule.at(state, step)
        return now._replace(prior_strength=now.prior_strength * (len(state.x) / len(state.ids)))

    def _advance(self, tensors: Tensors, row: Tensor, *, watch: bool) -> Tensors | None:
        """One gradient step on L with its priors, in place, by a row of the schedule."""
        now = Scheduled(*row.unbind())
        objective = self._at(now.sharpness)
        x, λ, unit = tensors["x"], tensors["multipliers"], tensors["multiplier_unit"]
        labels = () if "labels" not in tensors else (tensors["labels"],)
        of_priors = _penalties if self.prior.closed_form else _penalties.plain
        penalties = aside(partial(of_priors, self.prior, self.space, x, λ, unit))
        differentiated = self._derivatives if self._traceable else self._derivatives.plain
        e, *halves = differentiated(now.sharpness, x, λ, *labels)
        watched = None
        if watch:
            penalty = now.prior_strength * self.prior.value(self.space.images(x), λ / unit)
            loss = objective.norm_squared(e) / self.T2
            penalty = penalty * (self.loss_unit / self.T2)
            watched = {"loss": loss, "penalty": penalty, "gradient": 2 * halves[0].norm()}
        of_x, of_λ = zip(halves, penalties(), strict=True)
        multipliers_moved = aside(partial(self._move, "multipliers", tensors, *of_λ, now))
        self._move("x", tensors, *of_x, now)
        multipliers_moved()
        return watched

    def _move(self, name: str, tensors: Tensors, half: Tensor, penalty: Tensor, now: Scheduled) -> None:
        """One step of the candidates or of the multipliers, in place, by half of ∂L and by the gradient of the priors.

        Steps are taken in natural units: value = unit · u, so ∂/∂u = unit · ∂/∂value, and a step of u moves value by
        unit times as much. The unit of a multiplier stands for one pixel's typical deviation.
        """
        raw, optimiser, positive = self.settings.units, self.settings.optimiser, False
        scale: float | Tensor = self.space.unit
        if name == "multipliers":
            scale = tensors["multiplier_unit"] / (1.0 if raw else PIXEL)
            positive = not (raw or self.objective.signed)
            if raw and raw.multiplier_rate:
                now = now._replace(rate=now.rate * (raw.multiplier_rate / optimiser.learning_rate))
        moments = moments_of(tensors)[name]
        _update(optimiser, tensors[name], half, penalty, scale, self.loss_unit, moments, now, positive)

    def _differentiated(self, β: Tensor, x: Tensor, λ: Tensor, labels: Tensor | None = None) -> tuple:
        """e = v − T, ½∂L/∂x and ½∂L/∂λ."""
        assert self._bound is not None
        return self._at(β).error_and_half_gradients(self._bound, x, λ, labels)

    @property
    def _traceable(self) -> bool:
        """Whether a compiled step is traced as a whole.

        The number of candidates must stay, because each number compiles again. Processes must not wait inside.
        """
        return self.settings.splitting is None and self.objective.chunk is None and self.processes.count == 1

    def _record(self, state: State, watched: Tensors) -> dict[str, Any]:
        """One entry of the history. Phase I waits for the device, and for the other processes' numbers, only here."""
        mine = torch.stack([t.double() for t in watched.values()]).to(state.x.device)
        mine[0] /= self.processes.count  # each knows the whole loss; their mean is one number for all
        mine[2].square_()  # ‖∇‖² adds up
        loss, penalty, square = self.processes.total({"": mine})[""].tolist()
        if not math.isfinite(loss + penalty):
            raise DivergenceError(state.step, DIVERGED)
        t = self.schedule.elapsed(state, state.step)
        return {
            "step": state.step,
            "loss": loss,
            "objective": loss + penalty,
            "gradient": math.sqrt(square) / float(self.T2),
            "rate": self.schedule.rate(t) * self.settings.optimiser.learning_rate,
            "sharpness": self.schedule.sharpness(t, state.step),
            "candidates": len(state.ids),
        }

    def _phase_ended(self, state: State) -> Ending | None:
        """Why the present Phase I is over, or None. Only records decide, so a resumed run decides the same."""
        if state.step >= self.schedule.phase_end(state):
            return Ending.FINISHED
        last = state.history[-1] if state.history else {}
        if state.step % self.record_every or "loss" not in last:
            return None
        if last["gradient"] <= self.settings.gradient_tolerance:
            return Ending.CONVERGED
        earlier = state.history[-1 - PATIENCE :][0]
        of_this_phase = len(state.history) > PATIENCE and "loss" in earlier and earlier["step"] >= state.phase_start
        if self.settings.plateau > 0 and of_this_phase:
            fallen = 1 - last["objective"] / earlier["objective"]
            return Ending.PLATEAU if fallen < self.settings.plateau else None
        return None


@fusible
def _penalties(prior: Prior, space: Parametrisation, x: Tensor, λ: Tensor, unit: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of the priors, in the candidates' coordinates and in the multipliers."""
    px, pλ = prior.gradients(space.images(x), λ / unit)
    return space.pulled_back(px), pλ / unit


@fusible
def _update(
    optimiser: Optimiser,
    value: Tensor,
    half: Tensor,
    penalty: Tensor,
    scale: Tensor | float,
    loss_unit: Tensor,
    moments: Moments,
    now: Scheduled,
    positive: bool,
) -> None:
    """Move a value down the gradients of L / loss_unit and of the priors, in place, with ``scale`` as its unit."""
    gradient = torch.addcmul(half * (2 * scale / loss_unit), penalty, now.prior_strength * scale)
    optimiser.update_(value, gradient, moments, Pace(now.rate * scale, now.unbias))
    if positive:
        value.clamp_min_(0)
