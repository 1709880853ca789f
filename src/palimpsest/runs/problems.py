"""The one place that turns options into an objective and the space of its images."""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from palimpsest.errors import InvalidInputError
from palimpsest.methods import KKT, NTK, AdamPath, Gradient, MulticlassKKT, Path
from palimpsest.methods.path import Checkpoints
from palimpsest.objectives import Objective
from palimpsest.objectives.spaces import Subspace
from palimpsest.span import first_dense_layer, span

Method = Literal["ntk", "path", "gradient", "kkt", "kkt-signed", "multiclass"]
Within = Literal["everywhere", "span"]
Rule = Literal["sgd", "adam"]  # the optimiser of the training; sgd stands for momentum, too
METHODS: dict[str, Method] = {"squared": "ntk", "logistic": "kkt", "cross_entropy": "multiclass"}  # by training loss
CHANGES = ("ntk", "path", "gradient")  # the methods whose target is a sum of gradients
WHITENING = 0.5


def problem(
    method: Method,
    model: nn.Module,
    initial: Mapping[str, Tensor] | None = None,
    *,
    checkpoints: Checkpoints | None = None,
    gradient: Mapping[str, Tensor] | None = None,
    image_shape: Sequence[int] | None = None,
    at: float | Sequence[float] = 0.5,
    weights: Literal["auto"] | None = "auto",
    within: Within | None = "everywhere",
    whitening: float | None = None,
    rule: Rule = "sgd",
    continues: bool = True,
    live: bool = False,
) -> tuple[Objective, Subspace | None]:
    """The objective of a method, and the subspace to search in; None stands for all images.

    If the first layer shows that weight decay shrank the initial weights, NTK and Path start from the shrunk ones.

    Args:
        initial: the weights before training. NTK and the span need them. The KKT methods use them only for `weights`.
        checkpoints: for ``"path"``, as for `pal.Path`.
        gradient: for ``"gradient"``, as for `pal.Gradient`.
        image_shape: the shape of one image, as for `pal.span`.
        at: tangent points of NTK and Path.
        weights: ``"auto"`` lowers the weight of parameters that training images explain badly.
        within: None chooses the span of the first layer's change for NTK, Path and Gradient, if it is readable.
        whitening: how strongly these methods balance the directions of a layer's change. None chooses 0.5 in the span
            of a dense network, and 0 elsewhere.
        rule: ``"adam"`` makes NTK and Path those of a training by Adam. Its first layer does not show the span.
        continues: for Adam, whether each segment continues the last one, as for `pal.AdamPath`.
        live: whether batch normalisation was live in training. NTK, Path and Gradient then take the candidates as one
            batch.
    """
    if initial is None and (method == "ntk" or (within == "span" and method not in CHANGES)):
        raise InvalidInputError("the NTK method and --within span need the weights before training; give --initial")
    if method == "path" and checkpoints is None:
        raise InvalidInputError("the path method needs weights on the way; give them by --checkpoints")
    if method == "gradient" and gradient is None:
        raise InvalidInputError("the gradient method needs a gradient; give one, or the state of the optimiser")
    if rule == "adam" and method in ("ntk", "path"):
        if within == "span" or whitening:
            raise InvalidInputError("a training by Adam is searched everywhere and without whitening; leave both out")
        way = checkpoints if method == "path" else [(initial or {}, model.state_dict())]
        assert way is not None
        points = (at,) if isinstance(at, int | float) else at
        adam = AdamPath(model, way, at=points, continues=continues, weights=weights)
        return adam.with_live_batch_norm() if live else adam, None
    ends: Mapping[str, Tensor] | Checkpoints | None = checkpoints if method == "path" else initial
    if method == "gradient" and gradient is not None:
        ends = as_change(gradient)
    if live and within == "span":
        raise InvalidInputError("live batch normalisation hides the span of the images; search everywhere")
    names = first_dense_layer(model, image_shape) if method in CHANGES and not live else None
    readable = names and (method != "gradient" or set(names) <= set(gradient or {}))  # a frozen layer has no gradient
    found = subspace = None
    if ends is not None and (within == "span" or readable):
        found = span(model, ends, image_shape=image_shape)
        if found.subspace is None and within == "span":
            raise InvalidInputError(f"{found.reason}; leave out --within span")
        subspace = None if within == "everywhere" else found.subspace
    if whitening and method not in CHANGES:
        raise InvalidInputError("--whitening works only for NTK and Path; leave it out")
    if method == "multiclass":
        return MulticlassKKT(model, initial=initial, weights=weights), subspace
    if method in ("kkt", "kkt-signed"):
        return KKT(model, signed=method == "kkt-signed", initial=initial, weights=weights), subspace
    made: NTK | Path | Gradient
    if method == "gradient" and gradient is not None:
        made = Gradient(model, gradient, weights=weights)
    elif method == "path" and checkpoints is not None:
        made = Path(model, checkpoints, at=at, shrinkage=found.shrinkages if found else 1.0, weights=weights)
    else:
        assert initial is not None
        made = NTK(model, found.shrunk(initial) if found else initial, at=at, weights=weights)
    made = made.with_live_batch_norm() if live else made
    made.whitening = _default(made, subspace, image_shape) if whitening is None else whitening
    return made, subspace


def as_change(gradient: Mapping[str, Tensor]) -> Checkpoints:
    """A gradient as the change on one segment from 0, for `pal.span`: its rows span the images, as those of Δθ do."""
    return [({name: torch.zeros_like(g) for name, g in gradient.items()}, gradient)]


def _default(objective: Objective, subspace: Subspace | None, image_shape: Sequence[int] | None) -> float:
    """The usual strength of whitening, for networks of dense layers alone."""
    if subspace is None:
        return 0.0
    x = subspace.offset[None] if image_shape is None else subspace.offset.view(1, *image_shape)
    return WHITENING if objective.dense_layers(x.to(objective.device, objective.dtype)) else 0.0
