"""Multiclass KKT reconstruction (Buzaglo et al. 2024)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from palimpsest.objectives import weighting
from palimpsest.objectives.base import Objective, parameters_of
from palimpsest.objectives.labels import Classes


class MulticlassKKT(Objective):
    """θ = Σ_i λ_i ∇_θ [Φ_{y_i}(θ, x_i) − max_{j≠y_i} Φ_j(θ, x_i)], λ ≥ 0: the margin over the runner-up class.

    Args:
        model: the trained network, with one output per class.
        initial: the initial weights, if known; only ``weights="auto"`` makes use of them.
        sharpness, weights: see :class:`~palimpsest.objectives.base.Objective`.
    """

    signed = False
    label_kind = Classes()

    def __init__(
        self,
        model: nn.Module,
        *,
        initial: Mapping[str, Tensor] | None = None,
        sharpness: float | None = None,
        weights: weighting.Weights = None,
    ) -> None:
        θ = parameters_of(model)
        super().__init__(model, target=θ, tangents=θ, sharpness=sharpness, weights=weights, initial=initial)

    def scalar(self, outputs: Tensor, labels: Tensor | None) -> Tensor:
        assert labels is not None
        own = labels[:, None] == torch.arange(outputs.shape[1], device=labels.device)
        others = outputs.masked_fill(own, -torch.inf)
        return outputs.masked_fill(~own, 0).sum(1) - others.amax(1)
