"""The norm in which a residual counts.

    ‖r‖² = Σ_p w_p ‖H_p r_p‖²          ½ ∂‖r‖²/∂r = w∘HHr

w weighs the parameters (`palimpsest.objectives.weighting`), and H balances the directions of a layer's change
(`palimpsest.objectives.whitening`). With several targets, each ‖r_j‖² counts relative to ‖T_j‖²
(`palimpsest.objectives.segments`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from palimpsest.objectives.autograd import Parameters, total
from palimpsest.objectives.segments import Segments
from palimpsest.objectives.weighting import Likelihood
from palimpsest.objectives.whitening import Metric


@dataclass(frozen=True)
class Norm:
    weights: dict[str, float] | Likelihood
    segments: Segments
    metrics: Mapping[str, Metric]  # H of the layers that are whitened

    def squared(self, r: Parameters) -> Tensor:
        """‖r‖²."""
        squares = self._squares(r)
        if isinstance(self.weights, Likelihood):
            return self.weights.value(squares)
        return total([self.weights[name] * square for name, square in squares.items()])

    def half_gradient(self, r: Parameters) -> Parameters:
        """w∘HHr."""
        HHr = {name: self.metrics[name].squared(t) if name in self.metrics else t for name, t in r.items()}
        if isinstance(self.weights, Likelihood):
            w = self.weights.weights(self._squares(r))
            return {name: w[name] * t for name, t in HHr.items()}
        return {name: self.segments.weighed(t, self.weights[name]) for name, t in HHr.items()}

    def half_curvature(self, r: Parameters, change: Parameters) -> Parameters:
        """The derivative of `half_gradient` at r along a change of r. Fixed weights make that map linear."""
        if isinstance(self.weights, Likelihood):
            return torch.func.jvp(self.half_gradient, (r,), (change,))[1]
        return self.half_gradient(change)

    def _squares(self, r: Parameters) -> Parameters:
        """‖H_p r_p‖² of each parameter."""
        H = self.metrics
        return {name: self.segments.square(H[name](t) if name in H else t) for name, t in r.items()}
