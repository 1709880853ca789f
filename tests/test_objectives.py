"""Every operator against its definition, over the shared table."""

import torch

import brute_force
from cases import Case


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


def test_hessian_equals_finite_differences(case: Case):
    v = torch.randn_like(case.x)
    h = 1e-6
    forward, _ = case.objective.gradients(case.x + h * v, case.multipliers, case.labels)
    backward, _ = case.objective.gradients(case.x - h * v, case.multipliers, case.labels)
    assert close(case.objective.hessian(*case.arguments)(v), (forward - backward) / (2 * h), 1e-6)


def test_a_solver_that_keeps_no_graph_gets_the_same_gradients(case):
    """Executors run without gradients; the graph of several tangent points must not depend on who asks."""
    dx, dλ = case.objective.gradients(*case.arguments)
    case.objective.check(*case.arguments)
    with torch.no_grad():
        λ_grad_g, g = case.objective.slopes(*case.arguments)
    assert torch.allclose(-2 * λ_grad_g, dx, rtol=1e-10, atol=1e-12)
    assert torch.allclose(-2 * g, dλ, rtol=1e-10, atol=1e-12)
