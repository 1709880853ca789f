"""Every operator against its definition, over the shared table."""

import sys
import threading

import pytest
import torch

import brute_force
import palimpsest as pal
from cases import NETWORKS, Case, make_case
from palimpsest.auditing.reading import candidates
from palimpsest.errors import InvalidInputError
from palimpsest.objectives import convolution, dense, smoothing
from palimpsest.objectives.spaces import Everywhere
from palimpsest.solver.merging import contributions


def close(a, b, relative=1e-10) -> bool:
    return bool((a - b).norm() <= relative * b.norm())


def test_loss_and_residual_equal_brute_force(case: Case):
    expected = brute_force.residual(case.objective, *case.arguments)
    actual = case.objective.residual(*case.arguments)
    assert list(actual) == list(expected)
    assert all(close(actual[name], expected[name]) for name in expected)
    assert close(case.objective.loss(*case.arguments), brute_force.loss(case.objective, *case.arguments))


def test_gradients_equal_brute_force(case: Case):
    expected = brute_force.gradients(case.objective, *case.arguments)
    loss, *actual = case.objective.loss_and_gradients(*case.arguments)
    assert close(loss, case.objective.loss(*case.arguments), 1e-14)
    assert all(close(a, e) for a, e in zip(actual, expected, strict=True))
    assert expected[0].norm() > 0
    assert expected[1].norm() > 0


def test_convolutions_as_on_a_gpu_give_the_same_derivatives(case: Case, monkeypatch):
    if not any(isinstance(layer, torch.nn.Conv2d) for layer in case.objective._network.module.modules()):
        return
    expected = case.objective.gradients(*case.arguments)
    monkeypatch.setattr(convolution, "faster_on", lambda device: True)
    assert all(close(a, e) for a, e in zip(case.objective.gradients(*case.arguments), expected, strict=True))


class Hidden(torch.nn.Module):
    """One parameter works behind torch.no_grad(), and two have equal gradients."""

    def __init__(self, hide: bool) -> None:
        super().__init__()
        self.hide, self.layer = hide, torch.nn.Linear(4, 3)
        self.a, self.b = (torch.nn.Parameter(torch.randn(3)) for _ in range(2))
        self.c = torch.nn.Parameter(torch.randn(3))

    def forward(self, x):
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.hide):
            scale = self.c * 2
        return (torch.tanh(self.layer(x)) * (self.a + self.b) * scale).sum(1, keepdim=True)


def test_parts_out_of_autograds_sight_are_constants():
    torch.manual_seed(0)
    x, λ = torch.randn(3, 4).double(), torch.randn(3).double()
    for hide in (False, True):
        start, end = (Hidden(hide).double() for _ in range(2))
        objective = pal.NTK(end, start.state_dict(), sharpness=10.0)
        for a, e in zip(objective.gradients(x, λ), brute_force.gradients(objective, x, λ, None), strict=True):
            assert close(a, e)


def test_hessian_equals_finite_differences(case: Case):
    v = torch.randn_like(case.x)
    h = 1e-6
    forward, _ = case.objective.gradients(case.x + h * v, case.multipliers, case.labels)
    backward, _ = case.objective.gradients(case.x - h * v, case.multipliers, case.labels)
    assert close(case.objective.hessian(*case.arguments)(v), (forward - backward) / (2 * h), 1e-6)


