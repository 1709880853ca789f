"""A different dataset that explains the same network: proof that weights need not determine the data.

The stationarity system of a two-layer network Φ(x) = Σ_j a_j (W_j·x)^α,

    α a_j Σ_i b_i (W_j·x_i)^{α−1} x_i = W_j,    Σ_i b_i (W_j·x_i)^α = a_j,

has a solution set through the true (x_i, b_i). If that set has a tangent space, we take a step along it and return to
the set by Gauss–Newton. If it does not, one more sample gives it one. With margins, y_i Φ(x_i) = 1 and y_i b_i > 0 for
y_i = sign b_i are kept as well, so the network is a KKT point of the new dataset too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from margin_problem.checks import check_samples
from palimpsest.errors import InvalidInputError, PalimpsestError
from palimpsest.networks import PolynomialNetwork

System = Callable[[Tensor, Tensor, Tensor], Tensor]


class NoCounterexampleError(PalimpsestError):
    """No other dataset was found that gives the same weights. This does not prove that none exists."""


@dataclass(frozen=True)
class Counterexample:
    """Another dataset with the same stationarity system.

    Attributes:
        samples: x'_i, (n', d), with n' = n or n + 1.
        weights: b'_i, (n',), of the same signs.
        residual: the largest violation of the system, relative to the largest parameter.
        distance: the distance between the direction of a new sample and those of all true ones, for the farthest.
        dimension: dimension of the family of solutions around the true data, to first order; 0 if a sample was added.
    """

    samples: Tensor
    weights: Tensor
    residual: float
    distance: float
    dimension: int


def counterexample(
    network: PolynomialNetwork,
    samples: Tensor,
    weights: Tensor,
    *,
    margins: bool = True,
    distance: float = 0.05,
    seed: int = 0,
) -> Counterexample:
    """Construct a dataset ``distance`` away from the samples that satisfies the same system to 1e-12.

    Args:
        network: a network without bias and with a monomial activation of degree α ≥ 1, stationary for the samples.
        samples: the active samples x_i, (n, d).
        weights: b_i = λ_i y_i, (n,), none of them zero.
        margins: whether to keep y_i Φ(x_i) = 1 too. Without it, the weights b_i are kept instead.
        distance: the distance between the directions of the sample that moves most, as unit vectors.
        seed: the seed of the random directions.

    Raises:
        NoCounterexampleError: if none was found. The data may or may not be determined.

    Examples:
        >>> from margin_problem import max_margin
        >>> x, y = torch.eye(3, dtype=torch.float64), torch.tensor([1.0, -1.0, 1.0], dtype=torch.float64)
        >>> found = max_margin(x, y, neurons=8)
        >>> other = counterexample(found.network, x, found.multipliers * y)
        >>> other.residual < 1e-12
        True
    """
    if network.b is not None or any(network.coefficients[:-1]):
        raise InvalidInputError("the network has a bias or lower powers; give one without bias, of one power")
    x, b = samples.detach().double(), weights.detach().double()
    check_samples(x, b)
    if x.shape[1] != (d := network.W.shape[1]):
        raise InvalidInputError(f"the samples have {x.shape[1]} coordinates; give {d}, as the network's neurons have")
    system = _system(network, margins)
    if not (start := _violation(system, x, b, b.sign(), b)) <= 1e-8:
        raise InvalidInputError(f"the network is not stationary for these samples ({start:.1e}); use max_margin first")
    generator = torch.Generator().manual_seed(seed)
    J = torch.func.jacrev(lambda u: system(u, b.sign(), b))(_pack(x, b))
    _, σ, Vh = torch.linalg.svd(J)
    tangent = Vh[int((σ > 1e-9 * σ[0]).sum()) :].T
    for trial in range(40):
        y, start_x, start_b = _guess(x, b, tangent, generator, size=0.4 * 0.9**trial)
        found = _return_to_set(system, start_x, start_b, y)
        if found is None:
            continue
        moved = _distance(found[0], x)
        if moved >= distance and (found[1] * y > 0).all():
            return Counterexample(*found, _violation(system, *found, y, start_b), moved, tangent.shape[1])
    raise NoCounterexampleError("found no other dataset with these weights; try another seed or a smaller distance")


def _system(network: PolynomialNetwork, margins: bool) -> System:
    """The equations as one residual vector, relative to the largest parameter.

    Its arguments are the unknowns u = (x, b), flat, the labels y, and the weights b_0 that b keeps without margins.
    """
    a, W, α = network.a.detach().double(), network.W.detach().double(), network.degree
    largest = torch.maximum(W.abs().max(), a.abs().max())

    def residuals(u: Tensor, y: Tensor, b0: Tensor) -> Tensor:
        x, b = _unpack(u, len(y))
        t = x @ W.T
        stationarity = W - α * a[:, None] * ((t ** (α - 1)).T @ (b[:, None] * x))
        head = a - (t**α).T @ b
        held = y * (t**α @ a) - 1 if margins else b - b0
        return torch.cat([stationarity.flatten(), head, held]) / largest

    return residuals


def _violation(system: System, x: Tensor, b: Tensor, y: Tensor, b0: Tensor) -> float:
    return float(system(_pack(x, b), y, b0).abs().max())


def _pack(x: Tensor, b: Tensor) -> Tensor:
    return torch.cat([x.flatten(), b])


def _unpack(u: Tensor, n: int) -> tuple[Tensor, Tensor]:
    return u[:-n].reshape(n, -1), u[-n:]


def _guess(
    x: Tensor, b: Tensor, tangent: Tensor, generator: torch.Generator, size: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Labels, samples and weights after a step along the set or, if the set is a point, with one sample split."""
    scale = size * float(x.norm(dim=1).mean())
    if tangent.shape[1]:
        step = tangent @ torch.randn(tangent.shape[1], generator=generator, dtype=x.dtype)
        step = scale * step / _unpack(step, len(b))[0].norm(dim=1).max()
        return b.sign(), *_unpack(_pack(x, b) + step, len(b))
    i = int(torch.randint(len(x), (1,), generator=generator))
    v = torch.randn(x.shape[1], generator=generator, dtype=x.dtype)
    v *= scale / v.norm()
    split, halves = torch.cat([x, (x[i] - v)[None]]), torch.cat([b, b[i : i + 1]])
    split[i] += v
    halves[[i, -1]] /= 2
    return halves.sign(), split, halves


def _return_to_set(system: System, x: Tensor, b: Tensor, y: Tensor) -> tuple[Tensor, Tensor] | None:
    """Gauss–Newton with the shortest steps, so that it does not slide back; None if it does not converge."""
    u = _pack(x, b)
    for _ in range(60):
        g = system(u, y, b)
        if g.abs().max() < 1e-14 or not g.isfinite().all():
            break
        J = torch.func.jacrev(lambda v: system(v, y, b))(u)
        step = torch.linalg.lstsq(J, -g[:, None], rcond=1e-11, driver="gelsd").solution[:, 0]
        u = u + step * min(1.0, 0.5 * float(u.norm() / step.norm().clamp(min=1e-300)))
    return _unpack(u, len(b)) if system(u, y, b).abs().max() < 1e-12 else None


def _distance(new: Tensor, old: Tensor) -> float:
    """The distance between the direction of the farthest new sample and all old ones, up to sign."""
    u, v = (torch.nn.functional.normalize(x, dim=1) for x in (new, old))
    return float(torch.minimum(torch.cdist(u, v), torch.cdist(u, -v)).min(1).values.max())
