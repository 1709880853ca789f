"""Sample splitting: two candidates take the place of one that cannot descend any further.

The split x_i → x_i ± ηv, with λ_i/2 each, changes L by ½η² vᵀS(x_i)v to second order, whatever the gradient, with

    S(x_i) = −2 ∇²_x Σ_s λ_is ⟨w∘r, f_s(x_i)⟩        the splitting matrix.

If λ_min(S(x_i)) < 0, a split along the eigenvector lowers L by ½η²|λ_min|, even at a local minimum of L. Because
∇²_x L = 2 JᵀJ + diag S(x_i), S ⪰ −ε for all candidates certifies ∇²_x L ⪰ −ε.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from palimpsest.errors import InvalidInputError
from palimpsest.objectives import Objective
from palimpsest.solver.lanczos import BASIS, Eigenpairs, smallest_eigenpairs

HALVINGS = 10  # the line search tries η_max, η_max/2, …, η_max/2⁹


def matrix(objective: Objective, x: Tensor, multipliers: Tensor, labels: Tensor | None = None) -> Tensor:
    """The splitting matrices S(x_i) = −2λ_i ∇²_x⟨w∘r, f(x_i)⟩ of candidates x (k, *image_shape), dense: (k, d, d).

    Use it for inspection: it takes d products.

    Examples:
        >>> import palimpsest as pal
        >>> _ = torch.manual_seed(0)
        >>> objective = pal.KKT(pal.networks.MLP(4, hidden=(8,)), sharpness=10.0)
        >>> x, λ, y = torch.randn(3, 4), torch.rand(3), torch.tensor([1, -1, 1])
        >>> pal.splitting.matrix(objective, x, λ, y).shape
        torch.Size([3, 4, 4])
    """
    product = objective.curvature(x, multipliers, labels)
    basis = torch.eye(x[0].numel(), dtype=x.dtype, device=x.device)
    columns = [product(e.reshape(x.shape[1:]).expand_as(x)).flatten(1) for e in basis]
    return torch.stack(columns, dim=2)


def min_eigenpairs(
    objective: Objective, x: Tensor, multipliers: Tensor, labels: Tensor | None = None, *, iterations: int = BASIS
) -> tuple[Tensor, Tensor]:
    """λ_min(S(x_i)), (k,), and its unit eigenvector, (k, *image_shape), for every candidate, by one Lanczos run.

    If an eigenvalue is negative, splitting the candidate x_i along the eigenvector lowers L.

    Examples:
        >>> import palimpsest as pal
        >>> _ = torch.manual_seed(0)
        >>> objective = pal.KKT(pal.networks.MLP(4, hidden=(8,)), sharpness=10.0)
        >>> x, λ, y = torch.randn(3, 4), torch.rand(3), torch.tensor([1, -1, 1])
        >>> values, vectors = pal.splitting.min_eigenpairs(objective, x, λ, y)
        >>> exact = torch.linalg.eigvalsh(pal.splitting.matrix(objective, x, λ, y))[:, 0]
        >>> torch.allclose(values, exact, atol=1e-4)
        True
    """
    found = eigenpairs(objective, x, multipliers, labels, iterations=iterations)
    return found.values, found.vectors


def eigenpairs(
    objective: Objective,
    x: Tensor,
    multipliers: Tensor,
    labels: Tensor | None,
    *,
    iterations: int,
    basis: int | None = None,
) -> Eigenpairs:
    """The smallest eigenpair of every S(x_i) with its error, chunk by chunk."""
    u, parts = objective.pull(x, multipliers, labels), []
    for chunk in objective.chunks(*objective.mine(x, multipliers, labels)):
        S = objective.curvature(*chunk, pull=u)
        parts.append(smallest_eigenpairs(S, chunk[0], iterations=iterations, basis=basis))
    return Eigenpairs(*(objective.joined(torch.cat(rows), len(x)) for rows in zip(*parts, strict=True)))


@dataclass(frozen=True, kw_only=True)
class Splitting:
    """When candidates split, which ones, and how.

    Args:
        rounds: the number of rounds. A phase of descent precedes each round, and one follows the last.
        until: the share of all steps after which the last round takes place. None makes all phases equally long.
        share: the largest share of the candidates that splits in one round.
        eta_max: the longest displacement η, in the units of the images.
        relative: a candidate splits if this is expected to lower L by more than this share:
            ½η_max²|λ_min| > relative · L. The criterion does not depend on the scale of weights and multipliers.
        threshold: the published criterion λ_min < threshold (−0.1 there), instead of the relative one.
        iterations: the number of Lanczos iterations.
        direction: ``"curvature"`` is the method. The others are controls with the same candidates at the same times:
            ``"random"`` directions, ``"duplicate"`` (η = 0), and ``"none"``, which only restarts the learning rate.

    Examples:
        >>> Splitting(rounds=3).last_round
        0.75
    """

    rounds: int = 2
    until: float | None = None
    share: float = 0.5
    eta_max: float = 1.0
    relative: float = 1e-6
    threshold: float | None = None
    iterations: int = BASIS
    direction: Literal["curvature", "random", "duplicate", "none"] = "curvature"

    def __post_init__(self) -> None:
        if self.rounds < 1 or not 0 < self.share <= 1 or self.eta_max <= 0 or self.iterations < 1:
            raise InvalidInputError("splitting needs rounds ≥ 1, 0 < share ≤ 1, eta_max > 0 and iterations ≥ 1")
        if self.until is not None and not 0 < self.until < 1:
            raise InvalidInputError(f"until is {self.until}; give the share of all steps, between 0 and 1, or None")
        if self.relative < 0 or (self.threshold is not None and self.threshold > 0):
            raise InvalidInputError("splitting needs relative ≥ 0 and threshold ≤ 0: only negative curvature descends")
        if self.direction not in ("curvature", "random", "duplicate", "none"):
            raise InvalidInputError(f"direction is {self.direction!r}; choose curvature, random, duplicate or none")

    @property
    def last_round(self) -> float:
        """The share of all steps after which the last round takes place."""
        return self.rounds / (self.rounds + 1) if self.until is None else self.until

    def chosen(self, eigenvalues: Tensor, loss: Tensor) -> Tensor:
        """Indices of the candidates that split: those past the criterion, most promising first, up to the cap."""
        if self.direction == "none":
            return eigenvalues.new_zeros(0, dtype=torch.long)
        if self.threshold is not None:
            eligible = eigenvalues < self.threshold
        else:
            eligible = 0.5 * self.eta_max**2 * -eigenvalues > self.relative * loss
        most = min(int(eligible.sum()), max(1, int(self.share * len(eigenvalues))))
        return eigenvalues.masked_fill(~eligible, torch.inf).argsort()[:most]

    def directions(self, vectors: Tensor, generator: torch.Generator) -> Tensor:
        """Unit displacement of each candidate."""
        if self.direction == "random":
            noise = torch.randn(vectors.shape, generator=generator, dtype=torch.float64).to(vectors)
            return noise / noise.flatten(1).norm(dim=1).reshape(-1, *[1] * (noise.ndim - 1))
        return torch.zeros_like(vectors) if self.direction == "duplicate" else vectors


@dataclass(frozen=True)
class Split:
    """The candidates after a round of splitting, and how the round went."""

    x: Tensor
    multipliers: Tensor
    labels: Tensor | None
    chosen: Tensor
    """The indices of the candidates that split. Empty if all are stable."""
    parents: Tensor
    """(k',) the index of each candidate's parent before the round. Its own index if it did not split."""
    eta: float
    eigenvalues: Tensor
    """(k,) λ_min(S(x_i)) of every candidate before the round."""
    before: float
    after: float
    """The full objective at η. ``before`` is the same at η = 0."""


def apply(
    x: Tensor, multipliers: Tensor, labels: Tensor | None, chosen: Tensor, displacement: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """x_i → x_i ± δ_i with λ_i/2 each, for the chosen i: the + takes the parent's place, the − goes to the end.

    Returns (x, multipliers, labels). L is unchanged if every δ_i is zero.
    """
    parents = parents_of(len(x), chosen)
    moved, halved = x[parents], multipliers[parents]
    moved[chosen] += displacement
    moved[len(x) :] -= displacement
    halved[chosen] /= 2
    halved[len(x) :] /= 2
    return moved, halved, None if labels is None else labels[parents]


def parents_of(k: int, chosen: Tensor) -> Tensor:
    """Index of the parent of each candidate after the chosen ones among k have split."""
    return torch.cat([torch.arange(k, device=chosen.device), chosen])


def split(
    objective: Objective,
    x: Tensor,
    multipliers: Tensor,
    labels: Tensor | None,
    policy: Splitting,
    *,
    full: Callable[[Tensor, Tensor, Tensor | None], Tensor] | None = None,
    generator: torch.Generator | None = None,
) -> Split:
    """Run one round of splitting (Phase II). If the candidates are stable, none is chosen.

    The step η is the same for all that split. A line search over ``full`` finds it. If no η lowers ``full``, a split
    along curvature does not take place.

    Args:
        policy: which candidates split, and how.
        full: the objective with its priors. None is L alone.
        generator: for random directions.

    Examples:
        >>> import palimpsest as pal
        >>> _ = torch.manual_seed(0)
        >>> objective = pal.KKT(pal.networks.MLP(4, hidden=(8,)), sharpness=10.0)
        >>> x, λ, y = torch.randn(3, 4), torch.rand(3), torch.tensor([1, -1, 1])
        >>> after = pal.splitting.split(objective, x, λ, y, pal.Splitting())
        >>> len(after.x) == 3 + len(after.chosen)
        True
    """
    full = full or objective.loss
    eigenvalues, vectors = min_eigenpairs(objective, x, multipliers, labels, iterations=policy.iterations)
    chosen = policy.chosen(eigenvalues, objective.loss(x, multipliers, labels))
    v = policy.directions(vectors, generator or torch.Generator().manual_seed(0))[chosen]

    steps = [0.0]
    if len(chosen) and policy.direction != "duplicate":
        steps += [policy.eta_max / 2**j for j in range(HALVINGS)]
    values = torch.stack([full(*apply(x, multipliers, labels, chosen, η * v)) for η in steps]).tolist()
    unmoved = values[0]
    after, η = min(zip(values[1:], steps[1:], strict=True), key=lambda pair: pair[0], default=(unmoved, 0.0))
    if policy.direction == "curvature" and not after < unmoved:
        chosen, v, η, after = chosen[:0], v[:0], 0.0, unmoved
    x_new, λ_new, labels_new = apply(x, multipliers, labels, chosen, η * v)
    parents = parents_of(len(x), chosen)
    return Split(x_new, λ_new, labels_new, chosen, parents, η, eigenvalues, unmoved, after)
