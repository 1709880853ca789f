"""The same numbers in every mode, in chunks or whole, by hand or by autograd."""

import functools
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import palimpsest as pal
from cases import NETWORKS, Case, make_case
from palimpsest import benchmark, fusion
from palimpsest.errors import InvalidInputError
from palimpsest.execution import Execution, memory
from palimpsest.execution.allocator import keep_freed_memory
from palimpsest.objectives import dense
from palimpsest.parametrisation import Everywhere
from palimpsest.solver import Settings, Solver


def close(a, b, relative=1e-12) -> bool:
    return bool((a - b).norm() <= relative * b.norm())


# --- dense stacks ---------------------------------------------------------------------------------


def test_dense_stacks_are_recognised_and_differentiated_as_autograd_does(case: Case, request):
    """Over the whole table: perceptrons take the path for dense layers, everything else does not."""
    by_hand = case.objective.loss_and_gradients(*case.arguments)
    by_autograd = case.objective.by_autograd().loss_and_gradients(*case.arguments)
    assert (case.objective._dense is not None) == ("mlp" in request.node.name)
    assert all(close(a, b) for a, b in zip(by_hand, by_autograd, strict=True))


def test_plain_relus_are_differentiated_as_autograd_does():
    case = make_case(NETWORKS[1], "ntk-nodes")
    case.objective.sharpness = None
    by_hand = case.objective.loss_and_gradients(*case.arguments)
    by_autograd = case.objective.by_autograd().loss_and_gradients(*case.arguments)
    assert all(close(a, b) for a, b in zip(by_hand, by_autograd, strict=True))


class Foreign(nn.Module):
    """Somebody else's perceptron, with one thing about it changed."""

    def __init__(self, change: str = "nothing") -> None:
        super().__init__()
        self.change = change
        self.first, self.second, self.head = nn.Linear(6, 6), nn.Linear(6, 6, bias=False), nn.Linear(6, 2)
        if change == "tied":
            self.second.weight = self.first.weight
        if change == "unused":
            self.extra = nn.Linear(6, 6)

    def forward(self, x):
        h = F.relu(self.first(x.reshape(len(x), -1)))
        middle = self.first if self.change == "repeated" else self.second
        h = F.gelu(middle(h)) if self.change == "gelu" else middle(h).clamp(min=0)
        h = h + x if self.change == "skip" else h
        out = self.head(h)
        return 2 * out if self.change == "scaled" else out


@pytest.mark.parametrize("change", ["nothing", "gelu", "skip", "scaled", "tied", "repeated", "unused"])
def test_networks_are_recognised_by_what_they_compute(change):
    torch.manual_seed(0)
    layers = dense.recognise(Foreign(change).double(), torch.zeros(1, 6, dtype=torch.float64))
    names = None if layers is None else [(layer.weight, layer.bias) for layer in layers]
    expected = [("first.weight", "first.bias"), ("second.weight", None), ("head.weight", "head.bias")]
    assert names == (expected if change == "nothing" else None)


def test_a_frozen_layer_is_left_to_autograd():
    torch.manual_seed(0)
    model = Foreign().double()
    model.head.requires_grad_(False)
    objective = pal.KKT(model, signed=True, sharpness=4.0)
    x, λ = torch.randn(3, 6).double(), torch.randn(3, 2).double()
    assert set(objective.residual(x, λ)) == {"first.weight", "first.bias", "second.weight"}
    assert objective._dense is None


def test_a_step_takes_the_fewest_matrix_products():
    """5·kdm + 7·km² multiply-adds for d–m–m–1, and what the output layer needs; the floor of the benchmark is that."""
    k, d, m = 3, 10, 7
    shape = benchmark.Shape((d,), (m, m), k)
    model = pal.networks.MLP(d, (m, m))
    objective = pal.KKT(model, sharpness=5.0)
    x, λ, y = torch.randn(k, d), torch.rand(k), torch.tensor([1, -1, 1])
    objective.check(x, λ, y)

    def accumulating(_, a, b, out_shape=None, **options):  # the counter does not know the product in place
        return 2 * a[0] * a[1] * b[1]

    count = functools.partial(FlopCounterMode, display=False, custom_mapping={torch.ops.aten.addmm_: accumulating})
    with count() as ours:
        objective.pulls(x, λ, y)
    with count() as floor:
        benchmark._floor(model, shape)(1)
    assert ours.get_total_flops() == floor.get_total_flops()
    assert floor.get_total_flops() == 2 * (5 * k * d * m + 7 * k * m * m + 6 * k * m)


# --- chunks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "relative"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_chunks_change_nothing(case: Case, dtype, relative):
    objective = case.objective.to(dtype=dtype)
    x, λ = case.x.to(dtype), case.multipliers.to(dtype)
    whole = objective.loss_and_gradients(x, λ, case.labels)
    values, vectors = pal.splitting.min_eigenpairs(objective, x, λ, case.labels)
    objective.chunk = 3  # of 4: the last chunk is a smaller one
    parts = objective.loss_and_gradients(x, λ, case.labels)
    assert all(close(a, b, relative) for a, b in zip(parts, whole, strict=True))
    in_parts, _ = pal.splitting.min_eigenpairs(objective, x, λ, case.labels)
    assert close(in_parts, values, 1e3 * relative)
    assert vectors.shape == x.shape


def test_a_bound_on_memory_sets_the_size_of_chunks():
    objective = pal.KKT(pal.networks.MLP(100, (200, 200)), sharpness=5.0)
    x = torch.randn(5000, 100)
    sizes = [memory.chunk_size(objective, x, gigabytes) for gigabytes in (None, 0.01, 0.001)]
    assert sizes[0] is None
    assert 5000 > sizes[1] > sizes[2] >= 1
    assert all(size & (size - 1) == 0 for size in sizes[1:])


