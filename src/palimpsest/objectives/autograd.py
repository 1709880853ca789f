"""Any network, differentiated by autograd.

v = Σ_s ∇_θ Σ_i λ_is φ(θ_s, x_i)     one backward pass
(∂v/∂x)ᵀ u, (∂v/∂λ)ᵀ u               a second one, over the graph of the first
∂/∂x of these                        a third pass, whose graph is kept for further products
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from palimpsest.errors import NoGradientError
from palimpsest.execution.precision import matrix_products
from palimpsest.objectives import dense, smoothing
from palimpsest.objectives.written_out import WrittenOut

IGNORED = "no parameter receives a gradient from the outputs; check that the network uses its weights"
# The fused kernels of attention cannot be differentiated twice; the plain one can.
_DIFFERENTIABLE_ATTENTION = partial(sdpa_kernel, SDPBackend.MATH)

# Threads may share a network, and functional_call puts parameters into it, so one thread uses it at a time. One lock
# serves all networks: torch keeps the choice of attention kernels for the process, and another thread would undo it.
_FORWARD = threading.RLock()

Parameters = dict[str, Tensor]
Operator = Callable[[Tensor], Tensor]
Sharpness = float | Tensor | None


@dataclass(frozen=True, eq=False)
class Network:
    """A network as a function of its parameters and of images, with its ReLUs smoothed. Threads may share it.

    Args:
        module: the network, in evaluation mode.
        exact_forward: whether ReLUs keep their values, and only their derivatives are smoothed.
        live: whether batch normalisation uses the statistics of the images that it is given, as in training mode.
    """

    module: nn.Module
    exact_forward: bool = False
    live: bool = False

    def __call__(self, θ: Parameters, images: Tensor, β: Sharpness) -> Tensor:
        """Outputs (k, C)."""
        rectifier = smoothing.exact_forward if self.exact_forward else smoothing.softplus
        smoothed = nullcontext() if β is None else smoothing.Smoothed(β, rectifier)
        written_out = WrittenOut(live=self.live)
        with smoothing.failures_named(), _FORWARD, _DIFFERENTIABLE_ATTENTION(), written_out, smoothed:
            outputs = functional_call(self.module, θ, (images,))
        return outputs.flatten(1) if outputs.ndim > 1 else outputs.unsqueeze(1)

    def check(self, images: Tensor, β: Sharpness) -> None:
        """Raise a named error unless the network can be differentiated twice at such images."""
        written_out = WrittenOut(live=self.live)
        with _FORWARD, _DIFFERENTIABLE_ATTENTION(), written_out, matrix_products(tf32=False, device=images.device):
            smoothing.check(self.module, images, β, live=self.live)

    def dense_layers(self, images: Tensor) -> tuple[dense.Layer, ...] | None:
        """The layers, if the network is a stack of dense ones."""
        with _FORWARD:
            return dense.recognise(self.module, images)

    def to(self, device: torch.device | str | None, dtype: torch.dtype | None) -> Network:
        with _FORWARD:
            return replace(self, module=copy.deepcopy(self.module).to(device=device, dtype=dtype))

    def state_dict(self) -> dict[str, Any]:
        with _FORWARD:
            return self.module.state_dict()


def leaf(t: Tensor) -> Tensor:
    return t.detach().requires_grad_()


def total(tensors: Sequence[Tensor]) -> Tensor:
    return functools.reduce(torch.add, tensors)


def represent(
    φ: Callable[[Parameters], Tensor],
    names: Sequence[str],
    nodes: Sequence[tuple[Parameters, Tensor]],
    *,
    differentiable: bool,
) -> Parameters:
    """v = Σ_s ∇_θ Σ_i λ_is φ_i(θ_s) for these parameters, with a graph if v is to be differentiated further."""
    points = [θ | {name: leaf(θ[name]) for name in names} for θ, _ in nodes]
    with torch.enable_grad():  # around the parts of several tangents too, or they lose their graph
        value = total([(λ * φ(θ)).sum() for θ, (_, λ) in zip(points, nodes, strict=True)])
        if not value.requires_grad:
            raise NoGradientError(IGNORED)
        inputs = [θ[name] for θ in points for name in names]
        grads = torch.autograd.grad(value, inputs, create_graph=differentiable, materialize_grads=True)
        for θ_p in inputs:
            θ_p.requires_grad_(False)  # v is never differentiated by θ; see `convolution`
        return {name: total(grads[i :: len(names)]) for i, name in enumerate(names)}


def adjoint(
    v: Parameters, inputs: tuple[Tensor, ...], u: Mapping[str, Tensor], *, differentiable: bool = False
) -> tuple[Tensor, ...]:
    """(∂v/∂input)ᵀ u for each input; zero for those that v does not depend on."""
    names = [name for name, value in v.items() if value.requires_grad]
    if not names:
        return tuple(map(torch.zeros_like, inputs))
    with torch.enable_grad():
        paired = _Paired.apply(*(u[name] for name in names), *(v[name] for name in names))
        return torch.autograd.grad(paired, inputs, create_graph=differentiable, materialize_grads=True)


class _Paired(torch.autograd.Function):
    """A number with the gradient u in v: ⟨v, u⟩, if it were computed.

    Nobody reads its value. Torch could be given u as it is, but would then import a library of symbolic algebra first.
    """

    @staticmethod
    def forward(ctx: Any, *u_and_v: Tensor) -> Tensor:
        ctx.save_for_backward(*u_and_v[: len(u_and_v) // 2])
        return u_and_v[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return *(None for _ in ctx.saved_tensors), *ctx.saved_tensors


def pushed(
    represent: Callable[..., Parameters], point: tuple[Tensor, Tensor, Tensor | None], direction: Tensor
) -> Parameters:
    """Jv = Σ_i (∂v/∂x_i) direction_i at (x, λ, labels): the adjoint is linear in u, and its derivative in u is J."""
    x = leaf(point[0])
    v = represent(x, *point[1:])
    u = {name: leaf(torch.zeros_like(t)) for name, t in v.items()}
    (back,) = adjoint(v, (x,), u, differentiable=True)
    if not back.requires_grad:  # no trained parameter depends on the candidates
        return {name: t.detach() for name, t in u.items()}
    with torch.enable_grad():
        along = torch.dot(back.flatten(), direction.flatten())
    return dict(zip(u, torch.autograd.grad(along, list(u.values()), materialize_grads=True), strict=True))


def directional(gradient: Tensor, x: Tensor) -> Operator:
    """v ↦ (∂ gradient / ∂x) v for a symmetric derivative; its graph is kept for the next product."""

    def product(direction: Tensor) -> Tensor:
        if not gradient.requires_grad:  # piecewise linear in x: no curvature at all
            return torch.zeros_like(x)
        with torch.enable_grad():
            along = torch.dot(gradient.flatten(), direction.flatten())
        return torch.autograd.grad(along, x, retain_graph=True, materialize_grads=True)[0]

    return product
