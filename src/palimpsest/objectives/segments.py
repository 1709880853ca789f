"""Several targets T_1, …, T_m that share the images: how their values are held, and how they add up to one loss.

    L = (1/m) Σ_j Σ_p w_p ‖r_jp‖² / ‖T_j‖²

T, v and r are dictionaries by parameter name. With several targets each tensor has a first axis for j. An objective
with one target does not have this axis, nor the factor 1/‖T‖².
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from palimpsest.objectives.autograd import Parameters, total


@dataclass(frozen=True)
class Segments:
    """The targets of an objective by their lengths ‖T_j‖; None for one target, without an axis."""

    lengths: tuple[float, ...] | None

    @classmethod
    def of(cls, targets: Sequence[Mapping[str, Tensor]]) -> Segments:
        """Several targets, with an axis even for one."""
        return cls(tuple(sum(float(t.double().square().sum()) for t in T.values()) ** 0.5 for T in targets))

    @property
    def shape(self) -> tuple[int, ...]:
        """(m,), or () for one target."""
        return () if self.lengths is None else (len(self.lengths),)

    @property
    def shares(self) -> tuple[float, ...]:
        """1 / (m ‖T_j‖²): how much each ‖r_j‖² counts."""
        return (1.0,) if self.lengths is None else tuple(1 / (len(self.lengths) * T**2) for T in self.lengths)

    def joined(self, parts: Sequence[Parameters]) -> Parameters:
        """The values for each target as one dictionary."""
        if self.lengths is None:
            return parts[0]
        return {name: torch.stack([part[name] for part in parts]) for name in parts[0]}

    def divided(self, values: Mapping[str, Tensor]) -> list[Mapping[str, Tensor]]:
        """The values on the first axis, one dictionary each."""
        if self.lengths is None:
            return [values]
        return [{name: t[j] for name, t in values.items()} for j in range(len(next(iter(values.values()))))]

    def square(self, t: Tensor) -> Tensor:
        """‖t‖²; with several targets, (1/m) Σ_j ‖t_j‖² / ‖T_j‖²."""
        if self.lengths is None:
            return torch.dot(t.flatten(), t.flatten())
        return total([s * torch.dot(t_j.flatten(), t_j.flatten()) for s, t_j in zip(self.shares, t, strict=True)])

    def weighed(self, t: Tensor, w: float) -> Tensor:
        """w t; with several targets, w t_j / (m ‖T_j‖²)."""
        if self.lengths is None:
            return t if w == 1 else w * t
        if len(t) == 1:
            return self.shares[0] * w * t
        u = torch.empty(t.shape, dtype=t.dtype, device=t.device)  # contiguous: compiled code cannot write elsewhere
        for s, t_j, u_j in zip(self.shares, t, u, strict=True):  # numbers, not a tensor: a CUDA graph cannot copy one
            torch.mul(t_j, s * w, out=u_j)
        return u
