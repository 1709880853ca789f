"""The objective L = Σ_p w_p ‖T_p − Σ_i λ_i ∇_p φ(θ*, x_i)‖², its derivatives, and the engines."""

from palimpsest.objectives.base import Objective

__all__ = ["Objective"]
