"""What Adam makes of gradients: the change of the weights in each stage of a training.

Adam divides a mean of the gradients by the root of a mean of their squares, both without their bias. The mean of the
squares is long, a thousand steps by default. If the gradient in stage s = 1, …, S is v_s, the weights change there by a
multiple of

    h_s = v_s / √(u_s + (εσ)²),   u_s = (1/s) Σ_{s'≤s} v_s'²,   σ² = mean of v² over stages and entries,

entry by entry, for each named parameter. Of the first stage only the sign of v_1 is left. ε softens the root, because a
descent on images cannot follow a sign. Mini-batches also add their spread to the squares. ε = 0 is Adam's own rule.

This leaves out momentum, which matters if a stage has only a few steps. It also assumes that all stages have equally
many steps, and that the training is not much longer than Adam's memory of the squares.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Adjoint = Callable[[Tensor], Tensor]


def adam_changes(v: Tensor, ε: float) -> tuple[Tensor, Adjoint]:
    """h of one parameter, from v with a first axis for the stages, and the adjoint b ↦ (∂h/∂v)ᵀ b.

    >>> h, adjoint = adam_changes(torch.tensor([[0.5, -3.0], [0.5, -3.0]]), 0.0)
    >>> h
    tensor([[ 1., -1.],
            [ 1., -1.]])
    """
    S, σ2 = len(v), torch.dot(v.flatten(), v.flatten()) / v.numel()
    floor = ε**2 * σ2 + torch.finfo(v.dtype).tiny ** (2 / 3)  # a gradient of zero must leave q³ finite
    q, total = [], torch.zeros_like(v[0])
    for s, v_s in enumerate(v, start=1):  # stage by stage: one fits into a processor's cache, all may not
        total = total.addcmul(v_s, v_s)
        q.append(total.div(s).add_(floor).rsqrt_())

    def adjoint(b: Tensor) -> Tensor:
        # ⟨b_s, ∂h_s/∂(u_s + ε²σ²)⟩ = −½ c_s, c_s = b_s v_s q_s³. u_s holds v_s'² for s' ≤ s, and σ² all squares.
        bq = [b_s * q_s for b_s, q_s in zip(b, q, strict=True)]
        c = [(bq_s * v_s).mul_(q_s).mul_(q_s) for bq_s, v_s, q_s in zip(bq, v, q, strict=True)]
        found, later = [], (ε**2 / v.numel() * torch.stack([c_s.sum() for c_s in c]).sum()).expand_as(v[0])
        for s in range(S, 0, -1):
            later = later.add(c[s - 1], alpha=1 / s)
            found.append(bq[s - 1].addcmul_(v[s - 1], later, value=-1))
        return torch.stack(found[::-1])

    return torch.stack([v_s * q_s for v_s, q_s in zip(v, q, strict=True)]), adjoint
