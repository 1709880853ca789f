"""The splitting matrix, its eigenvalues, and what a split does."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import brute_force
from cases import TABLE, Case, make_case
from palimpsest.errors import InvalidInputError
from palimpsest.solver import splitting
from palimpsest.solver.splitting import Splitting
from synthetic import stalled_problem


def test_matrix_is_symmetric_and_equals_finite_differences(case: Case):
    S = splitting.matrix(case.objective, *case.arguments)
    assert (S - S.mT).norm() <= 1e-12 * S.norm()
    expected = brute_force.splitting_matrix(case.objective, *case.arguments)
    assert (S - expected).norm() <= 1e-6 * expected.norm()
    assert S.norm() > 0


def test_lanczos_to_full_dimension_equals_eigh(case: Case):
    S = splitting.matrix(case.objective, *case.arguments)
    exact = torch.linalg.eigvalsh(S)
    values, vectors = splitting.min_eigenpairs(case.objective, *case.arguments, iterations=case.x[0].numel())
    scale = exact.abs().amax()
    assert (values - exact[:, 0]).abs().max() <= 1e-8 * scale
    v = vectors.flatten(1)
    assert torch.allclose(v.norm(dim=1), torch.ones(len(v), dtype=v.dtype))
    assert ((S @ v[:, :, None])[:, :, 0] - values[:, None] * v).norm(dim=1).max() <= 1e-6 * scale


def test_for_a_fixed_residual_candidates_do_not_touch_each_other(case: Case):
    x, multipliers, labels = case.arguments
    u = case.objective.pull(*case.arguments)
    v = torch.randn_like(x)
    together = case.objective.curvature(x, multipliers, labels, pull=u)(v)
    moved = x.clone()
    moved[1:] += torch.randn_like(x[1:])
    elsewhere = case.objective.curvature(moved, multipliers, labels, pull=u)(v)
    assert torch.allclose(together[0], elsewhere[0], rtol=1e-10, atol=1e-12 * float(together.abs().max()))
    assert not torch.allclose(together[1:], elsewhere[1:])


def test_a_split_with_no_displacement_leaves_the_loss_unchanged(case: Case):
    chosen = torch.tensor([0, 2])
    doubled = splitting.apply(*case.arguments, chosen, torch.zeros_like(case.x[chosen]))
    before, after = case.objective.loss(*case.arguments), case.objective.loss(*doubled)
    assert len(doubled[0]) == len(case.x) + 2
    assert abs(after - before) <= 1e-13 * before


def test_a_small_split_lowers_the_loss_by_half_eta_squared_times_the_eigenvalue(case: Case):
    values, vectors = splitting.min_eigenpairs(case.objective, *case.arguments, iterations=case.x[0].numel())
    i, η = values.argmin(), 1e-3
    assert values[i] < 0
    split = splitting.apply(*case.arguments, i[None], η * vectors[i][None])
    change = case.objective.loss(*split) - case.objective.loss(*case.arguments)
    assert change == pytest.approx(float(0.5 * η**2 * values[i]), rel=0.02)


@pytest.mark.parametrize("name", [name for name in TABLE if "/adam" not in name])  # Adam's loss is not convex in v
def test_the_hessian_is_bounded_below_by_the_splitting_matrices(name):
    case = make_case(*TABLE[name])
    k, d = len(case.x), case.x[0].numel()
    product = case.objective.hessian(*case.arguments)
    basis = torch.eye(k * d, dtype=case.x.dtype).reshape(-1, *case.x.shape)
    H = torch.stack([product(e).flatten() for e in basis])
    S = splitting.matrix(case.objective, *case.arguments)
    assert torch.linalg.eigvalsh(H)[0] >= torch.linalg.eigvalsh(S)[:, 0].min() - 1e-9 * H.norm()


def test_without_smoothing_a_relu_network_has_no_curvature_to_split_along():
    """Why smoothing is needed: f is piecewise linear in x, so S vanishes and no split is ever seen to help."""
    case = make_case(*TABLE["mlp-2-all/kkt"])
    case.objective.sharpness = None
    assert splitting.matrix(case.objective, *case.arguments).abs().max() == 0
    assert splitting.min_eigenpairs(case.objective, *case.arguments)[0].abs().max() == 0
    case.objective.sharpness = 4.0
    assert splitting.matrix(case.objective, *case.arguments).abs().max() > 0


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**20), name=st.sampled_from(["mlp-2-all/kkt", "mlp-1-first/ntk-nodes", "cubic/kkt"]))
def test_permuting_candidates_permutes_everything(seed, name):
    case = make_case(*TABLE[name], seed=seed)
    order = torch.randperm(len(case.x), generator=torch.Generator().manual_seed(seed))
    x, λ, y = case.arguments
    permuted = (x[order], λ[order], None if y is None else y[order])
    assert torch.allclose(case.objective.loss(*permuted), case.objective.loss(*case.arguments))
    for a, b in zip(case.objective.gradients(*permuted), case.objective.gradients(*case.arguments), strict=True):
        assert torch.allclose(a, b[order])
    values, _ = splitting.min_eigenpairs(case.objective, *case.arguments)
    assert torch.allclose(splitting.min_eigenpairs(case.objective, *permuted)[0], values[order])


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**20), scale=st.floats(1e-3, 1e3))
def test_rescaling_target_and_multipliers_rescales_loss_and_curvature_but_not_who_splits(seed, scale):
    case = make_case(*TABLE["mlp-2-all/kkt"], seed=seed)
    scaled = make_case(*TABLE["mlp-2-all/kkt"], seed=seed)
    scaled.objective.target = {name: scale * t for name, t in scaled.objective.target.items()}
    scaled.multipliers = scale * scaled.multipliers
    losses = case.objective.loss(*case.arguments), scaled.objective.loss(*scaled.arguments)
    values = [splitting.min_eigenpairs(c.objective, *c.arguments)[0] for c in (case, scaled)]
    assert torch.allclose(losses[1], scale**2 * losses[0])
    assert torch.allclose(values[1], scale**2 * values[0], atol=1e-9 * float(scale**2 * values[0].abs().max()))
    policy = Splitting(relative=1e-4)
    chosen = [policy.chosen(v, L) for v, L in zip(values, losses, strict=True)]
    assert torch.equal(*chosen)


def test_the_absolute_criterion_depends_on_the_scale_and_the_cap_holds():
    values, loss = torch.tensor([-3.0, -0.2, -0.05, 0.1]), torch.tensor(1.0)
    assert Splitting(threshold=-0.1, share=1.0).chosen(values, loss).tolist() == [0, 1]
    assert Splitting(threshold=-0.1, share=0.25).chosen(values, loss).tolist() == [0]
    assert Splitting(relative=0.01, share=1.0).chosen(values, loss).tolist() == [0, 1, 2]
    assert Splitting(direction="none").chosen(values, loss).tolist() == []


@pytest.mark.parametrize("wrong", [{"rounds": 0}, {"share": 0}, {"eta_max": 0}, {"iterations": 0}, {"direction": "up"}])
def test_policies_that_make_no_sense_are_refused(wrong):
    with pytest.raises(InvalidInputError):
        Splitting(**wrong)


def test_the_line_search_never_raises_the_objective(case: Case):
    result = splitting.split(case.objective, *case.arguments, Splitting(eta_max=10.0))
    assert len(result.chosen) > 0
    assert result.after < result.before
    assert case.objective.loss(result.x, result.multipliers, result.labels) == pytest.approx(result.after)
    assert torch.equal(result.parents[len(case.x) :], result.chosen)


# --- where gradient descent has stalled with too few candidates ---------------------------------


@pytest.mark.parametrize("seed", range(10))
def test_where_descent_has_stalled_curvature_beats_a_random_direction_and_duplication_does_nothing(seed):
    objective, x, λ = stalled_problem(seed)
    policies = {d: Splitting(direction=d, share=1.0) for d in ("curvature", "random", "duplicate")}
    values, vectors = splitting.min_eigenpairs(objective, x, λ, iterations=x[0].numel())
    before = objective.loss(x, λ)
    chosen = policies["curvature"].chosen(values, before)
    assert len(chosen) > 0

    def decrease(direction: str, η: float) -> float:
        v = policies[direction].directions(vectors, torch.Generator().manual_seed(seed))[chosen]
        return float(before - objective.loss(*splitting.apply(x, λ, None, chosen, η * v)[:2]))

    for η in (0.01, 0.05):
        assert decrease("curvature", η) > max(decrease("random", η), 0)
    assert abs(decrease("duplicate", 0.05)) <= 1e-12 * before
