"""Performance: the floor of a convolutional step has the products of its formulas, and faster ways read the same."""

import convolutional_floor
import performance
import pytest
import torch
from torch import nn

CALLS = ("forward", "back", "weight")


@pytest.mark.parametrize("points", [1, 2, 3])
def test_the_floor_has_the_products_of_the_formulas(points):
    network = nn.Sequential(
        nn.Conv2d(3, 4, 3, 2, 1), nn.ReLU(), nn.Conv2d(4, 6, 3, 1, 1, groups=2), nn.ReLU(),
        nn.Conv2d(6, 4, 1, bias=False), nn.Flatten(), nn.Linear(64, 2),
    )  # fmt: skip
    first, *inner, last = convolutional_floor.recorded(network, torch.randn(2, 3, 8, 8))
    products = convolutional_floor.products([first, *inner, last], points)

    def count(layer):
        return sum(product.func.__self__ is layer for product in products)

    assert count(first) == 5 * points - 3 * (points - 1)  # all but W ∗ x and Wᵀz̄ is shared
    assert [count(layer) for layer in inner] == [7 * points] * 2
    assert count(last) == 6 * points
    for product in products:  # each result has the shape of what it is a derivative by
        layer, call = product.func.__self__, product.func.__name__
        assert product().shape == dict(zip(CALLS, (layer.y, layer.x, layer.W), strict=True))[call].shape
    assert not any(module._forward_hooks for module in network)


def test_the_maps_of_a_layer_are_the_derivatives_of_its_form():
    network = nn.Sequential(nn.Conv2d(4, 6, 3, 2, 1, groups=2, bias=False), nn.Flatten(), nn.Linear(96, 5, bias=False))
    for layer in convolutional_floor.recorded(network.double(), torch.randn(2, 4, 8, 8, dtype=torch.float64)):
        g, W = torch.randn_like(layer.y), layer.W.detach()
        torch.testing.assert_close(layer.forward(layer.x, W), layer.y)
        form = (g * layer.y).sum()
        for other, derivative in ((layer.x, layer.back(g, W)), (W, layer.weight(g, layer.x))):
            torch.testing.assert_close((other * derivative).sum(), form)


def test_a_step_is_timed_against_its_floor():
    rows = performance.residual(small=True)
    assert list(rows) == ["eager", "floor"]
    for k in (2, 3):
        assert rows["floor"][f"{k} candidates, relative to the floor"] == 1
        assert rows["eager"][f"{k} candidates, ms"] > 0
    assert performance.table(rows).count("\n") == 3


def test_all_ways_read_the_same_images():
    values = [row["mean SSIM"] for row in performance.same_images(small=True).values()]
    assert values == pytest.approx([values[0]] * 3, abs=1e-3)


def test_a_part_that_was_not_measured_leaves_its_table_alone():
    table = "<!-- table: h200 nothing -->\nas it was\n<!-- end of table -->"
    assert performance.rewritten(table) == table