def test_a_solver_that_keeps_no_graph_gets_the_same_gradients(case):
    """Executors run without gradients; the graph of several tangent points must not depend on who asks."""
    dx, dλ = case.objective.gradients(*case.arguments)
    bound = case.objective.bind(*case.arguments)
    with torch.no_grad():
        _, *halves = case.objective.error_and_half_gradients(bound, *case.arguments)
    assert torch.allclose(2 * halves[0], dx, rtol=1e-10, atol=1e-12)
    assert torch.allclose(2 * halves[1], dλ, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("chunk", [1, 3])
def test_the_hessian_does_not_depend_on_chunks(case, chunk):
    v = torch.randn_like(case.x)
    whole = case.objective.hessian(*case.arguments)(v)
    case.objective.chunk = chunk
    assert close(case.objective.hessian(*case.arguments)(v), whole)


@pytest.mark.parametrize("network", [NETWORKS[0], NETWORKS[3]], ids=lambda network: network.name)
def test_moving_an_objective_and_changing_its_coordinates_may_come_in_either_order(network):
    case = make_case(network, "ntk")
    basis = torch.linalg.qr(torch.randn(case.x[0].numel(), 3, dtype=torch.float64))[0].T
    space = pal.Subspace(torch.randn_like(case.x[0]), basis.reshape(3, *network.image_shape))
    c = torch.randn(4, 3, dtype=torch.float64)
    for dtype, relative in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        point = (c.to(dtype), case.multipliers.to(dtype))
        one, other = case.objective.within(space).to(dtype=dtype), case.objective.to(dtype=dtype).within(space)
        assert one.loss(*point).dtype == dtype
        assert close(one.loss(*point), other.loss(*point), relative)
        assert all(close(a, b, relative) for a, b in zip(one.gradients(*point), other.gradients(*point), strict=True))
    everywhere = case.objective.within(Everywhere(network.image_shape)).to("cpu", torch.float32)
    assert everywhere.loss(case.x.float(), case.multipliers.float()).dtype == torch.float32


@pytest.mark.parametrize("of_each", [contributions, candidates])
@pytest.mark.parametrize("method", ["kkt", "multiclass", "ntk"])
def test_what_each_candidate_contributes_is_measured_without_trying_the_network_each_time(method, of_each, monkeypatch):
    case, count = make_case(NETWORKS[0], method, k=7), {"checks": 0, "copies": 0}

    def counted(name, function):
        def call(*arguments, **options):
            count[name] += 1
            return function(*arguments, **options)

        return call

    monkeypatch.setattr(smoothing, "check", counted("checks", smoothing.check))
    monkeypatch.setattr(dense, "recognise", counted("copies", dense.recognise))  # in double precision
    of_each(case.objective, *case.arguments)
    assert count == {"checks": 1, "copies": 1}


def test_contributions_equal_brute_force(case):
    expected = []
    for i in range(len(case.x)):
        features = brute_force.per_sample_gradients(case.objective, case.x, case.labels, i)
        slots = list(zip(case.multipliers[i].flatten(), features, strict=True))
        m = len(brute_force.shares(case.objective))
        parts = len(case.objective.tangents) if isinstance(case.objective, pal.AdamPath) else m
        n = len(slots) // parts
        groups = [slots[j : j + n] for j in range(0, len(slots), n)]
        sums = [{name: sum(λ * f[name] for λ, f in group) for name in case.objective.target} for group in groups]
        squares = [brute_force.norm_squared(case.objective, sums[s :: parts // m]) for s in range(parts // m)]
        expected.append(torch.stack(squares).sum().sqrt())
    assert close(contributions(case.objective, *case.arguments), torch.stack(expected))


class Shared(torch.nn.Module):
    """Two parameters with one gradient, whose memory autograd shares."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.last = (torch.nn.Parameter(torch.randn(*shape)) for shape in ((5, 4), (5, 4), (1, 5)))

    def forward(self, x):
        return torch.tanh(x @ (self.a + self.b).T) @ self.last.T


def test_the_pull_does_not_write_into_shared_gradients():
    torch.manual_seed(0)
    objective = pal.KKT(Shared().double(), signed=True)
    x, λ = torch.randn(3, 4, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    r = objective.residual(x, λ)
    assert all(close(u, r[name]) for name, u in objective.pull(x, λ).items())


@pytest.mark.parametrize("wrong", [torch.tensor([1, 0, 1, 1]), torch.tensor([1, -1, 1])])
def test_labels_are_checked_however_often_the_network_was(wrong):
    case = make_case(NETWORKS[0], "kkt")
    case.objective.loss(*case.arguments)
    with pytest.raises(InvalidInputError):
        case.objective.loss(case.x, case.multipliers, wrong)
    with pytest.raises(InvalidInputError):
        case.objective.loss(case.x, case.multipliers[:3], case.labels)


@pytest.mark.parametrize("network", [NETWORKS[0], NETWORKS[3]], ids=lambda network: network.name)
def test_threads_may_share_an_objective(network):
    case, wrong = make_case(network, "kkt"), []
    parts = [(case.x[:k], case.multipliers[:k], case.labels[:k]) for k in (1, 2, 3, 4)]
    expected = [case.objective.gradients(*part)[0] for part in parts]

    def work(part, alone):
        try:
            for _ in range(20):
                case.objective._bound = None  # so that the network is tried each time
                if not close(case.objective.gradients(*part)[0], alone):
                    wrong.append(len(alone))
        except Exception as error:
            wrong.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=job) for job in zip(parts, expected, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert wrong == []
