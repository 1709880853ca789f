"""The same numbers in every mode, in chunks or whole, by hand or by autograd."""

import functools
import weakref
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from published.raw import LazyAdam, RawUnits, Sharpening
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import palimpsest as pal
from cases import NETWORKS, Case, make_case
from palimpsest import execution, training
from palimpsest.bench import steps
from palimpsest.errors import InvalidInputError, UnsupportedNetworkError
from palimpsest.execution import Execution, Executor, fusion
from palimpsest.execution.graph import CAPTURE, Graph, copies
from palimpsest.execution.processes import Processes
from palimpsest.objectives import dense
from palimpsest.objectives.spaces import Everywhere
from palimpsest.solver import loop, memory
from palimpsest.solver.loop import Solver
from palimpsest.solver.priors import Box, TotalVariation
from palimpsest.solver.settings import Settings


def close(a, b, relative=1e-12) -> bool:
    return bool((a - b).norm() <= relative * b.norm())


# --- dense stacks ---------------------------------------------------------------------------------


def test_dense_stacks_are_recognised_and_differentiated_as_autograd_does(case: Case, request):
    """Over the whole table: perceptrons take the path for dense layers, everything else does not."""
    by_hand = case.objective.loss_and_gradients(*case.arguments)
    by_autograd = case.objective.by_autograd().loss_and_gradients(*case.arguments)
    assert (case.objective.bind(*case.arguments).layers is not None) == ("mlp" in request.node.name)
    assert all(close(a, b) for a, b in zip(by_hand, by_autograd, strict=True))


def test_plain_relus_are_differentiated_as_autograd_does():
    case = make_case(NETWORKS[1], "ntk-nodes")
    case.objective.sharpness = None
    by_hand = case.objective.loss_and_gradients(*case.arguments)
    by_autograd = case.objective.by_autograd().loss_and_gradients(*case.arguments)
    assert all(close(a, b) for a, b in zip(by_hand, by_autograd, strict=True))


@pytest.mark.parametrize("segments", [1, 2])
def test_a_step_of_a_network_in_another_memory_layout_can_be_compiled(segments):
    """Without kernels: torch refuses some operations on such tensors while it reads the code."""
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 1))
    model = nn.Sequential(*layers).double().to(memory_format=torch.channels_last)
    states = [{name: t.clone() + j for name, t in model.state_dict().items()} for j in range(-segments, 1)]
    objective = pal.Path(model, states).within(Everywhere((3, 4, 4)))
    x, λ = torch.randn(2, 3, 4, 4).double(), torch.randn(2, segments).double()
    bound = objective.bind(x, λ, None)

    def derivatives(x, λ):
        return objective.error_and_half_gradients(bound, x, λ, None)

    compiled = torch.compile(make_fx(derivatives)(x, λ), backend="eager", fullgraph=True)
    assert all(close(a, b) for a, b in zip(compiled(x, λ)[1:], derivatives(x, λ)[1:], strict=True))


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
        if change == "hooked":
            self.second.register_forward_hook(lambda module, given, output: 3 * output)
        if change == "rescaled layer":
            self.second = Rescaled(6, 6, bias=False)
        if change == "scaled and small":
            self.head.weight.data.mul_(1e-3)
            self.head.bias.data.zero_()

    def forward(self, x):
        h = F.relu(self.first(x.reshape(len(x), -1)))
        middle = self.first if self.change == "repeated" else self.second
        h = F.gelu(middle(h)) if self.change == "gelu" else middle(h).clamp(min=0)
        h = h + x if self.change == "skip" else h
        out = self.head(h)
        return out / 64 if "scaled" in self.change and self.change != "rescaled layer" else out


class Rescaled(nn.Linear):
    """Called like a dense layer, but it is another one."""

    def forward(self, x):
        return F.linear(x, 0.1 * self.weight, self.bias)


CHANGES = "gelu, skip, scaled, scaled and small, tied, repeated, unused, hooked, rescaled layer".split(", ")


