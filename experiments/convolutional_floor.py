"""The floor of a step on a network of convolutions and dense layers: their products alone.

A layer y = W ∗ x stands for three maps, each linear in both of its arguments: forward(x, W), back(g, W), which is Wᵀg,
and weight(g, x), which is g ⋆ x. In the symbols of palimpsest.objectives.dense, a step takes for each tangent point

    z = W ∗ h,   u = Wᵀδ,   V = δ ⋆ h       R ∗ h,   W ∗ ḣ,   Rᵀδ,   Wᵀz̄

in a layer. The first layer has neither u nor ḣ, and the last one has no z̄, because φ is linear in the outputs. Tangent
points share x and R, so that the products of the first layer that are linear in δ_1, and R ∗ x, are done once for all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from palimpsest.execution import Execution

Product = Callable[[], Tensor]


class Layer(NamedTuple):
    """A layer with a batch of its inputs and outputs, which show their shapes and memory formats."""

    module: nn.Module
    x: Tensor
    y: Tensor

    @property
    def W(self) -> Tensor:  # noqa: N802 - the equations' own symbol
        assert isinstance(self.module.weight, Tensor)
        return self.module.weight

    def forward(self, x: Tensor, W: Tensor) -> Tensor:
        if not isinstance(self.module, nn.Conv2d):
            return x @ W.T
        return torch.ops.aten.convolution(x, W, None, *_how(self.module))

    def back(self, g: Tensor, W: Tensor) -> Tensor:
        return self._gradient(g, self.x, W, of=0) if isinstance(self.module, nn.Conv2d) else g @ W

    def weight(self, g: Tensor, x: Tensor) -> Tensor:
        return self._gradient(g, x, self.W, of=1) if isinstance(self.module, nn.Conv2d) else g.T @ x

    def _gradient(self, g: Tensor, x: Tensor, W: Tensor, *, of: int) -> Tensor:
        wanted = [of == 0, of == 1, False]
        return torch.ops.aten.convolution_backward(g, x, W, None, *_how(self.module), wanted)[of]


def _how(module: Any) -> tuple[Any, ...]:
    zeros = [0] * len(module.stride)
    return module.stride, module.padding, module.dilation, False, zeros, module.groups


def recorded(network: nn.Module, images: Tensor) -> list[Layer]:
    """The layers in the order in which the network calls them."""
    layers: list[Layer] = []
    with ExitStack() as hooks, torch.no_grad():
        for module in network.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                note = module.register_forward_hook(lambda m, given, y: layers.append(Layer(m, given[0], y)))
                hooks.callback(note.remove)
        network(images)
    return layers


def products(layers: Sequence[Layer], points: int) -> list[Product]:
    """The products of a step, in its order, with separate memory for the factors of each tangent point."""
    first, last = layers[0], layers[-1]
    R = [torch.randn_like(layer.W) for layer in layers]
    found: list[Product] = []
    for _ in range(points):
        W, h, ḣ, δ, z̄ = (
            [torch.randn_like(t) for t in like]
            for like in zip(*((layer.W, layer.x, layer.x, layer.y, layer.y) for layer in layers), strict=True)
        )
        every = range(len(layers))
        found += [partial(layers[j].forward, h[j], W[j]) for j in every]
        for j in every[:0:-1]:
            found += [partial(layers[j].back, δ[j], W[j]), partial(layers[j].weight, δ[j], h[j])]
        for j in every[1:]:
            found += [partial(layers[j].forward, h[j], R[j]), partial(layers[j].forward, ḣ[j], W[j])]
        for j in every[::-1]:
            found += [partial(layers[j].back, δ[j], R[j])] if layers[j] is not first else []
            found += [partial(layers[j].back, z̄[j], W[j])] if layers[j] is not last else []
    x, δ_1 = torch.randn_like(first.x), torch.randn_like(first.y)
    return [*found, partial(first.weight, δ_1, x), partial(first.forward, x, R[0]), partial(first.back, δ_1, R[0])]


def runner(found: Sequence[Product], device: torch.device) -> Callable[[int], None]:
    """Does all products this number of times: as one CUDA graph on a GPU, one after another on a CPU."""

    def step() -> list[Tensor]:  # all results at once: each has its own memory, as in a step
        with torch.no_grad():
            return [product() for product in found]

    replay: Callable[[], object] = step
    if device.type == "cuda":
        with Execution().matrix_precision(device):
            step()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
        replay = graph.replay

    def run(steps: int, memory_of: Callable[[], object] = step) -> None:  # the graph does not keep its tensors alive
        for _ in range(steps):
            replay()

    return run
