"""Problems whose answer is known: the target is built from chosen images and multipliers."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

import palimpsest as pal
from palimpsest.objectives import Objective
from palimpsest.objectives.spaces import Everywhere
from palimpsest.solver.loop import Solver
from palimpsest.solver.optimisers import Adam
from palimpsest.solver.settings import Settings


def exact_problem(seed: int, *, n: int = 2, d: int = 6, width: int = 60) -> tuple[Objective, Tensor, Tensor]:
    """An objective whose target is exactly Σ λ_i f(x_i) for the returned n images and multipliers."""
    torch.manual_seed(seed)
    initial, final = (pal.networks.MLP(d, (width, width)).double() for _ in range(2))
    objective = pal.NTK(final, initial.state_dict(), sharpness=5.0)
    x = torch.randn(n, d, dtype=torch.float64)
    λ = torch.randn(n, dtype=torch.float64).sign() * (0.5 + torch.rand(n, dtype=torch.float64))
    objective.target = objective.represent(x, λ)
    return objective, x, λ


def descend(objective: Objective, x: Tensor, λ: Tensor, *, steps: int, learning_rate: float) -> tuple[Tensor, Tensor]:
    """Plain Phase I from a given point, without priors and at the objective's own sharpness."""
    settings = Settings(
        candidates=len(x), steps=steps, priors=(), sharpness=None, optimiser=Adam(learning_rate=learning_rate)
    )
    solver = Solver(objective, Everywhere(tuple(x.shape[1:])), settings)
    state = replace(solver.init(), x=x, multipliers=λ)
    while not solver.done(state):
        state = solver.step(state)
    return state.x, state.multipliers


def stalled_problem(seed: int) -> tuple[Objective, Tensor, Tensor]:
    """Fewer candidates than images, descended until nothing moves any more."""
    objective, x, λ = exact_problem(seed, n=6, d=8, width=30)
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(2, *x.shape[1:], generator=generator, dtype=x.dtype)
    return objective, *descend(objective, start, λ[:2] * 0.1, steps=1500, learning_rate=0.05)
