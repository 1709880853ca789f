"""Live batch normalisation: the candidates are one batch. torch's own training mode is the oracle."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import palimpsest as pal
from cases import NETWORKS, OBJECTIVES, Network, make_case
from palimpsest.errors import InvalidInputError, ResourceError, UnsupportedNetworkError
from palimpsest.execution.processes import Processes
from palimpsest.objectives.written_out import WrittenOut
from palimpsest.solver import memory
from test_objectives import (  # noqa: F401  the same tests, with the cases below
    test_a_solver_that_keeps_no_graph_gets_the_same_gradients,
    test_contributions_equal_brute_force,
    test_gradients_equal_brute_force,
    test_hessian_equals_finite_differences,
    test_loss_and_residual_equal_brute_force,
    test_the_hessian_does_not_depend_on_chunks,
)


class Normalised(nn.Module):
    """Both kinds of batch normalisation. One does not keep running statistics, and one does not have weights."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.near, self.norm1 = nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3, affine=False)
        self.dense, self.norm2 = nn.Linear(12, 5), nn.BatchNorm1d(5, track_running_stats=False)
        self.head = nn.Linear(5, outputs)

    def forward(self, x):
        h = torch.relu(self.norm1(self.near(x)))
        return self.head(F.relu(self.norm2(self.dense(h.flatten(1)))))


NORMALISED = Network("normalised", Normalised, (1, 3, 3))
LIVE = [*(network for network in NETWORKS if network.name == "cnn"), NORMALISED]


@pytest.fixture(params=[(n, m) for n in LIVE for m in OBJECTIVES], ids=lambda pair: f"{pair[0].name}/{pair[1]}")
def case(request):
    return make_case(*request.param, live=True)


@pytest.mark.parametrize("shape", [(3, 4), (3, 4, 5), (2, 4, 3, 3)], ids=str)
def test_values_are_those_of_training_mode_and_third_derivatives_are_right(shape):
    torch.manual_seed(0)
    x, along = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(2))
    w, b = torch.randn(2, 4, dtype=torch.float64).unbind()
    mean, variance = torch.zeros(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)

    def gradient(x, along):
        with WrittenOut(live=True):
            y = F.batch_norm(x, mean, variance, w, b)
        return torch.autograd.grad((y + y**3).sum(), x, create_graph=True)[0] * along

    with WrittenOut(live=True):
        written_out = F.batch_norm(x, mean, variance, weight=w, bias=b, eps=1e-3)
    assert not mean.any()  # the running statistics stay
    assert torch.allclose(written_out, F.batch_norm(x, None, None, w, b, training=True, eps=1e-3), rtol=1e-12)
    assert torch.autograd.gradgradcheck(gradient, (x, along))


def test_without_batch_normalisation_live_changes_nothing():
    case = make_case(NETWORKS[1], "ntk-nodes")
    live = case.objective.with_live_batch_norm()
    assert torch.allclose(live.loss(*case.arguments), case.objective.loss(*case.arguments), rtol=1e-12)


def test_an_exact_step_of_training_is_explained_by_its_batch_alone():
    """One step of gradient descent with live batch normalisation, and the multipliers that it implies."""
    torch.manual_seed(0)
    model, x, y = Normalised(1).double().train(), torch.randn(6, 1, 3, 3).double(), torch.randn(6).double()
    before = copy.deepcopy(model.state_dict())
    outputs = model(x)[:, 0]
    (outputs - y).square().sum().backward()
    λ = -0.02 * (outputs - y).detach()
    with torch.no_grad():
        for θ in model.parameters():
            θ -= 0.01 * θ.grad
    objective = pal.NTK(model, before, at=0.0, sharpness=None).with_live_batch_norm()
    assert objective.loss(x, λ) <= 1e-20 * objective.target_norm_squared
    assert objective.loss(x.roll(1, 0), λ) > 0.01 * objective.target_norm_squared


def test_live_batches_are_read_in_one_piece():
    case = make_case(LIVE[0], "ntk", k=6, live=True)
    objective, whole = case.objective, case.objective.loss(*case.arguments)
    objective.chunk = 2
    assert len(objective.chunks(*case.arguments)) == 1
    assert objective.loss(*case.arguments) == whole
    assert memory.chunk_size(objective, case.x, None, Processes(), len(case.x)) is None
    with pytest.raises(ResourceError, match="fewer candidates"):
        memory.chunk_size(objective, case.x, 1e-9, Processes(), len(case.x))


def test_live_batches_do_not_split():
    case = make_case(LIVE[0], "ntk", live=True)
    with pytest.raises(InvalidInputError, match="splitting"):
        pal.splitting.matrix(case.objective, *case.arguments)
    with pytest.raises(InvalidInputError, match="splitting"):
        pal.reconstruct(case.objective, image_shape=(1, 6, 6), candidates=4, steps=2, splitting=pal.Splitting())


def test_live_batches_do_not_merge():
    case = make_case(LIVE[0], "ntk", live=True)
    with pytest.raises(InvalidInputError, match="merging"):
        pal.merging.merge(case.objective, *case.arguments)


def test_live_batches_stay_on_one_process():
    case = make_case(LIVE[0], "ntk", live=True)
    processes = Processes()
    processes.count = 2
    with pytest.raises(InvalidInputError, match="process"):
        case.objective.among(processes)


def test_the_certificate_rests_on_the_hessian_alone():
    case = make_case(LIVE[0], "ntk", live=True)
    found = pal.certify(case.objective, *case.arguments, epsilon=1e9)
    H = torch.stack([case.objective.hessian(*case.arguments)(e.view_as(case.x)).flatten()
                     for e in torch.eye(case.x.numel(), dtype=torch.float64)])  # fmt: skip
    least = torch.linalg.eigvalsh(H)[0] / case.objective.target_norm_squared
    assert found.splitting == float("-inf")
    assert found.hessian <= least + 1e-9
    assert found.hessian == pytest.approx(float(least), rel=0.05)


def test_a_network_without_running_statistics_says_how_to_read_it():
    start, end = (Normalised(1) for _ in range(2))
    with pytest.raises(UnsupportedNetworkError, match="with_live_batch_norm"):
        pal.reconstruct(pal.NTK(end, start.state_dict()), image_shape=(1, 3, 3), candidates=2, steps=1)
    objective = pal.NTK(end, start.state_dict()).with_live_batch_norm()
    assert pal.reconstruct(objective, image_shape=(1, 3, 3), candidates=2, steps=1).images.shape == (2, 1, 3, 3)


def test_a_run_resumes_only_with_the_same_normalisation(tmp_path):
    case = make_case(LIVE[0], "ntk")
    options = {"image_shape": (1, 6, 6), "candidates": 3, "steps": 4, "checkpoint": tmp_path / "state"}
    pal.reconstruct(case.objective, **options)
    with pytest.raises(pal.errors.PalimpsestError):
        pal.reconstruct(case.objective.with_live_batch_norm(), **options)


def test_copies_stay_live():
    case = make_case(LIVE[0], "ntk", live=True)
    loss = float(case.objective.loss(*case.arguments))
    exact = case.objective.with_exact_forward().by_autograd()
    assert exact.live
    assert exact._network.live
    moved = case.objective.to(dtype=torch.float32)
    assert float(moved.loss(case.x.float(), case.multipliers.float())) == pytest.approx(loss, rel=1e-4)
