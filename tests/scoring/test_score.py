"""`score` on candidates whose truth is known."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from palimpsest import datasets
from palimpsest.errors import InvalidInputError, NonFiniteError
from palimpsest.scoring import Outcome, metrics, score

RULES = ("nearest", "best-buddies", "one-to-one")


@pytest.fixture(scope="module")
def faces():
    return datasets.load("faces", held_out_per_class=40)


def noise(like, scale, seed=0):
    return scale * torch.randn(like.shape, generator=torch.Generator().manual_seed(seed))


def judged(data, candidates, **options):
    return score(candidates, data.train.images, held_out=data.held_out.images, mean=data.mean, **options)


@pytest.mark.parametrize("rule", RULES)
def test_exact_copies_are_found(faces, rule):
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    result = judged(faces, faces.centred(faces.train.images)[order], matching=rule)
    assert order[result.match].tolist() == list(range(40))
    torch.testing.assert_close(result.ssim_as_is, torch.ones(40).double(), atol=1e-4, rtol=0)
    torch.testing.assert_close(result.ncc, torch.ones(40).double(), atol=1e-6, rtol=0)
    assert result.l2_as_is.max() < 1e-5
    assert result.verdict.outcome is Outcome.LEAKAGE


def test_measures_are_those_of_the_match(faces):
    candidates = faces.centred(faces.train.images[:10]) * 0.8 + noise(faces.train.images[:10], 0.1)
    result = judged(faces, SimpleNamespace(images=candidates))
    shown = (candidates + faces.mean)[result.match].double()
    images = faces.train.images.double()
    torch.testing.assert_close(result.ssim, metrics.ssim(metrics.minmax(shown), images))
    torch.testing.assert_close(result.ssim_as_is, metrics.ssim(shown, images))
    torch.testing.assert_close(result.l2, metrics.l2(metrics.minmax(shown), images))
    torch.testing.assert_close(result.psnr_as_is, metrics.psnr(shown, images))
    assert result.held_out.ssim.shape == (80,)


def test_partial_leakage_counts_what_was_recovered(faces):
    strangers = noise(faces.train.images, 0.2)
    strangers[20:40] = faces.centred(faces.train.images)[20:] + noise(strangers[20:], 0.03)
    result = judged(faces, strangers)
    assert result.verdict.outcome is Outcome.LEAKAGE
    assert result.verdict.recovered == int(result.recovered.sum())
    assert result.recovered[20:].sum() >= 18
    assert result.recovered[:20].sum() <= 2


def unrelated(data, kind, seed):
    generator = torch.Generator().manual_seed(seed)
    if kind == "noise":
        return 0.2 * torch.randn(80, *data.image_shape, generator=generator)
    everything = data.centred(torch.cat([data.train.images, data.held_out.images]))
    if kind == "blurs of everyone":
        return metrics.gaussian_blur(everything, sigma=3.0)
    weights = torch.rand(80, len(everything), generator=generator)
    return torch.einsum("kn,nchw->kchw", weights / weights.sum(1, keepdim=True), everything) * 5


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", ["noise", "blurs of everyone", "blends of everyone"])
def test_no_claim_from_candidates_that_know_nobody(kind, rule):
    claims = 0
    for seed in range(4):
        data = datasets.load("faces", seed=seed)
        claims += judged(data, unrelated(data, kind, seed), matching=rule).verdict.outcome is Outcome.LEAKAGE
    assert claims == 0


MEANS = {
    "training": lambda x, y: x.mean(0),
    "channels": lambda x, y: x.mean((0, 2, 3))[:, None, None].expand(x.shape[1:]),
    "all": lambda x, y: torch.cat([x, y]).mean(0),
    "constant": lambda x, y: torch.full(x.shape[1:], 0.5),
}


@pytest.mark.parametrize("n", [4, 10, 40])
@pytest.mark.parametrize("mean", list(MEANS))
def test_no_mean_turns_noise_into_a_claim(mean, n):
    """A mean of the training images holds a share of each of them; noise plus that mean must not look like leakage."""
    claims, wins = 0, 0.0
    for seed in range(10):
        generator = torch.Generator().manual_seed(seed)
        texture = metrics.gaussian_blur(torch.randn(n + 40, 3, 24, 24, generator=generator), sigma=1.0)
        x, y = metrics.minmax(texture).split([n, 40])
        candidates = 0.2 * torch.randn(2 * n, 3, 24, 24, generator=generator)
        verdict = score(candidates, x, held_out=y, mean=MEANS[mean](x, y)).verdict
        claims += verdict.outcome is Outcome.LEAKAGE
        wins += verdict.auc / 10
    assert claims == 0
    assert 0.35 < wins < 0.65


@pytest.mark.parametrize("mean", list(MEANS))
def test_images_are_recovered_whatever_mean_was_subtracted(faces, mean):
    x, y = faces.train.images, faces.held_out.images
    m = MEANS[mean](x, y)
    result = score(x - m + noise(x, 0.02), x, held_out=y, mean=m)
    assert result.verdict.recovered >= 32


def test_the_likeness_ignores_brightness_colour_cast_and_contrast():
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(6, 3, 16, 16, generator=generator)
    cast = torch.rand(6, 3, 1, 1, generator=generator)
    torch.testing.assert_close(score(0.3 * x + cast, x).likeness, torch.ones(6).double())


def test_a_mean_may_be_a_number(faces):
    x, y = faces.train.images, faces.held_out.images
    plain, number = (score(x - 0.5, x, held_out=y, mean=m) for m in (torch.full_like(x[0], 0.5), 0.5))
    assert torch.equal(plain.ssim, number.ssim)


def test_the_mean_takes_no_part_in_the_likeness(faces):
    x, y = faces.train.images, faces.held_out.images
    candidates = faces.centred(x) + noise(x, 0.1)
    shown, seen = judged(faces, candidates), score(candidates, faces.centred(x), held_out=faces.centred(y))
    torch.testing.assert_close(shown.likeness, seen.likeness, atol=1e-5, rtol=0)
    assert shown.verdict.recovered == seen.verdict.recovered


def test_a_blur_recovers_nothing(faces):
    blurred = metrics.gaussian_blur(faces.centred(faces.train.images), sigma=25 / 8)
    assert judged(faces, blurred).verdict.recovered == 0


def test_a_flat_image_is_not_recovered_by_a_gradient():
    generator = torch.Generator().manual_seed(0)
    ramp = torch.linspace(0, 1, 24).expand(40, 1, 24, 24)
    sky = 0.5 + 0.3 * ramp + 0.02 * torch.rand(40, 1, 24, 24, generator=generator)
    result = score(ramp[:1].clone(), sky, held_out=torch.rand(40, 1, 24, 24, generator=generator))
    assert result.verdict.recovered == 0


def test_no_verdict_without_held_out_images(faces):
    result = score(faces.centred(faces.train.images), faces.train.images, mean=faces.mean)
    assert result.verdict.outcome is Outcome.NO_VERDICT
    assert result.held_out is None


def test_centred_images_need_no_mean(faces):
    x, h = faces.centred(faces.train.images), faces.centred(faces.held_out.images)
    result = score(x + noise(x, 0.03), x, held_out=h)
    low, high = result.value_range
    assert low == pytest.approx(float(min(x.min(), h.min())))
    assert high == pytest.approx(float(max(x.max(), h.max())))
    assert result.verdict.outcome is Outcome.LEAKAGE
    assert result.match.tolist() == judged(faces, x + noise(x, 0.03)).match.tolist()


@given(st.integers(0, 2**31), st.sampled_from(RULES), st.booleans())
@settings(max_examples=15, deadline=None)
def test_the_order_of_candidates_does_not_matter(seed, rule, voting):
    generator = torch.Generator().manual_seed(seed)
    candidates = torch.randn(12, 1, 12, 12, generator=generator)
    images, others = (torch.rand(9, 1, 12, 12, generator=generator), torch.rand(11, 1, 12, 12, generator=generator))
    order = torch.randperm(12, generator=generator)
    voting = voting and rule != "one-to-one"
    plain, mixed = (
        score(c, images, held_out=others, matching=rule, voting=voting) for c in (candidates, candidates[order])
    )
    torch.testing.assert_close(plain.ssim, mixed.ssim)
    assert plain.verdict.recovered == mixed.verdict.recovered
    assert plain.verdict.p_value == mixed.verdict.p_value


@given(st.floats(0.2, 5), st.floats(-2, 2))
@settings(max_examples=15, deadline=None)
def test_brightness_and_contrast_of_candidates_do_not_matter_after_scaling(scale, shift):
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(5, 3, 14, 14, generator=generator)
    candidates = (images + 0.3 * torch.rand(5, 3, 14, 14, generator=generator)).double()
    plain, changed = (score(c, images) for c in (candidates, scale * candidates + shift))
    torch.testing.assert_close(plain.ssim, changed.ssim)
    assert plain.match.tolist() == changed.match.tolist()


def test_unmatched_images_are_compared_with_the_mean(faces):
    result = judged(faces, faces.centred(faces.train.images)[:3], matching="one-to-one")
    lost = result.match < 0
    assert int((~lost).sum()) + int((result.held_out.match >= 0).sum()) == 3
    assert (result.ncc[lost] == 0).all()


@pytest.mark.parametrize("rule", RULES)
def test_the_verdict_does_not_depend_on_the_matching_rule(faces, rule):
    """Rules by which images compete favour a set that was centred by its own mean."""
    x, y = faces.train.images, faces.held_out.images
    candidates = x[:20] - x.mean(0) + noise(x[:20], 0.05)
    plain, other = (score(candidates, x, held_out=y, mean=x.mean(0), matching=r) for r in ("nearest", rule))
    assert torch.equal(plain.recovered, other.recovered)
    assert plain.verdict == other.verdict


def test_what_cannot_be_scored(faces):
    x = faces.train.images
    with pytest.raises(InvalidInputError):
        score(x[:, :, :5], x)
    with pytest.raises(InvalidInputError):
        score(x, x, held_out=x[:, :, 1:])
    with pytest.raises(InvalidInputError):
        score(x[:0], x)
    with pytest.raises(NonFiniteError):
        score(x * torch.nan, x)
    with pytest.raises(InvalidInputError, match=r"held-out image 1 .*training image 4"):
        score(x, x, held_out=x[3:5])
