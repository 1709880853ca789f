"""The facts that are known before the reconstruction: number of images, limits, and the method that fits."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.modules.conv import _ConvNd

from palimpsest.auditing.normalisation import live_layers
from palimpsest.auditing.relation import relation
from palimpsest.auditing.subject import Subject
from palimpsest.errors import InvalidInputError
from palimpsest.objectives.binding import parameters_of
from palimpsest.objectives.weighting import bulk_variance
from palimpsest.runs.journal import note
from palimpsest.runs.problems import as_change
from palimpsest.span import Span, first_dense_layer, span

EDGE_MARGIN = 1.1  # factor by which noise may exceed its theoretical edge
SIZEABLE = 0.01  # of the largest singular value: a reconstruction can use directions of this size


@dataclass(frozen=True)
class Preflight:
    """The facts that are known before anything is reconstructed. None means unknown."""

    parameters: int
    """The number of trained parameters, which is the number of equations."""
    pixels: int
    """The number of unknowns of one image."""
    outputs: int
    related: bool | None
    """Whether the initial weights belong to this training."""
    correlation: float | None
    """The correlation of initial and final weights, over all weight matrices."""
    moved: float | None
    """‖θ − θ_0‖ / ‖θ_0‖."""
    samples: int | None
    """The number of training images, if the change of the first layer shows it."""
    span_reason: str
    bound: int | None
    """The number of directions of image space in the first layer. No method can read more images there."""
    beyond_noise: float | None
    """The share of the first layer's energy that exceeds the noise of an initialisation."""
    still_units: int
    """The number of units that training did not change. If that is unknown, the number with zero weights."""
    units: int
    unusable: str = ""
    """Why the start of training cannot be used; empty if it can."""
    live_layers: int = 0
    """The number of batch normalisations that used the statistics of each batch in training."""
    convolutional: bool = False
    """Whether the network has convolutions."""

    def images_determined(self, segments: int) -> int:
        """The number of images that the equations of all segments could determine, by count alone."""
        return segments * self.parameters // (self.pixels + segments)


def check_start(subject: Subject) -> None:
    """Refuse initial weights that equal the final ones: training changed nothing, or one of the files is wrong."""
    θ, θ_0 = parameters_of(subject.model), subject.initial
    if θ and θ_0 is not None and all(torch.equal(t, θ_0[name].to(t)) for name, t in θ.items()):
        raise InvalidInputError("the initial weights equal the final ones; check the files --initial and --weights")


def preflight(subject: Subject) -> Preflight:
    """Examine a network before the audit reads it. This takes seconds at most.

    Args:
        subject: the network and its weights, from `pal.auditing.subject`.

    Examples:
        >>> from palimpsest.auditing.subject import subject
        >>> from palimpsest.networks import MLP
        >>> examined = subject(lambda: MLP((1, 4, 4), (3,)), MLP((1, 4, 4), (3,)).state_dict(), image_shape=(1, 4, 4))
        >>> found = preflight(examined)
        >>> found.parameters, found.pixels
        (54, 16)
    """
    for remark in subject.remarks:
        note(remark)
    θ = parameters_of(subject.model)
    if not θ:
        raise InvalidInputError("no parameter of the network is trainable; set requires_grad on the trained ones")
    ends = [*subject.segments]
    if not ends and subject.initial is not None:
        ends = [(subject.initial, θ)]
    pairs = [({name: a[name].to(t) for name, t in θ.items()}, {name: b[name] for name in θ}) for a, b in ends]
    θ_0, θ_m = (pairs[0][0], pairs[-1][1]) if pairs else (None, θ)
    correlation, related = (None, None) if θ_0 is None else relation(θ_m, θ_0)
    moved = None if θ_0 is None else _norm({name: θ_m[name] - θ_0[name] for name in θ}) / max(_norm(θ_0), 1e-300)
    known_start = bool(related and moved)
    changes = [{name: b[name] - a[name] for name in θ} for a, b in pairs] if known_start else [θ]
    matrices = [name for name in θ if θ[name].ndim > 1]
    T = {name: torch.cat([change[name] for change in changes]) for name in matrices}  # one below the other
    unusable = _unusable_start(related, moved)
    first, span_found = _first_layer(subject, θ, known_start=known_start)
    return Preflight(
        parameters=sum(t.numel() for t in θ.values()),
        pixels=math.prod(subject.image_shape),
        outputs=subject.outputs,
        related=related,
        correlation=correlation,
        moved=moved,
        samples=None if span_found is None else trusted(span_found),
        span_reason=_span_reason(first, unusable, span_found),
        bound=None if first is None else _bound(T[first], noisy=not known_start),
        beyond_noise=None if first is None or known_start else _beyond_noise(θ[first]),
        still_units=sum(_still(t, len(changes)) for t in T.values()),
        units=sum(len(θ[name]) for name in matrices),
        unusable=unusable,
        live_layers=live_layers(subject),
        convolutional=any(isinstance(each, _ConvNd) for each in subject.model.modules()),
    )


