"""The certificate: what it predicts, what it refuses, and that it claims nothing false."""

import math

import pytest
import torch
from identifiability_problems import (
    DEGENERACIES,
    Degenerate,
    degenerate,
    error,
    evaluate,
    healthy,
    is_wrong,
    network,
    unit,
)

from palimpsest.errors import InvalidInputError, NonFiniteError
from palimpsest.identifiability import Extent, Identification, from_network, identify


@pytest.mark.parametrize(
    ("n", "d", "α", "m", "scalar"), [(4, 6, 3, 40, False), (5, 5, 4, 60, False), (4, 5, 3, 50, True)]
)
@pytest.mark.parametrize("declared", [True, False])
def test_errors_grow_as_the_certificate_predicts(n, d, α, m, scalar, declared):
    x, _, w, F = healthy(n, d, α, m, scalar=scalar, seed=7)
    size, errors = F.square().mean().sqrt(), {}
    for k in range(-12, -2 if declared else -3):
        generator = torch.Generator().manual_seed(-k)
        noisy = F + 10.0**k * size * torch.randn(F.shape, generator=generator, dtype=F.dtype)
        found = identify(w, noisy, α, noise=10.0**k if declared else None)
        assert len(found.samples) == n
        errors[k] = math.hypot(*(error(x, sample[None]) for sample in found.samples))
        assert 0.1 < errors[k] / float(found.certificate.expected_error.norm()) < 10
    last = max(errors)
    slope = math.log10(errors[last] / errors[-12]) / (last + 12)
    assert slope == pytest.approx(1, abs=0.1)


def test_frozen_neurons_pass_the_rank_test_but_not_the_misfit():
    found = identify(*from_network(network(4, 30)))
    assert found.certificate.rank == found.certificate.needed
    assert found.certificate.interpolation_misfit > 0.1
    assert found.certificate.verdict is Extent.NOT_IDENTIFIED
    assert not len(found.samples)


@pytest.mark.parametrize("kind", range(len(DEGENERACIES)), ids=DEGENERACIES)
def test_no_claim_about_degenerate_problems_is_false(kind):
    for problem in map(degenerate, range(kind, 10 * len(DEGENERACIES), len(DEGENERACIES))):
        for found in problem.answers():
            if isinstance(found, Identification):
                assert not is_wrong(found, problem), f"{problem.kind}: {found.certificate}"


def test_what_is_open_depends_on_what_is_known():
    _, _, w, F = healthy(3, 4, 3, 20)
    plain = identify(w, F).certificate
    assert plain.verdict is Extent.CONDITIONAL
    assert len(plain.not_identified) == 2  # sign and norm
    assert plain.most_active == 3
    known = identify(w, F, norm=1.0, count=3).certificate
    assert known.verdict is Extent.UP_TO
    assert len(known.not_identified) == 1
    assert "label" in known.not_identified[0]
    _, _, w, F = healthy(3, 4, 4, 40)
    assert "label" not in identify(w, F, 4).certificate.not_identified[0]


def test_an_announced_count_that_does_not_fit_is_not_identified():
    x, b, w, _ = healthy(3, 4, 3, 20)
    doubled, weights = torch.cat([x, x[:1]]), torch.cat([b, b[:1]])
    found = identify(w, evaluate(doubled, weights, w, 3), count=4)
    assert found.certificate.verdict is Extent.NOT_IDENTIFIED
    assert not len(found.samples)


def test_three_samples_in_a_plane_are_never_vouched_for():
    """α samples in one plane have the same cubic as two others: the verdict must depend on the count."""
    for seed in range(10):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(4, 6, generator=generator, dtype=torch.float64)
        x = unit(torch.cat([x, torch.randn(1, 2, generator=generator, dtype=torch.float64) @ x[:2]]))
        b, w = torch.randn(5, generator=generator).double(), torch.randn(60, 6, generator=generator).double()
        F = evaluate(x, b, w, 3)
        assert identify(w, F, count=5).certificate.verdict is Extent.NOT_IDENTIFIED
        found = identify(w, F)
        assert found.certificate.verdict in (Extent.CONDITIONAL, Extent.IN_PART, Extent.NOT_IDENTIFIED)
        if found.certificate.verdict is Extent.IN_PART:  # the two outside the plane split off
            assert error(found.samples, x[2:4]) < 1e-6


