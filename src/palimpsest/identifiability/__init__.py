"""When do the weights determine the data? Exact recovery, its certificate, and counterexamples."""

from palimpsest.identifiability.certificate import Extent, IdentifiabilityCertificate, Margins, margins
from palimpsest.identifiability.counterexamples import Counterexample, counterexample
from palimpsest.identifiability.maxmargin import MaxMargin, max_margin
from palimpsest.identifiability.recovery import Identification, identify
from palimpsest.identifiability.sources import from_gradient, from_head_training, from_lazy_training, from_network
from palimpsest.identifiability.stationary import stationary_network

__all__ = [
    "Counterexample", "Extent", "IdentifiabilityCertificate", "Identification", "Margins", "MaxMargin",
    "counterexample", "from_gradient", "from_head_training", "from_lazy_training", "from_network", "identify",
    "margins", "max_margin", "stationary_network",
]  # fmt: skip
