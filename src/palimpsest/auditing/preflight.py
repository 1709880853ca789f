"""What the weights say before anything is read out of them: what a method may hope for, and which one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from palimpsest.auditing.subject import Subject
from palimpsest.errors import InvalidInputError
from palimpsest.objectives.base import parameters_of
from palimpsest.objectives.weighting import bulk_variance
from palimpsest.runs.journal import note
from palimpsest.span import Span, first_dense_layer, span

Method = Literal["ntk", "kkt", "kkt-signed", "multiclass"]
SIGMAS = 6.0  # a correlation this many standard errors from zero is no accident
ROOM = 1.1  # by which noise may exceed its edge
NEVER_MOVED = "the initial weights equal the trained ones: nothing was trained, or one of the two files is wrong"
SIZEABLE = 0.01  # of the largest singular value: what a reconstruction can make use of


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
    method: Method
    why: str

    @property
    def images_determined(self) -> int:
        """The number of images that the equations could determine, by count alone."""
        return self.parameters // (self.pixels + 1)

    @property
    def warning(self) -> str:
        """A likely mistake in the given files, or the empty string."""
        return NEVER_MOVED if self.moved == 0 else ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def check_method(subject: Subject, method: Method | None) -> None:
    """Refuse a method that was asked for and cannot fit."""
    if method == "ntk" and subject.initial is None:
        raise InvalidInputError("the NTK method needs the weights before training; give them, or leave out the method")
    if method == "kkt" and subject.outputs != 1:
        raise InvalidInputError(f"kkt needs a network with one output, not {subject.outputs}; use multiclass")
    if method == "multiclass" and subject.outputs < 2:
        raise InvalidInputError("multiclass needs a network with one output per class; use kkt for one output")


def preflight(subject: Subject, *, method: Method | None = None, weight_decay: bool = False) -> Preflight:
    """Examine a network before the audit reads it. This takes seconds at most.

    Args:
        subject: the network and its weights, from `pal.auditing.subject`.
        method: ``"ntk"``, ``"kkt"``, ``"kkt-signed"`` or ``"multiclass"``. None chooses one.
        weight_decay: whether training used weight decay.

    Examples:
        >>> from palimpsest.auditing.subject import subject
        >>> from palimpsest.networks import MLP
        >>> examined = subject(lambda: MLP((1, 4, 4), (3,)), MLP((1, 4, 4), (3,)).state_dict(), image_shape=(1, 4, 4))
        >>> found = preflight(examined)
        >>> found.method, found.parameters, found.pixels
        ('kkt', 54, 16)
    """
    for remark in subject.remarks:
        note(remark)
    θ = parameters_of(subject.model)
    if not θ:
        raise InvalidInputError("the network has no trainable parameter; set requires_grad on what was trained")
    θ_0 = None if subject.initial is None else {name: subject.initial[name].to(t) for name, t in θ.items()}
    correlation, related = (None, None) if θ_0 is None else _relation(θ, θ_0)
    moved = None if θ_0 is None else _norm(_difference(θ, θ_0)) / max(_norm(θ_0), 1e-300)
    start = θ_0 if related and moved else None
    names = first_dense_layer(subject.model, subject.image_shape)
    first = names[0] if names and names[0] in θ else None
    found = None
    if first is not None and start is not None and subject.initial is not None:
        found = span(subject.model, subject.initial, image_shape=subject.image_shape)
    chosen, why = _method(subject.outputs, start is not None, _unknown(related, moved), weight_decay)
    return Preflight(
        parameters=sum(t.numel() for t in θ.values()),
        pixels=math.prod(subject.image_shape),
        outputs=subject.outputs,
        related=related,
        correlation=correlation,
        moved=moved,
        samples=None if found is None else found.samples,
        span_reason=_span_reason(first, _unknown(related, moved), found),
        bound=None if first is None else _bound(_target(θ, start)[first], noisy=start is None),
        beyond_noise=None if first is None or start is not None else _beyond_noise(θ[first]),
        still_units=_still(_target(θ, start)),
        units=sum(len(t) for t in θ.values() if t.ndim > 1),
        method=method or chosen,
        why="as asked for" if method not in (None, chosen) else why,
    )


def _unknown(related: bool | None, moved: float | None) -> str:
    """Why the start of training cannot be made use of."""
    if related is None:
        return "the weights before training are unknown"
    return "the initial weights given are not those of this training" if moved else "the weights never moved"


def _method(outputs: int, start: bool, unknown: str, weight_decay: bool) -> tuple[Method, str]:
    """The method that fits what is known, and why."""
    if start:
        return "ntk", "the weights before training are known, and their change is a sum of gradients at the images"
    if weight_decay:
        return "kkt-signed", f"{unknown}, and weight decay makes the weights a sum of gradients at the images"
    if outputs == 1:
        return "kkt", f"{unknown}, and a classifier with one output tends to a maximum margin"
    return "multiclass", f"{unknown}, and a classifier with {outputs} outputs tends to a maximum margin"


# --- start and end -------------------------------------------------------------------------------


def _relation(θ: Mapping[str, Tensor], θ_0: Mapping[str, Tensor]) -> tuple[float, bool]:
    """Correlation of the weight matrices before and after training, and whether it is beyond chance.

    Each matrix is centred: gains that start at one correlate with any other gains. Two unrelated initialisations of P
    weights correlate by 0 ± 1/√P.
    """
    pairs = [(θ[n].double(), θ_0[n].double()) for n in θ if θ[n].ndim > 1 and θ[n].numel() > 1]
    if not pairs:
        return 1.0, True
    centred = [(a - a.mean(), b - b.mean()) for a, b in pairs]
    scores = [float((a * b).sum() / (a.norm() * b.norm()).clamp_min(1e-300)) for a, b in centred]
    sizes = [a.numel() for a, _ in pairs]
    z = sum(score * size for score, size in zip(scores, sizes, strict=True)) / math.sqrt(sum(sizes))
    return z / math.sqrt(sum(sizes)), z > SIGMAS


def _target(θ: Mapping[str, Tensor], start: Mapping[str, Tensor] | None) -> Mapping[str, Tensor]:
    return θ if start is None else _difference(θ, start)


def _difference(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: a[name] - b[name] for name in a}


def _norm(θ: Mapping[str, Tensor]) -> float:
    return math.sqrt(sum(float(t.double().square().sum()) for t in θ.values()))


def _still(target: Mapping[str, Tensor]) -> int:
    return sum(int((t.flatten(1) == 0).all(1).sum()) for t in target.values() if t.ndim > 1)


# --- the first layer -----------------------------------------------------------------------------


def _span_reason(first: str | None, unknown: str, found: Span | None) -> str:
    if found is not None and found.samples is not None:
        return found.reason
    reason = unknown if found is None else found.reason
    if first is None:
        reason = "no dense layer of its own weights sees whole images, so its change does not count them"
    return f"{reason}; give --samples if you know the number of images"


def _bound(T: Tensor, *, noisy: bool) -> int:
    """Singular values of a hundredth of the largest and, where the target still holds its start, beyond that noise."""
    σ = torch.linalg.svdvals(T.double())
    least = max(SIZEABLE * float(σ[0]), _edge(T) if noisy else 0.0)
    return int((σ > least).sum())


def _beyond_noise(W: Tensor) -> float:
    """Share of ‖W‖² in singular values that no initialisation explains."""
    σ = torch.linalg.svdvals(W.double())
    return float((σ[σ > _edge(W)] ** 2).sum() / (σ**2).sum().clamp_min(1e-300))


def _edge(W: Tensor) -> float:
    """√v(√m + √n), the largest singular value of noise (Marchenko and Pastur), v from the bulk; with some room."""
    return ROOM * math.sqrt(bulk_variance({"W": W})["W"]) * sum(math.sqrt(side) for side in W.shape)
