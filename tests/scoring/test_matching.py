"""Matching rules against brute force, and what they must not depend on."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from palimpsest.errors import InvalidInputError
from palimpsest.scoring import matching

RULES = ("nearest", "best-buddies", "one-to-one")


def similarity(n, k, seed):
    return torch.rand(n, k, generator=torch.Generator().manual_seed(seed)) * 2 - 1


@given(st.integers(1, 7), st.integers(1, 7), st.integers(0, 2**31), st.sampled_from(RULES))
@settings(max_examples=60, deadline=None)
def test_order_of_images_and_candidates_does_not_matter(n, k, seed, rule):
    s = similarity(n, k, seed)
    rows, columns = torch.randperm(n), torch.randperm(k)
    plain, mixed = matching.match(s, rule=rule), matching.match(s[rows][:, columns], rule=rule)
    found = torch.where(mixed >= 0, columns[mixed.clamp_min(0)], -1)
    assert found.tolist() == plain[rows].tolist()


@pytest.mark.parametrize(("n", "k"), [(4, 4), (3, 5), (5, 3)])
def test_one_to_one_has_the_largest_total(n, k):
    s = similarity(n, k, 0)
    index = matching.match(s, rule="one-to-one")
    used = index[index >= 0]
    assert len(used.unique()) == len(used) == min(n, k)
    small, large = min(n, k), max(n, k)
    table = s if n <= k else s.T
    best = max(sum(float(table[i, p[i]]) for i in range(small)) for p in itertools.permutations(range(large), small))
    total = sum(float(s[i, j]) for i, j in enumerate(index.tolist()) if j >= 0)
    assert total == pytest.approx(best)


def test_best_buddies_are_mutual_and_a_subset_of_candidates():
    s = similarity(6, 20, 1)
    for image, candidate in enumerate(matching.match(s, rule="best-buddies").tolist()):
        mine = [j for j in range(20) if int(s[:, j].argmax()) == image]
        assert candidate == (max(mine, key=lambda j: float(s[image, j])) if mine else -1)


def test_votes_average_the_near_ones():
    candidates = torch.arange(4.0).view(4, 1, 1, 1)
    s = torch.tensor([[0.9, 0.895, 0.5, -1.0], [0.0, 0.0, 0.0, 0.8]])
    assert matching.vote(candidates, s, rule="nearest").flatten().tolist() == pytest.approx([0.5, 3.0])
    assert matching.vote(candidates, s, rule="nearest", ratio=6.0).flatten().tolist() == pytest.approx(
        [1.0, 2.25 / 1.5]
    )


def test_images_without_a_candidate_get_zeros():
    s = torch.tensor([[0.9, 0.8], [0.7, 0.1]])
    assert matching.vote(torch.ones(2, 1, 2, 2), s, rule="best-buddies").flatten(1).sum(1).tolist() == [4.0, 0.0]


def test_unknown_rules():
    with pytest.raises(InvalidInputError, match="furthest"):
        matching.match(torch.zeros(2, 2), rule="furthest")
    with pytest.raises(InvalidInputError, match="one-to-one"):
        matching.vote(torch.zeros(2, 1, 2, 2), torch.zeros(2, 2), rule="one-to-one")
