"""The floor: the share of the target that the training images leave unexplained with their best multipliers.

    min_λ Σ_p w_p ‖T_p − Σ_i λ_i f_p(x_i)‖² / Σ_p w_p ‖T_p‖²,     λ ≥ 0 if the method demands it.

Near 0 the method's assumption holds for this network. Near 1 the weights are not such a sum, and this method cannot
read the training images out of them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from palimpsest.objectives import Objective

ITERATIONS, PATIENCE = 200, 20
RATE = 0.1  # of the multipliers, relative to their start, if L is not a quadratic
GAIN = 1e-4  # of ‖T‖²: the search ends if PATIENCE iterations do not lower the floor by this much


@dataclass(frozen=True)
class Floor:
    """The stored result of this stage."""

    floor: float
    trace: float | None = None  # of folders that an older version began; not used


def floor(objective: Objective, images: Tensor, labels: Tensor | None = None) -> float:
    """The relative loss of the training images (as the network sees them) under their best multipliers.

    L is a quadratic in λ, so projected gradient descent with the steps of Barzilai and Borwein needs few iterations.
    """
    x = images.to(objective.device, objective.dtype)
    if not objective.scaled:
        return _descended(objective, x, labels)
    λ = torch.zeros(len(x), *objective.multiplier_shape(x)).to(x)
    L, _, gradient = objective.loss_and_gradients(x, λ, labels)
    T2 = best = float(L)
    # The first step is exact along the gradient: L is a parabola there, known by its values at two points.
    ahead = float(objective.loss(x, λ - gradient, labels))
    slope = float(gradient.square().sum())
    step = slope / max(2 * (ahead - T2 + slope), 1e-300)
    lowest = [best]
    for _ in range(ITERATIONS):
        new = λ - step * gradient
        new = new if objective.signed else new.clamp_min(0)
        L, _, new_gradient = objective.loss_and_gradients(x, new, labels)
        moved, turned = new - λ, new_gradient - gradient
        curvature = float((moved * turned).sum())
        if curvature <= 0 or not float(L) < float("inf"):
            break
        best = min(best, float(L))
        lowest.append(best)
        if len(lowest) > PATIENCE and lowest[-PATIENCE] - best < GAIN * T2:
            break
        step, λ, gradient = float(moved.square().sum()) / curvature, new, new_gradient
    return best / T2


def _descended(objective: Objective, x: Tensor, labels: Tensor | None) -> float:
    """The same for a loss that is not quadratic in λ and does not depend on its scale, by Adam from random signs."""
    signs = torch.randint(2, (len(x), *objective.multiplier_shape(x)), generator=torch.Generator().manual_seed(0))
    λ = (2.0 * signs - 1).to(x)
    rule, best = torch.optim.Adam([λ], lr=RATE), 1.0
    for _ in range(ITERATIONS):
        L, _, λ.grad = objective.loss_and_gradients(x, λ, labels)
        best = min(best, float(L / objective.target_norm_squared))
        rule.step()
    return best
