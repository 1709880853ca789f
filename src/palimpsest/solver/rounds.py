"""Phase II: merge candidates that show one image, then split those that one candidate alone cannot improve."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from palimpsest.solver import merging, splitting
from palimpsest.solver.state import Ending, State

if TYPE_CHECKING:
    from palimpsest.solver.loop import Solver


def next_round(solver: Solver, state: State, ended: Ending) -> State:
    """The state after a round of merging and splitting, or the end of the run. A phase has just ended."""
    policy, rounds, counts = solver.settings.splitting, solver.settings.rounds, solver.settings.counts_images
    if policy is None or (state.round >= rounds and not counts):
        return replace(state, outcome=ended)
    solver.prepare(state)
    state, account = _merge(solver, state)
    if state.round >= rounds or "images" in account:  # no more splitting: the last phase follows or has just ended
        L = float(solver.final(state.step).loss(*state.point) / solver.T2)
        event = {"split": 0, "eta": 0.0, "before": L - account["merging"], "after": L, "eigenvalues": []}
        outcome, following = ended if state.round >= rounds else None, rounds
    else:
        state, event = _split(solver, state, policy)
        # A phase that ended by itself, at a point that no split improves, is the end of the run.
        stable = event["split"] == 0 and ended is not Ending.FINISHED and policy.direction == "curvature"
        outcome, following = Ending.STABLE if stable and not counts else None, state.round + 1
    history = (*state.history, {"step": state.step} | event | account)
    return replace(state, round=following, phase_start=state.step, history=history, outcome=outcome)


def _merge(solver: Solver, state: State) -> tuple[State, dict[str, Any]]:
    """The state with fewer candidates, and an account: the number that left, and the change of L / ‖T‖²."""
    policy = solver.settings.merging
    if policy is None:
        return state, {}
    objective, count = solver.final(state.step), {}
    merged = merging.merge(objective, *state.point, policy)
    if policy.counting:
        count = {"among": len(merged.x)}
        if images := merging.images(merged.sizes):
            count["images"] = images
            if state.round >= solver.settings.rounds:
                merged = merged[merging.largest(merged.sizes, images)]
    change = objective.loss(merged.x, merged.multipliers, merged.labels) - objective.loss(*state.point)
    fewer = replace(state.inherited(merged.kept), x=merged.x, multipliers=merged.multipliers, labels=merged.labels)
    return fewer, {"merged": len(state.x) - len(merged.x), "merging": float(change / solver.T2)} | count


def _split(solver: Solver, state: State, policy: splitting.Splitting) -> tuple[State, dict[str, Any]]:
    """The state after a split, and an account, relative to ‖T‖²."""
    generator = torch.Generator()
    generator.set_state(state.generator)
    # As smooth as the phase to come: curvature is felt from afar.
    objective, unit = solver.first(state.step), solver.unit(state)

    def full(x: Tensor, multipliers: Tensor, labels: Tensor | None) -> Tensor:
        images, λ = solver.space.images(x), multipliers / unit
        penalty = solver.settings.prior_strength[0] * solver.prior.value(images, λ)
        return objective.loss(x, multipliers, labels) + solver.loss_unit * penalty

    split, T2 = splitting.split(objective, *state.point, policy, full=full, generator=generator), float(solver.T2)
    event: dict[str, Any] = {
        "split": len(split.chosen),
        "eta": split.eta,
        "before": split.before / T2,
        "after": split.after / T2,
    }
    event |= {"eigenvalues": (split.eigenvalues / solver.T2).tolist()}
    return replace(_with_offspring(solver, state, split), generator=generator.get_state()), event


def _with_offspring(solver: Solver, state: State, split: splitting.Split) -> State:
    """The state after a split: both offspring get new numbers and inherit the optimiser's memory.

    ∂L/∂x_i is proportional to λ_i, so an offspring's gradients are half its parent's, and so is its memory.
    """
    k, parents, chosen = len(state.x), split.parents, split.chosen
    heirs = state.inherited(parents)
    changed = torch.cat([chosen, torch.arange(k, len(parents), device=chosen.device)])
    lineage = torch.cat([state.lineage, heirs.ids[changed]])
    heirs.ids[changed] = torch.arange(len(state.lineage), len(lineage), device=heirs.ids.device)
    scale = torch.ones(len(parents), *[1] * (state.x.ndim - 1)).to(state.x)
    scale[changed] = 0.5
    moments = heirs.moments | {"x": solver.settings.optimiser.rescaled(heirs.moments["x"], scale)}
    return replace(
        heirs, x=split.x, multipliers=split.multipliers, labels=split.labels, lineage=lineage, moments=moments
    )
