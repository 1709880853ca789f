"""Multi-layer perceptrons and two-layer polynomial networks."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn

from palimpsest.errors import InvalidInputError


class MLP(nn.Module):
    """A perceptron Φ(x) = W_L σ(… σ(W_1 x + b_1) …) with ReLUs σ, on images of a given shape.

    By default only the first layer has a bias, as in the literature. The network is then homogeneous in its
    parameters, which the theory of the maximum margin requires.

    Args:
        image_shape: the shape of one input, for example ``(1, 28, 28)``, or a plain dimension.
        hidden: the widths of the hidden layers. Empty gives a linear network.
        outputs: the number of outputs. The result has shape ``(k, outputs)``.
        bias: which layers have a bias: ``"first"``, ``"all"`` or ``"none"``.
        scale: a factor on the initial weights, one for all layers or one for each. Initial weights are He's
            N(0, 2 / fan-in), and biases are zero. The known reconstructions from classifiers start with a small
            first layer.

    Examples:
        >>> MLP((1, 4, 4), hidden=(8, 8))(torch.zeros(5, 1, 4, 4)).shape
        torch.Size([5, 1])
    """

    def __init__(
        self,
        image_shape: Sequence[int] | int,
        hidden: Sequence[int] = (1000, 1000),
        outputs: int = 1,
        *,
        bias: Literal["first", "all", "none"] = "first",
        scale: float | Sequence[float] = 1.0,
    ) -> None:
        super().__init__()
        if bias not in ("first", "all", "none"):
            raise InvalidInputError(f"bias is {bias!r}; choose 'first', 'all' or 'none'")
        self.image_shape = (image_shape,) if isinstance(image_shape, int) else tuple(image_shape)
        widths = [math.prod(self.image_shape), *hidden, outputs]
        if min(widths) < 1:
            raise InvalidInputError(f"the widths are {widths}; give every layer at least one unit")
        depth = len(widths) - 1
        scales = [float(scale)] * depth if isinstance(scale, int | float) else [float(s) for s in scale]
        if len(scales) != depth:
            raise InvalidInputError(f"{len(scales)} scales were given for {depth} layers; give one per layer")
        self.layers = nn.ModuleList()
        for i, (fan_in, fan_out) in enumerate(pairwise(widths)):
            layer = nn.Linear(fan_in, fan_out, bias=bias == "all" or (bias == "first" and i == 0))
            nn.init.normal_(layer.weight, 0.0, scales[i] * math.sqrt(2 / fan_in))
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
            self.layers.append(layer)

    def forward(self, x: Tensor) -> Tensor:
        h = x.flatten(1)
        for layer in self.layers[:-1]:
            h = torch.relu(layer(h))
        return self.layers[-1](h)


class PolynomialNetwork(nn.Module):
    """Φ(x) = Σ_j a_j σ(W_j·x + b_j) with a polynomial σ. Weights of such networks can determine the data.

    Args:
        dimension: the length d of an input. Images are flattened.
        neurons: the number m of neurons.
        activation: a degree α for the monomial σ(t) = t^α, or the coefficients ``(c_0, c_1, …, c_α)`` of
            σ(t) = Σ_q c_q t^q.
        bias: whether neurons have a bias b_j.

    Examples:
        >>> net = PolynomialNetwork(3, 2, activation=3)
        >>> x = torch.randn(4, 3)
        >>> torch.allclose(net(x)[:, 0], (x @ net.W.T) ** 3 @ net.a, atol=1e-6)
        True
    """

    def __init__(
        self, dimension: int, neurons: int, *, activation: int | Sequence[float] = 3, bias: bool = False
    ) -> None:
        super().__init__()
        if dimension < 1 or neurons < 1:
            raise InvalidInputError(f"dimension is {dimension} and neurons is {neurons}; give at least 1")
        if isinstance(activation, int):
            activation = (0.0,) * activation + (1.0,)
        self.coefficients = tuple(float(c) for c in activation)
        if len(self.coefficients) < 2 or self.coefficients[-1] == 0:
            raise InvalidInputError("the activation must be a polynomial of degree at least 1; give its coefficients")
        self.W = nn.Parameter(torch.randn(neurons, dimension) / math.sqrt(dimension))
        self.a = nn.Parameter(torch.randn(neurons) / math.sqrt(neurons))
        self.b = nn.Parameter(torch.zeros(neurons)) if bias else None

    @property
    def degree(self) -> int:
        return len(self.coefficients) - 1

    def forward(self, x: Tensor) -> Tensor:
        t = x.flatten(1) @ self.W.T
        if self.b is not None:
            t = t + self.b
        σ = torch.full_like(t, self.coefficients[-1])
        for c in reversed(self.coefficients[:-1]):  # Horner
            σ = σ * t + c
        return (σ @ self.a).unsqueeze(-1)
