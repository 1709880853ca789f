"""How a trained network is read: by the recipe of its authors, and by ours."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

import palimpsest as pal
from palimpsest.datasets import DataSet
from palimpsest.objectives import Objective
from palimpsest.objectives.weighting import bulk_variance
from palimpsest.solver.reconstruction import Reconstruction
from published.raw import LazyAdam, RawUnits, Sharpening
from published.recipes import KKTRun, LooRun, Precision, Setting
from published.training import Trained, dtype_of


@dataclass(frozen=True)
class KKTPenalty(pal.priors.Prior):
    """Σ relu(x − 1)² + Σ relu(−1 − x)² + 5 Σ relu(λ_min − λ)², summed over candidates; without λ_min no third sum."""

    least: float | None

    def value(self, images: Tensor, multipliers: Tensor) -> Tensor:
        outside = torch.relu(images.abs() - 1).square().sum()
        return outside if self.least is None else outside + 5 * torch.relu(self.least - multipliers).square().sum()

    def gradients(self, images: Tensor, multipliers: Tensor) -> tuple[Tensor, Tensor]:
        dx = 2 * (torch.relu(images - 1) - torch.relu(-1 - images))
        if self.least is None:
            return dx, torch.zeros_like(multipliers)
        return dx, -10 * torch.relu(self.least - multipliers)


@dataclass(frozen=True, kw_only=True)
class BoxOfAll(pal.priors.Box):
    """weight · k · mean over pixels of the squared distance from the box, for the present number k of candidates."""

    def value(self, images: Tensor, multipliers: Tensor) -> Tensor:
        return len(images) * super().value(images, multipliers)

    def gradients(self, images: Tensor, multipliers: Tensor) -> tuple[Tensor, Tensor]:
        dx, dλ = super().gradients(images, multipliers)
        return len(images) * dx, dλ


# --- by the authors' recipe -----------------------------------------------------------------------


def published(
    setting: Setting,
    run: KKTRun | LooRun,
    network: Trained,
    data: DataSet,
    *,
    precision: Precision,
    seed: int,
    checkpoint: Path | None = None,
    exact_forward: bool = True,
    **changes: Any,
) -> Reconstruction:
    """One published run, number by number. ``changes`` replace options of `pal.reconstruct`."""
    network = cast(network, precision)
    if isinstance(run, LooRun):
        objective, options = _loo(setting, run, network, data)
    else:
        objective, options = _kkt(setting, run, network)
        objective = objective.with_exact_forward() if exact_forward else objective
    options |= {"schedule": "constant", "candidates": setting.candidates, "steps": setting.steps, "seed": seed}
    return pal.reconstruct(
        objective,
        image_shape=data.image_shape,
        execution=pal.Execution(tf32=precision == "tf32"),
        checkpoint=checkpoint,
        progress=False,
        **options | changes,
    )


def kkt_objective(setting: Setting, network: Trained, **options: Any) -> Objective:
    """The KKT method for this setting, which knows the final weights alone."""
    if setting.loss == "cross_entropy":
        return pal.MulticlassKKT(network.model, **options)
    return pal.KKT(network.model, signed=setting.loss == "squared", **options)


def _kkt(setting: Setting, run: KKTRun, network: Trained) -> tuple[Objective, dict[str, Any]]:
    """Σ_p ‖θ_p − (1/k) Σ_i λ_i ∇_p φ(x_i)‖² with exact ReLUs whose derivative is σ(αz)."""
    draw: Literal["uniform", "normal"] = "normal" if run.least is None else "uniform"
    return kkt_objective(setting, network), {
        "optimiser": pal.optimisers.SGD(learning_rate=run.rate, momentum=0.9),
        "units": RawUnits(pixels=run.scale, multipliers=draw, multiplier_rate=run.multiplier_rate),
        "sharpness": (run.alpha, run.alpha),
        "priors": KKTPenalty(run.least),
    }


def _loo(setting: Setting, run: LooRun, network: Trained, data: DataSet) -> tuple[Objective, dict[str, Any]]:
    """‖θ − θ_0 − (1/k) Σ_i λ_i ∇Φ(θ, x_i)‖² + 0.1 k · mean(distance from the box)²."""
    return pal.NTK(network.model, network.initial, at=1.0), {
        "optimiser": LazyAdam(learning_rate=run.rate),
        "units": RawUnits(pixels=run.scale, multipliers="centred"),
        "sharpness": Sharpening(steps=setting.steps),
        "priors": BoxOfAll.around(data.mean, weight=run.box),
    }


def cast(network: Trained, precision: Precision) -> Trained:
    """The same weights in the precision of a reconstruction."""
    dtype = dtype_of(precision)
    model = copy.deepcopy(network.model).to(dtype)
    return replace(network, model=model, initial={name: t.to(dtype) for name, t in network.initial.items()})


# --- by our recipe --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Options of `pal.reconstruct` for a reader of ours."""

    steps: float = 1.0
    """Relative to the setting's `own_steps`."""
    candidates: float = 1.0
    """Relative to those of one published run."""
    total_variation: float = 1.0
    prior_strength: tuple[float, float] = (1.0, 0.1)
    rate: float = 0.02
    within_span: bool = False
    """Search the span of the images, as the final weights alone show it; see `image_space`."""
    at: tuple[float, ...] = (0.1, 0.5, 0.9)
    whitening: float = 0.0
    to_end: bool = True
    """Whether a path goes on from its last checkpoint to the final weights."""

    def options(self, setting: Setting) -> dict[str, Any]:
        return {
            "candidates": round(self.candidates * setting.candidates),
            "steps": round(self.steps * setting.own_steps),
            "optimiser": pal.optimisers.Adam(learning_rate=self.rate),
            "priors": (pal.priors.Box(), pal.priors.TotalVariation(weight=self.total_variation)),
            "prior_strength": self.prior_strength,
        }


