"""The numbers that matrix products are done in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def matrix_products(*, tf32: bool, device: torch.device) -> Iterator[None]:
    """Within it, float32 matrix products on CUDA are done in TF32, or not; the setting before is restored."""
    if device.type != "cuda":
        yield
        return
    # torch refuses to read allow_tf32 once a program has set fp32_precision, but not the other way round.
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
