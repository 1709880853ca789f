"""The verdict of exact recovery, the evidence for it, and what it leaves open."""

import copy
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from palimpsest.identifiability.polynomials import monomial_count
from palimpsest.identifiability.problem import Problem
from palimpsest.networks import PolynomialNetwork


class Extent(StrEnum):
    """The answer in words. Every value except the first comes with a condition or a reason."""

    IDENTIFIED = "identified"
    UP_TO = "identified up to"
    CONDITIONAL = "identified if"
    IN_PART = "identified in part"
    NOT_IDENTIFIED = "not identified"


@dataclass(frozen=True)
class Margins:
    """Does a network whose weights are a stationary point of the margin problem agree with the samples?

    At θ = c·θ̃, with θ̃ on the margin of every active sample, |Φ(θ; x_i)| = c^{α+1} and λ_i = b_i y_i > 0.

    Attributes:
        outputs: Φ(x_i), (n,).
        spread: (max − min)/max of |Φ(x_i)|. It is zero for a stationary point and samples of the right norm.
        scale: c, from the mean of |Φ(x_i)|.
        labels: y_i = sign Φ(x_i).
        dual_feasible: whether every λ_i = b_i y_i is positive.
    """

    outputs: Tensor
    spread: float
    scale: float
    labels: Tensor
    dual_feasible: bool

    @property
    def agree(self) -> bool:
        """Whether the outputs are those of a stationary point on its margins, so that c is known."""
        return self.spread < 1e-6 and self.dual_feasible


def margins(network: PolynomialNetwork, samples: Tensor, weights: Tensor) -> Margins:
    """Outputs, scale, labels and dual feasibility of recovered samples under the network itself.

    Args:
        network: the network that the samples were recovered from.
        samples: x_i, (n, d).
        weights: b_i, (n,).

    Examples:
        >>> x, b = torch.eye(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
        >>> margins(PolynomialNetwork(3, 10, activation=3), x, b).outputs.shape
        torch.Size([3])
    """
    with torch.no_grad():
        outputs = copy.deepcopy(network).double()(samples.double())[:, 0]
    size, labels = outputs.abs(), outputs.sign()
    spread = float((size.max() - size.min()) / size.max())
    scale = float(size.mean() ** (1 / (network.degree + 1)))
    return Margins(outputs, spread, scale, labels, bool((labels * weights.to(labels) > 0).all()))


@dataclass(frozen=True)
class IdentifiabilityCertificate:
    """The evidence for a verdict. ``print(certificate)`` puts it into words.

    Attributes:
        verdict: see `Extent`.
        reason: the condition, or why not more is identified. Empty if there is neither.
        most_active: the claim assumes that no more samples than this are active. None if it does not assume a number.
        not_identified: what evaluations never tell about active samples. (Inactive samples leave no trace.)
        degree: α.
        dimension: d of the samples (including the constant 1 of a bias).
        reduced_dimension: r, the dimension of the span of the active samples.
        evaluations: m.
        needed: N, unknowns of the interpolation in the reduced space.
        rank: rank of the interpolation. T is determined if it equals ``needed``.
        family: dimension of the family of solutions: of tensors if T is not determined, of samples if it is.
        interpolation_misfit: relative residual of the best symmetric T.
        misfit: relative residual of the recovered samples.
        noise: the assumed relative accuracy of the values.
        interpolation_conditioning: smallest over largest singular value of the interpolation.
        sample_conditioning: the same of the matrix of unit samples (of their φ_p if overcomplete).
        jacobian_conditioning: the same of the derivative of the values by the samples; nan if not formed.
        error_per_noise: expected ‖x̂_i − x_i‖ per unit of relative noise on the values, (n,).
        direction_bounds: bound on the sine of the angle by which each direction of the span is wrong, (r,).
        margins: agreement with the network, if one was given.
    """

    verdict: Extent
    reason: str
    most_active: int | None
    not_identified: tuple[str, ...]
    degree: int
    dimension: int
    reduced_dimension: int
    evaluations: int
    needed: int
    rank: int
    family: int
    interpolation_misfit: float
    misfit: float
    noise: float
    interpolation_conditioning: float
    sample_conditioning: float
    jacobian_conditioning: float
    error_per_noise: Tensor
    direction_bounds: Tensor
    margins: Margins | None = None

    @property
    def expected_error(self) -> Tensor:
        """Expected ‖x̂_i − x_i‖ at the assumed noise, (n,)."""
        return self.noise * self.error_per_noise

    @property
    def summary(self) -> str:
        """The verdict as one sentence."""
        open_ = " and ".join(self.not_identified)
        if self.verdict in (Extent.IDENTIFIED, Extent.UP_TO):
            return f"{self.verdict} {open_}".rstrip()
        if self.verdict is Extent.CONDITIONAL:
            return f"{self.verdict} {self.reason}" + (f", up to {open_}" if open_ else "")
        return f"{self.verdict}: {self.reason}"

    def __str__(self) -> str:
        lines = [
            self.summary,
            f"  {self.evaluations} evaluations of degree {self.degree} in dimension {self.dimension}, "
            f"samples span {self.reduced_dimension}",
            f"  interpolation: rank {self.rank} of {self.needed}, conditioning "
            f"{self.interpolation_conditioning:.1e}, misfit {self.interpolation_misfit:.1e}",
            f"  samples: misfit {self.misfit:.1e} against noise {self.noise:.1e}, "
            f"conditioning {self.sample_conditioning:.1e}, Jacobian {self.jacobian_conditioning:.1e}, "
            f"family {self.family}",
        ]
        if len(self.error_per_noise):
            lines.append(f"  expected error: {float(self.expected_error.max()):.1e} at most")
        if self.margins is not None:
            lines.append(
                f"  margins: spread {self.margins.spread:.1e}, scale {self.margins.scale:.6g}, multipliers "
                + ("positive" if self.margins.dual_feasible else "of both signs")
            )
        return "\n".join(lines)


