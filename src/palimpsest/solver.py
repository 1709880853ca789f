"""The two phases, over one explicit state: descend until nothing moves, split what can be split, descend again."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from palimpsest import splitting
from palimpsest.errors import DivergenceError, InvalidInputError
from palimpsest.objectives import Objective
from palimpsest.optimisers import Adam, Moments, Optimiser
from palimpsest.parametrisation import Parametrisation
from palimpsest.priors import Box, Prior, Sum, TotalVariation
from palimpsest.splitting import Splitting
from palimpsest.state import Outcome, State

PIXEL = 0.2  # typical deviation of a pixel from its mean, for images in [0, 1]
START = 0.1  # multipliers start small: candidates first turn towards the images, then grow
PATIENCE = 10  # records over which a plateau is judged


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a reconstruction is run. The defaults are one recipe for every problem.

    Args:
        candidates: how many candidates k to start with; about twice the number of training images is safe.
        steps: gradient steps in all phases together.
        splitting: when and how candidates split, or None for a single phase of descent.
        priors: what is known of the images; one :class:`~palimpsest.priors.Prior` or several, () for none.
        optimiser: :class:`~palimpsest.optimisers.Adam` or :class:`~palimpsest.optimisers.SGD`. The rate falls to zero
            along a cosine within each phase, and starts afresh after a split.
        sharpness: β of the smoothed ReLUs at the start and the end of each phase, annealed geometrically, or None to
            keep the objective's own.
        gradient_tolerance: a phase ends once ‖∇_x L‖ / ‖T‖² is at most this. Where there are priors this gradient
            need not vanish, for they pull against it.
        plateau: a phase ends once L with its priors has fallen by less than this share over the last ten records.
        record_every: steps between two entries of the history; about 200 in a run by default.
        seed: of the initial candidates and of random directions.
    """

    candidates: int
    steps: int = 4000
    splitting: Splitting | None = None
    priors: Prior | tuple[Prior, ...] = (Box(), TotalVariation())
    optimiser: Optimiser = field(default_factory=Adam)
    sharpness: tuple[float, float] | None = (10.0, 200.0)
    gradient_tolerance: float = 0.0
    plateau: float = 0.0
    record_every: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.candidates < 1 or self.steps < 1:
            raise InvalidInputError(f"candidates ({self.candidates}) and steps ({self.steps}) must be at least 1")
        if self.record_every is not None and self.record_every < 1:
            raise InvalidInputError("record_every must be at least 1")
        if self.sharpness is not None and min(self.sharpness) <= 0:
            raise InvalidInputError(f"sharpness is {self.sharpness}; give two positive numbers, or None")


