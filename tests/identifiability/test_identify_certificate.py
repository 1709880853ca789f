"""The certificate: what it predicts, what it refuses, and that it claims nothing false."""

import math

import pytest
import torch
from identifiability_problems import degenerate, error, evaluate, healthy, is_wrong, network, unit

from palimpsest.errors import InvalidInputError, NonFiniteError, PalimpsestError
from palimpsest.identifiability import Verdict, from_network, identify


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
    assert found.certificate.verdict is Verdict.NOT_IDENTIFIED
    assert "no evaluations" in str(found.certificate)
    assert not len(found.samples)


@pytest.mark.parametrize("seed", range(12))
def test_no_claim_about_degenerate_problems_is_false(seed):
    for problem in map(degenerate, range(seed, 120, 12)):  # one kind each
        for count in (None, problem.active):
            try:
                found = identify(problem.points, problem.values, problem.degree, count=count)
            except PalimpsestError:
                continue
            assert not is_wrong(found, problem), f"{problem.kind}: {found.certificate}"


def test_what_is_open_depends_on_what_is_known():
    _, _, w, F = healthy(3, 4, 3, 20)
    plain = identify(w, F).certificate
    assert plain.verdict is Verdict.CONDITIONAL
    assert plain.not_identified == ("the sign of each sample (and so its label)", "its norm")
    assert "no more than 3" in plain.summary
    known = identify(w, F, norm=1.0, count=3).certificate
    assert known.verdict is Verdict.UP_TO
    assert known.not_identified == ("the sign of each sample (and so its label)",)
    _, _, w, F = healthy(3, 4, 4, 40)
    assert identify(w, F, 4).certificate.not_identified[0] == "the sign of each sample"


def test_an_announced_count_that_does_not_fit_is_not_identified():
    x, b, w, _ = healthy(3, 4, 3, 20)
    doubled, weights = torch.cat([x, x[:1]]), torch.cat([b, b[:1]])
    found = identify(w, evaluate(doubled, weights, w, 3), count=4)
    assert found.certificate.verdict is Verdict.NOT_IDENTIFIED
    assert "4 active samples were announced" in found.certificate.reason


def test_three_samples_in_a_plane_are_never_vouched_for():
    """α samples in one plane have the same cubic as two others: the verdict must depend on the count."""
    for seed in range(10):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(4, 6, generator=generator, dtype=torch.float64)
        x = unit(torch.cat([x, torch.randn(1, 2, generator=generator, dtype=torch.float64) @ x[:2]]))
        b, w = torch.randn(5, generator=generator).double(), torch.randn(60, 6, generator=generator).double()
        F = evaluate(x, b, w, 3)
        assert identify(w, F, count=5).certificate.verdict is Verdict.NOT_IDENTIFIED
        found = identify(w, F)
        assert found.certificate.verdict in (Verdict.CONDITIONAL, Verdict.IN_PART, Verdict.NOT_IDENTIFIED)
        if found.certificate.verdict is Verdict.IN_PART:  # the two outside the plane split off
            assert error(found.samples, x[2:4]) < 1e-6


def test_too_few_evaluations_still_give_the_span():
    x, _, w, F = healthy(6, 10, 3, 7)
    found = identify(w, F)
    assert found.certificate.verdict is Verdict.NOT_IDENTIFIED
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
    assert found.certificate.verdict is Verdict.NOT_IDENTIFIED
    assert "no sample is active" in found.certificate.reason


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"degree": 2}, "degree 2 determines only a moment"),
        ({"values": torch.zeros(4)}, "do not fit"),
        ({"norm": -1.0}, "norm must be positive"),
        ({"norm": 1.0, "bias": True}, "a bias already fixes it"),
        ({"noise": 2.0}, "noise is 2.0"),
    ],
)
def test_wrong_use_is_named(change, message):
    arguments = {"points": torch.randn(10, 3), "values": torch.randn(10, 3), "degree": 3} | change
    with pytest.raises(InvalidInputError, match=message):
        identify(**arguments)


def test_nan_is_named():
    w = torch.randn(10, 3)
    with pytest.raises(NonFiniteError, match="NaN"):
        identify(w, w * torch.nan)


def test_undeclared_noise_in_many_dimensions_is_found():
    x, _, w, F = healthy(5, 150, 3, 300)
    noisy = F + 1e-7 * torch.randn(F.shape, generator=torch.Generator().manual_seed(0), dtype=F.dtype)
    found = identify(w, noisy)
    assert found.certificate.verdict is Verdict.CONDITIONAL
    assert "is noise" in found.certificate.reason
    assert error(found.samples, x) < 1e-5


def test_spans_too_large_for_memory_are_refused():
    w = torch.randn(200, 150, dtype=torch.float64)
    with pytest.raises(InvalidInputError, match="monomials"):
        identify(w, torch.randn(200, 150, dtype=torch.float64))