def claim(
    problem: Problem, sure: Tensor, r: int, family: int, compared: Margins | None
) -> tuple[Extent, str, tuple[str, ...]]:
    """Verdict, reason and open questions, for samples that fit the values to within the noise.

    The ``sure`` ones have a small expected error. All span r dimensions, and a family of them has the same values.
    """
    n, hidden = len(sure), int((~sure).sum())
    if refusal := _refusal(problem, n, hidden, r, family):
        return Extent.NOT_IDENTIFIED, refusal, ("the samples",)
    open_ = open_questions(problem, compared)
    conditions = [no_more_active_than(n)] if problem.count is None else []
    if hidden:
        reason = f"noise of this size hides {hidden} of {n} samples"
        return Extent.IN_PART, "; the others are samples if ".join([reason, *conditions]), open_
    if problem.estimated:
        conditions.append(f"the misfit of {problem.noise:.0e} is noise in the values")
    if conditions:
        return Extent.CONDITIONAL, " and ".join(conditions), open_
    return (Extent.UP_TO if open_ else Extent.IDENTIFIED), "", open_


def _refusal(problem: Problem, n: int, hidden: int, r: int, family: int) -> str:
    if problem.count not in (None, n):
        return f"the count is {problem.count}, but the values show {n} active samples"
    if problem.count is None and r > 1 and n * r >= monomial_count(r, problem.degree):
        return f"{n} terms in {r} dimensions fit any tensor, so the fit does not prove them; give the count"
    if family:
        return f"the samples belong to a family of dimension {family} with the same values"
    if hidden == n or (problem.estimated and hidden):
        return f"noise of the size of the misfit hides {hidden} of {n} samples"
    return ""


def no_more_active_than(number: int) -> str:
    """The condition that only a given count removes, because larger datasets can always imitate this one."""
    return f"no more than {number} samples are active"


def open_questions(problem: Problem, compared: Margins | None = None) -> tuple[str, ...]:
    """The facts about an active sample that evaluations of f never tell."""
    open_ = []
    if not problem.bias:
        open_.append("the sign of each sample" + (" (and so its label)" if problem.degree % 2 else ""))
        if problem.norm is None:
            open_.append("its norm")
    if compared is not None and not scale_is_known(problem, compared):
        open_.append("the common scale of the weights")
    return tuple(open_)


def scale_is_known(problem: Problem, compared: Margins) -> bool:
    """Whether the margins tell c of θ = c·θ̃: they agree, and a common norm of the samples cannot look like c."""
    return compared.agree and (problem.bias or problem.norm is not None)
