"""While active, torch computes some layers by operations whose derivatives are right and fast to every order."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from palimpsest.objectives import convolution, normalising

_WRITTEN_OUT: dict[str, Callable[..., Tensor]] = {
    "layer_norm": normalising.layer_norm,
    "instance_norm": normalising.instance_norm,
}
_CONVOLUTIONS = ("conv1d", "conv2d", "conv3d")


class WrittenOut(TorchFunctionMode):
    """Replaces normalisations and convolutions; see :mod:`normalising` and :mod:`convolution` beside this file.

    ``live`` normalises batches by their own statistics, whatever mode the network is in.
    """

    def __init__(self, *, live: bool = False) -> None:
        super().__init__()
        self.live = live

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.batch_norm:
            func = normalising.live_batch_norm if self.live else normalising.batch_norm
        name = getattr(func, "__name__", "")
        if name in _CONVOLUTIONS and convolution.takes(*args, **kwargs):
            func = convolution.convolution
        return _WRITTEN_OUT.get(name, func)(*args, **kwargs)
