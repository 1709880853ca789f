"""From the fitted z_i = |b_i|^{1/α} x_i and its errors to samples, weights and their errors."""

from __future__ import annotations

import torch
from torch import Tensor


def samples_and_weights(
    z: Tensor, signs: Tensor, degree: int, *, bias: bool, norm: float
) -> tuple[Tensor, Tensor, Tensor]:
    """x_i, b_i and the derivative ∂x_i/∂z_i, of shapes (n, d), (n,) and (n, d, D).

    With a bias, z_i ∝ (x_i, 1), D = d + 1, and the last coordinate gives sign and norm. Without one, D = d, the
    norm is given, and the sign makes the sum of the coordinates positive.
    """
    if bias:
        last = z[:, -1:]
        x = z[:, :-1] / last
        eye = torch.eye(x.shape[1], dtype=z.dtype).expand(len(z), -1, -1)
        return x, signs * last[:, 0] ** degree, torch.cat([eye, -x[:, :, None]], 2) / last[:, :, None]
    length = z.norm(dim=1)
    flip = torch.where(z.sum(1) < 0, -1.0, 1.0).to(z)
    x = (flip / length)[:, None] * z
    tangent = torch.eye(z.shape[1], dtype=z.dtype) - x[:, :, None] * x[:, None, :]
    return norm * x, signs * flip**degree * (length / norm) ** degree, norm * tangent / length[:, None, None]


def propagate(derivative: Tensor, covariance: Tensor, outside: Tensor, embedding: Tensor) -> Tensor:
    """Expected ‖δx_i‖ = √(tr D C Dᵀ), (n,), for independent errors inside and outside the embedded space.

    Args:
        derivative: ∂x_i/∂z_i, (n, d, D).
        covariance: of z_i in the coordinates of the embedding, (n, k, k).
        outside: variance of each coordinate of z_i orthogonal to the embedding, (n,).
        embedding: orthonormal columns, (D, k).
    """
    inside = derivative @ embedding
    hidden = covariance.diagonal(dim1=1, dim2=2).isinf().any(1)
    variance = ((inside @ covariance.nan_to_num(posinf=0.0)) * inside).sum((1, 2))
    variance[hidden] = torch.inf
    rest = derivative.square().sum((1, 2)) - inside.square().sum((1, 2))
    return (variance + outside * rest.clamp(min=0)).sqrt()
