"""Path reconstruction of a training by Adam."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from palimpsest.errors import InvalidInputError
from palimpsest.methods.path import Checkpoints, Path
from palimpsest.objectives import weighting
from palimpsest.objectives.adam_rule import Adjoint, adam_changes
from palimpsest.objectives.autograd import Parameters, total

STAGES = (0.1, 0.3, 0.5, 0.7, 0.9)


class AdamPath(Path):
    """The path method for a training by Adam or AdamW. It needs the weights before training.

    Adam rescales every entry of a gradient. The change of the weights is then not a sum of gradients, and `pal.NTK` and
    `pal.Path` read little. This method models the rescaling. Each segment θ_{j−1} → θ_j has stages, each with a tangent
    point and multipliers:

        v_s = Σ_i λ_is ∇_θ Φ(θ_s*, x_i)        T_j = θ_j − c_j θ_{j−1}
        L = (1/m) Σ_j Σ_p w_p ‖T_jp − a_j h_jp‖² / ‖T_j‖²,   h_j = Σ_{s in j} h_s

    h_s is what Adam makes of the gradients v; see `palimpsest.objectives.adam_rule`. a_j stands for the learning rate
    and the number of steps. It is the best one: a_j = ⟨w∘h_j, T_j⟩ / ⟨w∘h_j, h_j⟩.

    The optimiser's state and settings are not needed, except for strong weight decay. AdamW with learning rate η and
    decay δ leaves c = (1 − ηδ)ⁿ of the weights after n steps. Give it as ``shrinkage`` if it is below about 0.99;
    `pal.span` does not find it here.

    The loss does not depend on the scale of all multipliers. It is not convex in v, so splitting matrices do not bound
    its Hessian. ``target`` and ``residual`` have a first axis for the segments, and ``represent`` has one for all
    stages. Parameters that did not move do not take part. `Objective` explains ``sharpness`` and ``weights``.

    Args:
        model: the trained network.
        checkpoints: as for `pal.Path`. ``[initial, model.state_dict()]`` is enough.
        at: t of each stage, relative to each segment, in the order of the training. The multipliers have the shape
            (k, m, stages). A network with C > 1 outputs adds an axis of length C. More stages read more, and cost
            proportionally more.
        softness: ε, which softens the root that Adam divides by, relative to the size of the gradients. 0 is Adam's own
            rule, which a descent on images cannot follow.
        continues: whether each segment continues Adam's mean of squares. If not, each starts it again, as a client does
            in every round of federated learning. None: state dicts continue, and pairs of them start again.

    Examples:
        >>> import torch
        >>> from palimpsest.networks import MLP
        >>> before, after = MLP(4, hidden=(8,)), MLP(4, hidden=(8,))
        >>> objective = AdamPath(after, [before.state_dict(), after.state_dict()], at=(0.25, 0.75))
        >>> round(float(objective.loss(torch.randn(3, 4), torch.zeros(3, 1, 2))), 6)
        1.0
    """

    apart = True
    scaled = False
    weights: dict[str, float]

    def __init__(
        self,
        model: nn.Module,
        checkpoints: Checkpoints,
        *,
        at: Sequence[float] = STAGES,
        softness: float = 0.1,
        continues: bool | None = None,
        shrinkage: float | Sequence[float] = 1.0,
        sharpness: float | None = None,
        weights: weighting.Weights = None,
    ) -> None:
        if not isinstance(at, Sequence) or isinstance(at, str) or list(at) != sorted(set(at)):
            raise InvalidInputError(f"at is {at!r}; give a sequence, one point for each stage, in increasing order")
        if not 0 <= softness < float("inf"):
            raise InvalidInputError(f"softness is {softness}; give a finite number that is not negative")
        super().__init__(model, checkpoints, at=at, shrinkage=shrinkage, sharpness=sharpness, weights=weights)
        self.softness = float(softness)
        self.weights = {name: w if bool(self.target[name].any()) else 0.0 for name, w in self.weights.items()}
        together = isinstance(checkpoints[0], Mapping) if continues is None else continues
        segments = len(self.segments.shares)
        self.memories = [len(at) * segments] if together else [len(at)] * segments  # stages that share means of squares

    @property
    def convex(self) -> bool:
        return False

    def length_squared(self, v: Parameters) -> Tensor:
        """Σ_s of the size of v_s, each relative to the ‖T_j‖² of its segment."""
        stages = {name: t.unflatten(0, (*self.segments.shape, -1)) for name, t in v.items()}
        count = next(iter(stages.values())).shape[1]
        return total([self.norm_squared({name: t[:, s] for name, t in stages.items()}) for s in range(count)])

    def _residual(self, v: Parameters) -> Parameters:
        return {name: -e for name, e in self._error(_times(v, self._beyond_rounding(v)))[0].items()}

    def _error_and_pull(self, v: Parameters) -> tuple[Parameters, Parameters]:
        """e, and ½ ∂L/∂v. L is stationary in a_j, so that ½ ∂L/∂h_j = a_j w∘e_j / (m ‖T_j‖²)."""
        kept = self._beyond_rounding(v)
        e, a, runs = self._error(_times(v, kept))
        stages, pull = len(self.tangents) // len(a), {}
        for name, of in runs.items():
            b = [
                s * self.weights[name] * a_j * e_j for s, a_j, e_j in zip(self.segments.shares, a, e[name], strict=True)
            ]
            each = torch.stack([b_j for b_j in b for _ in range(stages)]).split(self.memories)
            pull[name] = torch.cat([adjoint(b_s) for (_, adjoint), b_s in zip(of, each, strict=True)])
        return e, _times(pull, kept)

    def _error(self, v: Parameters) -> tuple[Parameters, Tensor, dict[str, list[tuple[Tensor, Adjoint]]]]:
        """e_j = a_j h_j − T_j, the best a_j, and h_s with its adjoint for the stages that share their means."""
        runs = {name: [adam_changes(part, self.softness) for part in t.split(self.memories)]
                for name, t in v.items()}  # fmt: skip
        h = {name: torch.cat([h_s for h_s, _ in of]).unflatten(0, (*self.segments.shape, -1)).sum(1)
             for name, of in runs.items()}  # fmt: skip
        a = self._factors(h)
        return {n: a.view(-1, *[1] * (t.ndim - 1)) * t - self.target[n] for n, t in h.items()}, a, runs

    def _pull_change(self, v: Parameters, change: Parameters) -> Parameters:
        return torch.func.jvp(lambda v: self._error_and_pull(v)[1], (v,), (change,))[1]

    def _factors(self, h: Parameters) -> Tensor:
        """a_j of either sign, and 0 if h_j = 0."""
        hT = total([self.weights[name] * _rows(t * self.target[name]).sum(1) for name, t in h.items()])
        hh = total([self.weights[name] * _rows(t).square().sum(1) for name, t in h.items()])
        return hT / hh.clamp_min(torch.finfo(hh.dtype).tiny)

    def _beyond_rounding(self, v: Parameters) -> Parameters:
        """With live batch normalisation, 0 for each parameter whose gradient is rounding, else 1.

        A bias before such a layer does not have any effect. Adam's rule would make its rounding as large as the rest.
        """
        if not self.live:
            return {}
        sizes = {name: t.detach().square().mean().sqrt() for name, t in v.items()}
        rounding = torch.finfo(self.dtype).eps ** 0.5  # of the largest gradient; a sum over images rounds far below it
        least = rounding * torch.stack(list(sizes.values())).max()
        return {name: (size > least).to(size) for name, size in sizes.items()}


def _times(v: Parameters, kept: Parameters) -> Parameters:
    return {name: kept[name] * t for name, t in v.items()} if kept else v


def _rows(t: Tensor) -> Tensor:
    """One row for each segment. A parameter may be a number, which does not have further axes."""
    return t.reshape(len(t), -1)