@pytest.mark.parametrize("change", ["nothing", *CHANGES])
def test_networks_are_recognised_by_what_they_compute(change):
    torch.manual_seed(0)
    layers = dense.recognise(Foreign(change), torch.zeros(1, 6))
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
    assert objective.bind(x, λ, None).layers is None


def _accumulating(_, a, b, out_shape=None, **options):
    """The counter does not know the product in place."""
    return 2 * a[0] * a[1] * b[1]


counting = functools.partial(FlopCounterMode, display=False, custom_mapping={torch.ops.aten.addmm_: _accumulating})


@pytest.mark.parametrize("span", [0, 4])
@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_a_step_takes_the_fewest_matrix_products(span, nodes):
    """As many as the floor of the benchmark: (3 + 2S)·kdm + 7S·km² multiply-adds for d–m–m–1 and S nodes.

    Three products of the first layer are done once for all nodes. The output layer takes 6S·km. Of these, a step leaves
    out S·km for the outputs, on which a linear φ's derivatives do not depend, and does 2S·km elementwise.
    """
    k, d, m, cpu = 3, 10, 7, torch.device("cpu")
    shape = steps.Shape((d,), (m, m), k, span, nodes)
    objective, space = steps._problem(shape, cpu)
    objective = objective.within(space)
    point = torch.randn(k, *space.shape), torch.rand(k, nodes).squeeze(1), None
    bound, run = objective.bind(*point), steps._floor(shape, cpu)
    with counting() as ours:
        objective.error_and_half_gradients(bound, *point)
    with counting() as floor:
        run(1)
    left_out = 3 * nodes * k * m
    assert ours.get_total_flops() + 2 * left_out == floor.get_total_flops()
    if not span:
        expected = (3 + 2 * nodes) * k * d * m + 7 * nodes * k * m * m + 6 * nodes * k * m
        assert floor.get_total_flops() == 2 * expected


# --- chunks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "relative"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_chunks_change_nothing(case: Case, dtype, relative):
    objective = case.objective.to(dtype=dtype)
    x, λ = case.x.to(dtype), case.multipliers.to(dtype)
    whole = objective.loss_and_gradients(x, λ, case.labels)
    values, _ = pal.splitting.min_eigenpairs(objective, x, λ, case.labels)
    objective.chunk = 3  # of 4: the last chunk is a smaller one
    parts = objective.loss_and_gradients(x, λ, case.labels)
    assert all(close(a, b, relative) for a, b in zip(parts, whole, strict=True))
    in_parts, _ = pal.splitting.min_eigenpairs(objective, x, λ, case.labels)
    assert close(in_parts, values, 1e3 * relative)


def test_a_bound_on_memory_sets_the_size_of_chunks():
    objective = pal.KKT(pal.networks.MLP(100, (200, 200)), sharpness=5.0)
    x = torch.randn(5000, 100)
    sizes = [memory.chunk_size(objective, x, gigabytes, Processes(), len(x)) for gigabytes in (None, 0.01, 0.001)]
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


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")


@needs_cuda
@pytest.mark.parametrize("mode", ["graph", "compiled-graph"])
def test_every_mode_reconstructs_the_same(mode):
    torch.manual_seed(0)
    models = [pal.networks.MLP((1, 4, 4), (8, 8)).double().cuda() for _ in range(3)]
    objective = pal.Path(models[-1], [model.state_dict() for model in models], at=(0.2, 0.8))
    runs = [
        pal.reconstruct(
            objective,
            image_shape=(1, 4, 4),
            candidates=6,
            steps=45,
            record_every=10,
            splitting=pal.Splitting(),
            progress=False,
            execution=Execution(mode=m),
        )
        for m in ("eager", mode)
    ]
    assert torch.allclose(runs[0].images, runs[1].images, atol=1e-9)
    assert torch.allclose(runs[0].multipliers, runs[1].multipliers, atol=1e-9)
    assert [r["step"] for r in runs[0].history] == [r["step"] for r in runs[1].history]


