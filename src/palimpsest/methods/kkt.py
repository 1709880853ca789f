"""KKT reconstruction (Haim et al. 2022), and its form for any loss with weight decay (Buzaglo et al. 2024)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from palimpsest.objectives import Objective, weighting
from palimpsest.objectives.labels import Binary, Unlabelled


class KKT(Objective):
    """The KKT method (Haim et al. 2022), for classifiers with one output that were trained for long.

    Gradient descent on the logistic loss drives a homogeneous network towards the maximum margin. There the weights
    are a combination of gradients at the training images:

        θ = Σ_i λ_i y_i ∇_θ Φ(θ, x_i),   λ ≥ 0.

    `Objective` explains ``initial``, ``sharpness`` and ``weights``.

    Args:
        model: the trained network, with one output unless ``signed``.
        signed: use the form for any loss with weight decay (Buzaglo et al. 2024): candidates do not have labels, and
            multipliers have either sign, one for each output.

    Examples:
        >>> import torch
        >>> from palimpsest.networks import MLP
        >>> objective = KKT(MLP(4, hidden=(8,)), sharpness=10.0)
        >>> x, λ, y = torch.randn(3, 4), torch.rand(3), torch.tensor([1, -1, 1])
        >>> objective.loss(x, 0 * λ, y) == objective.target_norm_squared
        tensor(True)
    """

    linear = True

    def __init__(
        self,
        model: nn.Module,
        *,
        signed: bool = False,
        initial: Mapping[str, Tensor] | None = None,
        sharpness: float | None = None,
        weights: weighting.Weights = None,
    ) -> None:
        self.signed = signed
        self.label_kind = Unlabelled() if signed else Binary()
        super().__init__(model, sharpness=sharpness, weights=weights, initial=initial)

    def scalar(self, outputs: Tensor, labels: Tensor | None) -> Tensor:
        if self.signed:
            return outputs
        assert labels is not None
        return labels * outputs[:, 0]
