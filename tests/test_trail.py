"""The trail of a training: the order of its checkpoints, and a choice among many."""

import copy
from itertools import pairwise

import pytest
import torch

import palimpsest as pal
from palimpsest.auditing.subject import MOST_SEGMENTS, subject
from palimpsest.methods.trail import better_order, distance, spread

SHAPE = (1, 4, 4)


def make():
    return pal.networks.MLP(SHAPE, hidden=(12,), outputs=1)


def training(epochs: int) -> list[dict[str, torch.Tensor]]:
    """The weights at the start and after each epoch of a training."""
    torch.manual_seed(0)
    model, x, y = make(), torch.randn(6, *SHAPE), torch.randn(6).sign()
    rule = torch.optim.SGD(model.parameters(), lr=0.02)
    way = [copy.deepcopy(model.state_dict())]
    for _ in range(epochs):
        for _ in range(3):
            rule.zero_grad()
            (model(x)[:, 0] - y).square().mean().backward()
            rule.step()
        way.append(copy.deepcopy(model.state_dict()))
    return way


def saved(way, folder, numbers):
    folder.mkdir()
    for number, state in zip(numbers, way, strict=True):
        torch.save(state, folder / f"epoch-{number}.pt")
    return folder


def read(way, inner, folder):
    return subject(make, way[-1], initial=way[0], image_shape=SHAPE, checkpoints=folder)


def test_a_training_in_its_order_is_left_in_it():
    assert better_order(training(8)) == []


def test_noise_is_left_in_its_order():
    """A random walk, as differential privacy makes one."""
    steps = torch.randn(20, 500, generator=torch.Generator().manual_seed(1))
    assert better_order([{"w": w} for w in steps.cumsum(0)]) == []


@pytest.mark.parametrize("order", [(2, 5, 1), (7, 1, 3), (1, 7, 2)])
def test_checkpoints_in_another_order_are_noticed(order, tmp_path):
    way = training(8)
    shuffled = [way[0], *(way[j] for j in order), way[-1]]
    right = better_order(shuffled)
    far = [distance(way[0], shuffled[j]) for j in right]
    assert far == sorted(far)
    model = make()
    model.load_state_dict(way[-1])
    with pytest.warns(UserWarning, match="order"):
        pal.Path(model, shuffled)
    folder = saved(shuffled[1:-1], tmp_path / "epochs", (1, 2, 3))
    found = read(way, shuffled, folder)
    assert any(f"epoch-{order.index(min(order)) + 1}.pt" in doubt for doubt in found.doubts)


def test_checkpoints_in_the_right_order_raise_no_doubt(tmp_path):
    way = training(8)
    assert read(way, way, saved(way[1:-1], tmp_path / "epochs", range(1, 8))).doubts == ()


def test_an_audit_takes_few_of_many_checkpoints_at_about_equal_distances(tmp_path):
    way = training(30)
    found = read(way, way, saved(way[1:-1], tmp_path / "epochs", range(1, 30)))
    assert len(found.segments) == MOST_SEGMENTS
    assert all(torch.equal(t, way[0][name]) for name, t in found.segments[0][0].items())
    assert all(torch.equal(t, way[-1][name]) for name, t in found.segments[-1][1].items())
    far = [distance(way[0], end) for _, end in found.segments]
    assert far == sorted(far)
    step = far[-1] / MOST_SEGMENTS
    nearest = max(distance(a, b) for a, b in pairwise(way))
    assert all(abs(f - step * (j + 1)) <= nearest for j, f in enumerate(far))


@pytest.mark.parametrize("count", [2, 3, 5])
def test_all_of_few_checkpoints_are_taken(count):
    assert spread(training(8)[:count], 4) == list(range(count))
