"""Gradient reconstruction: the target is a known gradient, a sum of gradients, or an optimiser's moment."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from palimpsest.errors import InvalidInputError
from palimpsest.methods.path import strength
from palimpsest.objectives import weighting
from palimpsest.objectives.base import Objective
from palimpsest.objectives.binding import matching


class Gradient(Objective):
    """Read images out of a gradient g that was taken at known weights θ.

    The gradient of any loss ℓ(Φ(x), y) is a sum of the network's gradients at the images of the batch:

        g = Σ_i λ_i ∇_θ Φ(θ, x_i),   λ_i = ∂ℓ/∂Φ(x_i), of either sign, one for each output.

    So is a sum of gradients over several steps, if θ hardly moved meanwhile. An optimiser keeps such sums.
    `pal.moments` reads them out of its state, and `pal.undo_adam` recovers one from the change of the weights.
    `Objective` explains ``sharpness`` and ``weights``; automatic weights let all parameters count alike.

    Args:
        model: the network at the weights θ.
        gradient: g, keyed like ``model.named_parameters()``. A parameter may be missing or None, for example if it is
            frozen. It then does not take part.
        tangent: θ, a state dict, if it is not the weights of the model.
        whitening: from 0 to 1, as for `pal.NTK`.

    Examples:
        >>> import torch
        >>> from palimpsest.networks import MLP
        >>> model = MLP(4, hidden=(8,))
        >>> model(torch.randn(2, 4)).sum().backward()
        >>> objective = Gradient(model, {name: θ.grad for name, θ in model.named_parameters()})
        >>> objective.loss(torch.randn(3, 4), torch.zeros(3)) == objective.target_norm_squared
        tensor(True)
    """

    linear = True

    def __init__(
        self,
        model: nn.Module,
        gradient: Mapping[str, Tensor | None],
        *,
        tangent: Mapping[str, Tensor] | None = None,
        sharpness: float | None = None,
        weights: weighting.Weights = None,
        whitening: float = 0.0,
    ) -> None:
        if not isinstance(gradient, Mapping):
            raise InvalidInputError(f"the gradient is a {type(gradient).__name__}; give a tensor for each name")
        θ = {name: t.detach() for name, t in model.named_parameters()}
        if "param_groups" in gradient:
            raise InvalidInputError("the gradient is the state of an optimiser; give pal.moments(model, state)")
        given = {name: g for name, g in gradient.items() if g is not None}
        if unknown := sorted(given.keys() - θ.keys()):
            raise InvalidInputError(f"the gradient names {unknown[0]!r}; choose among {', '.join(θ)}")
        if not any(bool(g.any()) for g in given.values()):
            raise InvalidInputError("the gradient is empty or zero, so there is nothing to read; call backward() first")
        T = matching(given, {name: t for name, t in θ.items() if name in given}, "the gradient")
        point = θ if tangent is None else matching(tangent, θ, "the weights of the tangent point")
        super().__init__(model, target=T, tangents=point, sharpness=sharpness, weights=weights)
        self.whitening = strength(whitening)

    def unexplained(self) -> dict[str, float]:
        return weighting.mean_square(self.target)

    def scalar(self, outputs: Tensor, labels: Tensor | None) -> Tensor:
        return outputs
