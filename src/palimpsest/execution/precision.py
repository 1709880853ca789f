"""The precision of matrix products."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def matrix_products(*, tf32: bool, device: torch.device) -> Iterator[None]:
    """Within it, float32 matrix products on CUDA use TF32, or not. The earlier setting is restored."""
    if device.type != "cuda":
        yield
        return
    # Not allow_tf32: torch refuses to read it once a program has set fp32_precision.
    backends: Any = torch.backends
    settings = (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)
    before = [setting.fp32_precision for setting in settings]
    try:
        for setting in settings:
            setting.fp32_precision = "tf32" if tf32 else "ieee"
        yield
    finally:
        for setting, precision in zip(settings, before, strict=True):
            setting.fp32_precision = precision
