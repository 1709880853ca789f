"""Whether a candidate shows a training image: the question that the probabilities of an audit answer.

A candidate shows an image if its SSIM is at least `LEAST`, and `CLEARLY` higher than with any of as many images that
were not trained on. A search of the span finds mixtures of the training images even in noise, and a mixture resembles
its parts. There the SSIM must also exceed that of most random mixtures.
"""

import torch
from torch import Tensor

from palimpsest.scoring.metrics import minmax, ssim

LEAST = 0.4  # the SSIM from which the literature counts an image
CLEARLY = 0.1
MIXTURES, MOST = 200, 0.95  # random mixtures, and the share of them that a candidate must exceed


def shows(candidates: Tensor, members: Tensor, others: Tensor, *, within: str) -> Tensor:
    """Which candidates show one of the members. All images are as the network sees them."""
    least = max(LEAST, by_mixture(members)) if within == "span" else LEAST
    member, other = likeness(candidates, members), likeness(candidates, others)
    return (member >= least) & (member > other + CLEARLY)


def likeness(candidates: Tensor, images: Tensor) -> Tensor:
    """The highest SSIM of each candidate with one of the images.

    All are stretched to the same range. Weights do not determine contrast, because a candidate of twice the contrast
    with half the multiplier explains as much.
    """
    if len(candidates) == 0:
        return torch.zeros(0, dtype=torch.double)
    x, images = minmax(candidates.double()), minmax(images.double())
    return torch.stack([ssim(x, image.expand_as(x)) for image in images]).amax(0)


def by_mixture(images: Tensor) -> float:
    """The SSIM that most random mixtures Σ_i c_i x_i, c ~ N(0, 1), reach with none of the images x_i."""
    c = torch.randn(MIXTURES, len(images), generator=torch.Generator().manual_seed(0))
    mixtures = torch.einsum("ki,ichw->kchw", c.to(images), images)
    return float(likeness(mixtures, images).quantile(MOST))
