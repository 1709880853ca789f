"""Networks at stationary points of the margin problem, and datasets that explain the same weights.

These functions show when the weights of a polynomial network do *not* determine the data. `docs/identifiability.md`
has the theory, and `experiments/identifiability.py` the measurements.
"""

from margin_problem.counterexamples import Counterexample, NoCounterexampleError, counterexample
from margin_problem.maxmargin import MaxMargin, max_margin
from margin_problem.stationary import stationary_network

__all__ = [
    "Counterexample", "MaxMargin", "NoCounterexampleError", "counterexample", "max_margin", "stationary_network",
]  # fmt: skip
