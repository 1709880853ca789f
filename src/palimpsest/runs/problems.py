"""The one place that turns options into an objective and the space of its images."""

from collections.abc import Mapping, Sequence
from typing import Literal

from torch import Tensor, nn

from palimpsest.errors import InvalidInputError
from palimpsest.methods import KKT, NTK, MulticlassKKT
from palimpsest.objectives import Objective
from palimpsest.objectives.spaces import Subspace
from palimpsest.span import first_dense_layer, span

Method = Literal["ntk", "kkt", "kkt-signed", "multiclass"]
Within = Literal["everywhere", "span"]
METHODS: dict[str, Method] = {"squared": "ntk", "logistic": "kkt", "cross_entropy": "multiclass"}  # by training loss
WHITENING = 0.5


def problem(
    method: Method,
    model: nn.Module,
    initial: Mapping[str, Tensor] | None = None,
    *,
    at: float | Sequence[float] = 0.5,
    weights: Literal["auto"] | None = "auto",
    within: Within | None = "everywhere",
    whitening: float | None = None,
) -> tuple[Objective, Subspace | None]:
    """The objective of a method, and the subspace to search in; None stands for all images.

    If the first layer shows that weight decay shrank the initial weights, NTK starts from the shrunk ones.

    Args:
        initial: the weights before training. NTK and the span need them. The KKT methods use them only for `weights`.
        at: tangent points of the NTK method.
        weights: ``"auto"`` lowers the weight of parameters that training images explain badly.
        within: None chooses the span of the first layer's change for NTK, if it is readable.
        whitening: how strongly NTK balances the directions of the span. None chooses 0.5.
    """
    if initial is None and (method == "ntk" or within == "span"):
        raise InvalidInputError("the NTK method and --within span need the weights before training; give --initial")
    found = subspace = None
    if initial is not None and (within == "span" or (method == "ntk" and first_dense_layer(model))):
        found = span(model, initial)
        if found.subspace is None and within == "span":
            raise InvalidInputError(f"{found.reason}; leave out --within span")
        subspace = None if within == "everywhere" else found.subspace
    if whitening and (method != "ntk" or subspace is None):
        raise InvalidInputError("--whitening works only for the NTK method within the span; leave it out")
    if method == "ntk":
        assert initial is not None
        start = initial if found is None else found.shrunk(initial)
        strength = (WHITENING if subspace else 0.0) if whitening is None else whitening
        return NTK(model, start, at=at, weights=weights, whitening=strength), subspace
    if method == "multiclass":
        return MulticlassKKT(model, initial=initial, weights=weights), subspace
    return KKT(model, signed=method == "kkt-signed", initial=initial, weights=weights), subspace
