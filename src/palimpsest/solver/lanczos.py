"""Batched Lanczos: the smallest eigenvalue of many symmetric operators at once."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

BASIS = 20  # directions that a round of splitting keeps at a time, each as large as its candidates


class Eigenpairs(NamedTuple):
    values: Tensor  # (k,) the smallest Ritz value of each operator, an upper bound on its smallest eigenvalue
    vectors: Tensor  # (k, *shape) unit Ritz vectors
    residuals: Tensor  # (k,) ‖A v − value · v‖: some eigenvalue lies within this distance of the value


def smallest_eigenpairs(
    operator: Callable[[Tensor], Tensor],
    like: Tensor,
    *,
    iterations: int = BASIS,
    basis: int | None = None,
    seed: int = 0,
) -> Eigenpairs:
    """Smallest eigenpairs of k symmetric operators, given one call that applies each to its own vector.

    Every iteration orthogonalises twice, so a run to the full dimension is exact. If a Krylov space is exhausted, the
    iteration goes on from a fresh orthogonal direction. All operators start from the same vector, so the result for one
    does not depend on its place.

    Args:
        operator: maps (k, *shape) to (k, *shape), acting on each of the k vectors separately.
        like: a tensor of that shape.
        basis: the most directions to keep in memory, at least 2; by default all of them. A longer sequence starts again
            from the best vector so far, so it needs more iterations for the same accuracy.
    """
    k, dimension = len(like), like[0].numel()
    basis = dimension if basis is None else min(basis, dimension)
    m = min(iterations, basis)
    generator = torch.Generator().manual_seed(seed)
    fresh = torch.randn(m + 1, dimension, generator=generator, dtype=torch.float64).to(like)  # directions to start from
    vectors, V = _unit(fresh[0].expand(k, dimension)), like.new_zeros(k, m, dimension)
    for _ in range(math.ceil(iterations / m) if basis < dimension else 1):
        values, vectors = _sequence(operator, like, vectors, V, fresh[1:])
    errors = operator(vectors.view_as(like)).reshape(k, dimension) - values[:, None] * vectors
    return Eigenpairs(values, vectors.view_as(like), errors.norm(dim=1))


def _sequence(
    operator: Callable[[Tensor], Tensor], like: Tensor, v: Tensor, V: Tensor, fresh: Tensor
) -> tuple[Tensor, Tensor]:
    """The smallest Ritz values and their vectors, for the Krylov sequence from v that fills the basis V."""
    k, m, dimension = V.shape
    α, β, scale = like.new_zeros(k, m), like.new_zeros(k, m), like.new_zeros(k)
    tiny = 10 * torch.finfo(like.dtype).eps
    for j in range(m):
        V[:, j] = v
        w = operator(v.view_as(like)).reshape(k, dimension)
        α[:, j] = (v * w).sum(1)
        scale = torch.maximum(scale, w.norm(dim=1))
        w = _orthogonal(w, V[:, : j + 1])
        norm = w.norm(dim=1)
        exhausted = norm <= tiny * scale
        β[:, j] = norm.masked_fill(exhausted, 0)
        restart = _unit(_orthogonal(fresh[j].expand(k, dimension), V[:, : j + 1]))
        v = torch.where(exhausted[:, None], restart, w / norm.masked_fill(exhausted, 1)[:, None])

    above = torch.diag_embed(β[:, :-1], offset=1)
    tridiagonal = (torch.diag_embed(α) + above + above.mT).cpu()  # small: sooner solved here than a GPU library loads
    values, rotations = (t.to(like.device) for t in torch.linalg.eigh(tridiagonal))
    return values[:, 0], _unit(torch.einsum("kj,kjd->kd", rotations[:, :, 0], V))


def _unit(v: Tensor) -> Tensor:
    return v / v.norm(dim=1, keepdim=True).clamp_min(torch.finfo(v.dtype).tiny)


def _orthogonal(w: Tensor, V: Tensor) -> Tensor:
    for _ in range(2):  # once loses half the digits where w lies almost in the span; twice is enough
        w = w - torch.einsum("kj,kjd->kd", torch.einsum("kjd,kd->kj", V, w), V)
    return w
