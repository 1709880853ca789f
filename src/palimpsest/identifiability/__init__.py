"""When do the weights determine the data? Exact recovery and its certificate."""

from palimpsest.identifiability.certificate import Extent, IdentifiabilityCertificate, Margins, margins
from palimpsest.identifiability.recovery import Identification, identify
from palimpsest.identifiability.sources import from_gradient, from_head_training, from_lazy_training, from_network

__all__ = [
    "Extent", "IdentifiabilityCertificate", "Identification", "Margins", "from_gradient", "from_head_training",
    "from_lazy_training", "from_network", "identify", "margins",
]  # fmt: skip
