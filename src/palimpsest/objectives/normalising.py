"""Normalisation with right and fast derivatives of every order.

torch saves the mean and the deviation of its fused normalisation, and takes them as constants in third derivatives.
Splitting matrices and Hessians would be wrong. Here both are written out,

    y = (x − mean x) / √(mean (x − mean x)² + ε) · w + b,

so torch differentiates each operation. Group normalisation is right in torch.

Batch normalisation with fixed statistics is linear. Written out, its derivatives take fewer passes over memory. *Live*,
as in training mode, it takes mean and deviation over the whole batch. An output then depends on all images of its
batch, and so does each gradient.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def _standardised(x: Tensor, axes: tuple[int, ...], ε: float) -> Tensor:
    d = x - x.mean(axes, keepdim=True)
    return d * (d.square().mean(axes, keepdim=True) + ε).rsqrt()


def _affine(y: Tensor, w: Tensor | None, b: Tensor | None) -> Tensor:
    y = y if w is None else y * w
    return y if b is None else y + b


def layer_norm(
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    """As `torch.nn.functional.layer_norm`."""
    return _affine(_standardised(input, tuple(range(-len(normalized_shape), 0)), eps), weight, bias)


def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """As `torch.nn.functional.instance_norm`."""
    if not use_input_stats:  # fixed statistics: linear
        return F.instance_norm(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)
    over = tuple(range(2, input.ndim))
    w, b = (None if t is None else t.view(-1, *[1] * len(over)) for t in (weight, bias))
    return _affine(_standardised(input, over, eps), w, b)


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """As `torch.nn.functional.batch_norm`. With fixed statistics it is a x + c for each channel, in one pass over x.

    A network in evaluation mode may still ask for the statistics of the batch: some normalise their weights this way.
    """
    if training or running_mean is None or running_var is None:
        return live_batch_norm(input, None, None, weight, bias, eps=eps)
    a = (running_var + eps).rsqrt()
    a = a if weight is None else a * weight
    c = -running_mean * a if bias is None else bias - running_mean * a
    a, c = (t.view(-1, *[1] * (input.ndim - 2)) for t in (a, c))
    return torch.addcmul(c, input, a)


def live_batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """As `torch.nn.functional.batch_norm` in training. It leaves the running statistics as they are."""
    over = tuple(range(2, input.ndim))
    w, b = (None if t is None else t.view(-1, *[1] * len(over)) for t in (weight, bias))
    return _affine(_standardised(input, (0, *over), eps), w, b)
