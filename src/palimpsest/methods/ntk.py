"""NTK reconstruction (Loo et al. 2024): squared loss, known initial weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from palimpsest.methods.path import segment, strength
from palimpsest.objectives import weighting
from palimpsest.objectives.base import Objective
from palimpsest.objectives.binding import matching, parameters_of


class NTK(Objective):
    """The NTK method (Loo et al. 2024). It needs the weights before training.

    Every step of gradient descent adds gradients at the training images, so the change of the weights is close to

        θ − θ_0 = Σ_i λ_i ∇_θ Φ(θ_0 + t(θ − θ_0), x_i),   multipliers of either sign.

    The midpoint t = ½ represents the whole path better than either end. Several points represent it better still, and
    cost proportionally more. If weights on the way are known as well, `Path` reads more. `Objective` explains
    ``sharpness`` and ``weights``.

    Args:
        model: the trained network.
        initial: its weights before training, a state dict.
        at: t, or several of them. Each point has its own multipliers, of shape (k, len(at)). A network with C > 1
            outputs adds an axis of length C.
        whitening: from 0 to 1. 1 lets all directions of a layer's change count alike, and 0 leaves them as they are.
            `pal.reconstruct` then measures the loss in that metric. Within the span of a dense network, it is that of
            the first layer's inputs; elsewhere, that of all layers. See `palimpsest.objectives.whitening`.

    Examples:
        >>> import torch
        >>> from palimpsest.networks import MLP
        >>> before, after = MLP(4, hidden=(8,)), MLP(4, hidden=(8,))
        >>> objective = NTK(after, before.state_dict(), at=(0.25, 0.75))
        >>> objective.loss(torch.randn(3, 4), torch.zeros(3, 2)) == objective.target_norm_squared
        tensor(True)
    """

    linear = True

    def __init__(
        self,
        model: nn.Module,
        initial: Mapping[str, Tensor],
        *,
        at: float | Sequence[float] = 0.5,
        sharpness: float | None = None,
        weights: weighting.Weights = None,
        whitening: float = 0.0,
    ) -> None:
        θ, θ_0 = parameters_of(model), matching(initial, parameters_of(model))
        equal = "initial and final weights are the same; clone the state dict before training"
        Δ, tangents = segment(θ_0, θ, at, equal=equal)
        super().__init__(model, target=Δ, tangents=tangents, sharpness=sharpness, weights=weights, initial=θ_0)
        self.whitening = strength(whitening)

    def unexplained(self) -> dict[str, float]:
        assert self.initial is not None
        return weighting.linearisation_error(self.target, self.initial)

    def scalar(self, outputs: Tensor, labels: Tensor | None) -> Tensor:
        return outputs
