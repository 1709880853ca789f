"""When do the weights determine the data? Exact recovery, its certificate, and counterexamples."""

from palimpsest.identifiability.certificate import Certificate, Verdict
from palimpsest.identifiability.recovery import Identification, identify
from palimpsest.identifiability.sources import (
    from_gradient,
    from_head_training,
    from_lazy_training,
    from_network,
)
