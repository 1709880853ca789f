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
        outcome: leakage, or no evidence of it; uncalibrated where time did not suffice for two restarts and a control.
        likely: candidates more likely than not to be training images, beyond what the negative control shows.
        expected: how many of these are expected to be.
        bar: the highest probability that a candidate of the negative control reached.
        unexplained: share of the target that the candidates leave unexplained.
        unexplained_by_chance: the same of the negative control.
        readable: whether the positive control was read, so that nothing found means something; None without one.
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
    explain as much, in the shuffled network.
    """
    left = 1 - ranking.explained
    if negative is None:
        sentence = "No verdict: time did not suffice for two restarts and the negative control; give more --minutes."
        return AuditVerdict(Outcome.UNCALIBRATED, sentence, 0, 0.0, None, readable, left, None)
    bar = float(negative.probability.max()) if len(negative) else 0.0
    left_by_chance = 1 - negative.explained
    p = counting(ranking, bar) if left < LEFT * left_by_chance else ranking.probability[:0]
    claim = bool((p >= CERTAIN).any())
    outcome = Outcome.LEAKAGE if claim else Outcome.NO_EVIDENCE
    expected = float(p.sum())
    sentence = _sentence(claim, len(p), expected, readable)
    return AuditVerdict(outcome, sentence, len(p), expected, bar, readable, left, left_by_chance)


def counting(ranking: Ranking, bar: float) -> Tensor:
    """The probabilities that count: more likely than not, and beyond the bar."""
    return ranking.probability[(ranking.probability >= LIKELY) & (ranking.probability > bar)]


def _sentence(claim: bool, likely: int, expected: float, readable: bool | None) -> str:
    if claim:
        found = round(expected)
        return (
            f"Leakage is likely: independent restarts agree on {likely} candidate{'s' * (likely != 1)},"
            f" about {found} of which {'is' if found == 1 else 'are'} expected to show a training image."
        )
    start = "No evidence of leakage: nothing was read out of the weights that independent restarts agree on"
    if readable:
        return f"{start}, although the same audit reads a network of the same kind trained on public images."
    why = "no such control was made" if readable is None else "neither could it read one trained on public images"
    return f"{start}; this says little, for {why}."
