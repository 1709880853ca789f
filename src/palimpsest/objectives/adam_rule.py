"""What Adam makes of gradients: the change of the weights in each stage of a training.

Adam divides a mean of the gradients by the root of a mean of their squares, both without their bias. The mean of the
squares is long, a thousand steps by default. If the gradient in stage s = 1, …, S is v_s, the weights change there by a
multiple of

    h_s = v_s / √(u_s + (εσ)²),   u_s = (1/s) Σ_{s'≤s} v_s'²,   σ² = mean of v² over stages and entries,

entry by entry, for each named parameter. Of the first stage only the sign of v_1 is left. ε softens the root, because a
descent on images cannot follow a sign. Mini-batches also add their spread to the squares.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def adam_changes(v: Sequence[Tensor], ε: float) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], list[Tensor]]]:
    """h_s of one parameter from v_s, and the adjoint b ↦ (∂h/∂v)ᵀ b.

    >>> h, adjoint = adam_changes([torch.tensor([0.5, -3.0]), torch.tensor([0.5, -3.0])], 0.0)
    >>> h
    [tensor([ 1., -1.]), tensor([ 1., -1.])]
    """
    mean = torch.stack([torch.dot(v_s.flatten(), v_s.flatten()) for v_s in v]).mean() / v[0].numel()
    floor = ε**2 * mean + torch.finfo(mean.dtype).tiny  # a gradient of zero must not divide by zero
    q, total = [], torch.zeros_like(v[0])
    for s, v_s in enumerate(v, start=1):
        total = total.addcmul(v_s, v_s)
        q.append(total.div(s).add_(floor).rsqrt_())

    def adjoint(b: Sequence[Tensor]) -> list[Tensor]:
        # ∂h_s/∂(u_s + ε²σ²) = −½ c_s with c_s = v_s q_s³. u_s holds v_s'² for all s' ≤ s, and σ² holds all squares.
        bq = [b_s * q_s for b_s, q_s in zip(b, q, strict=True)]
        c = [(bq_s * v_s).mul_(q_s).mul_(q_s) for bq_s, v_s, q_s in zip(bq, v, q, strict=True)]
        by_σ2 = ε**2 * torch.stack([c_s.mean() for c_s in c]).mean()
        found, later = [], by_σ2.expand_as(v[0])
        for s in range(len(v), 0, -1):
            later = later.add(c[s - 1], alpha=1 / s)
            found.append(bq[s - 1].addcmul_(v[s - 1], later, value=-1))
        return found[::-1]

    return [v_s * q_s for v_s, q_s in zip(v, q, strict=True)], adjoint
