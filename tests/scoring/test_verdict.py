"""The verdict's arithmetic against enumeration, and its rate of false alarms against its promise."""

import itertools
import json
import math
from dataclasses import asdict

import numpy as np
import pytest
import torch

from palimpsest.errors import InvalidInputError
from palimpsest.scoring import verdict
from palimpsest.scoring.verdict import Outcome, judge, strongest


def normal(n, seed, shift=0.0):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 0.1 + 0.3 + shift


@pytest.mark.parametrize(("n", "m"), [(3, 4), (5, 2), (4, 4)])
def test_count_and_rank_tests_are_exact(n, m):
    ranks = range(n + m)
    orders = [(list(c), [r for r in ranks if r not in c]) for c in itertools.combinations(ranks, n)]
    counts = [sum(a > max(y) for a in x) for x, y in orders]
    for r in range(n + 1):
        assert verdict._exceedance(r, n, m) == pytest.approx(np.mean([c >= r for c in counts]))
    wins = np.array([sum(a > b for a in x for b in y) for x, y in orders])
    for (x, y), u in zip(orders, wins, strict=True):
        p = verdict._mann_whitney(np.array(x, float), np.array(y, float))
        assert p == pytest.approx(np.mean(wins >= u))


def test_ties_never_help_the_claim():
    assert verdict._mann_whitney(np.zeros(20), np.zeros(20)) == pytest.approx(1.0)
    tied = judge(torch.full((30,), 0.4), torch.full((30,), 0.4))
    assert tied.outcome is Outcome.NO_EVIDENCE
    assert (tied.recovered, tied.auc) == (0, 0.5)


@pytest.mark.parametrize(("n", "m"), [(40, 40), (40, 160), (10, 60)])
def test_false_alarms_are_rarer_than_promised(n, m):
    draws = (normal(n + m, seed) for seed in range(600))
    claims = sum(judge(x[:n], x[n:]).outcome is Outcome.LEAKAGE for x in draws)
    assert claims <= 12  # at 1 % six are expected at most; more than 12 has a probability below 1 %


def test_the_lower_end_of_the_count_holds():
    """Eight of 40 are truly recovered: the interval says more in at most (1 − 0.9)/2 of the draws."""
    too_many = 0
    for s in range(600):
        scores = normal(80, s)
        scores[:8] += 2
        too_many += judge(scores[:40], scores[40:], confidence=0.9).interval[0] > 8
    assert too_many <= 45


def test_the_interval_of_the_auc_covers():
    truth = 0.5 * (1 + math.erf(1 / 2))  # P(X > Y) for normal X and Y with means one σ apart
    covered = 0
    for s in range(300):
        low, high = judge(normal(30, s, 0.1), normal(30, 10_000 + s), confidence=0.95).auc_interval
        covered += low <= truth <= high
    assert covered >= 275


@pytest.mark.parametrize("recovered", [10, 20, 40])
def test_leakage_is_claimed(recovered):
    members = normal(40, 0)
    members[:recovered] += 1
    result = judge(members, normal(40, 1))
    assert result.outcome is Outcome.LEAKAGE
    assert result.recovered >= recovered
    assert result.interval[0] <= recovered <= result.interval[1]


def test_few_recovered_among_many_are_noticed():
    members = normal(500, 0)
    members[:12] += 1
    assert judge(members, normal(500, 1)).outcome is Outcome.LEAKAGE


def test_a_shift_without_a_single_recovery_is_called_what_it_is():
    members, others = normal(60, 0, 0.15), normal(60, 1)
    others[0] = 5.0
    result = judge(members, others)
    assert result.outcome is Outcome.LEAKAGE
    assert result.interval == (0, 0)


def test_several_looks_are_paid_for():
    """The strongest of two independent reconstructions that hold nothing is claimed no more often than one would be."""
    claims = 0
    for seed in range(600):
        verdicts = [judge(normal(20, s), normal(20, s + 10_000), looks=2) for s in (2 * seed, 2 * seed + 1)]
        claims += verdicts[strongest(verdicts)].outcome is Outcome.LEAKAGE
    assert claims <= 12  # as for one look
    once, twice = (judge(normal(40, 0, 0.1), normal(40, 1), looks=looks) for looks in (1, 2))
    assert twice.p_value == pytest.approx(2 * once.p_value)
    assert twice.interval[0] <= once.interval[0]


def test_the_strongest_verdict_is_the_one_that_recovered_most():
    weak, strong = (judge(normal(40, 0, shift), normal(40, 1), looks=2) for shift in (0.05, 0.5))
    assert strongest([weak, strong]) == 1
    assert strongest([strong, weak]) == 0


def test_scores_no_better_than_a_blur_are_never_recovered():
    result = judge(-torch.rand(40) * 0.1, -1 - torch.rand(40))
    assert result.recovered == 0
    assert result.threshold == 0


def test_perfect_and_worst_separation_have_intervals():
    assert judge(torch.ones(20), torch.zeros(20)).auc_interval[1] == 1
    low, high = judge(torch.zeros(20), torch.ones(20)).auc_interval
    assert low == 0 < high < 0.5


def test_no_verdict_without_held_out_images_or_with_too_few():
    none = judge(torch.tensor([0.5, -0.5, 0.2]), torch.zeros(0))
    assert none.outcome is Outcome.NO_VERDICT
    assert none.recovered == 2
    assert none.interval is none.auc is none.p_value is None
    assert judge(torch.ones(3), torch.zeros(3)).outcome is Outcome.NO_VERDICT


def test_a_verdict_is_plain_data():
    stored = json.loads(json.dumps(asdict(judge(torch.ones(20), torch.zeros(20)))))
    assert stored["outcome"] == "leakage"
    assert stored["interval"] == [19, 20]


def test_confidence_out_of_range():
    with pytest.raises(InvalidInputError, match="confidence"):
        judge(torch.ones(20), torch.zeros(20), confidence=1.0)
