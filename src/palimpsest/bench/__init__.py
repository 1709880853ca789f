"""How fast a step is, against the method as published and against the least that the hardware must do.

All contenders are timed in one run, in turns, so that what slows the machine slows them all; only ratios of such a run
mean anything.

    published   autograd through autograd with gradients for the parameters too, one step of an optimiser, and a look at
                the loss on every step, as the known implementations do it: everywhere, with one node
    ours        Palimpsest's whole step, priors and optimiser included, in every mode: on a CPU the demo's own problem,
                two nodes in the span of 40 images; "any network" leaves out the path for dense layers
    floor       only the matrix products of our loss and its gradients, of the same shapes, factors and precision
"""

from palimpsest.bench.steps import Shape, automatic, contenders
from palimpsest.bench.timing import Effort, Timing, compare, measure, ratios, ticks, variations

__all__ = [
    "Effort",
    "Shape",
    "Timing",
    "automatic",
    "compare",
    "contenders",
    "measure",
    "ratios",
    "ticks",
    "variations",
]
