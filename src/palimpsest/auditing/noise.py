"""How much noise must be added to weights before nothing can be read out of them?"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from palimpsest.auditing.truth import Truth
from palimpsest.methods import NTK
from palimpsest.solver.reconstruction import reconstruct


@dataclass(frozen=True)
class Recovery:
    """The result at one level of noise: number of recovered images, mean SSIM, and remaining accuracy."""

    level: float
    recovered: int
    ssim: float
    accuracy: float


def noisy(
    final: Mapping[str, Tensor], initial: Mapping[str, Tensor], level: float, *, seed: int = 0
) -> dict[str, Tensor]:
    """θ_p + level · rms(θ_p − θ_{0,p}) · N(0, 1) for each tensor p: noise in units of the change by training.

    >>> final, initial = {"w": torch.ones(2000)}, {"w": torch.zeros(2000)}
    >>> round(float((noisy(final, initial, 0.5)["w"] - 1).std()), 1)
    0.5
    """
    generator = torch.Generator().manual_seed(seed)
    result = {name: θ.clone() for name, θ in final.items()}
    for name, θ in final.items():
        if θ.is_floating_point():
            size = (θ - initial[name].to(θ)).square().mean().sqrt()
            result[name] = θ + level * size * torch.randn(θ.shape, generator=generator).to(θ)
    return result


def recovery_under_noise(
    model: nn.Module,
    initial: Mapping[str, Tensor],
    truth: Truth,
    *,
    levels: Sequence[float] = (0.0, 0.1, 0.3, 1.0),
    candidates: int | None = None,
    steps: int = 1500,
    seed: int = 0,
    **settings: Any,
) -> list[Recovery]:
    """Add more and more noise to the weights, read them by the NTK method, and score each result.

    Args:
        model: the trained network, with one output. Its weights are the same afterwards.
        initial: its weights before training.
        truth: training and held-out images.
        levels: the levels of noise, relative to the change of each tensor during training.
        candidates: the number of candidates. None is twice the number of images.
        steps: the number of gradient steps at each level.
        seed: the seed of the noise and of the candidates.
        **settings: further arguments of `pal.reconstruct`.

    Returns:
        For each level: ``level``, ``recovered``, ``ssim`` and ``accuracy``.

    Examples:
        >>> import palimpsest as pal
        >>> data = pal.datasets.load("digits", per_class=2, seed=0)
        >>> _ = torch.manual_seed(0)
        >>> fit = pal.train(pal.networks.MLP((1, 8, 8), (20,)), data.train.images - 0.5, data.train.labels, steps=50)
        >>> truth = Truth(data.train.images, (data.train.labels > 0).long(), data.held_out.images, mean=0.5)
        >>> found = recovery_under_noise(fit.model, fit.initial, truth, levels=(0.0, 1.0), steps=5, progress=False)
        >>> [each.level for each in found]
        [0.0, 1.0]
    """
    final = {name: θ.detach().clone() for name, θ in model.state_dict().items()}
    settings |= {"image_shape": tuple(truth.images.shape[1:]), "candidates": candidates or 2 * len(truth.images)}
    recoveries = []
    try:
        for level in levels:
            model.load_state_dict(noisy(final, initial, level, seed=seed))
            rec = reconstruct(NTK(model, initial, weights="auto"), steps=steps, seed=seed, **settings)
            score = truth.score(rec.images)
            with torch.no_grad():
                outputs = model(truth.seen.to(rec.images)).flatten().cpu()
            accuracy = float((outputs * truth.labels_for(1) > 0).double().mean())
            recoveries.append(Recovery(level, score.verdict.recovered, float(score.ssim.mean()), accuracy))
    finally:
        model.load_state_dict(final)
    return recoveries
