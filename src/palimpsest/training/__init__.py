"""Full-batch training to convergence, keeping the start and saying how converged the end is.

Gradient descent with momentum, v ← μv − η∇F(θ), θ ← θ + v. Without weight decay θ − θ_0 is a sum of
gradients, so everything that the theory says about the span of the data holds for these networks.

For a separable loss without weight decay F is log L, not L. Its gradient ∇L/L is, once the
data are separated, a convex combination of the gradients of the margins, so the step keeps its length when
the loss is 10⁻³⁰⁰: training goes on towards the direction of maximum margin instead of standing still.
"""

from palimpsest.training.fit import Convergence, Fit, Record, train
from palimpsest.training.problem import LossName

__all__ = ["Convergence", "Fit", "LossName", "Record", "train"]
