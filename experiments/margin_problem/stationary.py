"""Stationary points of the margin problem that satisfy the rank condition, built from the eigenvectors of T.

A neuron (a, W) is stationary if W = α a f(W) and a = W·f(W). Every real eigenvector, f(v) = μ v with ‖v‖ = 1, gives
W = s v and a = sign(μ) s/√α with s^{2α−2} = 1/(α μ²). Such networks exist, but training does not reach them: see
`docs/identifiability.md`.
"""

from __future__ import annotations

from itertools import combinations

import torch
from torch import Tensor

from margin_problem.checks import check_samples
from palimpsest.identifiability.polynomials import contract, power_sum
from palimpsest.identifiability.problem import check_degree
from palimpsest.networks import PolynomialNetwork


def eigenvectors(T: Tensor, starts: Tensor, *, iterations: int = 50) -> tuple[Tensor, Tensor]:
    """Distinct unit v and μ with T(·, v, …, v) = μ v, by Newton's method from every start.

    >>> e = torch.eye(3, dtype=torch.float64)
    >>> v, μ = eigenvectors(power_sum(e, 2 * torch.ones(3).double(), 3), e)
    >>> v.shape, μ
    (torch.Size([3, 3]), tensor([2., 2., 2.], dtype=torch.float64))
    """
    d, α = T.shape[0], T.dim()
    eye = torch.eye(d, dtype=T.dtype)
    vectors, values = T.new_zeros(0, d), T.new_zeros(0)
    for v in torch.nn.functional.normalize(starts, dim=1):
        μ = contract(T, *[v] * α)
        for _ in range(iterations):
            J = (α - 1) * contract(T, *[v] * (α - 2)) - μ * eye
            bordered = torch.cat([torch.cat([J, -v[:, None]], 1), torch.cat([v, v.new_zeros(1)])[None]])
            residual = torch.cat([μ * v - contract(T, *[v] * (α - 1)), v.new_zeros(1)])
            step = torch.linalg.lstsq(bordered, residual[:, None]).solution[:, 0]
            v, μ = torch.nn.functional.normalize(v + step[:d], dim=0), μ + step[d]
            if step.norm() < 1e-15:
                break
        exact = (contract(T, *[v] * (α - 1)) - μ * v).norm() < 1e-13 * T.norm() and μ.abs() > 1e-8 * T.norm()
        if exact and all((v @ u).abs() < 1 - 1e-9 for u in vectors):
            vectors, values = torch.cat([vectors, v[None]]), torch.cat([values, μ[None]])
    return vectors, values


def stationary_network(samples: Tensor, weights: Tensor, degree: int = 3) -> PolynomialNetwork:
    """Make a network that is stationary for Σ_i b_i ∇Φ(x_i), with one neuron for each eigenvector of T.

    For orthonormal samples the eigenvectors are Σ_{i∈S} (±) b_i^{−1/(α−2)} x_i over subsets S of the samples. Nearly
    orthogonal samples are reached from there. With α = 3 their number 2ⁿ − 1 exceeds N from n = 3 on.

    Args:
        samples: x_i, (n, d).
        weights: b_i, (n,).
        degree: α.

    Examples:
        >>> x = torch.eye(3, dtype=torch.float64)
        >>> stationary_network(x, torch.ones(3, dtype=torch.float64)).W.shape
        torch.Size([7, 3])
    """
    check_degree(degree)
    x, b = samples.detach().double(), weights.detach().double()
    check_samples(x, b)
    T = power_sum(x, b, degree)
    parts = b.abs().pow(-1 / (degree - 2)) * b.sign()
    dual = torch.linalg.pinv(x).T
    subsets = [list(S) for size in range(1, len(x) + 1) for S in combinations(range(len(x)), size)]
    v, μ = eigenvectors(T, torch.stack([parts[S] @ dual[S] for S in subsets]))
    s = (degree * μ.square()).pow(-1 / (2 * degree - 2))
    network = PolynomialNetwork(x.shape[1], len(v), activation=degree).double()
    network.load_state_dict({"W": s[:, None] * v, "a": μ.sign() * s / degree**0.5})
    return network
