"""The peers' own measures, beside `pal.score`. They match every training image, however unlike, and know no control.

- Haim et al. and Buzaglo et al.: the nearest candidate of each image by normalised cross-correlation, channel by
  channel, at half resolution for CIFAR-10. Several images may share a candidate. Candidate plus mean is stretched to
  [0, 1] by its own least and largest value. SSIM has a window of three pixels (kornia: Gaussian, σ = 1.5, reflected).
- Loo et al.: pairs in the order of their Euclidean distance, each image and each candidate used once.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

BEST = 25  # images that the figures of the literature show
Measured = dict[str, Tensor]


def haim(candidates: Tensor, images: Tensor, mean: Tensor, *, half: bool) -> Measured:
    """SSIM and L2 of each image with its nearest candidate. ``images`` contain the mean, candidates do not."""
    x, y = candidates.double(), images.to(candidates.device).double()
    shift = mean.to(x)
    index = _nearest(_searched(x, half), _searched(y - shift, half))
    shown = _stretched(x[index] + shift)
    return {"ssim": ssim(shown, y).cpu(), "l2": (shown - y).flatten(1).norm(dim=1).cpu()}


def loo(candidates: Tensor, images: Tensor, mean: Tensor) -> Measured:
    """L2 and SSIM of the pairs of a greedy matching by L2, clipped to [0, 1] for SSIM alone."""
    x, y = candidates.double(), images.to(candidates.device).double()
    x = x + mean.to(x)
    index, distance = greedy(torch.cdist(y.flatten(1), x.flatten(1)).cpu())
    return {"ssim": ssim(x[index.to(x.device)].clamp(0, 1), y).cpu(), "l2": distance}


def greedy(distance: Tensor) -> tuple[Tensor, Tensor]:
    """The candidate of each image and its distance; the nearest pair goes first, and each candidate goes once.

    >>> greedy(torch.tensor([[1.0, 2.0], [0.5, 9.0]]))
    (tensor([1, 0]), tensor([2.0000, 0.5000]))
    """
    left, rows, columns = distance.clone(), *distance.shape
    index, found = torch.zeros(rows, dtype=torch.long), torch.full((rows,), torch.inf).to(distance)
    for _ in range(min(rows, columns)):
        i, j = divmod(int(left.argmin()), columns)
        index[i], found[i] = j, distance[i, j]
        left[i], left[:, j] = torch.inf, torch.inf
    return index, found


def ssim(a: Tensor, b: Tensor) -> Tensor:
    """Mean SSIM (n,) of images in [0, 1]."""
    return ssim_map(a, b).flatten(1).mean(1)


def ssim_map(a: Tensor, b: Tensor) -> Tensor:
    """SSIM at each pixel, with a Gaussian window of 3 pixels, σ = 1.5, reflected at the edges."""
    tap = torch.exp(torch.tensor([-1.0, 0.0, -1.0], dtype=torch.float64) / (2 * 1.5**2))
    kernel = (torch.outer(tap, tap) / tap.sum() ** 2).to(a).expand(a.shape[1], 1, 3, 3)

    def blur(x: Tensor) -> Tensor:
        return F.conv2d(F.pad(x, (1, 1, 1, 1), mode="reflect"), kernel, groups=x.shape[1])

    μa, μb = blur(a), blur(b)
    va, vb, covariance = blur(a * a) - μa**2, blur(b * b) - μb**2, blur(a * b) - μa * μb
    c1, c2 = 0.01**2, 0.03**2
    return (2 * μa * μb + c1) * (2 * covariance + c2) / ((μa**2 + μb**2 + c1) * (va + vb + c2) + 1e-12)


def improved(before: Tensor, after: Tensor, *, larger_is_better: bool, best: int = BEST) -> int:
    """Of the best images by the better of two runs, how many are better after than before.

    >>> improved(torch.tensor([0.1, 0.5, 0.9]), torch.tensor([0.2, 0.4, 0.95]), larger_is_better=True, best=2)
    1
    """
    sign = 1 if larger_is_better else -1
    before, after = sign * before, sign * after
    chosen = torch.maximum(before, after).argsort(descending=True)[:best]
    return int((after > before)[chosen].sum())


def _searched(images: Tensor, half: bool) -> Tensor:
    """What distances are measured on: each channel standardised."""
    if half:
        images = F.interpolate(images, scale_factor=0.5, mode="bicubic", align_corners=False)
    mean, std = images.mean((2, 3), keepdim=True), images.std((2, 3), keepdim=True)
    return ((images - mean) / std).flatten(1)


def _nearest(candidates: Tensor, images: Tensor) -> Tensor:
    return torch.cdist(images, candidates).argmin(1)


def _stretched(x: Tensor) -> Tensor:
    low, high = x.flatten(1).amin(1), x.flatten(1).amax(1)
    return (x - low.view(-1, 1, 1, 1)) / (high - low).view(-1, 1, 1, 1)
