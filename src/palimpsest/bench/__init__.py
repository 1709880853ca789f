"""The speed of a step, compared with the published method and with the minimum that the hardware needs.

All contenders are timed in turns within one run, so that a slow machine slows them all. Compare only ratios of one run.

    published   autograd through autograd, also for the parameters, with one step of an optimiser. It looks at the loss
                on every step, as the known implementations do. It searches everywhere, with one node
    ours        Palimpsest's whole step, with priors and optimiser, in every mode. On a CPU it is that of the demo: two
                nodes in the span of 40 images. "any network" does not use the path for dense layers
    floor       only the matrix products of our loss and its gradients, of the same shapes, factors and precision
"""

from palimpsest.bench.steps import Shape, contenders
from palimpsest.bench.timing import Effort, compare, measure, ratios, ticks, variations

__all__ = ["Effort", "Shape", "compare", "contenders", "measure", "ratios", "ticks", "variations"]
