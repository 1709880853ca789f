"""TF32 is switched on and off by torch's present settings, whichever ones the host program uses."""

import pytest
import torch

from palimpsest.execution.precision import matrix_products

CUDA = torch.device("cuda")  # only settings are touched, so no such device is needed
MATRICES, CONVOLUTIONS = torch.backends.cuda.matmul, torch.backends.cudnn.conv


@pytest.fixture(autouse=True)
def _as_before():
    before = MATRICES.fp32_precision, CONVOLUTIONS.fp32_precision
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = False, True
    MATRICES.fp32_precision, CONVOLUTIONS.fp32_precision = before


@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("host", ["none", "ieee", "tf32"])
def test_what_a_host_program_set_is_no_obstacle_and_is_restored(host, tf32):
    MATRICES.fp32_precision = host
    with matrix_products(tf32=tf32, device=CUDA):
        wanted = "tf32" if tf32 else "ieee"
        assert (MATRICES.fp32_precision, CONVOLUTIONS.fp32_precision) == (wanted, wanted)
    assert MATRICES.fp32_precision == host


@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("host", [False, True])
def test_a_host_program_that_uses_the_old_settings_can_go_on_doing_so(host, tf32):
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = host
    with pytest.raises(ArithmeticError), matrix_products(tf32=tf32, device=CUDA):
        raise ArithmeticError
    assert torch.backends.cuda.matmul.allow_tf32 is host
    assert torch.backends.cudnn.allow_tf32 is host
