"""Whitening of all layers: the operators of the shared table in the metric of whitening, against full matrices."""

import pytest
import torch

import palimpsest as pal
from cases import NETWORKS, make_case
from palimpsest.errors import InvalidInputError
from palimpsest.objectives.spaces import Everywhere
from palimpsest.objectives.whitening import SMALLEST, metrics
from test_objectives import (  # noqa: F401  the same tests, with the cases below
    test_a_solver_that_keeps_no_graph_gets_the_same_gradients,
    test_contributions_equal_brute_force,
    test_gradients_equal_brute_force,
    test_hessian_equals_finite_differences,
    test_loss_and_residual_equal_brute_force,
    test_the_hessian_does_not_depend_on_chunks,
)
from test_splitting import test_matrix_is_symmetric_and_equals_finite_differences  # noqa: F401

METHODS = ("ntk", "ntk-nodes-outputs", "path-nodes-outputs", "gradient-likelihood")
P = {"ntk": 1.0, "ntk-nodes-outputs": 0.5, "path-nodes-outputs": 0.7, "gradient-likelihood": 1.0}


def whitened(case):
    case.objective = case.objective.within(Everywhere(tuple(case.x.shape[1:])))
    return case


@pytest.fixture(params=[(n, m) for n in NETWORKS for m in METHODS], ids=lambda pair: f"{pair[0].name}/{pair[1]}")
def case(request):
    made = make_case(*request.param)
    made.objective.whitening = P[request.param[1]]
    return whitened(made)


def test_whitening_keeps_the_size_of_the_target(case):
    plain = case.objective._changed(_metrics={})
    assert torch.allclose(case.objective.target_norm_squared, plain.target_norm_squared)
    assert not torch.allclose(case.objective.loss(*case.arguments), plain.loss(*case.arguments), rtol=1e-9)


@pytest.mark.parametrize("p", [0.3, 0.5, 1.0])
@pytest.mark.parametrize("shape", [(5, 8), (8, 5), (4, 3, 2, 2)], ids=str)
def test_singular_values_of_the_whitened_target_are_powers(shape, p):
    torch.manual_seed(0)
    T = torch.randn(shape, dtype=torch.float64)
    (metric,) = metrics({"W": T}, (1.0,), several=False, p=p).values()
    before, after = (torch.linalg.svdvals(t.flatten(1)) for t in (T, metric(T)))
    assert torch.allclose(after / after[0], (before / before[0]) ** (1 - p))
    assert torch.allclose(metric(metric(T)), metric.squared(T))


def test_weak_directions_do_not_count_beyond_the_limit():
    σ = torch.tensor([1.0, 0.1, SMALLEST / 10, 0.0], dtype=torch.float64)
    (metric,) = metrics({"W": σ.diag()}, (1.0,), several=False, p=1.0).values()
    counts = metric.squared(torch.eye(4, dtype=torch.float64)).diagonal()
    assert torch.allclose(counts[2], counts[3])
    assert torch.allclose(counts[2] / counts[0], torch.tensor(SMALLEST**-2, dtype=torch.float64))
    assert len(metric.B.g) == 2


def test_vectors_and_layers_that_did_not_move_are_left_alone():
    target = {"bias": torch.ones(3), "still": torch.zeros(3, 4), "row": torch.ones(1, 4), "W": torch.eye(3)}
    assert set(metrics(target, (1.0,), several=False, p=1.0)) == {"W"}


def test_without_whitening_nothing_changes():
    case = make_case(NETWORKS[0], "ntk")
    plain = case.objective.loss(*case.arguments)
    assert whitened(case).objective.loss(*case.arguments) == plain


def test_a_whitened_objective_moves_with_its_metric():
    case = make_case(NETWORKS[0], "path")
    case.objective.whitening = 1.0
    case = whitened(case)
    single = case.objective.to(dtype=torch.float32)
    loss = float(case.objective.loss(*case.arguments))
    assert float(single.loss(case.x.float(), case.multipliers.float())) == pytest.approx(loss, rel=1e-4)


def test_directions_in_which_training_moved_little_are_read_better():
    """Two images, of which one has a hundredth of the other's share in an exact sum of gradients."""
    torch.manual_seed(0)
    model = pal.networks.MLP(16, hidden=(40,), outputs=1).double()
    x = torch.randn(2, 16).double()
    (torch.tensor([[1.0], [1e-2]]) * model(x)).sum().backward()
    gradient = {name: θ.grad for name, θ in model.named_parameters()}

    def likeness(whitening):
        """|cos| of the weaker image and the nearest candidate."""
        objective = pal.Gradient(model, gradient, whitening=whitening)
        rec = pal.reconstruct(objective, image_shape=(16,), candidates=4, steps=400, priors=(), progress=False)
        return float(torch.cosine_similarity(rec.images, x[1:]).abs().max())

    assert likeness(0.0) < 0.6
    assert likeness(1.0) > 0.9


def test_a_training_by_adam_is_not_whitened():
    case = make_case(NETWORKS[0], "adam")
    case.objective.whitening = 1.0
    with pytest.raises(InvalidInputError, match="whitening"):
        whitened(case)


def test_a_run_resumes_only_with_the_same_whitening(tmp_path):
    case = make_case(NETWORKS[3], "ntk")
    options = {"image_shape": tuple(case.x.shape[1:]), "candidates": 3, "steps": 4, "checkpoint": tmp_path / "state"}
    pal.reconstruct(case.objective, **options)
    case.objective.whitening = 1.0
    with pytest.raises(pal.errors.PalimpsestError):
        pal.reconstruct(case.objective, **options)
