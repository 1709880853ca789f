"""The same numbers in every mode, in chunks or whole, by hand or by autograd."""

import functools
import platform
import tempfile
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import palimpsest as pal
from cases import NETWORKS, Case, make_case
from palimpsest import execution, training
from palimpsest.bench import steps
from palimpsest.errors import InvalidInputError, UnsupportedNetworkError
from palimpsest.execution import Execution, Executor, fusion, memory
from palimpsest.execution import whole as compiling
from palimpsest.execution.allocator import keep_freed_memory
from palimpsest.objectives import dense, gram
from palimpsest.objectives.factor import Factor
from palimpsest.objectives.spaces import Everywhere
from palimpsest.solver.loop import Settings, Solver
from palimpsest.solver.priors import Box, TotalVariation


def close(a, b, relative=1e-12) -> bool:
    return bool((a - b).norm() <= relative * b.norm())


# --- dense stacks ---------------------------------------------------------------------------------


def test_dense_stacks_are_recognised_and_differentiated_as_autograd_does(case: Case, request):
    """Over the whole table: perceptrons take the path for dense layers, everything else does not."""
    by_hand = case.objective.loss_and_gradients(*case.arguments)
    by_autograd = case.objective.by_autograd().loss_and_gradients(*case.arguments)
    assert (case.objective._dense is not None) == ("mlp" in request.node.name)
    assert all(close(a, b) for a, b in zip(by_hand, by_autograd, strict=True))


def test_a_step_without_the_residual_is_the_same_step(case: Case):
    """Over the whole table, in float64, where it is not taken by itself."""
    objective, (x, λ, labels) = case.objective, case.arguments
    objective.check(x, λ, labels)
    if objective._dense is None or len(objective._dense) < 2:
        pytest.skip("not a stack of dense layers")
    parts = (objective._dense, objective.tangents, objective.target, objective.weights, len(x), objective._top)
    with torch.no_grad():
        _, *expected = objective.pulls(x, λ, labels)
        objective._gram = gram.GramStep(*parts)
        actual = objective.slopes(x, λ, labels)
    assert all(close(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize("candidates", [3, 40])
def test_the_residual_is_left_out_where_candidates_are_few(candidates):
    """2k(d + m) multiplications stand against dm; either way the gradients agree to single precision."""
    torch.manual_seed(0)
    objective = pal.KKT(pal.networks.MLP(60, (50, 40)), sharpness=5.0)
    x, λ, y = torch.randn(candidates, 60), torch.rand(candidates), 1 - 2 * (torch.arange(candidates) % 2)
    _, dx, dλ = objective.loss_and_gradients(x, λ, y)
    objective.prepare(x)
    assert (objective._gram is not None) == (candidates == 3)
    with torch.no_grad():
        λ_grad_g, g = objective.slopes(x, λ, y)
    assert close(-2 * λ_grad_g, dx, 1e-5)
    assert close(-2 * g, dλ, 1e-5)


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
    assert objective._dense is None


def _accumulating(_, a, b, out_shape=None, **options):
    """The counter does not know the product in place."""
    return 2 * a[0] * a[1] * b[1]


counting = functools.partial(FlopCounterMode, display=False, custom_mapping={torch.ops.aten.addmm_: _accumulating})


def test_a_step_takes_the_fewest_matrix_products():
    """5·kdm + 7·km² multiply-adds for d–m–m–1, and what the output layer needs; the floor of the benchmark is that."""
    k, d, m = 3, 10, 7
    shape = steps.Shape((d,), (m, m), k)
    model = pal.networks.MLP(d, (m, m))
    objective = pal.KKT(model, sharpness=5.0)
    x, λ, y = torch.randn(k, d), torch.rand(k), torch.tensor([1, -1, 1])
    objective.check(x, λ, y)
    with counting() as ours:
        objective.pulls(x, λ, y)
    with counting() as floor:
        steps._floor(model, shape)(1)
    assert ours.get_total_flops() == floor.get_total_flops()
    assert floor.get_total_flops() == 2 * (5 * k * d * m + 7 * k * m * m + 6 * k * m)


@pytest.mark.parametrize("at", [(0.5,), (0.2, 0.8), (0.1, 0.5, 0.9)])
def test_tangent_nodes_share_what_they_can(at):
    """(3 + 2S)·kdm + 7S·km² for S nodes: three products of the first layer are done once for all."""
    k, d, m, S = 3, 10, 7, len(at)
    initial, final = (pal.networks.MLP(d, (m, m)) for _ in range(2))
    objective = pal.NTK(final, initial.state_dict(), at=at, sharpness=5.0)
    x, λ = torch.randn(k, d), torch.rand(k, S)
    objective.check(x, λ, None)
    with counting() as ours:
        objective.pulls(x, λ, None)
    assert ours.get_total_flops() == 2 * ((3 + 2 * S) * k * d * m + 7 * S * k * m * m + 6 * S * k * m)


def test_what_a_graph_may_still_read_is_kept_through_a_split_that_was_refused():
    """The line search looks at more candidates and then stays; captured steps must not lose their factors by it."""
    torch.manual_seed(0)
    settings = Settings(candidates=4, steps=8, record_every=2, splitting=pal.Splitting(rounds=1, eta_max=1e9))
    solver = Solver(pal.KKT(pal.networks.MLP(60, (50, 40))), Everywhere((60,)), settings)
    state = solver.init()
    while state.round == 0:
        state, before = solver.step(state), solver.objective._gram
    assert before is not None
    assert len(state.x) == 4
    while not solver.done(state):
        state = solver.step(state)
    assert solver.objective._gram is before


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
    """What was traced, without generating code for it: all that can differ between modes on a CPU."""
    monkeypatch.setattr("torch._inductor.compile", lambda graph, inputs, options: graph)


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
    cpu = torch.device("cpu")
    assert Execution().resolved(cpu, 4000) == "eager"
    assert Execution().resolved(cpu, 10**9) == ("compiled" if fusion.available(cpu) else "eager")
    assert Execution().resolved(cpu, 30_000, phases=2) == "eager"  # each phase has to be compiled by itself
    with pytest.raises(InvalidInputError, match="no CUDA graphs"):
        Execution(mode="graph").resolved(torch.device("cpu"), 10)
    for wrong in ({"mode": "fast"}, {"memory": 0.0}, {"memory": float("nan")}):
        with pytest.raises(InvalidInputError):
            Execution(**wrong)


def test_no_compiler_is_said_in_one_sentence(monkeypatch):
    monkeypatch.setattr(fusion, "available", lambda device: False)
    with pytest.raises(InvalidInputError, match="cannot compile"):
        Execution(mode="compiled").resolved(torch.device("cpu"), 10)


@pytest.fixture
def pieces(monkeypatch):
    """All that is fused on a GPU, to be traced afresh, and without generating code."""
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **options: compile_(f, backend="aot_eager", **options))
    modules = (pal.solver, training.descent, training.losses, training.problem, dense)
    found = [f for module in modules for f in vars(module).values() if isinstance(f, fusion.fusible)]
    for piece in found:
        vars(piece).pop("compiled", None)
    yield found
    for piece in found:
        vars(piece).pop("compiled", None)


def test_pieces_that_are_fused_on_a_gpu_compute_the_same(pieces, monkeypatch):
    """As they are traced; the tensors stay here."""
    torch.manual_seed(0)
    model = pal.networks.MLP((1, 3, 3), (6, 5)).double()
    x, y = torch.randn(6, 1, 3, 3).double(), torch.tensor([1, -1] * 3)

    def both():
        settings = Settings(candidates=4, steps=8, record_every=8)
        solver = Solver(pal.KKT(model), Everywhere((1, 3, 3)), settings)
        state = solver.step(solver.init())
        fits = [
            pal.train(model, x, y, steps=12, loss=loss, weight_decay=decay)
            for loss, decay in (("squared", 0.0), ("logistic", 0.0), ("logistic", 0.1))
        ]
        return [state.x, state.multipliers, *(t for fit in fits for t in fit.model.state_dict().values())]

    plain = both()
    assert not any("compiled" in vars(piece) for piece in pieces)
    gpu = torch.device("cuda")
    monkeypatch.setattr(
        Execution, "executor", lambda how, programs, *_, **__: Executor(programs, "compiled", gpu, (), insist=True)
    )
    fused = both()
    assert all("compiled" in vars(piece) for piece in pieces)
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(plain, fused, strict=True))


