"""Matrices that stay the same while thousands of products are taken with them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class Factor:
    """h ↦ hA + b for a constant A.

    A matrix product begins by copying its factors into the order in which the processor reads them, which for few
    rows h is a third of the work. Intel's library can do that once and for all, for a given number of rows.

    >>> Factor(torch.eye(2), rows=1)(torch.tensor([[3.0, 4.0]]))
    tensor([[3., 4.]])
    """

    def __init__(self, A: Tensor, b: Tensor | None = None, *, rows: int) -> None:
        self._A, self._b, self._rows = A.T.contiguous(), b, rows  # torch's own layout of a dense layer
        packs = A.device.type == "cpu" and A.dtype == torch.float32 and torch.backends.mkl.is_available()
        packs &= hasattr(torch.ops.mkl, "_mkl_linear")
        self._packed = torch.ops.mkl._mkl_reorder_linear_weight(self._A, rows) if packs else None

    def __call__(self, h: Tensor) -> Tensor:
        if self._packed is None:
            return F.linear(h, self._A, self._b)
        return torch.ops.mkl._mkl_linear(h, self._packed, self._A, self._b, self._rows)

    def onto(self, total: Tensor, h: Tensor) -> Tensor:
        """total + hA, in place; for a factor without b."""
        return total.addmm_(h, self._A.T) if self._packed is None else total.add_(self(h))
