"""Given images told from held-out ones by their traces in the weights: the membership test and its result.

`traces` measures how much of each image the change of the weights holds. Held-out images of the same kind show what
images leave that were not trained on.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated

import torch
from scipy.stats import binom
from torch import Tensor, nn

from palimpsest.auditing.doubts import common_scales
from palimpsest.auditing.exchange import Scale, centred
from palimpsest.auditing.given import Given
from palimpsest.auditing.subject import Subject, Weights
from palimpsest.auditing.traces import Loss, Statistic, Traces, loss_trace, traces
from palimpsest.errors import InvalidInputError, NonFiniteError
from palimpsest.files.schema import Range
from palimpsest.scoring.rates import RATES, Rates, rates
from palimpsest.scoring.verdict import Outcome, judge

LEVEL = 0.01
LUCK = 0.05  # highest probability that chance names the number of images that were named
RETESTED = 200  # images of each kind that are tested at other scales, if nothing was found


@dataclass(frozen=True)
class MembershipOptions:
    """Options of a membership test."""

    level: Annotated[float, Range(above=0, most=0.5)] = LEVEL
    """The rate of false positives at which images are named."""
    statistic: Statistic | None = None
    """span: how much of the image a dense layer's change holds. gradients: works for any network. loss: the final
    weights fit the image. If omitted: the best that the material allows."""
    loss: Loss | None = None
    """The loss of the training: squared, logistic (one output) or cross_entropy. With the final weights alone, the loss
    of an image tells most. It needs classes: a sub-folder each, in --images and --held-out."""


@dataclass(frozen=True)
class Membership:
    """Which of the given images were trained on."""

    names: tuple[str, ...]
    """The names of the given images."""
    traces: Tensor
    """(n,) how much of each given image the weights hold."""
    held_out: Tensor
    """(m,) the same for held-out images."""
    rates: Rates
    level: float
    statistic: Statistic
    layer: str | None
    """The dense layer in whose change the images were found."""
    knowledge: str
    """The material that the test used."""
    doubt: str = ""
    """A sign that the mean or the standard deviation is wrong, as a clause; empty if there is none."""
    thinned: bool = False
    """Whether some images were left out, to save time."""

    @property
    def named(self) -> Tensor:
        """(n,) whether each given image is named as a training image, at ``level`` false positives."""
        return self.rates.at(self.level)

    @property
    def p_values(self) -> dict[str, float]:
        """The p-value of each given image, by its name."""
        return dict(zip(self.names, self.rates.p_values.tolist(), strict=True))

    @property
    def outcome(self) -> Outcome:
        return Outcome.NO_VERDICT if self.doubt else self.rates.verdict.outcome

    @property
    def sentence(self) -> str:
        """The result in two sentences."""
        n, verdict, α = len(self.names), self.rates.verdict, f"{100 * self.level:.3g} %"
        if verdict.auc is None or verdict.auc_interval is None:
            return f"No verdict: {n} given and {len(self.held_out)} held-out images are too few; give more."
        low, high = verdict.auc_interval
        auc = f"AUC of given against held-out images: {verdict.auc:.2f} ({low:.2f} to {high:.2f})."
        if not self.rates.resolves(self.level):
            found = (
                f"the given images leave {'larger' if self.outcome is Outcome.LEAKAGE else 'no larger'} traces than "
                f"held-out ones, but {len(self.held_out)} of these cannot resolve {α} false positives"
            )
        else:
            found = (
                f"{int(self.named.sum())} of {n} given images named as training images at {α} false positives, where "
                f"chance names {self.level * n:.2g}"
            )
        if self.doubt:
            return f"No verdict: {found}, but {self.doubt}. {auc}"
        start = "Membership shown" if self.outcome is Outcome.LEAKAGE else "No evidence of membership"
        if self.outcome is Outcome.LEAKAGE and binom.sf(int(self.named.sum()) - 1, n, self.level) > LUCK:
            start = "Membership shown as a whole"
        return f"{start}: {found}. {auc}"


def told_apart(
    examined: Subject, given: Given, others: Given, options: MembershipOptions, *, mean: Scale, std: Scale,
    device: torch.device | str, patience: float = math.inf,
) -> Membership:  # fmt: skip
    """The test itself. If nothing is found, it also tries other scales, unless that takes more than the patience."""
    model, loss, level = copy.deepcopy(examined.model).to(device), options.loss, options.level
    segments = [(_on(a, device), _on(b, device)) for a, b in segments_of(examined)]
    by_loss = options.statistic == "loss" or (options.statistic is None and loss is not None and not segments)

    def traced(x: Tensor, some: Given, rest: Given) -> Traces:
        if by_loss:
            return loss_trace(model, x, _labels(some, rest), loss, classes=len(rest.classes) or None)
        return traces(model, segments, x, statistic=options.statistic)

    began = time.monotonic()
    found = traced(seen(model, given, others, mean, std), given, others)
    seconds = time.monotonic() - began
    ours, theirs = found.values.cpu().split([len(given), len(others)])
    compared = rates(ours, theirs, at=tuple(dict.fromkeys([level, *RATES])))
    doubt = ""
    if compared.verdict.outcome is Outcome.NO_EVIDENCE and seconds * len(common_scales(given.images)) <= patience:
        doubt = _other_scale(given.thinned(RETESTED), others.thinned(RETESTED), model, traced)
    known = _knowledge(examined, found.statistic)
    return Membership(given.names, ours, theirs, compared, level, found.statistic, found.layer, known, doubt)


def segments_of(examined: Subject) -> tuple[tuple[Weights, Weights], ...]:
    """The changes of the weights that are known: of each segment, or of the whole training."""
    if examined.segments or examined.initial is None:
        return examined.segments
    return ((examined.initial, examined.model.state_dict()),)


def seen(model: nn.Module, given: Given, others: Given, mean: Scale, std: Scale) -> Tensor:
    """Given, then held-out images, as the network sees them."""
    return centred(given.images, others.images, mean, std).to(next(model.parameters()))


def _other_scale(
    given: Given, others: Given, model: nn.Module, traced: Callable[[Tensor, Given, Given], Traces]
) -> str:
    """A usual mean and deviation at which the given images do leave larger traces than held-out ones, as a clause.

    Each scale is one look at the same images, so the claim at one of them is corrected for all.
    """
    scales = common_scales(given.images)
    for name, (mean, std) in scales.items():
        with suppress(NonFiniteError):  # a scale that is far off
            values = traced(seen(model, given, others, mean, std), given, others).values.cpu()
            found = judge(*values.split([len(given), len(others)]), looks=len(scales))
            if found.outcome is Outcome.LEAKAGE:
                return f"the given images do leave larger traces with mean and deviation {name}; check --mean and --std"
    return ""


def _labels(given: Given, held_out: Given) -> Tensor:
    if given.labels is None or held_out.labels is None:
        raise InvalidInputError("the loss needs labels of the given and of the held-out images; give both")
    return torch.cat([given.labels, held_out.labels.to(given.labels)])


def _knowledge(examined: Subject, statistic: Statistic) -> str:
    if statistic == "loss":
        return "the final weights and the labels"
    if examined.segments:
        parts = len(examined.segments)
        return f"the weights before and after {'one part' if parts == 1 else f'each of {parts} parts'} of the training"
    return "the final weights" if examined.initial is None else "the initial and the final weights"


def _on(state: Mapping[str, Tensor], device: torch.device | str) -> dict[str, Tensor]:
    return {name: t.to(device) for name, t in state.items()}
