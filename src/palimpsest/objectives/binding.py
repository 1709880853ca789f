"""Does a point fit an objective? This file holds the refusals and the choice of the engine.

An objective is *bound* to the shapes of a candidate and of its multipliers. The network is tried once for each shape,
whatever the number of candidates and their labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from palimpsest.errors import InvalidInputError, NoGradientError, NonFiniteError, UnsupportedNetworkError
from palimpsest.execution.precision import matrix_products
from palimpsest.objectives.autograd import IGNORED, Parameters
from palimpsest.objectives.dense import Layer

if TYPE_CHECKING:
    from palimpsest.objectives.base import Objective

PROBE = 64  # candidates on which a network is tried before it is used on all


@dataclass(frozen=True)
class Bound:
    """The shapes for which an objective was checked, and the engine that differentiates it there."""

    shapes: tuple  # of one candidate and of its multipliers, with the kind of number and the device
    outputs: int
    layers: tuple[Layer, ...] | None  # the dense layers, if the network is a stack of them; None means autograd


def bind(objective: Objective, x: Tensor, multipliers: Tensor, labels: Tensor | None, known: Bound | None) -> Bound:
    """Raise a named error unless the arguments fit the network; choose the engine if their shapes are not known."""
    _check_numbers(objective, x, multipliers, labels)
    shapes = (x.shape[1:], multipliers.shape[1:], x.dtype, x.device)
    if known is not None and known.shapes == shapes and len(multipliers) == len(x):
        objective.label_kind.check(labels, len(x), known.outputs)
        return known
    with matrix_products(tf32=False, device=x.device):  # outputs can then be compared to many digits
        outputs = _check_fit(objective, x, multipliers, labels)
        layers = objective.dense_layers(x.detach()[:1])
        return Bound(shapes, outputs, layers)


def _check_numbers(objective: Objective, x: Tensor, multipliers: Tensor, labels: Tensor | None) -> None:
    if torch.is_inference_mode_enabled():
        raise InvalidInputError("an objective needs derivatives; call it outside of torch.inference_mode()")
    if not (x.is_floating_point() and multipliers.is_floating_point()):
        raise InvalidInputError("candidates and multipliers must be floating-point numbers; convert them with .float()")
    if x.ndim < 2 or len(x) == 0:
        raise InvalidInputError(f"candidates have shape {tuple(x.shape)}; give at least one, as (k, *image_shape)")
    for given in (x, multipliers, *(() if labels is None else (labels.to(x.dtype),))):
        if given.dtype != objective.dtype or given.device != objective.device:
            wanted, found = f"{objective.dtype} on {objective.device}", f"{given.dtype} on {given.device}"
            raise InvalidInputError(f"the objective is {wanted}, but an argument is {found}; move one with .to(...)")


def _check_fit(objective: Objective, x: Tensor, multipliers: Tensor, labels: Tensor | None) -> int:
    """Try the network on a few candidates. Returns the number of its outputs."""
    some, y = x.detach()[:PROBE], None if labels is None else labels[:PROBE]
    objective.check_network(some)
    outputs = objective.outputs(some[:1]).shape[1]
    objective.label_kind.check(labels, len(x), outputs)
    expected = (len(x), *objective.multiplier_shape(some))
    if multipliers.shape != expected:
        raise InvalidInputError(f"multipliers have shape {tuple(multipliers.shape)}; give them the shape {expected}")
    uneven = torch.linspace(0.5, 1.5, multipliers[: len(some)].numel()).to(multipliers)
    v = objective.explained(None, some, uneven.view_as(multipliers[:PROBE]), y)
    if not any(bool(t.any()) for t in v.values()):
        raise NoGradientError(IGNORED)
    return outputs


def check_scalar(objective: Objective, φ: Tensor, outputs: Tensor) -> None:
    """Refuse a method whose φ is not one number for each image, or a row of them."""
    if not isinstance(φ, Tensor) or φ.ndim > 2 or φ.shape[:1] != outputs.shape[:1]:
        method, found = type(objective).__name__, tuple(φ.shape) if isinstance(φ, Tensor) else type(φ).__name__
        wanted = f"({len(outputs)},) or ({len(outputs)}, slots)"
        raise InvalidInputError(f"{method}.scalar returned {found}; let it return a tensor of shape {wanted}")


def check_weights(
    model: nn.Module, targets: Sequence[Mapping[str, Tensor]], tangents: Sequence[Mapping[str, Tensor]]
) -> None:
    """Refuse weights that nothing can be read from."""
    if not all(targets):
        raise NoGradientError("the network does not have a trainable parameter; set requires_grad on the trained ones")
    for name, values in [item for point in (*targets, *tangents) for item in point.items()]:
        if values.dtype not in (torch.float32, torch.float64):
            raise InvalidInputError(f"the weights of {name!r} are {values.dtype}; convert the model with .float()")
        if not bool(values.isfinite().all()):
            raise NonFiniteError(f"the weights of {name!r} contain NaN or infinity; check the file or the training")
    if not all(any(bool(t.any()) for t in target.values()) for target in targets):
        raise InvalidInputError("the target is zero, so there is nothing to read; give the weights after training")
    if isinstance(model, torch.jit.ScriptModule):
        raise UnsupportedNetworkError("", "is compiled TorchScript, which hides its layers; pass the Python module")


def parameters_of(model: nn.Module) -> Parameters:
    """The trainable parameters by name. A frozen one was not trained, so it does not hold a trace of the data."""
    return {name: θ.detach() for name, θ in model.named_parameters() if θ.requires_grad}


def matching(
    initial: Mapping[str, Tensor], final: Mapping[str, Tensor], called: str = "the initial weights"
) -> Parameters:
    """The initial weights under the names of the final ones; InvalidInputError if they belong to another network."""
    if not isinstance(initial, Mapping):
        raise InvalidInputError(f"{called}: this is a {type(initial).__name__}; give a state_dict()")
    for name, θ in final.items():
        if name not in initial or initial[name].shape != θ.shape:
            has = tuple(initial[name].shape) if name in initial else "missing"
            raise InvalidInputError(f"{called}: {name!r} is {has}, but the network has {tuple(θ.shape)}; "
                                    "give those of the same network")  # fmt: skip
    return {name: initial[name].detach().to(θ) for name, θ in final.items()}
