"""The two phases, over one explicit state: descend until nothing moves, split what can be split, descend again."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import NoneType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from palimpsest.errors import DivergenceError, InvalidInputError
from palimpsest.execution import Execution, Executor, Tensors
from palimpsest.execution.fusion import fusible
from palimpsest.objectives import Objective
from palimpsest.objectives.base import Bound
from palimpsest.objectives.spaces import Parametrisation
from palimpsest.solver import memory, merging, splitting
from palimpsest.solver.fingerprints import digest
from palimpsest.solver.merging import Merging
from palimpsest.solver.optimisers import Adam, Moments, Optimiser, Pace
from palimpsest.solver.priors import Box, Prior, Sum, TotalVariation
from palimpsest.solver.splitting import Splitting
from palimpsest.solver.state import Ending, State

PIXEL = 0.2  # typical deviation of a pixel from its mean, for images in [0, 1]
START = 0.1  # multipliers start small: candidates first turn towards the images, then grow
PATIENCE = 10  # records over which a plateau is judged
STRETCH = 100  # most steps between two states: what an interruption may cost


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a run. `pal.reconstruct` explains each of them."""

    candidates: int
    steps: int = 4000
    splitting: Splitting | None = None
    merging: Merging | None = None
    priors: Prior | Sequence[Prior] = (Box(), TotalVariation())
    optimiser: Optimiser = field(default_factory=Adam)
    schedule: Literal["cosine", "constant"] = "cosine"
    sharpness: tuple[float, float] | None = (10.0, 200.0)
    prior_strength: tuple[float, float] = (1.0, 1.0)
    gradient_tolerance: float = 0.0
    plateau: float = 0.0
    record_every: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        several = [self.priors] if isinstance(self.priors, Prior) else self.priors
        if not isinstance(several, Sequence) or not all(isinstance(prior, Prior) for prior in several):
            raise InvalidInputError("priors must be instances of pal.priors.Prior; write a subclass for your own")
        kinds = {"optimiser": (Optimiser,), "splitting": (Splitting, NoneType), "merging": (Merging, NoneType)}
        for name, kind in kinds.items():
            if not isinstance(value := getattr(self, name), kind):
                raise InvalidInputError(f"{name} is a {type(value).__name__}; give an instance of {kind[0].__name__}")
        if self.candidates < 1 or self.steps < 1:
            raise InvalidInputError(f"candidates ({self.candidates}) and steps ({self.steps}) must be at least 1")
        if self.record_every is not None and self.record_every < 1:
            raise InvalidInputError("record_every must be at least 1")
        if self.sharpness is not None and min(self.sharpness) <= 0:
            raise InvalidInputError(f"sharpness is {self.sharpness}; give two positive numbers, or None")
        if min(self.prior_strength) <= 0:
            raise InvalidInputError(f"prior_strength is {self.prior_strength}; give two positive numbers")
        if self.schedule not in ("cosine", "constant"):
            raise InvalidInputError(f"schedule is {self.schedule!r}; choose cosine or constant")
        if self.merging is not None and self.splitting is None:
            raise InvalidInputError("merging takes place before each round of splitting; give a splitting too")


