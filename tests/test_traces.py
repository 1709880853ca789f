"""Traces of images in the weights, against brute force, and which layers and segments they are looked for in."""

import pytest
import torch
from torch import nn

import palimpsest as pal
from audited import SHAPE, mlp, pooled
from palimpsest.auditing import traces
from palimpsest.errors import InvalidInputError

F64 = torch.float64


@pytest.fixture(scope="module")
def data():
    return pal.datasets.load("digits", per_class=8, held_out_per_class=120, seed=3)


@pytest.mark.parametrize("points", [1, 3])
def test_the_drop_is_that_of_least_squares_without_the_image(points):
    random = torch.Generator().manual_seed(0)
    F = torch.randn(7, points, 40, dtype=F64, generator=random)
    T = torch.randn(40, dtype=F64, generator=random)
    rows = F / F.norm(dim=2, keepdim=True)

    def floor(some):
        A = some.reshape(-1, 40)
        system = torch.cat([A.T, traces.RIDGE**0.5 * torch.eye(len(A), dtype=F64)])
        wanted = torch.cat([T, torch.zeros(len(A), dtype=F64)])
        best = torch.linalg.lstsq(system, wanted[:, None]).solution[:, 0]
        return (system @ best - wanted).square().sum() / T.square().sum()

    without = torch.stack([floor(torch.cat([rows[:i], rows[i + 1 :]])) for i in range(7)])
    torch.testing.assert_close(traces.floor_drop(F, T), without - floor(rows), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("units", [5, 30])  # fewer and more than inputs
def test_the_trace_in_the_span_is_that_of_the_definition(units):
    random = torch.Generator().manual_seed(1)
    Z = torch.randn(9, 12, dtype=F64, generator=random)
    C = torch.randn(units, 12, dtype=F64, generator=random)
    z = Z / Z.norm(dim=1, keepdim=True)
    M = z.T @ z / 9 + traces.SHRINK * z.square().sum() / (9 * 12) * torch.eye(12, dtype=F64)
    eigenvalues, Q = torch.linalg.eigh(M)
    root = Q @ torch.diag(eigenvalues.rsqrt()) @ Q.T
    mixed = C
    if units > 12:
        mixed = torch.randn(12, units, generator=torch.Generator().manual_seed(0), dtype=F64) @ C
    white, S = z @ root, (mixed @ root).T @ (mixed @ root)
    I, top = torch.eye(12, dtype=F64), torch.linalg.eigvalsh(S)[-1]  # noqa: E741
    R = [ε * top * (white * torch.linalg.solve(S + ε * top * I, white.T).T).sum(1) for ε in traces.LEVELS]
    wanted = -(torch.stack(R) / white.square().sum(1)).log().mean(0)
    torch.testing.assert_close(traces.span_trace(C, Z), wanted, rtol=1e-3, atol=1e-5)


def test_a_sketch_keeps_angles_and_the_exact_gradients_are_those_of_autograd():
    random = torch.Generator().manual_seed(2)
    f, g = torch.randn(2, 50_001, dtype=F64, generator=random)
    g = f + 0.5 * g
    sketch = traces._sketch(50_001, 4096, f)
    assert sketch(f).shape == (4096,)
    assert float(sketch(f) @ sketch(g) / (f @ g)) == pytest.approx(1, abs=0.06)
    assert traces._sketch(5, 5, f)(f[:5]) is not None


def test_weight_decay_is_found_and_undone():
    random = torch.Generator().manual_seed(3)
    start = torch.randn(60, 40, dtype=F64, generator=random)
    low_rank = torch.randn(60, 5, dtype=F64, generator=random) @ torch.randn(5, 40, dtype=F64, generator=random)
    assert traces._decay(start, 0.9 * start + 0.1 * low_rank) == pytest.approx(0.9, abs=1e-6)
    assert traces._decay(start, start + 0.1 * low_rank) == pytest.approx(1.0, abs=1e-6)


def test_the_loss_is_that_of_the_training():
    torch.manual_seed(0)
    model, x, y = pooled(), torch.randn(6, *SHAPE), torch.tensor([0, 1, 1, 0, 1, 0])
    Φ = model(x)[:, 0].detach().double()
    sign = 2 * y - 1
    for loss, L in (("squared", (Φ - sign) ** 2), ("logistic", torch.log1p(torch.exp(-sign * Φ)))):
        for labels in (y, sign):
            found = traces.loss_trace(model, x, labels, loss).values
            torch.testing.assert_close(found, torch.log1p(1 / L), rtol=1e-5, atol=0)
    with pytest.raises(InvalidInputError):
        traces.loss_trace(model, x, torch.tensor([-1, 0, 1, 1, 1, 1]), "squared")
    wide = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    L = nn.functional.cross_entropy(wide(x), y, reduction="none").detach().double()
    found = traces.loss_trace(wide, x, y, "cross_entropy").values
    torch.testing.assert_close(found, torch.log1p(1 / L), rtol=1e-5, atol=0)


@pytest.mark.parametrize("statistic", ["span", "gradients"])
def test_networks_with_several_outputs_are_tested_too(statistic):
    """A layer's change is a sum over its inputs, with any number of outputs; gradients are those of the class given."""
    data = pal.datasets.load("digits", per_class=1, held_out_per_class=12, seed=4, task="classes")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
    start = {name: t.clone() for name, t in model.state_dict().items()}
    rule = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(60):
        rule.zero_grad()
        nn.functional.cross_entropy(model(data.train.images - 0.5), data.train.labels).backward()
        rule.step()
    found = pal.auditing.membership(
        lambda: model, model.state_dict(), data.train.images, data.held_out.images, initial=start, mean=0.5,
        statistic=statistic,
    )  # fmt: skip
    assert found.statistic == statistic
    assert found.rates.resolves(0.01)
    assert int(found.named.sum()) >= 9


def test_a_layer_that_did_not_move_is_not_asked(data):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 60), nn.ReLU(), nn.Linear(60, 40), nn.ReLU(), nn.Linear(40, 1))
    fit = pal.train(model, data.train.images - 0.5, data.train.labels, steps=100)
    final = fit.model.state_dict() | {name: fit.initial[name] for name in ("1.weight", "1.bias")}
    moved = traces.widest_dense_layer(model, data.train.images, [(fit.initial, fit.model.state_dict())])
    frozen = traces.widest_dense_layer(model, data.train.images, [(fit.initial, final)])
    assert (moved, frozen) == ("1", "3")


def test_segments_count_by_how_far_they_moved(data):
    torch.manual_seed(0)
    first = pal.train(mlp(), data.train.images - 0.5, data.train.labels, steps=100)
    end = {name: t + 1e-7 * torch.randn_like(t) for name, t in first.model.state_dict().items()}
    x = torch.cat([data.train.images, data.held_out.images]) - 0.5
    learnt, idle = (first.initial, first.model.state_dict()), (first.model.state_dict(), end)
    both = traces.traces(first.model, [learnt, idle], x).values
    torch.testing.assert_close(both, traces.traces(first.model, [learnt], x).values, rtol=1e-6, atol=1e-6)
