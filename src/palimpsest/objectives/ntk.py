"""NTK reconstruction (Loo et al. 2024): squared loss, known initial weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from palimpsest.errors import InvalidInputError
from palimpsest.objectives import weighting
from palimpsest.objectives.base import Objective, matching, parameters_of
from palimpsest.objectives.labels import Unlabelled


class NTK(Objective):
    """θ − θ_0 = Σ_i λ_i ∇_θ Φ(θ_0 + t(θ − θ_0), x_i): every step of gradient descent added gradients at the images.

    The tangent at the midpoint t = ½ represents the whole path twice as well as either end; several points with
    multipliers of their own represent it better still, at a proportional cost.

    Args:
        model: the trained network.
        initial: its weights before training, a state dict.
        at: t, or several of them; multipliers then have shape (k, len(at)), and with C > 1 outputs a further
            axis of length C.
        whitening: the power p of :mod:`palimpsest.objectives.reduced`, for searches within the span of the images;
            their losses are then measured in that metric.
        sharpness, weights: see :class:`~palimpsest.objectives.base.Objective`.
    """

    signed = True
    linear = True
    label_kind = Unlabelled()

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
        Δ = {name: θ[name] - θ_0[name] for name in θ}
        if Δ and not any(bool(change.any()) for change in Δ.values()):
            raise InvalidInputError("initial and final weights are the same; clone the state dict before training")
        if not isinstance(at, int | float) and len(at) == 0:
            raise InvalidInputError("at is empty; give at least one point t between 0 (initial) and 1 (final)")

        def point(t: float) -> dict[str, Tensor]:
            return {name: θ_0[name] + t * Δ[name] for name in θ}

        tangents = point(at) if isinstance(at, int | float) else [point(float(t)) for t in at]
        super().__init__(model, target=Δ, tangents=tangents, sharpness=sharpness, weights=weights, initial=θ_0)
        if not 0 <= whitening <= 1:
            raise InvalidInputError(f"whitening is {whitening}; give a number from 0 to 1")
        self.whitening = whitening

    def unexplained(self) -> dict[str, float]:
        assert self.initial is not None
        return weighting.linearisation_error(self.target, self.initial)

    def scalar(self, outputs: Tensor, labels: Tensor | None) -> Tensor:
        return outputs
