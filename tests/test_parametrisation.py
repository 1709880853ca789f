"""Derivatives in the coordinates of a subspace pass the same checks as those in pixels."""

import functools
import itertools
import math

import pytest
import torch
from torch import nn

import palimpsest as pal
from cases import TABLE, make_case
from palimpsest.errors import InvalidInputError
from palimpsest.objectives.spaces import Subspace
from palimpsest.solver import splitting


def confined(name: str):
    case = make_case(*TABLE[name])
    torch.manual_seed(1)
    d, n = case.x[0].numel(), 3
    basis = torch.linalg.qr(torch.randn(d, n, dtype=case.x.dtype))[0].T
    subspace = Subspace(torch.randn_like(case.x[0]), basis.reshape(n, *case.x.shape[1:]))
    c = torch.randn(len(case.x), n, dtype=case.x.dtype)
    return case, subspace, c


@pytest.mark.parametrize("name", TABLE)
def test_gradients_and_curvature_follow_the_chain_rule(name):
    case, subspace, c = confined(name)
    x, Q = subspace.images(c), subspace.basis.flatten(1).T
    inside = case.objective.within(subspace)
    dx, dλ = case.objective.gradients(x, case.multipliers, case.labels)
    dc, dλ_inside = inside.gradients(c, case.multipliers, case.labels)
    assert torch.allclose(
        inside.loss(c, case.multipliers, case.labels), case.objective.loss(x, case.multipliers, case.labels)
    )
    assert torch.allclose(dc, dx.flatten(1) @ Q, rtol=1e-10, atol=1e-12 * float(dx.abs().max()))
    assert torch.allclose(dλ_inside, dλ, rtol=1e-10)
    assert torch.allclose(dc, subspace.pulled_back(dx), rtol=1e-10, atol=1e-12 * float(dx.abs().max()))
    S = splitting.matrix(case.objective, x, case.multipliers, case.labels)
    S_inside = splitting.matrix(inside, c, case.multipliers, case.labels)
    assert torch.allclose(S_inside, Q.T @ S @ Q, rtol=1e-9, atol=1e-11 * float(S.abs().max()))


@pytest.mark.parametrize("name", ["mlp-2-all/kkt", "cnn/ntk-nodes", "cubic/kkt-signed"])
def test_lanczos_in_the_subspace_equals_eigh(name):
    case, subspace, c = confined(name)
    inside = case.objective.within(subspace)
    exact = torch.linalg.eigvalsh(splitting.matrix(inside, c, case.multipliers, case.labels))
    values, _ = splitting.min_eigenpairs(inside, c, case.multipliers, case.labels, iterations=3)
    assert torch.allclose(values, exact[:, 0], atol=1e-8 * float(exact.abs().max()))


def test_coordinates_invert_images():
    _, subspace, c = confined("mlp-2-all/kkt")
    assert torch.allclose(subspace.coordinates(subspace.images(c)), c)


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(InvalidInputError):
        Subspace(torch.zeros(4), torch.zeros(2, 5))
    with pytest.raises(InvalidInputError, match="image_shape"):
        Subspace(torch.zeros(4), torch.zeros(2, 4)).shaped((1, 3, 3))


# --- cosines --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 4, 4), (3, 4, 2), (2, 1, 3), (2, 6), (1, 2, 4, 2)])
def test_cosines_are_orthogonal_waves_of_the_stated_sizes(shape):
    """Row by row against the formula, with angles written out."""
    space, size = pal.Cosines.of(shape), math.prod(shape)
    B = space.images(torch.eye(size, dtype=torch.float64).view(size, *shape)).flatten(1)
    sizes = torch.empty(size, dtype=torch.float64)
    for j, frequency in enumerate(itertools.product(*map(range, shape))):
        waves = [
            torch.tensor([math.cos(math.pi * f * (2 * i + 1) / (2 * n)) for i in range(n)], dtype=torch.float64)
            for f, n in zip(frequency, shape, strict=True)
        ]
        wave = functools.reduce(lambda a, b: torch.outer(a, b).flatten(), waves)
        assert torch.allclose(B[j] / B[j].norm(), wave / wave.norm())
        per_pixel = math.hypot(*(f / n for f, n in zip(frequency[1:], shape[1:], strict=True)))
        sizes[j] = 1 / (1 + frequency[0]) / (1 + per_pixel * max(shape[1:]))
    assert torch.allclose(B @ B.T, torch.diag(B.square().sum(1)), atol=1e-12)
    assert torch.allclose(B.norm(dim=1), sizes / sizes.square().mean().sqrt())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cosines_invert_and_pull_back(dtype):
    space = pal.Cosines.of((3, 5, 4))
    c, g = torch.randn(2, 2, 3, 5, 4, dtype=dtype).unbind()
    assert space.images(c).dtype == dtype
    torch.testing.assert_close(space.coordinates(space.images(c)), c)
    torch.testing.assert_close((space.images(c) * g).sum(), (c * space.pulled_back(g)).sum())