@pytest.mark.skipif(
    not fusion.available(torch.device("cpu")) or " " in tempfile.gettempdir(),
    reason="no compiler, or a TMPDIR with spaces, which torch does not quote when it calls one",
)
def test_generated_code_computes_the_same(monkeypatch):
    """With nothing put in the compiler's place, in single precision, where matrices are laid out beforehand."""
    torch.manual_seed(0)
    initial, final = (pal.networks.MLP((1, 12, 12), (60, 60)) for _ in range(2))
    calls, real = [], compiling._compiled

    def counted(*arguments):
        code = real(*arguments)
        return lambda *tensors: calls.append(None) or code(*tensors)

    monkeypatch.setattr(compiling, "_compiled", counted)
    settings, where = Settings(candidates=3, steps=60, record_every=20), Everywhere((1, 12, 12))
    states = []
    for mode in ("eager", "compiled"):
        solver = Solver(pal.NTK(final, initial.state_dict()), where, settings, Execution(mode=mode))
        state = solver.init()
        while state.step < 40:
            state = solver.step(state)
        assert solver.objective._gram is not None
        states.append(state)
    plain, compiled = states
    assert torch.allclose(plain.x, compiled.x, atol=1e-4)
    assert calls  # one of them did run as generated code
    assert compiled.history[1]["loss"] == pytest.approx(plain.history[1]["loss"], rel=1e-4)


def fail(*arguments, **options):
    raise TypeError("no code for this")


