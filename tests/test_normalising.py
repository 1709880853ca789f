"""Layers that are written out, so that their derivatives are right and fast."""

import pytest
import torch
import torch.nn.functional as F

from palimpsest.objectives import convolution
from palimpsest.objectives.written_out import WrittenOut

W, B = torch.randn(2, 4, dtype=torch.float64).unbind()
KERNEL = torch.randn(2, 4, 3, dtype=torch.float64)
FIXED = torch.randn(4, dtype=torch.float64), torch.rand(4, dtype=torch.float64)
STATISTICS = torch.zeros(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
CALLS = {
    "layer norm": lambda x: F.layer_norm(x, (5,)),
    "layer norm over two axes": lambda x: torch.layer_norm(x, normalized_shape=(4, 5), eps=1e-3),
    "layer norm, affine": lambda x: F.layer_norm(x.mT, (4,), W, bias=B),
    "instance norm": lambda x: F.instance_norm(x, weight=W, bias=B),
    "batch norm, fixed statistics": lambda x: F.batch_norm(x, *FIXED, W, B),
    "batch norm, not affine": lambda x: F.batch_norm(x, *FIXED),
    "batch norm by the batch": lambda x: F.batch_norm(x, *FIXED, W, B, training=True),
    "batch norm of weights": lambda x: F.batch_norm(x.reshape(1, 8, 5), None, None, training=True).view_as(x),
    "convolution": lambda x: F.conv1d(x, KERNEL, B[:2], stride=2, padding=1),
    "convolution, dilated": lambda x: F.conv1d(x, weight=KERNEL, dilation=2),
    "convolution, in groups": lambda x: torch.conv1d(x, KERNEL[:, :2], padding=[2], groups=2),
    "convolution, padded by a word": lambda x: F.conv1d(x, KERNEL, padding="same"),
    "convolution of images": lambda x: F.conv2d(x[:, None], KERNEL[:, None, :3], B[:2], padding=(1, 0)),
    "convolution without a batch": lambda x: F.conv1d(x[0], KERNEL),
    "instance norm, fixed statistics": lambda x: F.instance_norm(x, *STATISTICS, use_input_stats=False),
}


@pytest.fixture(autouse=True)
def everywhere(monkeypatch):
    """Convolutions are written out on CPUs too."""
    monkeypatch.setattr(convolution, "faster_on", lambda device: True)


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


def test_convolutions_have_right_mixed_derivatives():
    torch.manual_seed(0)
    x, w, along = (
        torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 3, 5), (2, 3, 3), (2, 3, 3))
    )

    def of_weight(x, w):
        with WrittenOut():
            y = F.conv1d(x, w, padding=1)
        return torch.autograd.grad((y**3).sum(), w, create_graph=True)[0] * along

    assert torch.autograd.gradgradcheck(of_weight, (x, w))
