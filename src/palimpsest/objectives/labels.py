"""The labels of candidates: none, ±1, or a class. Each kind assigns labels and checks them."""

from __future__ import annotations

import torch
from torch import Tensor

from palimpsest.errors import InvalidInputError


class Labels:
    """The labels of a method's candidates."""

    def balanced(self, k: int, outputs: int) -> Tensor | None:
        """Labels for k fresh candidates of a network with this many outputs."""
        return None

    def check(self, labels: Tensor | None, k: int, outputs: int) -> None:
        """Raise InvalidInputError unless these are k labels that fit such a network."""


class Unlabelled(Labels):
    """The method ignores labels."""


class Binary(Labels):
    """y ∈ {−1, 1}, for a network with one output."""

    def balanced(self, k: int, outputs: int) -> Tensor:
        return 1 - 2 * (torch.arange(k) % 2)

    def check(self, labels: Tensor | None, k: int, outputs: int) -> None:
        if outputs != 1:
            raise InvalidInputError(f"this method needs a network with one output, not {outputs}; use MulticlassKKT")
        if labels is None or labels.shape != (k,) or not bool((labels.abs() == 1).all()):
            raise InvalidInputError(f"this method needs labels −1 or 1; give {k} of them")


class Classes(Labels):
    """y ∈ {0, …, C−1}, for a network with C ≥ 2 outputs."""

    def balanced(self, k: int, outputs: int) -> Tensor:
        return torch.arange(k) % outputs

    def check(self, labels: Tensor | None, k: int, outputs: int) -> None:
        if outputs < 2:
            raise InvalidInputError("this method needs a network with one output per class; use KKT for one output")
        whole = labels is not None and labels.shape == (k,) and not labels.is_floating_point()
        if labels is None or not whole or not bool(labels.ge(0).logical_and(labels.lt(outputs)).all()):
            raise InvalidInputError(f"this method needs integer labels from 0 to {outputs - 1}; give {k} of them")
