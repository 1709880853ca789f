"""From the symmetric tensor T = Σ_i b_i x_i^{⊗α} to its terms, by simultaneous diagonalisation.

With vectors φ_p(x_i) that are linearly independent (p = 1: independent samples), the slices

    M(v) = T(·, ·, v, …, v) = Σ_i b_i (x_i·v)^{α−2p} φ_p(x_i) φ_p(x_i)ᵀ

share their eigenvectors: those of M(v_1)^{-1} M(v_2) are the *dual* vectors u_i, with φ_p(x_k)·u_i = δ_ik.
Contracting T with them gives the samples, b_i x_i = T(·, u_i, …, u_i). The error is quadratic in that of the u_i, so
alternating the two is a Newton iteration.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from palimpsest.identifiability.polynomials import contract, expand, monomials, multi_indices, sqrt_multinomials


@dataclass(frozen=True)
class Terms:
    """Terms b_i x_i^{⊗α} found in T, with unit x_i."""

    samples: Tensor  # unit vectors x_i, (n, d)
    weights: Tensor  # b_i, (n,)
    duals: Tensor  # u_i, scaled to φ_p(x_i)·u_i = 1, (n, C(d+p−1, p))
    genuine: Tensor  # which terms are real, (n,); the others only span the remaining space
    conditioning: float  # smallest over largest singular value of the matrix of the φ_p(x_i)


def orders(degree: int) -> list[int]:
    """The possible p: 2p slots leave at least one for v, and p divides the α − 1 slots of a contraction to a vector."""
    return [p for p in range(1, degree) if 2 * p < degree and (degree - 1) % p == 0]


def decompose(T: Tensor, p: int = 1, *, noise: float = 1e-13, pairs: int = 8, seed: int = 0) -> Terms:
    """Terms of T whose φ_p(x_i) are linearly independent.

    p = 1 serves at most d samples, a larger p serves C(d+p−1, p). Directions of overcomplete slices below the noise,
    relative to T, count as empty. Of several random pairs of slices, the best-conditioned is kept.
    """
    M = random_slices(T, p, 2 * pairs, seed)
    basis = torch.eye(T.shape[0], dtype=T.dtype)
    if p > 1:  # the common range of the slices
        left, σ, _ = torch.linalg.svd(M.transpose(0, 1).flatten(1), full_matrices=False)
        basis = left[:, σ > noise * σ[0]]
    C = basis.T @ M @ basis
    candidates = [_duals(C[2 * k], C[2 * k + 1]) for k in range(pairs)]
    u, _, real = max(candidates, key=lambda found: (int(found[2].sum()), found[1]))
    return _polish(T, basis, u, p, real)


def random_slices(T: Tensor, p: int, number: int, seed: int) -> Tensor:
    """M(v) for random v, one in every remaining slot, as a stack of matrices."""
    directions = _directions(T, number * (T.dim() - 2 * p), seed).reshape(number, -1, T.shape[0])
    return torch.stack([_slice(T, v, p) for v in directions])


def _directions(T: Tensor, number: int, seed: int) -> Tensor:
    """Random unit vectors v, half of them drawn from the inverse of the spread of T.

    Only the latter separate similar samples, whose x_i·v are almost equal for every i.
    """
    left, σ, _ = torch.linalg.svd(T.flatten(1), full_matrices=False)
    v = torch.randn(number, len(σ), generator=torch.Generator().manual_seed(seed), dtype=T.dtype)
    v[number // 2 :] /= σ.clamp(min=1e-6 * float(σ[0]))
    return torch.nn.functional.normalize(v @ left.T, dim=1)


def _slice(T: Tensor, v: Tensor, p: int) -> Tensor:
    """M(v) in the coordinates of the weighted monomials of degree p."""
    d, T = T.shape[0], contract(T, *v)
    position = multi_indices(d, p) @ (d ** torch.arange(p - 1, -1, -1))
    weight = sqrt_multinomials(d, p).to(T)
    return T.reshape(d**p, d**p)[position][:, position] * weight[:, None] * weight


def _duals(A: Tensor, B: Tensor) -> tuple[Tensor, float, Tensor]:
    """Eigenvectors of A^{-1}B (of a complex pair: a real basis of its plane), their quality, which are real.

    The quality is the gap between eigenvalues over the vectors' condition. Noise on T is divided by it.
    """
    try:
        eigenvalues, vectors = torch.linalg.eig(torch.linalg.solve(A, B))
    except torch.linalg.LinAlgError:
        return torch.eye(len(A), dtype=A.dtype), 0.0, torch.zeros(len(A), dtype=torch.bool)
    real = eigenvalues.imag.abs() <= 1e-9 * eigenvalues.abs()
    u = torch.where(eigenvalues.imag < 0, vectors.imag, vectors.real)
    angle = torch.atan2(eigenvalues.real, torch.ones_like(eigenvalues.real))  # eigenvalues live on a circle
    gaps = (angle[:, None] - angle).abs() + torch.eye(len(angle), dtype=A.dtype) * (torch.pi / 2)
    gap = torch.minimum(gaps, torch.pi - gaps).clamp(min=0).min()
    σ = torch.linalg.svdvals(u)
    return u, float(gap * σ[-1] / σ[0]), real


def _polish(T: Tensor, basis: Tensor, u: Tensor, p: int, real: Tensor) -> Terms:
    """Alternate u_i ← dual vectors of φ_p(x_i) and b_i x_i ← T(·, u_i, …, u_i), for the real terms.

    The others, a real basis of the plane of each complex pair, stay, because noise may have made them complex.
    """
    x = _unlift(torch.linalg.pinv((basis @ u).T).T, T.shape[0], p)
    for _ in range(12):
        features = monomials(x, p)
        duals = torch.linalg.pinv(features).T
        bx = _contract_duals(T, duals, p)
        weights = (bx * x).sum(1)
        new = bx / bx.norm(dim=1, keepdim=True) * weights.sign()[:, None]
        new = torch.where(real[:, None] & new.isfinite(), new, x)
        change, x = (new - x).abs().max(), new
        if change <= 1e-15:
            break
    σ = torch.linalg.svdvals(features)
    return Terms(x, weights, duals, real, float(σ[-1] / σ[0]))


def _unlift(features: Tensor, d: int, p: int) -> Tensor:
    """Unit vectors x_i with φ_p(x_i) nearest to the given vectors, up to sign."""
    if p == 1:
        return features / features.norm(dim=1, keepdim=True)
    full = expand(features, d, p).reshape(len(features), d, -1)
    return torch.linalg.svd(full, full_matrices=False)[0][:, :, 0]


def _contract_duals(T: Tensor, u: Tensor, p: int) -> Tensor:
    """T(·, u_i, …, u_i) for every i. Each u_i fills p of the α − 1 slots."""
    d, n = T.shape[0], len(u)
    full = u if p == 1 else expand(u, d, p).reshape(n, -1)
    out = (T.reshape(-1, d**p) @ full.T).T  # (n, d^{α−p})
    while out.shape[1] > d:
        out = torch.einsum("nab,nb->na", out.reshape(n, -1, d**p), full)
    return out
