"""The coordinates in which a network is trained: the directions of its first layer that the images can move.

Let X be the n images as rows, and X = S Qᵀ with orthonormal columns Q (d×n). A stack of dense layers sees an image only
through W_1 x = (W_1 Q) s, and every gradient in W_1 is a sum of (…)·xᵀ. So W_1 moves in the columns of Q alone:

    W_1 = A Qᵀ + c∘U,    U = W_1(0) (1 − QQᵀ),    A(0) = W_1(0) Q,    c(0) = 1.

A rotation does not change gradient descent, so A is trained on the images S, with n numbers each instead of d. Weight
decay shrinks U row by row, like one more weight for each unit whose input is always 0. This weight, |U_j| at first, is
one more column of A. ‖θ‖ then stays the same.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from palimpsest.errors import InvalidInputError, NoGradientError, NonFiniteError
from palimpsest.objectives.dense import ALIGNED, Layer, aligned, recognise
from palimpsest.objectives.smoothing import failures_named


class Coordinates:
    """A network on its images, as a function of the parameters that are trained."""

    def __init__(self, model: nn.Module, images: Tensor) -> None:
        self.model = model
        self.named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not self.named:
            raise NoGradientError("the network does not have a parameter to train; set requires_grad on some")
        # A copy, because tensors of torch.inference_mode() cannot be trained on.
        self.images = images.to(next(iter(self.named.values())), copy=True)
        if len(images) == 0:
            raise InvalidInputError("there are no images to train on; give at least one")
        if not torch.isfinite(self.images).all():
            raise NonFiniteError("the images contain NaN or infinity; remove those images")

    def outputs(self, θ: Mapping[str, Tensor]) -> Tensor:
        """Φ for each image, (n, C)."""
        with failures_named(), sdpa_kernel(SDPBackend.MATH):  # fused attention does not have forward derivatives
            return self._matrix(functional_call(self.model, dict(θ), (self.images,)))

    def _matrix(self, outputs: Tensor) -> Tensor:
        n = len(self.images)
        if not isinstance(outputs, Tensor) or outputs.dtype not in (torch.float32, torch.float64):
            kind = outputs.dtype if isinstance(outputs, Tensor) else type(outputs).__name__
            raise InvalidInputError(f"the network returns {kind}; let it return a tensor of float32 or float64")
        if outputs.ndim > 2 or outputs.shape[:1] != (n,):
            shape = tuple(outputs.shape)
            raise InvalidInputError(f"the network returns {shape} for {n} images; let it return ({n},) or ({n}, C)")
        return outputs.reshape(n, -1)

    @torch.no_grad()
    def write(self, θ: Mapping[str, Tensor]) -> None:
        """Give the network these parameters."""
        for name, value in self.in_full(θ).items():
            self.model.get_parameter(name).copy_(value)

    def in_full(self, θ: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The network's own parameters."""
        return dict(θ)


class SpanCoordinates(Coordinates):
    """A stack of dense layers on fewer images than an image has pixels."""

    def __init__(self, model: nn.Module, images: Tensor, layers: tuple[Layer, ...]) -> None:
        super().__init__(model, images)
        self._layers, self._first = layers, layers[0].weight
        self._frozen = {name: p.detach() for name, p in model.named_parameters() if name not in self.named}
        W = self.named[self._first].detach().double()
        Q, R = torch.linalg.qr(self.images.flatten(1).double().T)
        A = W @ Q
        U = W - A @ Q.T
        size = U.norm(dim=1, keepdim=True)
        self._Q, self._U = Q, U / size.clamp_min(torch.finfo(U.dtype).tiny)
        self.images = aligned(R.T, torch.zeros_like(R[:, :1])).to(self.images)
        self._start, self._A = W, aligned(A, size).to(self.images)
        self.named[self._first] = nn.Parameter(self._A.clone())

    def outputs(self, θ: Mapping[str, Tensor]) -> Tensor:
        h, values = self.images, self._frozen | dict(θ)
        for number, layer in enumerate(self._layers):
            h = nn.functional.linear(h.relu() if number else h, values[layer.weight], values.get(layer.bias or ""))
        return self._matrix(h)

    def in_full(self, θ: Mapping[str, Tensor]) -> dict[str, Tensor]:
        ΔA, n = θ[self._first].double() - self._A.double(), self._Q.shape[1]
        # The change is added to W_1(0), so that directions that did not move stay exactly the same.
        W = self._start + ΔA[:, :n] @ self._Q.T + ΔA[:, n, None] * self._U
        return dict(θ) | {self._first: W}


def coordinates(model: nn.Module, images: Tensor) -> Coordinates:
    """The fewest coordinates in which the network can be trained."""
    whole = Coordinates(model, images)
    if len(images) + ALIGNED < images[0].numel():
        layers = recognise(model, whole.images)
        if layers and layers[0].weight in whole.named:
            return SpanCoordinates(model, images, layers)
    return whole
