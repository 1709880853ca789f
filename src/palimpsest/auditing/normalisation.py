"""Whether batch normalisation was live in training.

Live, it normalises each image by the statistics of its batch. A gradient then depends on the whole batch, so candidates
are read as one batch. Training also updates the running statistics, so the weights show it.
"""

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from palimpsest.auditing.subject import Subject, Weights

ROUNDING = 0.01  # of a statistic: files in half precision differ by less


def live_layers(subject: Subject) -> int:
    """The number of batch normalisations whose statistics changed. Without a start there are none to compare."""
    ends = list(subject.segments)
    if not ends and subject.initial is not None:
        ends = [(subject.initial, subject.model.state_dict())]
    layers = [(name, each) for name, each in subject.model.named_modules() if isinstance(each, _BatchNorm)]
    return sum(any(_live(name, layer, *pair) for pair in ends) for name, layer in layers)


def _live(name: str, layer: nn.Module, start: Weights, end: Weights) -> bool:
    statistics = [f"{name}.{buffer}" if name else buffer for buffer, _ in layer.named_buffers()]
    return any(_changed(start[each], end[each]) for each in statistics if each in start and each in end)


def _changed(a: Tensor, b: Tensor) -> bool:
    if not a.is_floating_point():  # the number of batches
        return not torch.equal(a, b)
    return float((b - a).double().norm()) > ROUNDING * float(b.double().norm())
