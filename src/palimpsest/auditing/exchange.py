"""Given and held-out images, treated alike: a comparison of the two tells training images only if nothing else differs.

A mean image holds a part of every image behind it. Centred by the mean of the given images, these differ from held-out
ones in every network, trained on them or not. The mean of all images together does not favour either side.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Scale = Tensor | float


def centred(given: Tensor, held_out: Tensor, mean: Scale, std: Scale) -> Tensor:
    """Given, then held-out images, as the network sees them, by a mean and deviation that do not favour the given."""
    mean, std = fair(given, held_out, mean, std)
    return (torch.cat([given, held_out.to(given)]) - mean) / std


def fair(given: Tensor, held_out: Tensor, mean: Scale, std: Scale) -> tuple[Scale, Scale]:
    """The mean and the deviation, or those of all images together if they are those of the given ones."""
    images = torch.cat([given, held_out.to(given)])
    return (
        _neutral(mean, images, len(given), lambda x: x.mean(0)),
        _neutral(std, images, len(given), lambda x: x.std(0).clamp_min(1e-6)),
    )


def _neutral(value: Scale, images: Tensor, n: int, statistic: Callable[[Tensor], Tensor]) -> Scale:
    """The statistic of all images, if the value is an image and closer to that of the first n of them."""
    if n == len(images) or min(n, len(images) - n) < 2:
        return value
    v = torch.as_tensor(value).to(images).expand(images.shape[1:])
    if torch.equal(v, v[:, :1, :1].expand_as(v)):  # a number for each channel holds next to nothing of an image
        return value
    own, other, joint = statistic(images[:n]), statistic(images[n:]), statistic(images)
    way = own - other
    share = float(((v - other) * way).sum() / way.square().sum().clamp_min(1e-300))  # 1 is the given images' own,
    fair = float(((joint - other) * way).sum() / way.square().sum().clamp_min(1e-300))  # and this is fair
    return joint if share > (1 + fair) / 2 else value


def chosen(n: int, most: int) -> Tensor:
    """At most this number of n rows, at random: in a fixed order, classes that take turns would be left out."""
    return torch.randperm(n, generator=torch.Generator().manual_seed(0))[:most].sort().values
