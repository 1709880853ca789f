"""Multiclass KKT reconstruction (Buzaglo et al. 2024)."""

from __future__ import annotations

import torch
from torch import Tensor

from palimpsest.objectives import Objective
from palimpsest.objectives.labels import Classes


class MulticlassKKT(Objective):
    """The KKT method for several classes (Buzaglo et al. 2024). It uses the margin over the runner-up class:

        θ = Σ_i λ_i ∇_θ [Φ_{y_i}(θ, x_i) − max_{j≠y_i} Φ_j(θ, x_i)],   λ ≥ 0.

    `Objective` explains ``initial``, ``sharpness`` and ``weights``.

    Args:
        model: the trained network, with one output for each class.

    Examples:
        >>> import torch
        >>> from palimpsest.networks import MLP
        >>> objective = MulticlassKKT(MLP(4, hidden=(8,), outputs=3))
        >>> dx, dλ = objective.gradients(torch.randn(2, 4), torch.rand(2), torch.tensor([0, 2]))
        >>> dx.shape, dλ.shape
        (torch.Size([2, 4]), torch.Size([2]))
    """

    signed = False
    label_kind = Classes()

    def scalar(self, outputs: Tensor, labels: Tensor | None) -> Tensor:
        assert labels is not None
        own = labels[:, None] == torch.arange(outputs.shape[1], device=labels.device)
        others = outputs.masked_fill(own, -torch.inf)
        return outputs.masked_fill(~own, 0).sum(1) - others.amax(1)