def test_every_image_can_be_reached_by_cosines_and_the_rest_of_a_run_is_the_same():
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 1)).double() for _ in range(2)]
    objective = pal.NTK(models[1], models[0].state_dict())
    space = pal.Cosines.of((3, 6, 6))
    c, λ = torch.randn(4, 3, 6, 6).double(), torch.randn(4).double()
    inside = objective.within(space)
    dc, dλ = inside.gradients(c, λ)
    dx, dλ_x = objective.gradients(space.images(c), λ)
    assert torch.allclose(dc, space.pulled_back(dx))
    assert torch.allclose(dλ, dλ_x)
    rec = pal.reconstruct(objective, image_shape=(3, 6, 6), candidates=4, steps=30, within=space, progress=False)
    assert rec.images.shape == (4, 3, 6, 6)
    assert rec.loss < 1


@pytest.mark.parametrize(
    ("within", "shape"), [(pal.Cosines.of((1, 4, 4)), (1, 3, 3)), (pal.Cosines.of((1, 4, 4)), 16), ("cosines", 16)]
)
def test_cosines_of_other_images_are_refused(within, shape):
    objective = pal.KKT(pal.networks.MLP(16, (5,)))
    with pytest.raises(InvalidInputError, match=r"Cosines\.of"):
        pal.reconstruct(objective, image_shape=shape, candidates=2, steps=1, within=within)


def test_cosines_need_channels_rows_and_columns():
    with pytest.raises(InvalidInputError, match="channels, rows and columns"):
        pal.Cosines.of((784,))


# --- whitening in a subspace ----------------------------------------------------------------------


@pytest.mark.parametrize("p", [0.5, 1.0])
@pytest.mark.parametrize("name", ["mlp-2-all/ntk-nodes", "mlp-3-none/ntk"])
def test_whitening_weighs_directions_of_the_first_layer_by_their_singular_values(name, p):
    case, subspace, c = confined(name)
    objective, first = case.objective, "layers.0.weight"
    T = objective.target[first]
    P = torch.linalg.qr(torch.cat([subspace.offset.reshape(1, -1), subspace.basis.flatten(1)]).T)[0]
    V, σ, _ = torch.linalg.svd(P.T @ T.T)
    V = P @ V
    s = σ[: V.shape[1]] ** -p
    s = s * (σ.norm() / (σ * s).norm())
    objective.whitening = p
    r = objective.residual(subspace.images(c), case.multipliers, case.labels)
    w = objective.weights
    expected = sum(w[name] * t.square().sum() for name, t in r.items() if name != first)
    expected += w[first] * ((r[first] @ V * s).square().sum() + (T - T @ V @ V.T).square().sum())
    inside = objective.within(subspace)
    assert torch.allclose(inside.loss(c, case.multipliers, case.labels), expected)
    assert torch.allclose(inside.target_norm_squared, objective.target_norm_squared)


@pytest.mark.parametrize("rank", [0, 2, None])
@pytest.mark.parametrize("inside", [True, False])
def test_whitening_keeps_the_size_of_a_target_of_any_rank_and_minds_no_rounding_of_the_offset(rank, inside):
    case, subspace, c = confined("mlp-2-all/ntk")
    first, losses = "layers.0.weight", []
    if rank is not None:
        U, σ, Vᵀ = torch.linalg.svd(case.objective.target[first], full_matrices=False)
        case.objective.target[first] = (U[:, :rank] * σ[:rank]) @ Vᵀ[:rank]
    case.objective.whitening = 1.0
    for rounding in (0.0, 1e-15):
        offset = subspace.basis.sum(0) if inside else subspace.offset
        where = Subspace(offset + rounding * torch.randn_like(offset), subspace.basis)
        reduced = case.objective.within(where)
        losses.append(float(reduced.loss(c, case.multipliers, case.labels)))
        assert torch.allclose(reduced.target_norm_squared, case.objective.target_norm_squared)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_coordinates_of_coordinates_are_refused():
    case, subspace, _ = confined("mlp-2-all/ntk")
    with pytest.raises(InvalidInputError):
        case.objective.within(subspace).within(subspace)


def test_whitening_beyond_its_range_is_refused():
    with pytest.raises(InvalidInputError, match="whitening"):
        pal.NTK(model := pal.networks.MLP(4, (3,)), {n: 0 * t for n, t in model.state_dict().items()}, whitening=2)
