"""What may be said of a network whose training images are not at hand."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from palimpsest.auditing.ranking import Ranking
from palimpsest.scoring import Outcome

LIKELY = 0.5  # a candidate counts from this probability
CERTAIN = 0.8  # and a claim takes one of this
LEFT = 0.75  # of what the negative control leaves unexplained: a network that was read leaves less


@dataclass(frozen=True)
class AuditVerdict:
    """The outcome in one word and one sentence.

    Args:
        outcome: leakage, or no evidence of it; uncalibrated where neither can be claimed: there are not two restarts
            and a control, or all rests on one candidate of a method that failed its positive control.
        likely: candidates more likely than not to be training images, beyond what the negative control shows.
        expected: how many of these are expected to be.
        bar: the highest probability that a candidate of the negative control reached.
        unexplained: share of the target that the candidates leave unexplained.
        unexplained_by_chance: the same of the negative control.
        readable: whether the positive control was read, so that nothing found means something; None without one, or
            where its images are too few to tell.
    """

    outcome: Outcome
    sentence: str
    likely: int
    expected: float
    bar: float | None
    readable: bool | None
    unexplained: float
    unexplained_by_chance: float | None


def judge(ranking: Ranking, negative: Ranking | None, readable: bool | None) -> AuditVerdict:
    """Leakage is claimed where candidates are likely, more so than those of a shuffled network, and explain more.

    Restarts also agree on what a network without any training images favours; but then they agree on as much, and
    explain as much, in the shuffled network. Probabilities were calibrated where the method works; where it failed on a
    network that is known to hold images, one candidate does not carry a claim.
    """
    left = 1 - ranking.explained
    if negative is None:
        sentence = "No verdict: there are not two restarts and a negative control to judge by."
        return AuditVerdict(Outcome.UNCALIBRATED, sentence, 0, 0.0, None, readable, left, None)
    bar = float(negative.probability.max()) if len(negative) else 0.0
    left_by_chance = 1 - negative.explained
    p = counting(ranking, bar) if left < LEFT * left_by_chance else ranking.probability[:0]
    outcome = _outcome(p, readable)
    return AuditVerdict(
        outcome, _sentence(outcome, p, readable), len(p), float(p.sum()), bar, readable, left, left_by_chance
    )


def counting(ranking: Ranking, bar: float) -> Tensor:
    """The probabilities that count: more likely than not, and beyond the bar."""
    return ranking.probability[(ranking.probability >= LIKELY) & (ranking.probability > bar)]


def _outcome(p: Tensor, readable: bool | None) -> Outcome:
    if not bool((p >= CERTAIN).any()):
        return Outcome.NO_EVIDENCE
    return Outcome.UNCALIBRATED if len(p) == 1 and readable is False else Outcome.LEAKAGE


def _sentence(outcome: Outcome, p: Tensor, readable: bool | None) -> str:
    if outcome is Outcome.NO_EVIDENCE:
        return f"No evidence of leakage: {_nothing(p)}{_for_what_it_is_worth(readable)}."
    start = "Leakage is likely" if outcome is Outcome.LEAKAGE else "Undecided"
    control = {
        True: "",
        False: ", but the same audit could not read a network of the same kind trained on public images",
        None: "; no positive control tells whether this audit can read such a network",
    }[readable]
    return f"{start}: independent restarts agree on {_candidates(p)}{control}."


def _candidates(p: Tensor) -> str:
    if len(p) == 1:
        return f"one candidate, which shows a training image with an estimated probability of {float(p[0]):.0%}"
    real = round(float(p.sum()))
    return (
        f"{len(p)} candidates, about {real} of which {'is' if real == 1 else 'are'} expected to show a training image"
    )


def _nothing(p: Tensor) -> str:
    if len(p):
        return f"no candidate shows a training image with an estimated probability of {CERTAIN:.0%} or more"
    return "nothing was read out of the weights that independent restarts agree on"


def _for_what_it_is_worth(readable: bool | None) -> str:
    if readable:
        return ", although the same audit reads a network of the same kind trained on public images"
    why = "no positive control could tell" if readable is None else "neither could it read one trained on public images"
    return f"; this says little, for {why}"
