"""Measures of how alike two images are, each a pure function of batches ``(N, C, H, W)``.

All are computed in double precision, because the variances inside SSIM are small differences of large numbers.
"""

import math

import torch
from torch import Tensor

from palimpsest.errors import InvalidInputError

WINDOW = 11
SIGMA = 1.5
K1, K2 = 0.01, 0.03  # the constants of Wang et al. (2004)


def l2(a: Tensor, b: Tensor) -> Tensor:
    """‖a_i − b_i‖ for each pair.

    Examples:
        >>> l2(torch.zeros(2, 1, 2, 2), torch.ones(2, 1, 2, 2))
        tensor([2., 2.], dtype=torch.float64)
    """
    _check(a, b)
    return (a.double() - b.double()).flatten(1).norm(dim=1)


def psnr(a: Tensor, b: Tensor, *, data_range: float = 1.0) -> Tensor:
    """Peak signal-to-noise ratio 10 log₁₀(R²/mean (a − b)²) in dB for each pair. It is infinite if they are equal.

    Examples:
        >>> psnr(torch.zeros(1, 1, 2, 2), torch.full((1, 1, 2, 2), 0.1))
        tensor([20.0000], dtype=torch.float64)
    """
    _check(a, b)
    return 10 * torch.log10(data_range**2 / (a.double() - b.double()).square().flatten(1).mean(1))


def pairwise_ncc(a: Tensor, b: Tensor) -> Tensor:
    """Normalised cross-correlation of each a_i with each b_j: the cosine after subtracting each image's mean.

    The row or column of a constant image is 0.
    """
    _check(a, b, paired=False)
    return _standardise(a) @ _standardise(b).T


def ssim(a: Tensor, b: Tensor, *, data_range: float = 1.0) -> Tensor:
    """Structural similarity of each pair, mean over channels and positions.

    With Gaussian-weighted local means μ, variances σ² and covariance σ_ab over an 11×11 window with σ = 1.5,

        SSIM = (2μ_aμ_b + c₁)(2σ_ab + c₂) / ((μ_a² + μ_b² + c₁)(σ_a² + σ_b² + c₂)),   c_i = (K_i · data_range)².

    Positions count if the whole window lies inside the image. For images smaller than the window, it shrinks to the
    largest odd size that fits. The variances are those of the window, without n/(n − 1).

    Examples:
        >>> x = torch.rand(2, 3, 16, 16)
        >>> ssim(x, x)
        tensor([1., 1.], dtype=torch.float64)
    """
    _check(a, b)
    a, b = a.double(), b.double()
    c1, c2 = (K1 * data_range) ** 2, (K2 * data_range) ** 2
    μa, μb = _blur(a), _blur(b)
    va, vb, covariance = _blur(a * a) - μa**2, _blur(b * b) - μb**2, _blur(a * b) - μa * μb
    map_ = (2 * μa * μb + c1) * (2 * covariance + c2) / ((μa**2 + μb**2 + c1) * (va + vb + c2))
    return map_.mean((-3, -2, -1))


def minmax(images: Tensor, *, low: float = 0.0, high: float = 1.0) -> Tensor:
    """Each image scaled so that its least value is ``low`` and its largest ``high``; constant ones become ``low``.

    Examples:
        >>> minmax(torch.tensor([[[[1.0, 3.0]]]]))
        tensor([[[[0., 1.]]]])
    """
    least, largest = images.flatten(1).aminmax(dim=1)
    shape = (-1,) + (1,) * (images.ndim - 1)
    span = (largest - least).clamp_min(torch.finfo(images.dtype).tiny)
    return low + (high - low) * ((images - least.view(shape)) / span.view(shape))


def standardise(images: Tensor) -> Tensor:
    """Each image with every channel centred, scaled to mean square 1; an image of constant channels becomes 0.

    >>> x = torch.rand(2, 3, 8, 8).double()
    >>> torch.allclose(standardise(x), standardise(5 * x + torch.rand(2, 3, 1, 1)))
    True
    """
    centred = images - images.mean((2, 3), keepdim=True)
    size = centred.square().mean((1, 2, 3), keepdim=True).sqrt()
    flat = size <= 1e-12
    return torch.where(flat, 0.0, centred / size.masked_fill(flat, 1.0))


def gaussian_blur(images: Tensor, *, sigma: float) -> Tensor:
    """Each image blurred by a Gaussian of that width; the weights inside the image sum to 1."""
    vertical, horizontal = (_gaussian(n, n, sigma, images) for n in images.shape[-2:])
    return vertical @ images @ horizontal.T


def _blur(x: Tensor) -> Tensor:
    """Gaussian-weighted mean over each window inside the image, as a product of small matrices."""
    window = min(WINDOW, *(n - 1 + n % 2 for n in x.shape[-2:]))
    vertical, horizontal = (_gaussian(n - window + 1, n, SIGMA, x) for n in x.shape[-2:])
    return vertical @ x @ horizontal.T


def _gaussian(rows: int, columns: int, sigma: float, like: Tensor) -> Tensor:
    """Row i has Gaussian weights around column i + (columns − rows)/2, limited to a band if rows are fewer."""
    offset = (columns - rows) / 2
    i, j = torch.arange(rows).double()[:, None], torch.arange(columns).double()
    distance = (j - i - offset).abs()
    weights = torch.exp(-(distance**2) / (2 * sigma**2))
    if rows < columns:
        weights = weights.masked_fill(distance > offset, 0)
    return (weights / weights.sum(1, keepdim=True)).to(like)


def _standardise(x: Tensor) -> Tensor:
    x = x.double().flatten(1)
    x = x - x.mean(1, keepdim=True)
    norm = x.norm(dim=1, keepdim=True)
    flat = norm <= 1e-12 * math.sqrt(x.shape[1])
    return torch.where(flat, 0.0, x / norm.masked_fill(flat, 1.0))


def _check(a: Tensor, b: Tensor, *, paired: bool = True) -> None:
    if a.ndim != 4 or b.ndim != 4 or a.shape[1:] != b.shape[1:] or (paired and len(a) != len(b)):
        raise InvalidInputError(
            f"images of shapes {tuple(a.shape)} and {tuple(b.shape)} do not match; give (N, C, H, W) of the same size"
        )