SPAN = Recipe(within_span=True, whitening=0.5)
OURS = {
    "haim-cifar10": SPAN,
    "haim-mnist": SPAN,
    "buzaglo-cifar10": SPAN,
    "buzaglo-regression": SPAN,
}
WITH_INITIAL = {  # as in the experiments of this repository with the same number of images
    "haim-cifar10": Recipe(total_variation=2.0),
    "haim-mnist": Recipe(total_variation=2.0),
    "buzaglo-cifar10": Recipe(total_variation=2.0),
    "loo-cifar10-100": Recipe(prior_strength=(1.0, 0.01), whitening=0.7),
    "loo-cifar10-200": Recipe(prior_strength=(1.0, 0.03), whitening=0.7),
}
ON_SEGMENTS = Recipe(total_variation=2.0, at=(0.5,))  # one tangent point on each segment
LATE = (5_000, 30_000, 200_000)
WHILE_THE_LOSS_FALLS = (100, 200, 300, 400, 500, 600, 800, 1_000)
EARLY = Recipe(total_variation=2.0, to_end=False)
WITH_CHECKPOINTS = {  # columns: the steps after which they know the weights, the recipe, and the settings, () for all
    "with-checkpoints": (LATE, ON_SEGMENTS, ()),
    "with-early-checkpoints": (WHILE_THE_LOSS_FALLS, EARLY, ("haim-cifar10", "haim-mnist")),
}
TRIALS = {  # tried on the tuning seed alone
    "ours": SPAN,
    "ours-everywhere": Recipe(),
    "ours-white-0": replace(SPAN, whitening=0.0),
    "ours-white-0.3": replace(SPAN, whitening=0.3),
    "ours-white-0.7": replace(SPAN, whitening=0.7),
    "ours-flat-prior": replace(SPAN, prior_strength=(1.0, 1.0)),
    "ours-weak-prior": replace(SPAN, total_variation=0.3),
    "ours-strong-prior": replace(SPAN, total_variation=3.0),
    "ours-more": replace(SPAN, steps=2.0, candidates=2.0),
    "ours-more-flat-prior": replace(SPAN, steps=2.0, candidates=2.0, prior_strength=(1.0, 1.0)),
}


def ours(setting: Setting, network: Trained, data: DataSet, recipe: Recipe, *, seed: int) -> Reconstruction:
    """The KKT method with automatic weights. It is given the final weights, and nothing about the initial ones."""
    network = cast(network, "tf32")
    objective = kkt_objective(setting, network, weights="auto")
    space = image_space(network.model) if recipe.within_span else None
    objective.whitening = recipe.whitening if space else 0.0
    return pal.reconstruct(
        objective,
        image_shape=data.image_shape,
        within=space,
        seed=seed,
        progress=False,
        **recipe.options(setting),
    )


def image_space(model: nn.Module) -> pal.Subspace:
    """What the final weights alone show of the span of the training images.

    The rows of (W_1, b_1) are combinations of the (x_i, 1), plus the initial values. Random values of variance v have
    singular values up to √v (√m + √d); those beyond belong to the images.
    """
    W, b = (p.detach().double() for p in list(model.parameters())[:2])
    _, σ, V = torch.linalg.svd(torch.cat([W, b[:, None]], 1), full_matrices=False)
    noise = bulk_variance({"W": W})["W"] ** 0.5 * sum(side**0.5 for side in W.shape)
    n = max(2, int((σ > noise).sum()))
    rows, last = V[:n], V[:n, -1]
    flat = torch.linalg.svd(last[None])[2][1:]  # combinations of the rows whose last entry vanishes
    offset = (last @ rows / last.square().sum())[:-1]
    return pal.Subspace(offset, (flat @ rows)[:, :-1])


def with_initial(
    setting: Setting,
    network: Trained,
    data: DataSet,
    recipe: Recipe,
    *,
    seed: int,
    checkpoints: Sequence[dict[str, Tensor]] = (),
) -> Reconstruction:
    """The NTK method on each segment between the initial weights, the checkpoints and, with ``to_end``, the final ones.

    It searches the span of the images.
    """
    if checkpoints and not recipe.to_end:
        model = copy.deepcopy(network.model)
        model.load_state_dict(checkpoints[-1])
        network, checkpoints = replace(network, model=model), checkpoints[:-1]
    found = pal.span(network.model, [network.initial, *checkpoints, network.model.state_dict()])
    network = cast(network, "tf32")
    states = [{name: t.float() for name, t in state.items()} for state in (network.initial, *checkpoints)]
    whitening = recipe.whitening if found.subspace else 0.0
    return pal.reconstruct(
        pal.Path(
            network.model,
            [*states, network.model.state_dict()],
            at=recipe.at,
            shrinkage=found.shrinkages,
            whitening=whitening,
        ),
        image_shape=data.image_shape,
        within=found.subspace,
        seed=seed,
        progress=False,
        **recipe.options(setting),
    )