@needs_cuda
@pytest.mark.parametrize("mode", ["graph", "compiled-graph"])
@pytest.mark.parametrize("options", [{}, {"loss": "logistic"}, {"loss": "logistic", "weight_decay": 0.1}])
def test_every_mode_trains_the_same(mode, options):
    torch.manual_seed(0)
    x, y = torch.randn(8, 5).double(), torch.tensor([1, -1] * 4)
    model = pal.networks.MLP(5, (9,)).double().cuda()
    fits = [pal.train(model, x, y, steps=35, execution=Execution(mode=m), **options) for m in ("eager", mode)]
    for name, value in fits[0].model.state_dict().items():
        assert torch.allclose(value, fits[1].model.state_dict()[name], atol=1e-9)
    assert len(fits[0].history) == len(fits[1].history)


def test_automatic_modes(monkeypatch):
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    monkeypatch.setattr(fusion, "available", lambda device: device == cuda)
    assert Execution().resolved(cpu) == "eager"
    assert Execution().resolved(cuda) == "graph"
    assert [steps.automatic(device) for device in (cpu, cuda)] == ["eager", "compiled-graph"]
    assert Execution(mode="compiled-graph").resolved(cuda) == "compiled-graph"
    monkeypatch.setattr(fusion, "available", lambda device: False)
    assert steps.automatic(cuda) == "graph"
    for device, mode in ((cpu, "graph"), (cuda, "compiled-graph")):
        with pytest.raises(InvalidInputError):
            Execution(mode=mode).resolved(device)
    for wrong in ({"mode": "fast"}, {"memory": 0.0}, {"memory": float("nan")}):
        with pytest.raises(InvalidInputError):
            Execution(**wrong)


@pytest.mark.parametrize("available", [True, False])
@pytest.mark.parametrize("group", [None, "several processes"])
def test_only_one_process_with_a_compiler_compiles_by_itself(available, group, monkeypatch):
    monkeypatch.setattr(fusion, "available", lambda device: available)
    cuda = torch.device("cuda")
    assert Execution(processes=group).executor({}, cuda)._may_compile == (available and group is None)
    assert not Execution(mode="graph").executor({}, cuda)._may_compile


def test_a_graph_that_cannot_be_captured_is_refused_or_run_eagerly(monkeypatch, caplog):
    """Refused where it was asked for, run eagerly where it was chosen automatically."""

    class Uncapturable(Graph):
        def run(self, tensors, plan, schedule):
            raise UnsupportedNetworkError("", CAPTURE) from RuntimeError("no")

    monkeypatch.setattr(execution, "Graph", Uncapturable)
    add = {"add": lambda tensors, row: tensors["a"].add_(1) and None}
    with pytest.raises(UnsupportedNetworkError):
        Executor(add, "graph", may_fall_back=False).run({"a": torch.zeros(1)}, ["add"])
    executor = Executor(add, "graph", may_fall_back=True)
    assert executor.run({"a": torch.zeros(1)}, ["add", "add"])[0]["a"] == 2
    assert executor.mode == "eager"
    assert len(caplog.records) == 1


