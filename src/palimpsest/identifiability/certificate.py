"""What exact recovery can vouch for: the verdict, the evidence behind it, and what it leaves open."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

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
        spread: (max − min)/max of |Φ(x_i)|; zero for a stationary point and samples of the right norm.
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
        >>> from palimpsest.identifiability import stationary_network
        >>> x, b = torch.eye(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
        >>> margins(stationary_network(x, b), x, b).dual_feasible
        True
    """
    with torch.no_grad():
        outputs = copy.deepcopy(network).double()(samples.double())[:, 0]
    size = outputs.abs()
    spread = float((size.max() - size.min()) / size.max())
    scale = float(size.mean() ** (1 / (network.degree + 1)))
    labels = outputs.sign()
    return Margins(outputs, spread, scale, labels, bool((labels * weights.to(labels) > 0).all()))


@dataclass(frozen=True)
class IdentifiabilityCertificate:
    """The evidence for a verdict. ``print(certificate)`` says it in words.

    Attributes:
        verdict: see `Verdict`.
        reason: the condition, or why not more is identified; empty when nothing stands in the way.
        most_active: the claim supposes that no more samples than this are active; None where it does not.
        not_identified: what evaluations never tell about active samples. (Inactive ones leave no trace.)
        degree: α.
        dimension: d of the samples (including the constant 1 of a bias).
        reduced_dimension: r, the dimension of the span of the active samples.
        evaluations: m.
        needed: N, unknowns of the interpolation in the reduced space.
        rank: rank of the interpolation; T is determined when it equals ``needed``.
        family: dimension of the family of solutions: of tensors while T is open, of samples after that.
        interpolation_misfit: relative residual of the best symmetric T.
        misfit: relative residual of the recovered samples.
        noise: relative accuracy of the values that was presumed.
        interpolation_conditioning: smallest over largest singular value of the interpolation.
        sample_conditioning: the same of the matrix of unit samples (of their φ_p when overcomplete).
        jacobian_conditioning: the same of the derivative of the values by the samples; nan when not formed.
        error_per_noise: expected ‖x̂_i − x_i‖ per unit of relative noise on the values, (n,).
        direction_bounds: bound on the sine of the angle by which each direction of the span is wrong, (r,).
        margins: agreement with the network, where one was given.
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
        """Expected ‖x̂_i − x_i‖ at the presumed noise, (n,)."""
        return self.noise * self.error_per_noise

    @property
    def summary(self) -> str:
        """The verdict as one sentence."""
        if self.verdict is Extent.IDENTIFIED:
            return str(self.verdict)
        open_ = " and ".join(self.not_identified)
        if self.verdict is Extent.UP_TO:
            return f"{self.verdict} {open_}"
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
