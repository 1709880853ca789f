"""Rates of false positives: p-values are ranks among held-out scores."""

import pytest
import torch

from palimpsest.errors import NonFiniteError
from palimpsest.scoring.rates import rates


def test_p_values_are_ranks_and_rates_that_cannot_be_resolved_are_not_stated():
    held_out = torch.arange(99.0)
    found = rates(torch.tensor([200.0, 98.0, 50.0, -1.0]), held_out, at=(0.02, 0.01, 0.001))
    assert found.p_values.tolist() == pytest.approx([0.01, 0.02, 0.5, 1.0])  # a tie counts against
    assert found.named == {0.02: 0.5, 0.01: 0.25, 0.001: None}
    assert found.finest == 0.01


def test_the_curve_has_the_shares_that_the_headline_states():
    found = rates(torch.tensor([3.0, 1.5]), torch.tensor([1.0, 2.0]))
    assert found.curve == [(1 / 3, 0.5), (2 / 3, 1.0), (1.0, 1.0)]
    some = rates(torch.arange(0.5, 99, 3), torch.arange(99.0), at=[k / 100 for k in range(1, 101)])
    assert dict(some.curve) == pytest.approx(some.named, rel=1e-12)


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
def test_scores_without_a_rank_are_refused(broken):
    scores = torch.arange(30.0)
    for pair in ((scores, scores.clone().index_fill_(0, torch.tensor([3]), broken)), (scores * broken, scores)):
        with pytest.raises(NonFiniteError):
            rates(*pair)
