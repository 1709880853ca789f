"""Candidates against images: match, measure, judge.

Two measures serve two purposes. `ssim` is the literature's: it adds the mean to the candidate and compares the sum with
the image. It must not decide a verdict. A mean of the training images contains a share x_i/n of each of them, so even
noise plus that mean resembles training images more than held-out ones.

`likeness` decides. It compares candidate and image as the network sees them, x − mean, and ignores brightness, colour
cast and contrast. For a mean m of n training images x_i − m = (1 − 1/n)(x_i − m_others): up to its contrast a training
image is centred by other images only, exactly as a held-out image is.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from palimpsest.errors import InvalidInputError, NonFiniteError
from palimpsest.scoring import metrics
from palimpsest.scoring.matching import UNMATCHED, MatchingRule, match, vote
from palimpsest.scoring.verdict import Verdict, judge

BETTER = 0.01  # by how much the likeness must exceed that of a blurred copy
BLUR = 1 / 8  # width of that blur, as a fraction of the image's shorter side
CONTRAST = 6.0  # range of a standardised image, in its standard deviations


class HasImages(Protocol):
    """Anything with candidates, as the network sees images."""

    @property
    def images(self) -> Tensor: ...


@dataclass(frozen=True)
class ImageScores:
    """How well each image is matched. All tensors have shape ``(n,)`` and are on the CPU.

    Args:
        match: the index of the candidate. −1 if the matching rule left none; the image is then compared with the mean.
        ncc: normalised cross-correlation with the candidate, as the network sees both.
        ssim: SSIM with the candidate, min–max scaled to the range of the images, as in the literature.
        l2: the distance ‖image − candidate‖, scaled in the same way.
        psnr: the peak signal-to-noise ratio in dB, scaled in the same way.
        ssim_as_is: SSIM without scaling.
        l2_as_is: the distance without scaling.
        psnr_as_is: the peak signal-to-noise ratio without scaling.
        likeness: SSIM of image and candidate as the network sees them, each channel centred and the contrast
            standardised. The verdict uses it.
        blurred: the likeness of a blurred copy of the image. The blur is an eighth of the image wide.
    """

    match: Tensor
    ncc: Tensor
    ssim: Tensor
    l2: Tensor
    psnr: Tensor
    ssim_as_is: Tensor
    l2_as_is: Tensor
    psnr_as_is: Tensor
    likeness: Tensor
    blurred: Tensor

    @property
    def evidence(self) -> Tensor:
        """The number that the verdict judges: the likeness, minus 1 if a blurred copy scores as well."""
        return self.likeness - (~self.shows_detail).to(self.likeness)

    @property
    def shows_detail(self) -> Tensor:
        """``(n,)``, whether the match is better than a blurred copy of the image."""
        return self.likeness > self.blurred + BETTER


@dataclass(frozen=True)
class Score(ImageScores):
    """The scores of the training images, the scores of the held-out images, and the verdict.

    It also has all attributes of `ImageScores`, for the training images.

    Args:
        recovered: ``(n,)``, which training images the verdict counts.
        held_out: the scores of the held-out images, or None.
        verdict: the claim and its numbers.
        matching: the rule that chose the candidates.
        voting: whether near candidates were averaged.
        value_range: the range that candidates were scaled to: (0, 1), or that of all images if they exceed it.
    """

    recovered: Tensor
    held_out: ImageScores | None
    verdict: Verdict
    matching: MatchingRule
    voting: bool
    value_range: tuple[float, float]


def score(
    reconstruction: HasImages | Tensor,
    images: Tensor,
    *,
    held_out: Tensor | None = None,
    mean: Tensor | float | None = None,
    matching: MatchingRule = "nearest",
    voting: bool = False,
    confidence: float = 0.99,
    looks: int = 1,
) -> Score:
    """Score candidates against the training images, and judge on held-out images whether they leaked.

    Args:
        reconstruction: candidates ``(k, C, H, W)`` as the network sees images, or an object with such ``.images``.
        images: the training images ``(n, C, H, W)``.
        held_out: images of the same kind that were not trained on, drawn like the training images. More are better.
            Without them there is no verdict.
        mean: the image that was subtracted before training, if ``images`` and ``held_out`` still contain it. Any mean
            works, also that of the training images. None if all images are in the same space
            already; candidates must not contain the mean then.
        matching: how candidates are chosen by normalised cross-correlation: ``"nearest"``, ``"best-buddies"`` or
            ``"one-to-one"``.
        voting: compare with the mean of the candidates that are about as near as the nearest.
        confidence: the confidence of the claim and its intervals.
        looks: how many reconstructions of the same weights you judge, if you report the strongest.

    Examples:
        >>> from palimpsest import datasets
        >>> data = datasets.load("faces")
        >>> _ = torch.manual_seed(0)
        >>> candidates = data.centred(data.train.images) + 0.05 * torch.randn(40, 1, 25, 25)
        >>> result = score(candidates, data.train.images, held_out=data.held_out.images, mean=data.mean)
        >>> result.verdict.outcome.value, result.verdict.recovered > 20
        ('leakage', True)
    """
    candidates = reconstruction if isinstance(reconstruction, Tensor) else getattr(reconstruction, "images", None)
    given = {"the reconstruction": candidates, "images": images, "held_out": images if held_out is None else held_out}
    for name, value in given.items():
        if not isinstance(value, Tensor):
            raise InvalidInputError(f"{name} is a {type(value).__name__}; give a tensor, as torch.as_tensor makes one")
    assert isinstance(candidates, Tensor)
    candidates = candidates.detach().double()
    others = images[:0] if held_out is None else held_out
    _check(candidates, images, others)
    pool = torch.cat([images.detach().to(candidates), others.detach().to(candidates)])
    shift = torch.as_tensor(0.0 if mean is None else mean).detach().to(candidates).expand(pool.shape[1:])
    low, high = float(pool.min()), float(pool.max())
    value_range = (0.0, 1.0) if low >= 0 and high <= 1 else (low, high)

    similarity = metrics.pairwise_ncc(pool - shift, candidates)
    index = match(similarity, rule=matching)
    matched = vote(candidates, similarity, rule=matching) if voting else candidates[index.clamp_min(0)]
    matched = matched.masked_fill((index == UNMATCHED).view(-1, 1, 1, 1), 0.0)
    table = _measure(pool, matched + shift, value_range)
    # The verdict uses the nearest candidate, because other rules favour images that were centred by their own mean.
    table |= _likeness(pool - shift, candidates[similarity.argmax(1)])
    table["match"] = index
    table["ncc"] = similarity.gather(1, index.clamp_min(0)[:, None])[:, 0].masked_fill(index == UNMATCHED, 0.0)

    parts = slice(len(images)), slice(len(images), None)
    trained, unseen = (ImageScores(**{k: v[part].cpu() for k, v in table.items()}) for part in parts)
    verdict = judge(trained.evidence, unseen.evidence, confidence=confidence, looks=looks)
    return Score(
        **vars(trained),
        recovered=trained.evidence > verdict.threshold,
        held_out=unseen if len(others) else None,
        verdict=verdict,
        matching=matching,
        voting=voting,
        value_range=value_range,
    )


def _check(candidates: Tensor, images: Tensor, held_out: Tensor) -> None:
    if not all(x.is_floating_point() for x in (candidates, images, held_out)):
        raise InvalidInputError("the images are whole numbers; give numbers in [0, 1], for example images / 255")
    shapes = {tuple(x.shape[1:]) for x in (candidates, images, held_out)}
    if len(shapes) > 1 or images.ndim != 4 or not len(candidates) or not len(images):
        given = " and ".join(str(tuple(x.shape)) for x in (candidates, images, held_out))
        raise InvalidInputError(f"candidates, images and held-out images are {given}; give (N, C, H, W) of one size")
    if not all(torch.isfinite(x).all() for x in (candidates, images, held_out)):
        raise NonFiniteError("candidates or images contain NaN or infinity; remove them before scoring")
    check_apart(images, held_out)


def check_apart(images: Tensor, held_out: Tensor) -> None:
    """Refuse held-out images that are training images too."""
    trained = {image.cpu().numpy().tobytes(): i for i, image in enumerate(images)}
    for j, image in enumerate(held_out.to(images)):
        if (i := trained.get(image.cpu().numpy().tobytes())) is not None:
            raise InvalidInputError(f"held-out image {j + 1} is also training image {i + 1}; hold out other images")


def _measure(images: Tensor, matched: Tensor, value_range: tuple[float, float]) -> dict[str, Tensor]:
    low, high = value_range
    result = {}
    for suffix, shown in (("", metrics.minmax(matched, low=low, high=high)), ("_as_is", matched)):
        result[f"ssim{suffix}"] = metrics.ssim(shown, images, data_range=high - low)
        result[f"l2{suffix}"] = metrics.l2(shown, images)
        result[f"psnr{suffix}"] = metrics.psnr(shown, images, data_range=high - low)
    return result


def _likeness(seen: Tensor, matched: Tensor) -> dict[str, Tensor]:
    """SSIM of standardised images: with the candidates, and with a blurred copy of each image itself."""
    target = metrics.standardise(seen)
    blur = metrics.gaussian_blur(seen, sigma=BLUR * min(seen.shape[-2:]))
    versions = {"likeness": matched, "blurred": blur}
    return {name: metrics.ssim(metrics.standardise(x), target, data_range=CONTRAST) for name, x in versions.items()}
