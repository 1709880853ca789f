"""Losses of the outputs Φ: F (without weight decay), log L, the gap, the least margin, and ∂F/∂Φ by hand."""

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from palimpsest.execution.fusion import fusible

Terms = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


@fusible
def squared(Φ: Tensor, y: Tensor, decay: bool, has_margin: bool) -> Terms:
    """L = mean_i ‖Φ(x_i) − y_i‖²; the gap is the largest error."""
    error = Φ - y
    L = error.square().sum(1).mean()
    return L, L.clamp_min(tiny(L)).log(), error.abs().max(), _least_margin(Φ, y, has_margin), 2 * error / len(Φ)


@fusible
def separable(Φ: Tensor, y: Tensor, decay: bool, has_margin: bool) -> Terms:
    """F = log mean_i log(1 + e^{−m_i}), or without the outer logarithm under weight decay; the gap is set later."""
    m = margins(Φ, y)
    log_loss = _log_losses(m).logsumexp(0) - math.log(len(m))
    p = torch.sigmoid(-m) / len(m) if decay else shares(m)  # −∂F/∂m
    if y.shape[1] == 1:
        pull = -p[:, None] * y
    else:
        others = torch.softmax(Φ.masked_fill(y > 0, -math.inf), 1)
        pull = -p[:, None] * (y - others)
    return log_loss.exp() if decay else log_loss, log_loss, log_loss, _least_margin(Φ, y, has_margin), pull


def margins(Φ: Tensor, y: Tensor) -> Tensor:
    """m of the loss log(1 + e^{−m}): yΦ for one output, Φ_y − log Σ_{j≠y} e^{Φ_j} for several, y one-hot."""
    if y.shape[1] == 1:
        return (Φ * y)[:, 0]
    return (Φ * y).sum(1) - Φ.masked_fill(y > 0, -math.inf).logsumexp(1)


def _log_losses(m: Tensor) -> Tensor:
    """log log(1 + e^{−m}) for each margin; −m if log(1 + e^{−m}) underflows."""
    far = m > 30
    return torch.where(far, -m, torch.log(-logsigmoid(m.masked_fill(far, 0.0))))


def shares(m: Tensor) -> Tensor:
    """p_i = σ(−m_i) / Σ_j ℓ_j of ∇ log L = −Σ_i p_i ∇m_i."""
    return torch.exp(logsigmoid(-m) - _log_losses(m).logsumexp(0))


def _least_margin(Φ: Tensor, y: Tensor, defined: bool) -> Tensor:
    """min_i of y_i Φ(x_i), or of Φ_y(x_i) − max_{j≠y} Φ_j(x_i); NaN if labels are real targets."""
    if not defined:
        return torch.full_like(Φ[0, 0], math.nan)
    if y.shape[1] == 1:
        return (Φ * y).min()
    return ((Φ * y).sum(1) - Φ.masked_fill(y > 0, -math.inf).amax(1)).min()


def tiny(x: Tensor) -> float:
    """The smallest positive number of a tensor's precision, against division by zero."""
    return torch.finfo(x.dtype).tiny
