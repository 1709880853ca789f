"""Full-batch training by gradient descent with momentum, v ← μv − η∇F(θ), θ ← θ + v.

Without weight decay θ − θ_0 is a sum of gradients, so the theory about the span of the data holds. For a separable loss
F is then log L. Its gradient ∇L/L keeps its size when L is 10⁻³⁰⁰, so training goes on towards the maximum margin.
"""

from palimpsest.training.fit import Convergence, Fit, Record, train
from palimpsest.training.problem import LossName

__all__ = ["Convergence", "Fit", "LossName", "Record", "train"]