def images_of_start(subject: Subject) -> int | None:
    """The number of images behind the change since the start alone, without weights on the way."""
    if subject.initial is None or not first_dense_layer(subject.model, subject.image_shape):
        return None
    return trusted(span(subject.model, subject.initial, image_shape=subject.image_shape))


def images_of_moment(subject: Subject) -> int | None:
    """The number of images behind the optimiser's moment, if the first layer shows it."""
    names, moment = first_dense_layer(subject.model, subject.image_shape), subject.moment or {}
    if not names or not set(names) <= set(moment):
        return None
    return trusted(span(subject.model, as_change(moment), image_shape=subject.image_shape))


def _still(T: Tensor, segments: int) -> int:
    """The number of units that no segment changed."""
    return int((T.view(segments, len(T) // segments, -1) == 0).all(2).all(0).sum())


def _unusable_start(related: bool | None, moved: float | None) -> str:
    """Why the start of training cannot be used; empty if it can."""
    if related is None:
        return "the weights before training are unknown"
    if not moved:
        return "the weights never moved"
    return "" if related else "the initial and the final weights are unrelated: of two trainings, or moved too far"


def _norm(θ: Mapping[str, Tensor]) -> float:
    return math.sqrt(sum(float(t.double().square().sum()) for t in θ.values()))


def _first_layer(subject: Subject, θ: Mapping[str, Tensor], *, known_start: bool) -> tuple[str | None, Span | None]:
    """The weights of the trained dense layer that sees whole images, and the span of its change."""
    names = first_dense_layer(subject.model, subject.image_shape)
    if not names or names[0] not in θ:
        return None, None
    ends = subject.segments or subject.initial
    if not known_start or ends is None:
        return names[0], None
    return names[0], span(subject.model, ends, image_shape=subject.image_shape)


def _span_reason(first: str | None, unusable: str, found: Span | None) -> str:
    if first is None:
        return "no trained dense layer sees whole images, so its change does not count them"
    if found is None or trusted(found) == found.samples:
        return unusable if found is None else found.reason
    return f"{found.reason}, but the layer could hardly show more, so they may not be the images"


def trusted(found: Span) -> int | None:
    """The number of images, if it is well below the number that the layer could show.

    Adam moves a layer in every direction that it has. A layer with dead units or constant pixels then has a gap, too,
    but at its own limit.
    """
    if found.samples is None or found.samples > found.limit / 2:
        return None
    return found.samples


def _bound(T: Tensor, *, noisy: bool) -> int:
    """The number of sizeable singular values. If T still contains its start, they must also exceed that noise."""
    σ = torch.linalg.svdvals(T.double())
    least = max(SIZEABLE * float(σ[0]), _edge(T) if noisy else 0.0)
    return int((σ > least).sum())


def _beyond_noise(W: Tensor) -> float:
    """Share of ‖W‖² in singular values that exceed those of an initialisation."""
    σ = torch.linalg.svdvals(W.double())
    return float((σ[σ > _edge(W)] ** 2).sum() / (σ**2).sum().clamp_min(1e-300))


def _edge(W: Tensor) -> float:
    """√v(√m + √n), the largest singular value of noise (Marchenko and Pastur), with v from the bulk and a margin."""
    return EDGE_MARGIN * math.sqrt(bulk_variance({"W": W})["W"]) * sum(math.sqrt(side) for side in W.shape)