@pytest.mark.parametrize("count", [None, 6])
def test_what_splits_off_is_a_sample_if_one_more_than_the_span_is_active(count):
    """Four samples in three dimensions share a family of decompositions; the two beside them are determined."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(5, 7, generator=generator, dtype=torch.float64)
    x = unit(torch.cat([x, torch.ones(1, 3, dtype=torch.float64) @ x[:3]]))
    b, w = torch.ones(6).double(), torch.randn(60, 7, generator=generator).double()
    found = identify(w, evaluate(x, b, w, 3), count=count)
    assert found.certificate.verdict is Extent.IN_PART
    assert found.certificate.most_active == (6 if count is None else None)
    assert len(found.samples) == 2
    assert error(found.samples, x[3:5]) < 1e-6
    assert not len(identify(w, evaluate(x, b, w, 3), count=7).samples)


@pytest.mark.parametrize("noise", [1e-6, 1e-4, 1e-3])
def test_noise_seldom_hides_what_it_need_not(noise):
    """Five samples in five dimensions, quartic: slices spoilt by noise are replaced by others."""
    found, wrong = [], 0
    for seed in range(20, 40):
        x, _, w, F = healthy(5, 5, 4, 60, seed=seed)
        generator = torch.Generator().manual_seed(1000 + seed)
        noisy = F + noise * F.square().mean().sqrt() * torch.randn(F.shape, generator=generator, dtype=F.dtype)
        found.append(identify(w, noisy, 4, noise=noise, count=5))
        wrong += is_wrong(found[-1], Degenerate("noise", 4, w, noisy, x, 5, noise))
    assert wrong == 0
    assert sum(f.certificate.verdict is Extent.UP_TO for f in found) >= 16
    assert all(f.certificate.interpolation_misfit < 2 * noise for f in found)


@pytest.mark.parametrize("scalar", [False, True])
def test_on_a_line_the_direction_is_no_question(scalar):
    w = torch.linspace(-1, 2, 30, dtype=torch.float64)[:, None]
    found = identify(w, 2.5 * (w[:, 0] ** 3 if scalar else w**2))
    assert found.certificate.verdict is Extent.CONDITIONAL
    torch.testing.assert_close(found.samples, torch.ones(1, 1, dtype=torch.float64))
    torch.testing.assert_close(found.weights, torch.tensor([2.5], dtype=torch.float64))


def test_too_few_evaluations_still_give_the_span():
    x, _, w, F = healthy(6, 10, 3, 7)
    found = identify(w, F)
    assert found.certificate.verdict is Extent.NOT_IDENTIFIED
    assert found.certificate.family > 0
    assert found.subspace.shape == (10, 6)
    residual = x - x @ found.subspace @ found.subspace.T
    assert residual.norm() < 1e-12
    assert found.certificate.direction_bounds.max() < 1e-10


def test_weak_samples_are_withheld_and_the_others_returned():
    x, b, w, _ = healthy(4, 6, 3, 60)
    b[0] *= 1e-5
    F = evaluate(x, b, w, 3)
    noisy = F + 1e-8 * F.square().mean().sqrt() * torch.randn(F.shape, generator=torch.Generator().manual_seed(0))
    with_noise = identify(w, noisy, noise=3e-7)
    assert len(with_noise.samples) == 3
    assert error(with_noise.samples, x[1:]) < 1e-5


def test_every_value_zero():
    w = torch.randn(10, 3)
    found = identify(w, torch.zeros(10, 3))
    assert found.certificate.verdict is Extent.NOT_IDENTIFIED
    assert not len(found.samples)


def test_values_below_the_declared_noise_show_no_sample():
    w = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    found = identify(w, w.flip(0), noise=0.9)
    assert found.certificate.verdict is Extent.NOT_IDENTIFIED
    assert found.subspace.shape == (4, 0)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"degree": 2}, "degree"),
        ({"degree": 3.0}, "degree"),
        ({"count": 0}, "count"),
        ({"count": 2.5}, "count"),
        ({"norm": torch.inf}, "norm"),
        ({"values": torch.randn(10, 3, dtype=torch.complex64)}, "complex"),
        ({"points": torch.randn(10, 1), "values": torch.randn(10, 1), "bias": True}, "bias"),
        ({"values": torch.zeros(4)}, "values"),
        ({"norm": -1.0}, "norm"),
        ({"norm": 1.0, "bias": True}, "norm"),
        ({"noise": 2.0}, "noise"),
    ],
)
def test_wrong_use_is_named(change, name):
    arguments = {"points": torch.randn(10, 3), "values": torch.randn(10, 3), "degree": 3} | change
    with pytest.raises(InvalidInputError, match=name):
        identify(**arguments)


def test_nan_is_named():
    w = torch.randn(10, 3)
    with pytest.raises(NonFiniteError):
        identify(w, w * torch.nan)


def test_undeclared_noise_in_many_dimensions_is_found():
    x, _, w, F = healthy(5, 150, 3, 300)
    noisy = F + 1e-7 * torch.randn(F.shape, generator=torch.Generator().manual_seed(0), dtype=F.dtype)
    found = identify(w, noisy)
    assert found.certificate.verdict is Extent.CONDITIONAL
    assert found.certificate.noise > 1e-9  # found, because rounding would be 2e-14
    assert error(found.samples, x) < 1e-5


def test_spans_too_large_for_memory_are_refused():
    w = torch.randn(200, 150, dtype=torch.float64)
    with pytest.raises(InvalidInputError, match="monomials"):
        identify(w, torch.randn(200, 150, dtype=torch.float64))
