import pytest
import torch

from cases import TABLE, Case, make_case

torch.set_num_threads(1)  # sums in one order: tests compare bits


@pytest.fixture(params=list(TABLE))
def case(request) -> Case:
    """Every network × objective of the shared table."""
    return make_case(*TABLE[request.param])