class Scheduled(NamedTuple):
    """The numbers that change from step to step: a row of the schedule, which lies on the device."""

    sharpness: Any
    prior_strength: Any
    rate: Any
    unbias: Any


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
        self.space, self.settings, self.execution = space, settings, execution or Execution()
        self._asked, self.objective = objective, objective.within(space)  # a copy: its sharpness is the solver's to set
        self._own_sharpness = objective.sharpness
        self._T2 = self.objective.target_norm_squared
        prior = settings.priors if isinstance(settings.priors, Prior) else Sum(settings.priors)
        self.prior = prior.placed(self._T2)
        self._prepared_for = 0  # candidates
        self._bound: Bound | None = None
        self.record_every = settings.record_every or max(1, settings.steps // 200)
        self.rounds = 0 if settings.splitting is None else settings.splitting.rounds
        self._counts = settings.merging is not None and settings.merging.counting
        itself = weakref.proxy(self)  # no cycle: captured graphs are freed with their solver
        programs = {
            "step": partial(Solver._advance, itself, watch=False),
            "watched step": partial(Solver._advance, itself, watch=True),
        }
        self._steps = self.execution.executor(programs, objective.device, steps=settings.steps)

    # --- the explicit state machine --------------------------------------------------------------

    def init(self) -> State:
        """Fresh candidates: pixels and multipliers are random, labels are balanced."""
        k, objective = self.settings.candidates, self._at(self._sharpness(0.0))
        generator = torch.Generator().manual_seed(self.settings.seed)
        x = torch.randn(k, *self.space.shape, generator=generator, dtype=torch.float64)
        x = (PIXEL * self.space.unit * x).to(objective.device, objective.dtype)
        objective.check_network(x)
        objective.chunk = memory.chunk_size(objective, x, self.execution.memory)
        noise = torch.rand(k, *objective.multiplier_shape(x), generator=generator, dtype=torch.float64).to(x)
        labels = objective.label_kind.balanced(k, objective.outputs(x[:1]).shape[1])
        labels = None if labels is None else labels.to(objective.device)
        objective.bind(x, noise, labels)
        unit = self._multiplier_unit(x, noise, labels, generator)
        multipliers = START * unit * (noise - 0.5 if objective.signed else noise)
        return State(
            x=x,
            multipliers=multipliers,
            labels=labels,
            ids=torch.arange(k, device=objective.device),
            lineage=torch.full((k,), -1, device=objective.device),
            moments={
                "x": self.settings.optimiser.init(x),
                "multipliers": self.settings.optimiser.init(multipliers),
            },
            generator=generator.get_state(),
            multiplier_unit=unit,
        )

    def _multiplier_unit(self, x: Tensor, like: Tensor, labels: Tensor | None, generator: torch.Generator) -> float:
        """√(‖T‖² / Σ‖f_i‖²): the multiplier at which candidates, added up with random signs, are as long as T.

        E‖Σ ±f_i‖² = Σ‖f_i‖², so a backward pass measures it; four are averaged. Multipliers are started and moved in
        this unit, and gradients taken in it and relative to ‖T‖², which makes a run blind to the scale of the network,
        of its weights and of the loss.
        """
        signs = [2.0 * torch.randint(2, like.shape, generator=generator).to(like) - 1.0 for _ in range(4)]
        squares = [self.objective.norm_squared(self.objective.represent(x, s, labels)) for s in signs]
        return float((self._T2 / torch.stack(squares).mean()).sqrt())

    def step(self, state: State) -> State:
        """A stretch of gradient steps (Phase I) or, where a phase is over, one round of splitting (Phase II)."""
        ended = self._phase_ended(state)
        return self._descend(state) if ended is None else self._split(state, ended)

    def done(self, state: State) -> bool:
        return state.outcome is not None

    def final(self) -> Objective:
        """The objective at the sharpness with which a run ends, in the candidates' coordinates."""
        return self._at(self._sharpness(1.0))

    def fingerprint(self) -> str:
        """Tells problems and settings apart, so that a saved state is never resumed on another one."""
        return digest([self.settings, self.space, self._own_sharpness, *self._asked.identity()]).hex()

    # --- Phase I ---------------------------------------------------------------------------------

    def _descend(self, state: State) -> State:
        """Gradient steps up to the next that is to be recorded, or to the end of the phase."""
        end = state.phase_start + self._phase_length(state)
        end = min(end, state.step + STRETCH, state.step - state.step % self.record_every + self.record_every)
        return self.descend(state, end - state.step)

    def descend(self, state: State, steps: int) -> State:
        """Take this many gradient steps; the first is recorded if its number is a multiple of ``record_every``."""
        end = state.step + steps
        schedule = torch.tensor([self._schedule(state, step) for step in range(state.step, end)], dtype=torch.float64)
        plan = ["watched step" if self._records(state) else "step"] + ["step"] * (steps - 1)
        tensors, seen = self.prepare(state).run(_tensors(state), plan, schedule.to(state.x))
        history = (*state.history, *(self._record(state, watched) for watched in seen))
        return replace(_with_tensors(state, tensors), step=end, history=history)

    def _advance(self, tensors: Tensors, row: Tensor, *, watch: bool) -> Tensors | None:
        """One gradient step on L with its priors, in place, by a row of the schedule."""
        now = Scheduled(*row.unbind())
        objective = self._at(now.sharpness)
        x, λ, unit = tensors["x"], tensors["multipliers"], tensors["multiplier_unit"]
        point, watched = (x, λ, tensors.get("labels")), None
        assert self._bound is not None
        r, *gradients = objective.residual_and_gradients(self._bound, *point)
        if watch:
            penalty = now.prior_strength * self.prior.value(self.space.images(x), λ / unit)
            watched = {
                "loss": objective.norm_squared(r) / self._T2,
                "penalty": penalty,
                "gradient": gradients[0].norm(),
            }
        penalties = (_penalties if self.prior.closed_form else _penalties.plain)(self.prior, self.space, x, λ, unit)
        step = (self.settings.optimiser, self.space.unit, objective.signed, x, λ, unit)
        _update(*step, gradients, self._T2, penalties, _moments(tensors), now)
        return watched

    def prepare(self, state: State) -> Executor:
        """A chunk of candidates is as large as memory allows, which is looked up when their number changes."""
        if self._prepared_for != len(state.x):
            arguments = (state.x, state.multipliers, state.labels)
            objective = self._at(self._sharpness(0.0))
            objective.chunk = memory.chunk_size(objective, state.x, self.execution.memory)
            self._bound = objective.bind(*arguments)
            self._prepared_for = len(state.x)
        return self._steps

    def _schedule(self, state: State, step: int) -> Scheduled:
        """The numbers of a step of the present phase."""
        t = self._elapsed(state, step)
        β, strength = self._sharpness(t), _geometric(*self.settings.prior_strength, t)
        pace = self.settings.optimiser.pace(step + 1, self._rate(state, step))
        return Scheduled(0.0 if β is None else float(β), strength, *pace)

    def _records(self, state: State) -> bool:
        return state.step % self.record_every == 0

    def _record(self, state: State, watched: Tensors) -> dict[str, Any]:
        """One entry of the history. The only place of Phase I that waits for the device."""
        loss, penalty, gradient = torch.stack([t.double() for t in watched.values()]).tolist()
        if not math.isfinite(loss + penalty):
            raise DivergenceError(state.step, "lower the learning rate, or check the scale of the weights")
        return {
            "step": state.step,
            "loss": loss,
            "objective": loss + penalty,
            "gradient": gradient / float(self._T2),
            "rate": self._rate(state, state.step) * self.settings.optimiser.learning_rate,
            "sharpness": self._sharpness(self._elapsed(state, state.step)),
            "candidates": len(state.x),
        }

    def _phase_ended(self, state: State) -> Ending | None:
        """Why the present Phase I is over, or None. Decided on what was recorded, so that a resumed run agrees."""
        if state.step >= state.phase_start + self._phase_length(state):
            return Ending.FINISHED
        last = state.history[-1] if state.history else {}
        if not self._records(state) or "loss" not in last:
            return None
        if last["gradient"] <= self.settings.gradient_tolerance:
            return Ending.CONVERGED
        earlier = state.history[-1 - PATIENCE :][0]
        of_this_phase = len(state.history) > PATIENCE and "loss" in earlier and earlier["step"] >= state.phase_start
        if self.settings.plateau > 0 and of_this_phase:
            fallen = 1 - last["objective"] / earlier["objective"]
            return Ending.PLATEAU if fallen < self.settings.plateau else None
        return None

    # --- Phase II --------------------------------------------------------------------------------

    def _split(self, state: State, ended: Ending) -> State:
        policy = self.settings.splitting
        if not bool(state.x.isfinite().all() & state.multipliers.isfinite().all()):
            raise DivergenceError(state.step, "lower the learning rate, or check the scale of the weights")
        if policy is None or (state.round >= self.rounds and not self._counts):
            return replace(state, outcome=ended)
        self.prepare(state)
        state, account = self._merge(state)
        if state.round >= self.rounds or "images" in account:
            return self._counted(state, account, ended)
        generator = torch.Generator()
        generator.set_state(state.generator)
        objective = self._at(self._sharpness(0.0))  # as smooth as the phase to come: curvature is then felt from afar

        def full(x: Tensor, multipliers: Tensor, labels: Tensor | None) -> Tensor:
            penalty = self.settings.prior_strength[0] * self.prior.value(
                self.space.images(x), multipliers / state.multiplier_unit
            )
            return objective.loss(x, multipliers, labels) + self._T2 * penalty

        split = splitting.split(
            objective, state.x, state.multipliers, state.labels, policy, full=full, generator=generator
        )
        T2, stable = float(self._T2), len(split.chosen) == 0
        event = {
            "step": state.step,
            "split": len(split.chosen),
            "eta": split.eta,
            "before": split.before / T2,
            "after": split.after / T2,
            "eigenvalues": (split.eigenvalues / self._T2).tolist(),
        } | account
        return replace(
            self._with_offspring(state, split),
            generator=generator.get_state(),
            round=state.round + 1,
            phase_start=state.step,
            history=(*state.history, event),
            # A phase that ended of itself, in a point that no split improves, is the end of the run.
            outcome=Ending.STABLE
            if stable and ended is not Ending.FINISHED and policy.direction == "curvature" and not self._counts
            else None,
        )

    def _counted(self, state: State, account: dict[str, Any], ended: Ending) -> State:
        """No splitting: what is left is the last phase or, after that, nothing."""
        L = float(self.final().loss(state.x, state.multipliers, state.labels) / self._T2)
        before = L - account["merging"]
        event = {"step": state.step, "split": 0, "eta": 0.0, "before": before, "after": L, "eigenvalues": []} | account
        return replace(
            state,
            round=self.rounds,
            phase_start=state.step,
            history=(*state.history, event),
            outcome=ended if state.round >= self.rounds else None,
        )

    def _merge(self, state: State) -> tuple[State, dict[str, Any]]:
        """The state with fewer candidates, and an account: how many went, and the change of L / ‖T‖²."""
        policy, point = self.settings.merging, (state.x, state.multipliers, state.labels)
        if policy is None:
            return state, {}
        objective, count = self.final(), {}
        merged = merging.merge(objective, *point, policy)
        if self._counts:
            count = {"among": len(merged.x)}
            if images := merging.images(merged.sizes):
                count["images"] = images
                merged = merged[merging.largest(merged.sizes, images)] if state.round >= self.rounds else merged
        change = objective.loss(merged.x, merged.multipliers, merged.labels) - objective.loss(*point)
        kept = {of: {name: t[merged.kept] for name, t in m.items()} for of, m in state.moments.items()}
        fewer = replace(
            state,
            x=merged.x,
            multipliers=merged.multipliers,
            labels=merged.labels,
            ids=state.ids[merged.kept],
            moments=kept,
        )
        went = len(state.x) - len(merged.x)
        return fewer, {"merged": went, "merging": float(change / self._T2)} | count

    def _with_offspring(self, state: State, split: splitting.Split) -> State:
        """The state after a split: new numbers for both off-spring, the optimiser's memory inherited.

        ∂L/∂x_i is proportional to λ_i, so an off-spring's gradients are half its parent's, and so is its memory.
        """
        k, parents, chosen = len(state.x), split.parents, split.chosen
        ids = state.ids[parents]
        changed = torch.cat([chosen, torch.arange(k, len(parents), device=chosen.device)])
        lineage = torch.cat([state.lineage, ids[changed]])
        ids[changed] = torch.arange(len(state.lineage), len(lineage), device=ids.device)
        scale = torch.ones(len(parents), *[1] * (state.x.ndim - 1)).to(state.x)
        scale[changed] = 0.5
        inherited = {of: {name: t[parents] for name, t in m.items()} for of, m in state.moments.items()}
        return replace(
            state,
            x=split.x,
            multipliers=split.multipliers,
            labels=split.labels,
            ids=ids,
            lineage=lineage,
            moments=inherited | {"x": self.settings.optimiser.rescaled(inherited["x"], scale)},
        )

    # --- schedules -------------------------------------------------------------------------------

    def _phase_length(self, state: State) -> int:
        """What is left of the steps before the last round is shared out evenly; one last phase takes the rest."""
        rounds_left = self.rounds - state.round
        if rounds_left <= 0:
            return self.settings.steps - state.phase_start
        assert self.settings.splitting is not None
        end = round(self.settings.splitting.last_round * self.settings.steps)
        return max(0, math.ceil((end - state.phase_start) / rounds_left))

    def _elapsed(self, state: State, step: int) -> float:
        """t from 0 to 1: how much of its phase has passed at a step."""
        return (step - state.phase_start) / self._phase_length(state)

    def _rate(self, state: State, step: int) -> float:
        """½(1 + cos πt): the learning rate falls over each phase and restarts after every split; or 1 throughout."""
        if self.settings.schedule == "constant":
            return 1.0
        return 0.5 * (1 + math.cos(math.pi * self._elapsed(state, step)))

    def _sharpness(self, t: float) -> float | Tensor | None:
        """β_0 (β_1/β_0)^t when the share t of a phase has passed; the objective's own where none was set."""
        if self.settings.sharpness is None:
            return self._own_sharpness
        return _geometric(*self.settings.sharpness, t)

    def _at(self, β: float | Tensor | None) -> Objective:
        """The objective at sharpness β, unless it keeps its own."""
        if self.settings.sharpness is not None:
            self.objective.sharpness = β
        return self.objective


def _geometric(start: float, end: float, t: float) -> float:
    """From start to end as t goes from 0 to 1, by equal factors."""
    return start * (end / start) ** t


@fusible
def _penalties(prior: Prior, space: Parametrisation, x: Tensor, λ: Tensor, unit: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of the priors, in the candidates' coordinates and in the multipliers."""
    px, pλ = prior.gradients(space.images(x), λ / unit)
    return space.pulled_back(px), pλ / unit


@fusible
def _update(
    optimiser: Optimiser,
    x_unit: float,
    signed: bool,
    x: Tensor,
    λ: Tensor,
    unit: Tensor,
    gradients: Sequence[Tensor],
    T2: Tensor,
    penalties: tuple[Tensor, Tensor],
    moments: dict[str, Moments],
    now: Scheduled,
) -> None:
    """Move candidates and multipliers down the gradients of L / ‖T‖² and of the priors, in place.

    Steps are taken in natural units: value = unit · u, so ∂/∂u = unit · ∂/∂value, and a step of u moves value by
    unit times as much. The unit of a multiplier stands for one pixel's typical deviation.
    """
    for of, value, dL, penalty, scale in (
        ("x", x, gradients[0], penalties[0], x_unit),
        ("multipliers", λ, gradients[1], penalties[1], unit / PIXEL),
    ):
        gradient = torch.addcmul(dL * (scale / T2), penalty, now.prior_strength * scale)
        optimiser.update_(value, gradient, moments[of], Pace(now.rate * scale, now.unbias))
    if not signed:
        λ.clamp_min_(0)


def _tensors(state: State) -> Tensors:
    """What a step reads and changes, under the names it goes by on its way through an executor."""
    tensors = {"x": state.x, "multipliers": state.multipliers}
    tensors |= {f"moments/{of}/{name}": t for of, moments in state.moments.items() for name, t in moments.items()}
    tensors["multiplier_unit"] = torch.tensor(state.multiplier_unit).to(state.x)
    return tensors if state.labels is None else tensors | {"labels": state.labels}


def _moments(tensors: Tensors) -> dict[str, Moments]:
    moments: dict[str, Moments] = {}
    for name, t in tensors.items():
        if name.startswith("moments/"):
            _, of, kind = name.split("/")
            moments.setdefault(of, {})[kind] = t
    return moments


def _with_tensors(state: State, tensors: Tensors) -> State:
    return replace(state, x=tensors["x"], multipliers=tensors["multipliers"], moments=_moments(tensors))
