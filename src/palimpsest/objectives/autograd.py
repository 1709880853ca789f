"""Any network, differentiated by autograd.

v = Σ_s ∇_θ Σ_i λ_is φ(θ_s, x_i)     one backward pass
(∂v/∂x)ᵀ u, (∂v/∂λ)ᵀ u               the gradients of ⟨v, u⟩ = Σ_s Σ_i λ_is φ̇(x_i), with φ̇ the derivative of φ along u
∂/∂x of these                        a third pass, whose graph is kept for further products

φ̇ comes from forward differentiation. Its backward pass takes half the time of a second one over the graph of v, whose
convolutions torch computes slowly. Networks with a layer that torch cannot differentiate forwards take that way.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from palimpsest.errors import NoGradientError, UnsupportedNetworkError
from palimpsest.execution.precision import matrix_products
from palimpsest.objectives import dense, normalising, smoothing

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
        written_out = normalising.WrittenOut(live=self.live)
        with smoothing.failures_named(), _FORWARD, _DIFFERENTIABLE_ATTENTION(), written_out, smoothed:
            outputs = functional_call(self.module, θ, (images,))
        return outputs.flatten(1) if outputs.ndim > 1 else outputs.unsqueeze(1)

    def check(self, images: Tensor, β: Sharpness) -> None:
        """Raise a named error unless the network can be differentiated twice at such images."""
        written_out = normalising.WrittenOut(live=self.live)
        with _FORWARD, _DIFFERENTIABLE_ATTENTION(), written_out, matrix_products(tf32=False, device=images.device):
            smoothing.check(self.module, images, β, live=self.live)

    def dense_layers(self, images: Tensor) -> tuple[dense.Layer, ...] | None:
        """The layers, if the network is a stack of dense ones."""
        with _FORWARD:
            return dense.recognise(self.module, images)

    def differentiates_forwards(self, θ: Parameters, names: Iterable[str], images: Tensor, β: Sharpness) -> bool:
        """Whether torch can differentiate the network forwards and then backwards, and agrees with a backward pass.

        A network that uses torch.no_grad() inside has two derivatives: forwards torch ignores it.
        """
        random, x = torch.Generator().manual_seed(0), leaf(images)
        u = {name: torch.randn(θ[name].shape, generator=random).to(θ[name]) for name in names}
        leaves = {name: leaf(θ[name]) for name in u}
        try:
            with torch.enable_grad():
                with _FORWARD, forward_ad.dual_level():
                    duals = {name: forward_ad.make_dual(θ[name], t) for name, t in u.items()}
                    along = forward_ad.unpack_dual(self(θ | duals, x, β)).tangent
                outputs = self(θ | leaves, images, β).sum()
            grads = torch.autograd.grad(outputs, list(leaves.values()), materialize_grads=True)
            if along is None:
                return False
            if along.requires_grad:
                torch.autograd.grad(along.sum(), x)
        except (UnsupportedNetworkError, RuntimeError):  # one that runs backwards twice
            return False
        expected = total([(g * t).sum() for g, t in zip(grads, u.values(), strict=True)])
        return torch.allclose(along.sum().detach(), expected, rtol=1e-3, atol=1e-3 * float(along.detach().abs().max()))

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
        return {name: total(grads[i :: len(names)]) for i, name in enumerate(names)}


def adjoint(
    v: Parameters, inputs: tuple[Tensor, ...], u: Mapping[str, Tensor], *, differentiable: bool = False
) -> tuple[Tensor, ...]:
    """(∂v/∂input)ᵀ u for each input; zero for those that v does not depend on.

    It is the gradient of ⟨v, u⟩. Given cotangents instead, torch would import a library of symbolic algebra first.
    """
    with torch.enable_grad():
        parts = [torch.dot(value.flatten(), u[name].flatten()) for name, value in v.items() if value.requires_grad]
        if not parts:
            return tuple(map(torch.zeros_like, inputs))
        return torch.autograd.grad(total(parts), inputs, create_graph=differentiable, materialize_grads=True)


def tangent_adjoint(
    φ: Callable[[Parameters], Tensor],
    nodes: Sequence[tuple[Parameters, Tensor, Mapping[str, Tensor]]],
    inputs: tuple[Tensor, ...],
) -> tuple[Tensor, ...]:
    """Σ_s ∂/∂input Σ_i λ_is φ̇_i for nodes (θ_s, λ_s, u_s), φ̇ the derivative of φ at θ_s along u_s."""
    sums = [torch.zeros_like(t) for t in inputs]
    for θ, λ, u in nodes:
        with torch.enable_grad(), _FORWARD, forward_ad.dual_level():  # torch has one level for all threads
            φ̇ = forward_ad.unpack_dual(φ(θ | {name: forward_ad.make_dual(θ[name], t) for name, t in u.items()})).tangent
            if φ̇ is None:  # no trained parameter reaches the outputs
                continue
            part = (λ * φ̇).sum()
        if part.requires_grad:
            grads = torch.autograd.grad(part, inputs, materialize_grads=True)
            sums = [a + b for a, b in zip(sums, grads, strict=True)]
    return tuple(sums)


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
