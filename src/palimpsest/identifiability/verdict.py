"""From the evidence to the verdict: what may be claimed, under which conditions, and what stays open."""

from __future__ import annotations

from torch import Tensor

from palimpsest.identifiability.certificate import Extent, Margins
from palimpsest.identifiability.polynomials import monomial_count
from palimpsest.identifiability.problem import Problem

Claim = tuple[Extent, str, tuple[str, ...]]


def no_more_active_than(number: int) -> str:
    """The condition that only an announced count removes: larger data sets can always imitate this one."""
    return f"no more than {number} samples are active"


def judge(problem: Problem, sure: Tensor, r: int, family: int, compared: Margins | None) -> Claim:
    """Verdict, reason and open questions, for samples that fit the values to within the noise.

    Args:
        sure: which samples have a small expected error.
        r: dimension of their span.
        family: dimension of the family of samples with the same values.
        compared: agreement with a network, where one was given.
    """
    n = len(sure)
    open_ = open_questions(problem, compared)
    if refusal := _refusal(problem, sure, r, family):
        return Extent.NOT_IDENTIFIED, refusal, ("the samples",)
    conditions = [no_more_active_than(n)] if problem.count is None else []
    if not sure.all():
        hidden = f"{int((~sure).sum())} of {n} samples are hidden by noise of this size"
        return Extent.IN_PART, "; the others are samples if ".join([hidden, *conditions]), open_
    if problem.estimated:
        conditions.append(f"the misfit of {problem.noise:.0e} is noise in the values")
    if conditions:
        return Extent.CONDITIONAL, " and ".join(conditions), open_
    return (Extent.UP_TO if open_ else Extent.IDENTIFIED), "", open_


def _refusal(problem: Problem, sure: Tensor, r: int, family: int) -> str:
    n = len(sure)
    if problem.count not in (None, n):
        return f"{problem.count} active samples were announced, but the values show {n}"
    if problem.count is None and r > 1 and n * r >= monomial_count(r, problem.degree):
        return (
            f"{n} terms in {r} dimensions have as many parameters as a tensor, so a fit proves nothing; give the count"
        )
    if family:
        return f"the samples belong to a family of dimension {family} with the same values"
    if not sure.any() or (problem.estimated and not sure.all()):
        return f"{int((~sure).sum())} of {n} samples are hidden by noise of the size of the misfit"
    return ""


def open_questions(problem: Problem, compared: Margins | None = None) -> tuple[str, ...]:
    """What no evaluation of f can tell about an active sample."""
    open_ = []
    if not problem.bias:
        open_.append("the sign of each sample" + (" (and so its label)" if problem.degree % 2 else ""))
        if problem.norm is None:
            open_.append("its norm")
    if compared is not None and not scale_is_known(problem, compared):
        open_.append("the common scale of the weights")
    return tuple(open_)


def scale_is_known(problem: Problem, compared: Margins) -> bool:
    """Whether the margins tell c of θ = c·θ̃: they must agree, on samples whose common norm cannot pass for it."""
    return compared.agree and (problem.bias or problem.norm is not None)
