"""Convolutions whose derivatives of every order are again convolutions of the same shapes.

A convolution y = w ∗ x belongs to a form ⟨g, w ∗ x⟩ that is linear in each of g, w and x, where g is a cotangent of y.
Each of its three derivatives is linear in the two others:

    forward(x, w) = ∂/∂g        to_input(g, w) = ∂/∂x        to_weight(g, x) = ∂/∂w

So the derivatives of each of these are the other two, to any order. Torch differentiates its own backward pass by
convolutions that take a whole image for a kernel, which are slow on a GPU.

Torch does not tell these functions which derivatives a backward pass is for. A weight that has stopped requiring a
gradient is not differentiated again, although it did when the graph was made.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function


class How(NamedTuple):
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    groups: int


def convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    """As `torch.nn.functional.conv1d`, `conv2d` and `conv3d`, for batches and padding by numbers."""
    axes = weight.ndim - 2
    stride, padding, dilation = ([n] * axes if isinstance(n, int) else list(n) for n in (stride, padding, dilation))
    how = How(stride, padding, dilation, groups)
    y = _Forward.apply(input, weight, how)
    return y if bias is None else y + bias.view(-1, *[1] * axes)


def faster_on(device: torch.device) -> bool:
    """On CPUs torch's own second derivatives are faster."""
    return device.type == "cuda"


def takes(
    input: Tensor, weight: Tensor, bias: Any = None, stride: Any = 1, padding: Any = 0, *rest: Any, **more: Any
) -> bool:
    """Whether `convolution` should take this call's place."""
    return faster_on(input.device) and input.ndim == weight.ndim and not isinstance(padding, str)


def _gradient(g: Tensor, x: Tensor, w: Tensor, how: How, *, of_weight: bool) -> Tensor:
    wanted = [not of_weight, of_weight, False]
    zeros = [0] * len(how.stride)
    options = (None, how.stride, how.padding, how.dilation, False, zeros, how.groups, wanted)
    return torch.ops.aten.convolution_backward(g, x, w, *options)[of_weight]


class _Forward(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, how: How) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.how = how
        zeros = [0] * len(how.stride)
        return torch.ops.aten.convolution(x, w, None, how.stride, how.padding, how.dilation, False, zeros, how.groups)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        (g,), (x, w) = cotangents, ctx.saved_tensors
        of_x = _ToInput.apply(g, w, x, ctx.how) if ctx.needs_input_grad[0] else None
        of_w = _ToWeight.apply(g, x, w, ctx.how) if w.requires_grad else None
        return of_x, of_w, None


class _ToInput(Function):
    """In (g, w); ``like`` has the shape of the result."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, w: Tensor, like: Tensor, how: How) -> Tensor:
        ctx.save_for_backward(g, w)
        ctx.how = how
        return _gradient(g, like, w, how, of_weight=False)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        (ẋ,), (g, w) = cotangents, ctx.saved_tensors
        of_g = _Forward.apply(ẋ, w, ctx.how) if ctx.needs_input_grad[0] else None
        of_w = _ToWeight.apply(g, ẋ, w, ctx.how) if w.requires_grad else None
        return of_g, of_w, None, None


class _ToWeight(Function):
    """In (g, x); ``like`` has the shape of the result."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, x: Tensor, like: Tensor, how: How) -> Tensor:
        ctx.save_for_backward(g, x)
        ctx.how = how
        return _gradient(g, x, like, how, of_weight=True)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        (ẇ,), (g, x) = cotangents, ctx.saved_tensors
        of_g = _Forward.apply(x, ẇ, ctx.how) if ctx.needs_input_grad[0] else None
        of_x = _ToInput.apply(g, ẇ, x, ctx.how) if ctx.needs_input_grad[1] else None
        return of_g, of_x, None, None
