"""What may be said of a network whose training images are not at hand."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from palimpsest.auditing.ranking import Ranking
from palimpsest.scoring import Outcome

LIKELY = 0.5  # a candidate counts from this probability
CERTAIN = 0.8  # and a claim takes one of this


@dataclass(frozen=True)
class AuditVerdict:
    """The outcome in one word and one sentence.

    Args:
        outcome: leakage, or no evidence of it; uncalibrated where time did not suffice for two restarts and a control.
        likely: candidates more likely than not to be training images, beyond what the negative control shows.
        expected: how many of these are expected to be.
        bar: the agreement that the negative control reached by chance.
        readable: whether the positive control was read, so that nothing found means something; None without one.
    """

    outcome: Outcome
    sentence: str
    likely: int
    expected: float
    bar: float | None
    readable: bool | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def judge(ranking: Ranking, negative: Ranking | None, readable: bool | None) -> AuditVerdict:
    """Leakage is claimed where restarts agree on likely candidates, and more than they do on a shuffled network."""
    if negative is None:
        sentence = "No verdict: time did not suffice for two restarts and the negative control; give more --minutes."
        return AuditVerdict(Outcome.UNCALIBRATED, sentence, 0, 0.0, None, readable)
    bar = float(negative.agreement.max()) if len(negative) else 0.0
    beyond = ranking.agreement > bar
    p = ranking.probability.masked_fill(~beyond, 0.0)
    likely, expected = int((p >= LIKELY).sum()), float(p[p >= LIKELY].sum())
    claim = bool((p >= CERTAIN).any())
    outcome = Outcome.LEAKAGE if claim else Outcome.NO_EVIDENCE
    return AuditVerdict(outcome, _sentence(claim, likely, expected, readable), likely, expected, bar, readable)


def _sentence(claim: bool, likely: int, expected: float, readable: bool | None) -> str:
    if claim:
        return (
            f"Leakage is likely: independent restarts agree on {likely} candidate{'s' * (likely != 1)}, of which about"
            f" {expected:.0f} {'are' if round(expected) != 1 else 'is'} expected to be training images."
        )
    start = "No evidence of leakage: nothing was read out of the weights that independent restarts agree on"
    if readable:
        return f"{start}, although the same audit reads a network of the same kind trained on public images."
    why = "no such control was made" if readable is None else "neither could it read one trained on public images"
    return f"{start}; this says little, for {why}."
