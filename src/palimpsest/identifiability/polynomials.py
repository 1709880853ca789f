"""Homogeneous polynomials and symmetric tensors, in coordinates in which inner products are kernels.

A degree-q monomial w^β carries the weight √(q!/β!), so that φ_q(u)·φ_q(v) = (u·v)^q. A symmetric tensor T of order α
in d dimensions is *full*, of shape (d, …, d), or *compressed*: the C(d+α−1, α) coefficients c of
T(w, …, w) = φ_α(w)·c.
"""

import math
from functools import lru_cache
from itertools import combinations_with_replacement

import torch
from torch import Tensor


def monomial_count(dimension: int, degree: int) -> int:
    """N = C(d+q−1, q), the dimension of the homogeneous polynomials of degree q in d variables."""
    return math.comb(dimension + degree - 1, degree)


@lru_cache(maxsize=32)
def multi_indices(dimension: int, degree: int) -> Tensor:
    """The N index tuples i_1 ≤ … ≤ i_q, one per monomial w_{i_1} … w_{i_q}, in lexicographic order."""
    tuples = list(combinations_with_replacement(range(dimension), degree))
    return torch.tensor(tuples, dtype=torch.long).reshape(len(tuples), degree)


@lru_cache(maxsize=32)
def sqrt_multinomials(dimension: int, degree: int) -> Tensor:
    """√(q!/β!) of every monomial, the weights under which φ_q(u)·φ_q(v) = (u·v)^q."""
    index = multi_indices(dimension, degree)
    factorials = run = torch.ones(len(index), dtype=torch.float64)  # β!: 1·2·…·k for every run of k equal indices
    for t in range(1, degree):
        run = torch.where(index[:, t] == index[:, t - 1], run + 1, 1.0)
        factorials = factorials * run
    return (math.factorial(degree) / factorials).sqrt()


def monomials(w: Tensor, degree: int) -> Tensor:
    """φ_q(w): the weighted monomials of degree q at the rows of w, as an (m, N) matrix."""
    index = multi_indices(w.shape[1], degree)
    φ = sqrt_multinomials(w.shape[1], degree).to(w).repeat(len(w), 1)
    for t in range(degree):
        φ *= w[:, index[:, t]]
    return φ


def monomials_jacobian(w: Tensor, degree: int) -> Tensor:
    """Dφ_q(w): derivatives of the weighted monomials, of shape (m, N, d)."""
    index = multi_indices(w.shape[1], degree)
    D = w.new_zeros(len(w), len(index), w.shape[1])
    for t in range(degree):
        others = w[:, torch.cat([index[:, :t], index[:, t + 1 :]], 1)].prod(-1)
        D.scatter_add_(2, index[:, t].expand(len(w), -1)[..., None], others[..., None])
    return D * sqrt_multinomials(w.shape[1], degree).to(w)[:, None]


def distinct_directions(w: Tensor) -> int:
    """The number of rows of w that are not multiples of each other. Parallel points give the same evaluation."""
    unit = torch.nn.functional.normalize(w, dim=1)
    return len(torch.unique((unit * unit.sum(1, keepdim=True).sign()).round(decimals=9), dim=0))


def expand(c: Tensor, dimension: int, degree: int) -> Tensor:
    """The full symmetric tensor with compressed coefficients c (batched over leading axes of c)."""
    grid = torch.cartesian_prod(*[torch.arange(dimension)] * degree).reshape(-1, degree)
    position = _positions(grid, dimension)
    entries = c / sqrt_multinomials(dimension, degree).to(c)
    return entries[..., position].reshape(*c.shape[:-1], *[dimension] * degree)


def _positions(index: Tensor, dimension: int) -> Tensor:
    """The row of `multi_indices` that holds w_{i_1} … w_{i_q}, for every row (i_1, …, i_q) in any order."""
    degree = index.shape[1]
    place = dimension ** torch.arange(degree - 1, -1, -1)
    return torch.searchsorted(multi_indices(dimension, degree) @ place, index.sort(1).values @ place)


def gradient_positions(dimension: int, degree: int) -> Tensor:
    """The (d, N) positions of the monomials w_a w^β of degree α, for every a and every w^β of degree α − 1."""
    lower = multi_indices(dimension, degree - 1)
    first = torch.arange(dimension).repeat_interleave(len(lower))[:, None]
    return _positions(torch.cat([first, lower.repeat(dimension, 1)], 1), dimension).reshape(dimension, -1)


def symmetrise(A: Tensor, degree: int) -> Tensor:
    """The symmetric tensor nearest to f(w) = A φ_{α−1}(w), with A of shape (d, N); exact when f = ∇p/α."""
    B = expand(A, A.shape[0], degree - 1)
    return torch.stack([B.movedim(0, t) for t in range(degree)]).mean(0)


def gradient_coefficients(T: Tensor) -> Tensor:
    """The (d, N) matrix A with T(·, w, …, w) = A φ_{α−1}(w)."""
    index = multi_indices(T.shape[0], T.dim() - 1)
    return T[(slice(None), *index.T)] * sqrt_multinomials(T.shape[0], T.dim() - 1).to(T)


def power_sum(x: Tensor, b: Tensor, degree: int) -> Tensor:
    """T = Σ_i b_i x_i^{⊗α}, full."""
    d = x.shape[1]
    power = x
    for _ in range(degree - 2):
        power = (power[:, :, None] * x[:, None, :]).flatten(1)
    return ((b[:, None] * x).T @ power).reshape([d] * degree)


def contract(T: Tensor, *vectors: Tensor) -> Tensor:
    """T(·, …, ·, v_1, …, v_k): the last k axes contracted with one vector each."""
    for v in vectors:
        T = T @ v
    return T