class ReadsValues(nn.Module):
    """Scales by numbers that it reads past torch, which tracing would make constants of."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 5), nn.Linear(5, 1)

    def forward(self, x):
        h = F.relu(self.first(x.flatten(1)))
        return self.head(h) * torch.tensor([[1 + float(row.mean())] for row in h.detach().numpy()])


@pytest.mark.parametrize("why", ["the compiler", "the network"])
def test_what_cannot_be_compiled_is_refused_or_run_eagerly(why, monkeypatch, caplog):
    """The first where compiling was asked for, the second where it was only thought of."""
    trouble = fail if why == "the compiler" else lambda graph, inputs, options: graph
    monkeypatch.setattr("torch._inductor.compile", trouble)
    monkeypatch.setattr(execution, "WORTH_COMPILING", 1)
    monkeypatch.setattr(fusion, "available", lambda device: True)
    torch.manual_seed(0)
    model = pal.networks.MLP(6, (5,)) if why == "the compiler" else ReadsValues()
    run = functools.partial(
        pal.reconstruct, pal.KKT(model), image_shape=6, candidates=4, steps=30, record_every=10, progress=False
    )
    with pytest.raises(UnsupportedNetworkError, match="use the execution mode eager"):
        run(execution=Execution(mode="compiled"))
    assert torch.equal(run().images, run(execution=Execution(mode="eager")).images)
    assert "going on in the mode eager" in caplog.text


def test_chunks_are_not_compiled_each_by_itself(monkeypatch):
    monkeypatch.setattr("torch._inductor.compile", fail)
    torch.manual_seed(0)
    rec = pal.reconstruct(
        pal.KKT(pal.networks.MLP(6, (5,))),
        image_shape=6,
        candidates=9,
        steps=30,
        record_every=10,
        progress=False,
        execution=Execution(mode="compiled", memory=1e-6),
    )
    assert rec.images.isfinite().all()


def test_where_a_run_is_resumed_does_not_decide_what_is_compiled(traced):
    """The step after a stop may be one alone, and is compiled all the same."""
    torch.manual_seed(0)
    objective = pal.KKT(pal.networks.MLP(6, (5,)).double())
    settings = Settings(candidates=4, steps=30, record_every=10)
    solver = Solver(objective, Everywhere((6,)), settings, Execution(mode="compiled"))
    solver.descend(solver.descend(solver.init(), 1), 1)
    assert list(solver._steps._runner._compiled) == ["step"]


def test_classes_are_told_apart_without_reading_them(traced):
    torch.manual_seed(0)
    objective = pal.MulticlassKKT(pal.networks.MLP(6, (5,), 3).double())
    run = functools.partial(pal.reconstruct, objective, image_shape=6, candidates=6, steps=20, record_every=10)
    runs = [run(progress=False, execution=Execution(mode=mode)) for mode in ("eager", "compiled")]
    assert torch.allclose(runs[0].images, runs[1].images, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_constant_factor_multiplies_and_adds(dtype):
    """With float32 packed where the library can, and with float64 never; into part of a larger tensor as well."""
    torch.manual_seed(0)
    A, b, h, total = (torch.randn(*shape).to(dtype) for shape in ((5, 4), (4,), (3, 5), (3, 8)))
    expected = total[:, 2:6] + h @ A
    assert torch.allclose(Factor(A, b, rows=3)(h), h @ A + b, atol=1e-5)
    assert Factor(A, rows=3).onto(total[:, 2:6], h).data_ptr() == total[:, 2:6].data_ptr()
    assert torch.allclose(total[:, 2:6], expected, atol=1e-5)


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


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
def test_glibc_agrees_to_keep_freed_memory():
    assert keep_freed_memory()


def test_a_prior_without_closed_form_runs_in_every_mode(traced):
    """Its gradient is taken by autograd, which is traced like anything else."""

    class Small(pal.priors.Prior):
        def value(self, images, multipliers):
            return 0.1 * images.square().mean() + 0.1 * multipliers.square().mean()

    assert not Small().closed_form
    assert (TotalVariation() + Box()).closed_form
    assert not (TotalVariation() + Small()).closed_form
    torch.manual_seed(0)
    initial, final = (pal.networks.MLP((1, 3, 3), (6,)).double() for _ in range(2))
    run = functools.partial(
        pal.reconstruct,
        pal.NTK(final, initial.state_dict()),
        image_shape=(1, 3, 3),
        candidates=3,
        steps=5,
        record_every=5,
    )
    runs = [run(priors=Small(), progress=False, execution=Execution(mode=mode)) for mode in ("eager", "compiled")]
    assert torch.allclose(runs[0].images, runs[1].images, atol=1e-9)


def test_a_fingerprint_does_not_depend_on_how_far_a_run_is():
    torch.manual_seed(0)
    solver = Solver(pal.KKT(pal.networks.MLP(6, (5,))), Everywhere((6,)), Settings(candidates=4, steps=3))
    before = solver.fingerprint()
    state = solver.step(solver.init())
    after = solver.fingerprint()
    solver.final()
    assert before == after == solver.fingerprint()
    assert state.step == 1
