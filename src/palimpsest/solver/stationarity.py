"""First- and second-order stationarity of the point at which a run ended."""

import math
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from palimpsest.objectives import Objective
from palimpsest.solver.lanczos import BASIS, smallest_eigenpairs
from palimpsest.solver.splitting import eigenpairs


class Stationarity(StrEnum):
    """The conclusion about a point."""

    CERTIFIED = "an ε-second-order stationary point"
    STEEP = "not stationary: the gradient is too large"
    SADDLE = "not second-order stationary: there is a direction of negative curvature"
    UNDECIDED = "stationary to first order, but the curvature was not resolved; ask for more iterations"


@dataclass(frozen=True)
class Certificate:
    """First- and second-order stationarity of L / ‖T‖² in the candidates.

    Because λ_min(∇²_x L) ≥ min_i λ_min(S(x_i)), the splitting matrices suffice to certify a point; only a direction of
    negative curvature refutes it. Both figures are Ritz values minus their error bounds. They are lower bounds once
    Lanczos has found the least eigenvalue. For all candidates jointly this takes more memory than a run in chunks has,
    so the splitting matrices alone certify such a run. Candidates that share live batch normalisation do not have
    splitting matrices; their bound is −∞, and the Hessian alone decides.
    """

    epsilon: float
    gradient: float  # ‖∇_x L‖
    splitting: float  # a lower bound on min_i λ_min(S(x_i))
    hessian: float  # a lower bound on λ_min(∇²_x L) over all candidates jointly
    found: float  # vᵀ∇²_x L v in the direction of least curvature that was found: an upper bound on λ_min
    rho: float  # a lower bound on ρ, the change of the curvature along its own direction; this is the safe side

    @property
    def allowed_curvature(self) -> float:
        """−√(ρε): how negative the curvature may be."""
        return -math.sqrt(self.rho * self.epsilon)

    @property
    def first_order(self) -> bool:
        return self.gradient <= self.epsilon

    @property
    def second_order(self) -> bool:
        """Whether the point is certified to be ε-second-order stationary."""
        return self.outcome is Stationarity.CERTIFIED

    @property
    def outcome(self) -> Stationarity:
        if not self.first_order:
            return Stationarity.STEEP
        if self.hessian >= self.allowed_curvature:
            return Stationarity.CERTIFIED
        return Stationarity.SADDLE if self.found < self.allowed_curvature else Stationarity.UNDECIDED

    def __str__(self) -> str:
        return f"{self.outcome} (ε = {self.epsilon:g})"


@torch.inference_mode(False)
def certify(
    objective: Objective,
    x: Tensor,
    multipliers: Tensor,
    labels: Tensor | None = None,
    *,
    epsilon: float = 1e-3,
    iterations: int = 40,
) -> Certificate:
    """Measure how stationary a point is: ‖∇_x L‖, min_i λ_min(S(x_i)) and λ_min(∇²_x L), all relative to ‖T‖².

    A point is ε-second-order stationary if ‖∇_x L‖ ≤ ε and λ_min(∇²_x L) ≥ −√(ρε), where ρ is the Lipschitz constant
    of the Hessian. ``rec.certify()`` measures the end of a run.

    Returns:
        An object with the numbers (``gradient``, ``splitting``, ``hessian``, ``found``, ``rho``) and the conclusion
            (``outcome``, ``first_order``, ``second_order``). ``print`` shows the conclusion as one sentence.

    Examples:
        >>> import palimpsest as pal
        >>> _ = torch.manual_seed(0)
        >>> objective = pal.KKT(pal.networks.MLP(4, hidden=(8,)), sharpness=10.0)
        >>> x, λ, y = torch.randn(3, 4), torch.rand(3), torch.tensor([1, -1, 1])
        >>> pal.certify(objective, x, λ, y).first_order
        False
    """
    T2 = float(objective.target_norm_squared)
    dx, _ = objective.gradients(x, multipliers, labels)
    hessian = objective.hessian(x, multipliers, labels)
    in_chunks = objective.chunk is not None and objective.chunk < len(x)
    of_all = max(2, BASIS * objective.chunk // len(x)) if in_chunks and objective.chunk else BASIS
    H = smallest_eigenpairs(lambda v: hessian(v[0])[None], x[None], iterations=iterations, basis=of_all)
    v, h = H.vectors[0], 1e-2

    def curvature_along_v(at: Tensor) -> float:
        return float((v * objective.hessian(at, multipliers, labels)(v)).sum())

    splitting = -torch.inf  # candidates that share live batch normalisation do not have splitting matrices
    if not objective.live:
        S = eigenpairs(objective, x, multipliers, labels, iterations=iterations, basis=BASIS)
        splitting = float((S.values - S.residuals).min()) / T2
    bounds = [splitting] if objective.convex else [-torch.inf]
    bounds += [] if in_chunks else [float(H.values[0] - H.residuals[0]) / T2]
    return Certificate(
        epsilon=epsilon,
        gradient=float(dx.norm()) / T2,
        splitting=splitting,
        hessian=max(bounds),
        found=float(H.values[0]) / T2,
        rho=abs(curvature_along_v(x + h * v) - curvature_along_v(x - h * v)) / (2 * h) / T2,
    )