class Solver:
    """Algorithm 1 over an explicit state.

    >>> from palimpsest.networks import MLP
    >>> from palimpsest.objectives import KKT
    >>> from palimpsest.parametrisation import Everywhere
    >>> solver = Solver(KKT(MLP(6, (5,))), Everywhere((6,)), Settings(candidates=4, steps=3))
    >>> state = solver.init()
    >>> while not solver.done(state):
    ...     state = solver.step(state)
    >>> state.step, str(state.outcome)
    (3, 'all steps were done')
    """

    def __init__(self, objective: Objective, where: Parametrisation, settings: Settings) -> None:
        self.where, self.settings = where, settings
        self.objective = objective.within(where.images)  # a copy: its sharpness is the solver's to set
        self.prior = settings.priors if isinstance(settings.priors, Prior) else Sum(settings.priors)
        self._T2 = objective.target_norm_squared
        self.record_every = settings.record_every or max(1, settings.steps // 200)
        self.rounds = 0 if settings.splitting is None else settings.splitting.rounds

    # --- the explicit state machine --------------------------------------------------------------

    def init(self) -> State:
        """Fresh candidates: pixels and multipliers are random, labels are balanced."""
        k, objective = self.settings.candidates, self._at(0.0)
        generator = torch.Generator().manual_seed(self.settings.seed)
        x = torch.randn(k, *self.where.shape, generator=generator, dtype=torch.float64)
        x = (PIXEL * self.where.unit * x).to(objective.device, objective.dtype)
        objective.check_network(x)
        noise = torch.rand(k, *objective.multiplier_shape(x), generator=generator, dtype=torch.float64).to(x)
        labels = objective.label_kind.balanced(k, objective.outputs(x[:1]).shape[1])
        labels = None if labels is None else labels.to(objective.device)
        objective.check(x, noise, labels)
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
            first_bad=torch.tensor(-1, device=objective.device),
            multiplier_unit=unit,
        )

    def _multiplier_unit(self, x: Tensor, like: Tensor, labels: Tensor | None, generator: torch.Generator) -> float:
        """√(‖T‖² / Σ‖f_i‖²): the multiplier at which candidates, added up with random signs, are as long as T.

        E‖Σ ±f_i‖² = Σ‖f_i‖², so a backward pass measures it; four are averaged. Multipliers are started and moved in
        this unit, and gradients taken in it and relative to ‖T‖², which makes a run blind to the scale of the network,
        of its weights and of the loss.
        """
        signs = [2.0 * torch.randint(2, like.shape, generator=generator).to(like) - 1.0 for _ in range(4)]
        squares = [self.objective.represented_norm_squared(x, s, labels) for s in signs]
        return float((self._T2 / torch.stack(squares).mean()).sqrt())

    def step(self, state: State) -> State:
        """One gradient step (Phase I) or, where a phase is over, one round of splitting (Phase II)."""
        ended = self._phase_ended(state)
        return self._descend(state) if ended is None else self._split(state, ended)

    def done(self, state: State) -> bool:
        return state.outcome is not None

    def final(self) -> Objective:
        """The objective at the sharpness with which a run ends, in the candidates' coordinates."""
        return self._at(1.0)

    def fingerprint(self) -> str:
        """Tells problems and settings apart, so that a saved state is never resumed on another one."""
        digest = hashlib.sha256()
        for part in (self.settings, self.where, *self.objective.identity()):
            _feed(digest, part)
        return digest.hexdigest()

    # --- Phase I ---------------------------------------------------------------------------------

    def _descend(self, state: State) -> State:
        objective, optimiser = self._at(self._elapsed(state)), self.settings.optimiser
        L, dx, dλ = objective.loss_and_gradients(state.x, state.multipliers, state.labels)
        penalty, px, pλ = self._penalty_and_gradients(state)
        first_bad = torch.where((state.first_bad < 0) & ~(L + penalty).isfinite(), state.step, state.first_bad)
        history = state.history
        if state.step % self.record_every == 0:
            history = (*history, self._record(state, L, penalty, dx, first_bad))

        def moved(of: str, value: Tensor, gradient: Tensor, unit: float) -> tuple[Tensor, Moments]:
            """One step in natural units: value = unit · u, so ∂/∂u = unit · ∂/∂value."""
            return optimiser.update(
                value, gradient * (unit / self._T2), state.moments[of], step=state.step + 1, factor=rate * unit
            )

        rate = self._rate(state)
        x, x_moments = moved("x", state.x, dx + px, self.where.unit)
        λ, λ_moments = moved("multipliers", state.multipliers, dλ + pλ, state.multiplier_unit / PIXEL)
        return replace(
            state,
            x=x,
            multipliers=λ if objective.signed else λ.clamp_min(0),
            moments={"x": x_moments, "multipliers": λ_moments},
            first_bad=first_bad,
            step=state.step + 1,
            history=history,
        )

    def _record(self, state: State, L: Tensor, penalty: Tensor, dx: Tensor, first_bad: Tensor) -> dict[str, Any]:
        """One entry of the history. The only place of Phase I that waits for the device."""
        _require_finite(first_bad)
        T2 = float(self._T2)
        return {
            "step": state.step,
            "loss": float(L) / T2,
            "objective": float(L + penalty) / T2,
            "gradient": float(dx.norm()) / T2,
            "rate": self._rate(state) * self.settings.optimiser.learning_rate,
            "sharpness": self.objective.sharpness,
            "candidates": len(state.x),
        }

    def _phase_ended(self, state: State) -> Outcome | None:
        """Why the present Phase I is over, or None. Decided on what was recorded, so that a resumed run agrees."""
        if state.step >= state.phase_start + self._phase_length(state):
            return Outcome.FINISHED
        last = state.history[-1] if state.history else {}
        if last.get("step") != state.step - 1 or "loss" not in last:
            return None
        if last["gradient"] <= self.settings.gradient_tolerance:
            return Outcome.CONVERGED
        earlier = state.history[-1 - PATIENCE :][0]
        of_this_phase = len(state.history) > PATIENCE and "loss" in earlier and earlier["step"] >= state.phase_start
        if self.settings.plateau > 0 and of_this_phase:
            fallen = 1 - last["objective"] / earlier["objective"]
            return Outcome.PLATEAU if fallen < self.settings.plateau else None
        return None

    # --- Phase II --------------------------------------------------------------------------------

    def _split(self, state: State, ended: Outcome) -> State:
        policy = self.settings.splitting
        _require_finite(torch.where(state.x.isfinite().all(), state.first_bad, state.step))
        if policy is None or state.round >= self.rounds:
            return replace(state, outcome=ended)
        generator = torch.Generator()
        generator.set_state(state.generator)
        objective = self._at(0.0)  # as smooth as the phase to come: curvature is then felt from afar

        def full(x: Tensor, multipliers: Tensor, labels: Tensor | None) -> Tensor:
            penalty = self.prior.value(self.where.images(x), multipliers / state.multiplier_unit)
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
        }
        return replace(
            self._with_offspring(state, split),
            generator=generator.get_state(),
            round=state.round + 1,
            phase_start=state.step,
            history=(*state.history, event),
            # A phase that ended of itself, in a point that no split improves, is the end of the run.
            outcome=Outcome.STABLE
            if stable and ended is not Outcome.FINISHED and policy.direction == "curvature"
            else None,
        )

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
        """What is left of the steps is shared out evenly among the phases that are left."""
        return math.ceil((self.settings.steps - state.phase_start) / (self.rounds - state.round + 1))

    def _elapsed(self, state: State) -> float:
        """t from 0 to 1: how much of its phase has passed."""
        return (state.step - state.phase_start) / self._phase_length(state)

    def _rate(self, state: State) -> float:
        """½(1 + cos πt): the learning rate falls over each phase and restarts after every split."""
        return 0.5 * (1 + math.cos(math.pi * self._elapsed(state)))

    def _at(self, t: float) -> Objective:
        """The objective at the sharpness β_0 (β_1/β_0)^t of a phase of which the share t has passed."""
        if self.settings.sharpness is not None:
            β_0, β_1 = self.settings.sharpness
            self.objective.sharpness = β_0 * (β_1 / β_0) ** t
        return self.objective

    def _penalty_and_gradients(self, state: State) -> tuple[Tensor, Tensor, Tensor]:
        """‖T‖² · prior, with its gradients in the candidates' coordinates and in the multipliers."""
        unit = state.multiplier_unit
        value, d_images, dλ = self.prior.value_and_gradients(self.where.images(state.x), state.multipliers / unit)
        return self._T2 * value, self._T2 * self.where.pulled_back(d_images), self._T2 * dλ / unit


def _feed(digest: Any, part: Any) -> None:
    """Every bit of a value: `repr` would leave out the middle of a tensor."""
    if isinstance(part, Tensor):
        digest.update(f"{part.dtype} {tuple(part.shape)}".encode() + part.cpu().contiguous().numpy().tobytes())
    elif is_dataclass(part):
        _feed(digest, [type(part).__name__, *(getattr(part, f.name) for f in fields(part))])
    elif isinstance(part, Mapping):
        _feed(digest, [x for item in part.items() for x in item])
    elif isinstance(part, Sequence) and not isinstance(part, str):
        for x in part:
            _feed(digest, x)
    else:
        digest.update(repr(part).encode())


def _require_finite(first_bad: Tensor) -> None:
    if (step := int(first_bad)) >= 0:
        raise DivergenceError(step, "lower the learning rate, or check the scale of the weights")