def test_a_run_in_chunks_ends_where_a_whole_one_does():
    torch.manual_seed(0)
    initial, final = (pal.networks.MLP((1, 3, 3), (6,)).double() for _ in range(2))
    objective = pal.NTK(final, initial.state_dict())
    run = functools.partial(
        pal.reconstruct,
        objective,
        image_shape=(1, 3, 3),
        candidates=9,
        steps=40,
        splitting=pal.Splitting(),
        progress=False,
    )
    whole, parts = run(), run(execution=Execution(memory=1e-6))
    assert torch.allclose(whole.images, parts.images, atol=1e-9)


# --- modes ----------------------------------------------------------------------------------------


@pytest.fixture
def traced(monkeypatch):
    """torch.compile without code generation: all that can differ between modes is what was traced."""
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **options: compile_(f, backend="aot_eager", **options))
    for function in _fusibles():
        vars(function).pop("compiled", None)
    yield
    for function in _fusibles():
        vars(function).pop("compiled", None)


def _fusibles():
    from palimpsest import solver, training

    return [f for module in (solver, training, dense) for f in vars(module).values() if isinstance(f, fusion.fusible)]


MODES = ["compiled", *(["graph", "compiled-graph"] if torch.cuda.is_available() else [])]


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_reconstructs_the_same(mode, traced):
    device = "cuda" if "graph" in mode else "cpu"
    torch.manual_seed(0)
    initial, final = (pal.networks.MLP((1, 4, 4), (8, 8)).double().to(device) for _ in range(2))
    objective = pal.NTK(final, initial.state_dict(), at=(0.2, 0.8))
    runs = [
        pal.reconstruct(
            objective,
            image_shape=(1, 4, 4),
            candidates=6,
            steps=45,
            splitting=pal.Splitting(),
            progress=False,
            execution=Execution(mode=m),
        )
        for m in ("eager", mode)
    ]
    assert torch.allclose(runs[0].images, runs[1].images, atol=1e-9)
    assert torch.allclose(runs[0].multipliers, runs[1].multipliers, atol=1e-9)
    assert [r["step"] for r in runs[0].history] == [r["step"] for r in runs[1].history]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("options", [{}, {"loss": "logistic"}, {"loss": "logistic", "weight_decay": 0.1}])
def test_every_mode_trains_the_same(mode, options, traced):
    torch.manual_seed(0)
    x, y = torch.randn(8, 5).double(), torch.tensor([1, -1] * 4)
    model = pal.networks.MLP(5, (9,)).double().to("cuda" if "graph" in mode else "cpu")
    fits = [pal.train(model, x, y, steps=35, execution=Execution(mode=m), **options) for m in ("eager", mode)]
    for name, value in fits[0].model.state_dict().items():
        assert torch.allclose(value, fits[1].model.state_dict()[name], atol=1e-9)
    assert len(fits[0].history) == len(fits[1].history)


def test_automatic_modes():
    assert Execution().resolved(torch.device("cpu"), 10**9) == "eager"
    with pytest.raises(InvalidInputError, match="no CUDA graphs"):
        Execution(mode="graph").resolved(torch.device("cpu"), 10)
    for wrong in ({"mode": "fast"}, {"memory": 0.0}, {"memory": float("nan")}):
        with pytest.raises(InvalidInputError):
            Execution(**wrong)


def test_no_compiler_is_said_in_one_sentence(monkeypatch):
    monkeypatch.setattr(fusion, "available", lambda device: False)
    with pytest.raises(InvalidInputError, match="cannot compile"):
        Execution(mode="compiled").resolved(torch.device("cpu"), 10)


def test_a_stretch_can_be_cut_anywhere():
    """What is recorded and computed does not depend on where a run is looked at."""
    torch.manual_seed(0)
    initial, final = (pal.networks.MLP((1, 3, 3), (6,)).double() for _ in range(2))
    settings = Settings(candidates=4, steps=60, record_every=20)
    solver = Solver(pal.NTK(final, initial.state_dict()), Everywhere((1, 3, 3)), settings)
    whole = solver.step(solver.init())
    cut = solver.descend(solver.descend(solver.init(), 7), 13)
    assert whole.step == cut.step == 20
    assert torch.equal(whole.x, cut.x)
    assert whole.history == cut.history


def test_the_allocator_is_asked_once():
    assert keep_freed_memory() in (True, False)


# --- the benchmark --------------------------------------------------------------------------------


def test_the_benchmark_compares_all_contenders_in_one_run(monkeypatch):
    monkeypatch.setattr(benchmark, "MODES", ("eager",))
    shape = benchmark.Shape((1, 4, 4), (8,), 3)
    assert shape.name == "16–8–1, k = 3"
    rows = benchmark.ratios(benchmark.measure(shape, torch.device("cpu"), turns=1, seconds=0.001))
    names = [row["name"] for row in rows]
    assert names == ["published float64", "published float32", "any network, eager", "eager", "floor"]
    assert rows[-1]["of the floor"] == 1
    assert all(row["milliseconds"] > 0 for row in rows)
    assert all(re.match("[a-z]", key) for key in rows[0])


def test_the_published_method_computes_the_same_gradients():
    """The contender is no straw man: its loss falls as the method's does, by the same gradient."""
    shape = benchmark.Shape((1, 3, 3), (6,), 4)
    model = pal.networks.MLP(shape.image, shape.hidden)
    benchmark._published(model, shape, torch.float64)(3)
