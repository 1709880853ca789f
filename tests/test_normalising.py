"""Normalisation, written out so that torch differentiates it rightly."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import palimpsest as pal
from palimpsest.objectives.normalising import WrittenOut

W, B = torch.randn(2, 4, dtype=torch.float64).unbind()
STATISTICS = torch.zeros(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
CALLS = {
    "layer norm": lambda x: F.layer_norm(x, (5,)),
    "layer norm over two axes": lambda x: torch.layer_norm(x, normalized_shape=(4, 5), eps=1e-3),
    "layer norm, affine": lambda x: F.layer_norm(x.mT, (4,), W, bias=B),
    "instance norm": lambda x: F.instance_norm(x, weight=W, bias=B),
    "instance norm, fixed statistics": lambda x: F.instance_norm(x, *STATISTICS, use_input_stats=False),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=list(CALLS))
def test_values_are_those_of_torch_and_third_derivatives_are_right(call):
    torch.manual_seed(0)
    x, along = (torch.randn(2, 4, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def gradient(x, along):
        with WrittenOut():
            y = call(x)
        return torch.autograd.grad((y + y**3).sum(), x, create_graph=True)[0] * along

    with WrittenOut():
        written_out = call(x)
    assert torch.allclose(written_out, call(x), rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradgradcheck(gradient, (x, along))


def test_differentiating_forwards_agrees_with_backwards_through_layer_norm():
    torch.manual_seed(0)
    start, end = (nn.Sequential(nn.Linear(9, 6), nn.LayerNorm(6), nn.GELU(), nn.Linear(6, 1)).double() for _ in "12")
    objective = pal.NTK(end, start.state_dict())
    x, λ = torch.randn(2, 9, dtype=torch.float64), torch.randn(2, dtype=torch.float64)
    _, dx, _ = objective.loss_and_gradients(x, λ)
    bound = objective.bind(x, λ, None)
    assert objective.differentiates_forwards(x)
    objective._bound = dataclasses.replace(bound, forwards=True)
    _, half, _ = objective.error_and_half_gradients(bound, x, λ, None)
    assert torch.allclose(2 * half, dx, rtol=1e-10)
