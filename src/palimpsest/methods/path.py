"""Path reconstruction: the NTK method on each segment between checkpoints of the training."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from itertools import pairwise

from torch import Tensor, nn

from palimpsest.errors import InvalidInputError
from palimpsest.methods.trail import better_order
from palimpsest.objectives import weighting
from palimpsest.objectives.autograd import Parameters
from palimpsest.objectives.base import Objective, Points
from palimpsest.objectives.binding import matching, parameters_of

Checkpoints = Sequence[Mapping[str, Tensor]] | Sequence[tuple[Mapping[str, Tensor], Mapping[str, Tensor]]]


class Path(Objective):
    """The NTK method on each segment between checkpoints θ_0, …, θ_m of one training run.

    Between two checkpoints the weights move little, so the change on each segment is closer to a sum of gradients than
    the change of the whole training. All segments share the images and have their own multipliers:

        T_j = θ_j − c_j θ_{j−1}        L = (1/m) Σ_j Σ_p w_p ‖T_jp − Σ_i λ_ij ∇_p Φ(θ_j*, x_i)‖² / ‖T_j‖²

    m segments give m times as many equations, at m times the cost of a step. `pal.NTK` is the case of one segment,
    without the factor 1/‖T‖². Any checkpoints of the run will do: segments need not be equally long.

    ``target``, ``residual`` and ``represent`` have a first axis for the segments. Buffers, such as the statistics of
    batch normalisation, and frozen parameters are those at the end of each segment. `Objective` explains ``sharpness``
    and ``weights``; automatic weights are the same for all segments.

    Args:
        model: the trained network.
        checkpoints: state dicts in the order of the training. The first is the start, the last holds the weights of
            the model. They are converted to its precision and device. Pairs (θ_{j−1}, θ_j) state the segments
            themselves, for example a client's weights before and after each round of federated learning.
        at: t from 0 to 1, the tangent point θ_j* = c_j θ_{j−1} + t T_j on each segment, or several. The multipliers
            have the shape (k, m). Several t add an axis of their number, and C > 1 outputs one of length C.
        shrinkage: c_j, the factor that weight decay left of the weights on each segment, or one for all:
            ``pal.span(model, checkpoints).shrinkages``. 1 without weight decay.
        whitening: from 0 to 1, as for `pal.NTK`. All segments share the metric.

    Examples:
        >>> import torch
        >>> from palimpsest.networks import MLP
        >>> start, middle, end = (MLP(4, hidden=(8,)) for _ in range(3))
        >>> objective = Path(end, [start.state_dict(), middle.state_dict(), end.state_dict()])
        >>> round(float(objective.loss(torch.randn(3, 4), torch.zeros(3, 2))), 6)
        1.0
    """

    linear = True

    def __init__(
        self,
        model: nn.Module,
        checkpoints: Checkpoints,
        *,
        at: float | Sequence[float] = 0.5,
        shrinkage: float | Sequence[float] = 1.0,
        sharpness: float | None = None,
        weights: weighting.Weights = None,
        whitening: float = 0.0,
    ) -> None:
        ends, others = _read(model, checkpoints)
        if isinstance(checkpoints[0], Mapping) and (order := better_order([ends[0][0], *(end for _, end in ends)])):
            said = f"the checkpoints may be in another order: in the order {order} their way is far shorter; check it"
            warnings.warn(said, stacklevel=2)
        m = len(ends)
        c = [float(shrinkage)] * m if isinstance(shrinkage, int | float) else list(shrinkage)
        if len(c) != m:
            raise InvalidInputError(f"shrinkage holds {len(c)} numbers; give one for each of the {m} segments")
        targets, tangents = [], []
        self.starts = [{name: c_j * t for name, t in start.items()} for c_j, (start, _) in zip(c, ends, strict=True)]
        for j, (start, (_, end)) in enumerate(zip(self.starts, ends, strict=True)):
            equal = f"the weights at both ends of segment {j + 1} are equal; leave one of them out"
            T, points = segment(start, end, at, equal=equal, others=others[j])
            targets.append(T)
            tangents.append(points)
        super().__init__(model, target=targets, tangents=tangents, sharpness=sharpness, weights=weights)
        self.whitening = strength(whitening)

    def unexplained(self) -> dict[str, float]:
        parts = zip(self.segments.shares, self.segments.divided(self.target), self.starts, strict=True)
        errors = [(s, weighting.linearisation_error(T, start)) for s, T, start in parts]
        return {name: sum(s * v[name] for s, v in errors) for name in self.target}

    def scalar(self, outputs: Tensor, labels: Tensor | None) -> Tensor:
        return outputs


def segment(
    start: Parameters, end: Parameters, at: float | Sequence[float], *, equal: str, others: Mapping[str, Tensor] = {}
) -> tuple[Parameters, Points]:
    """T = end − start, and the point start + tT or several, with the other tensors that the network uses there."""
    T = {name: end[name] - start[name] for name in end}
    if T and not any(bool(change.any()) for change in T.values()):
        raise InvalidInputError(equal)
    if not isinstance(at, int | float) and len(at) == 0:
        raise InvalidInputError("at is empty; give at least one point t between 0 (initial) and 1 (final)")

    def point(t: float) -> Parameters:
        return {name: start[name] + t * T[name] for name in T} | dict(others)

    return T, point(at) if isinstance(at, int | float) else [point(float(t)) for t in at]


def strength(whitening: float) -> float:
    """The strength of whitening, from 0 to 1."""
    if not 0 <= whitening <= 1:
        raise InvalidInputError(f"whitening is {whitening}; give a number from 0 to 1")
    return whitening


def segments_of(checkpoints: Checkpoints) -> list[tuple[Mapping[str, Tensor], Mapping[str, Tensor]]]:
    """(θ_{j−1}, θ_j) of each segment."""
    states = list(checkpoints) if isinstance(checkpoints, Sequence) else []
    if states and all(isinstance(state, tuple) and len(state) == 2 for state in states):
        return states  # type: ignore[return-value]
    if len(states) < 2:
        raise InvalidInputError("checkpoints is not a list of at least two state dicts; give those of the start, of "
                                "the end, and of any moments between them, in order")  # fmt: skip
    return list(pairwise(states))  # type: ignore[arg-type]


def _read(model: nn.Module, checkpoints: Checkpoints) -> tuple[list[tuple[Parameters, Parameters]], list[Parameters]]:
    """The trained parameters at both ends of each segment, and the other tensors at its end."""
    θ = parameters_of(model)
    tied = {name for name, t in model.named_parameters(remove_duplicate=False) if t.requires_grad}  # by other names too
    rest = {name: t for name, t in model.state_dict().items() if name not in tied and t.is_floating_point()}
    ends, others = [], []
    for j, (start, end) in enumerate(segments_of(checkpoints), start=1):
        called = f"the weights at the end of segment {j}"
        ends.append((matching(start, θ, f"the weights at the start of segment {j}"), matching(end, θ, called)))
        others.append(matching(end, {name: t for name, t in rest.items() if name in end}, called))
    last, chained = ends[-1][1], isinstance(checkpoints[-1], Mapping)
    if chained and (different := [name for name in θ if not bool((last[name] == θ[name]).all())]):
        raise InvalidInputError(f"the last checkpoint and the model differ in {different[0]!r}; load that checkpoint, "
                                "or append model.state_dict()")  # fmt: skip
    return ends, others