class ReadingRefused(TorchDispatchMode):
    """Fails where a program waits for values of the device, which a CUDA graph cannot capture."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default), func
        return func(*args, **(kwargs or {}))


class Small(pal.priors.Prior):
    """Without a closed form: its gradient is taken by autograd."""

    def value(self, images, multipliers):
        return 0.1 * images.square().mean() + 0.1 * multipliers.square().mean()


@pytest.mark.parametrize("priors", [(Box(), TotalVariation()), Small()], ids=["closed form", "autograd"])
@pytest.mark.parametrize("network", [NETWORKS[1], NETWORKS[3]], ids=lambda network: network.name)
@pytest.mark.parametrize("method", ["kkt", "multiclass", "ntk-nodes", "path"])
def test_a_step_reads_nothing_back_from_the_device(method, network, priors):
    settings = Settings(candidates=4, steps=8, record_every=4, priors=priors)
    solver = Solver(make_case(network, method).objective, Everywhere(network.image_shape), settings)
    state = solver.descend(solver.init(), 1)
    tensors = state.tensors() | {"multiplier_unit": torch.tensor(1.0).to(state.x)}
    with ReadingRefused():
        _, seen = solver.prepare(state).run(tensors, ["watched step", "step"], torch.ones(2, 4, dtype=torch.float64))
    assert seen[0]["loss"].isfinite()


def test_priors_say_whether_they_have_a_closed_form():
    assert not Small().closed_form
    assert (TotalVariation() + Box()).closed_form
    assert not (TotalVariation() + Small()).closed_form


@pytest.fixture
def pieces(monkeypatch):
    """All that is fused on a GPU, to be traced afresh, and without generating code."""
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **options: compile_(f, backend="aot_eager", **options))
    modules = (loop, training.descent, training.losses, training.problem, dense)
    found = [f for module in modules for f in vars(module).values() if isinstance(f, fusion.fusible)]
    for piece in found:
        vars(piece).pop("compiled", None)
    yield found
    for piece in found:
        vars(piece).pop("compiled", None)


@pytest.mark.parametrize("whole", [False, True])
def test_what_is_compiled_for_a_gpu_computes_the_same(pieces, monkeypatch, whole):
    """Derivatives in pieces, or traced as a whole; the tensors stay here."""
    monkeypatch.setattr(Solver, "_traceable", whole)
    torch.manual_seed(0)
    initial, between, model = (pal.networks.MLP((1, 3, 3), (6, 5)).double() for _ in range(3))
    path = pal.Path(model, [initial.state_dict(), between.state_dict(), model.state_dict()])
    x, y = torch.randn(6, 1, 3, 3).double(), torch.tensor([1, -1] * 3)

    def both():
        ours = Settings(candidates=4, steps=8, record_every=8)
        units, lazy = RawUnits(pixels=0.1, multiplier_rate=0.5), LazyAdam()
        published = replace(ours, units=units, optimiser=lazy, sharpness=Sharpening(steps=8))
        solvers = [
            Solver(objective, Everywhere((1, 3, 3)), settings)
            for objective, settings in (
                (pal.KKT(model), ours),
                (path, ours),
                (pal.KKT(model).with_exact_forward(), published),
            )
        ]
        states = [solver.step(solver.init()) for solver in solvers]
        fits = [
            pal.train(model, x, y, steps=12, loss=loss, weight_decay=decay)
            for loss, decay in (("squared", 0.0), ("logistic", 0.0), ("logistic", 0.1))
        ]
        found = [t for state in states for t in (state.x, state.multipliers)]
        return [*found, *(t for fit in fits for t in fit.model.state_dict().values())]

    plain = both()
    assert not any("compiled" in vars(piece) for piece in pieces)

    class Replayed(Graph):
        def run(self, tensors, plan, schedule):
            tensors = copies(tensors)
            results = [self._programs[name](tensors, row) for name, row in zip(plan, schedule, strict=True)]
            return tensors, [result for result in results if result]

    monkeypatch.setattr(execution, "Graph", Replayed)
    monkeypatch.setattr(Execution, "resolved", lambda *_: "compiled-graph")
    fused = both()
    derivatives = {piece for piece in vars(dense).values() if isinstance(piece, fusion.fusible)}
    assert {piece for piece in pieces if "compiled" not in vars(piece)} == (derivatives if whole else set())
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(plain, fused, strict=True))


def test_a_solver_is_freed_without_the_garbage_collector():
    """It may hold captured graphs, and much memory of a GPU with them."""
    solver = Solver(pal.KKT(pal.networks.MLP(6, (5,))), Everywhere((6,)), Settings(candidates=4, steps=3))
    solver.step(solver.init())
    gone = weakref.ref(solver)
    del solver
    assert gone() is None


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


def test_a_fingerprint_does_not_depend_on_how_far_a_run_is():
    torch.manual_seed(0)
    solver = Solver(pal.KKT(pal.networks.MLP(6, (5,))), Everywhere((6,)), Settings(candidates=4, steps=3))
    before = solver.fingerprint()
    state = solver.step(solver.init())
    after = solver.fingerprint()
    solver.final()
    assert before == after == solver.fingerprint()
    assert state.step == 1
