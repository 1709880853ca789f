"""Local minima of the max-margin problem for small polynomial networks, to the last digit.

    min_θ ½‖θ‖²   subject to   y_i Φ(θ; x_i) ≥ 1,     Φ(θ; x) = Σ_j a_j (W_j·x)^α

Gradient flow on the logistic loss converges to such a point in direction. An augmented Lagrangian finds the point and
its active set, and Newton's method on the KKT system makes it exact. The curvature of the Lagrangian along the active
margins shows whether it is a minimum.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

from margin_problem.checks import check_samples
from palimpsest.errors import InvalidInputError
from palimpsest.networks import PolynomialNetwork


@dataclass(frozen=True)
class MaxMargin:
    """A stationary point of the max-margin problem, and the evidence that it is a minimum.

    Attributes:
        network: the neurons that are not zero.
        multipliers: λ_i ≥ 0, (n,).
        residual: largest violation of stationarity, feasibility, sign and complementarity.
        curvature: least eigenvalue of the Lagrangian's Hessian on the directions that keep every margin with
            λ_i > 0; infinite if there are none.
    """

    network: PolynomialNetwork
    multipliers: Tensor
    residual: float
    curvature: float

    @property
    def active(self) -> Tensor:
        """Which samples enter the stationarity system, λ_i > 0, (n,)."""
        return self.multipliers > 0

    @property
    def is_minimum(self) -> bool:
        """Whether this is a strict local minimum, by the sufficient condition of second order.

        Zero neurons do not need a condition: one of size ε costs ½ε² and changes the margins by O(ε^{α+1}).
        """
        return self.residual <= 1e-10 and self.curvature > 1e-8


def max_margin(samples: Tensor, labels: Tensor, *, degree: int = 3, neurons: int = 20, seed: int = 0) -> MaxMargin:
    """Find a stationary point of the max-margin problem by descent from a random start.

        min_θ ½‖θ‖²   subject to   y_i Φ(θ; x_i) ≥ 1

    ``is_minimum`` of the result says whether it is a strict local minimum.

    Args:
        samples: x_i, (n, d).
        labels: y_i, ±1.
        degree: α of the activation.
        neurons: the number of neurons at the start, at least n.
        seed: the seed of the start.

    Examples:
        >>> x = torch.eye(3, dtype=torch.float64)
        >>> found = max_margin(x, torch.tensor([1.0, -1.0, 1.0]), neurons=8)
        >>> found.residual < 1e-12, found.is_minimum, len(found.network.a) <= int(found.active.sum())
        (True, True, True)
    """
    if not isinstance(degree, Integral) or degree < 1:
        raise InvalidInputError(f"degree is {degree}; give a whole number, 1 or more")
    x, y = (torch.as_tensor(t).detach().double() for t in (samples, labels))
    if not y.abs().eq(1).all() or neurons < len(x):
        raise InvalidInputError("labels other than ±1, or fewer neurons than samples; change labels or neurons")
    check_samples(x, y)
    θ = _feasible_start(x, y, degree, neurons, seed)
    λ, width = torch.zeros_like(y), len(θ) + 1
    while len(θ) < width:
        width = len(θ)
        θ, λ = _augmented_lagrangian(θ, λ, x, y, degree)
        θ = _without_idle_neurons(θ, degree)
    θ, λ = _newton(θ, λ, x, y, degree)
    return _result(θ, λ, x, y, degree)


def outputs(θ: Tensor, x: Tensor, degree: int) -> Tensor:
    """Φ(x_i), for neurons as rows θ_j = (a_j, W_j)."""
    return (x @ θ[:, 1:].T) ** degree @ θ[:, 0]


def _feasible_start(x: Tensor, y: Tensor, degree: int, neurons: int, seed: int) -> Tensor:
    """Random unit W_j and the smallest head with every margin 1, balanced to √α|a_j| = ‖W_j‖."""
    generator = torch.Generator().manual_seed(seed)
    W = torch.randn(neurons, x.shape[1], generator=generator, dtype=x.dtype)
    W = torch.nn.functional.normalize(W, dim=1)
    features = (x @ W.T) ** degree
    a = torch.linalg.lstsq(features, y[:, None], driver="gelsd").solution
    if (features @ a - y[:, None]).norm() > 1e-6:
        raise InvalidInputError(f"{neurons} neurons of degree {degree} do not separate the samples; give more neurons")
    c = (a.abs() * degree**0.5).clamp(min=1e-12) ** (1 / (degree + 1))
    return torch.cat([a * c**-degree, c * W], 1)  # a (W·x)^α is unchanged by (c^{−α} a, c W)


def _augmented_lagrangian(θ: Tensor, λ: Tensor, x: Tensor, y: Tensor, degree: int) -> tuple[Tensor, Tensor]:
    """min ½‖θ‖² + (ρ/2) Σ_i max(0, 1 − y_iΦ(x_i) + λ_i/ρ)², with λ_i ← max(0, λ_i + ρ(1 − y_iΦ(x_i)))."""
    shape, ρ = θ.shape, 10.0

    def value_and_gradient(flat: np.ndarray) -> tuple[float, np.ndarray]:
        p = torch.from_numpy(flat).reshape(shape)
        t = x @ p[:, 1:].T
        push = (1 - y * (t**degree @ p[:, 0]) + λ / ρ).clamp(min=0)
        b = ρ * push * y  # ∂/∂Φ_i of the penalty is −b_i
        da = p[:, 0] - (t**degree).T @ b
        dW = p[:, 1:] - degree * p[:, :1] * ((t ** (degree - 1)).T @ (b[:, None] * x))
        value = 0.5 * p.square().sum() + 0.5 * ρ * push.square().sum()
        return float(value), torch.cat([da[:, None], dW], 1).flatten().numpy()

    options = {"maxiter": 2000, "maxfun": 4000, "ftol": 1e-15, "gtol": 1e-9, "maxcor": 30}
    flat, violation = θ.flatten().numpy(), torch.inf
    for _ in range(25):
        trial = minimize(value_and_gradient, flat, jac=True, method="L-BFGS-B", options=options).x
        slack = 1 - y * outputs(torch.from_numpy(trial).reshape(shape), x, degree)
        if slack.max() > 0.5:  # a margin was given up, because the penalty is too weak
            ρ *= 10
            continue
        flat = trial
        previous, violation = violation, float(torch.maximum(slack, -λ / ρ).abs().max())
        λ = (λ + ρ * slack).clamp(min=0)
        if violation < 1e-10:
            break
        if violation > 0.5 * previous:
            ρ *= 2
    return torch.from_numpy(flat).reshape(shape), λ


def _without_idle_neurons(θ: Tensor, degree: int) -> Tensor:
    """Drop zero neurons, and merge neurons of the same direction into one with the same output."""
    θ = θ[θ.norm(dim=1) > 1e-3 * θ.norm(dim=1).max()]
    unit = torch.nn.functional.normalize(θ[:, 1:], dim=1)
    same = (unit @ unit.T).abs() > 1 - 1e-6
    leader = same.int().argmax(1)
    joined = []
    for j in torch.unique(leader):
        members = leader == j
        size = (θ[members, 0] * (θ[members, 1:] @ unit[j]) ** degree).sum()  # of a (w·x)^α along unit[j]
        c = (size.abs() * degree**0.5) ** (1 / (degree + 1))
        joined.append(torch.cat([(size / c**degree)[None], c * unit[j]]))
    return torch.stack(joined)


def _lagrangian(flat: Tensor, x: Tensor, y: Tensor, degree: int) -> Tensor:
    """½‖θ‖² − Σ_i λ_i (y_i Φ(x_i) − 1) at (θ, λ), whose gradient the KKT system sets to zero."""
    size = len(flat) - len(y)
    θ, λ = flat[:size].reshape(-1, x.shape[1] + 1), flat[size:]
    return 0.5 * θ.square().sum() - λ @ (y * outputs(θ, x, degree) - 1)


def _newton(θ: Tensor, λ: Tensor, x: Tensor, y: Tensor, degree: int) -> tuple[Tensor, Tensor]:
    active = λ > 1e-7 * λ.max()
    flat = torch.cat([θ.flatten(), λ[active]])
    arguments = (x[active], y[active], degree)
    best, kept = torch.inf, flat
    for _ in range(20):
        gradient = torch.func.grad(_lagrangian)(flat, *arguments)
        if not gradient.abs().max() < best:
            break
        kept, best = flat, float(gradient.abs().max())
        H = torch.func.hessian(_lagrangian)(flat, *arguments)
        flat = flat - torch.linalg.lstsq(H, gradient[:, None], driver="gelsd").solution[:, 0]
    λ = torch.zeros_like(λ)
    λ[active] = kept[θ.numel() :]
    return kept[: θ.numel()].reshape(θ.shape), λ


def _result(θ: Tensor, λ: Tensor, x: Tensor, y: Tensor, degree: int) -> MaxMargin:
    flat = torch.cat([θ.flatten(), λ])
    stationarity = torch.func.grad(_lagrangian)(flat, x, y, degree)[: θ.numel()]
    slack = y * outputs(θ, x, degree) - 1
    violations = [stationarity.abs(), -slack, -λ, (λ * slack).abs()]
    network = PolynomialNetwork(x.shape[1], len(θ), activation=degree).double()
    network.load_state_dict({"a": θ[:, 0], "W": θ[:, 1:]})
    return MaxMargin(network, λ, max(float(v.max()) for v in violations), _curvature(flat, x, y, degree))


def _curvature(flat: Tensor, x: Tensor, y: Tensor, degree: int) -> float:
    """Least eigenvalue of ∇²_θ of the Lagrangian on the null space of the gradients of the margins with λ_i > 0."""
    H, size = torch.func.hessian(_lagrangian)(flat, x, y, degree), len(flat) - len(y)
    gradients = H[size:, :size][flat[size:] > 0]  # ∂²/∂λ_i∂θ is −y_i ∇Φ(x_i)
    _, σ, Vh = torch.linalg.svd(gradients)
    tangent = Vh[int((σ > 1e-10 * σ.max()).sum()) if len(σ) else 0 :].T
    return float(torch.linalg.eigvalsh(tangent.T @ H[:size, :size] @ tangent).min()) if tangent.numel() else torch.inf
