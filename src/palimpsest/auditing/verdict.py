"""The headline of an audit: one outcome, from everything that the audit measured.

Leakage       Training images can be read out of the weights.
No evidence   Nothing was read, although the same effort reads a control that is as hard to read.
Undecided     The audit ran to its end, and what it found supports neither of the two.
No verdict    Something that a verdict needs is missing, or an assumption of the method does not hold.

The comparison with given training images decides alone where it claims leakage: its rate of false claims is known.
Everything else can only weaken a claim that nothing was found.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from palimpsest.auditing.ranking import Ranking
from palimpsest.scoring import Outcome, Verdict

LIKELY = 0.5  # a candidate counts from this probability
CERTAIN = 0.8  # and a claim takes one of this
LEFT = 0.75  # of what the negative control leaves unexplained: a network that was read leaves less
FITTED = 0.75  # accuracy on its own training images below which a network was trained on other images
DESCRIBED = 0.5  # floor above which the method does not describe the training
AS_FAR = 0.9  # of the subject's way: a control that moved less is easier to read
SUGGESTIVE = 0.1  # p-value of a comparison that decides nothing and yet excludes nothing
MANY = 5  # recovered images that chance may explain, but that nobody should call nothing


@dataclass(frozen=True)
class PositiveControl:
    """A network of the same kind that holds public images, read with the same effort.

    Args:
        ranking: its candidates, ranked as those of the subject are.
        comparison: these candidates compared with the public images.
        images: how many images it holds.
        samples: how many the subject holds, if known.
        way: how far it moved, relative to the subject.
    """

    ranking: Ranking
    comparison: Verdict
    images: int
    samples: int | None
    way: float

    @property
    def easier(self) -> str:
        """Why it may be easier to read than the subject, or nothing."""
        if self.samples is None:
            return "the number of training images is unknown; give it as --samples"
        if self.images < self.samples:
            return f"it holds {self.images} images, not {self.samples}"
        return "" if self.way >= AS_FAR else f"it moved only {self.way:.2g} times as far from its start"


@dataclass(frozen=True)
class Evidence:
    """Everything that a headline rests on; None where it was not measured.

    Args:
        ranking, negative: the candidates of the subject and of the negative control.
        positive: the positive control.
        comparison: the subject's candidates compared with its training images.
        floor: share of the target that the training images leave unexplained.
        accuracy: of the network on the training images.
        moved: whether the trained weights differ from the initial ones.
    """

    ranking: Ranking
    negative: Ranking | None = None
    positive: PositiveControl | None = None
    comparison: Verdict | None = None
    floor: float | None = None
    accuracy: float | None = None
    moved: bool = True

    @property
    def compared(self) -> bool:
        """Whether training images and enough held-out images were given."""
        return self.comparison is not None and self.comparison.outcome is not Outcome.NO_VERDICT

    def likely(self, ranking: Ranking) -> Tensor:
        """The probabilities that count: more likely than not, and beyond what a network without content reaches."""
        p = ranking.probability
        if self.negative is None or 1 - ranking.explained >= LEFT * (1 - self.negative.explained):
            return p[:0]
        return p[(p >= LIKELY) & (p > self.bar)]

    @property
    def bar(self) -> float:
        """The highest probability that a candidate of the negative control reached."""
        return float(self.negative.probability.max()) if self.negative is not None and len(self.negative) else 0.0

    @property
    def surplus(self) -> float:
        """Expected number of real candidates, less what the negative control shows."""
        chance = 0.0 if self.negative is None else float(self.negative.probability.sum())
        return float(self.ranking.probability.sum()) - chance

    @property
    def readable(self) -> bool | None:
        """Whether the control was read, by the same judgement as the subject; None without a control."""
        if self.positive is None or self.positive.comparison.outcome is Outcome.NO_VERDICT:
            return None
        if self.compared:
            return self.positive.comparison.outcome is Outcome.LEAKAGE
        return bool((self.likely(self.positive.ranking) >= CERTAIN).any())


@dataclass(frozen=True)
class AuditVerdict:
    """The headline, and the numbers behind it.

    Args:
        outcome: leakage, no evidence, undecided, or no verdict.
        sentence: the same for someone who reads nothing else.
        advice: what to do for a better answer, or nothing.
        likely: candidates more likely than not to be training images, beyond what the negative control shows.
        expected: how many of these are expected to be.
        bar: the highest probability that a candidate of the negative control reached.
        unexplained: share of the target that the candidates leave unexplained.
        unexplained_by_chance: the same of the negative control.
        readable: whether the positive control was read with the same effort; None without one.
    """

    outcome: Outcome
    sentence: str
    advice: str
    likely: int
    expected: float
    bar: float | None
    readable: bool | None
    unexplained: float
    unexplained_by_chance: float | None


def judge(e: Evidence) -> AuditVerdict:
    """Fold all evidence into one headline."""
    p = e.likely(e.ranking)
    outcome, sentence, advice = _leakage(e, p) or _no_verdict(e) or _undecided(e, p) or _no_evidence(e)
    return AuditVerdict(
        outcome=outcome,
        sentence=sentence,
        advice=advice,
        likely=len(p),
        expected=float(p.sum()),
        bar=None if e.negative is None else e.bar,
        readable=e.readable,
        unexplained=1 - e.ranking.explained,
        unexplained_by_chance=None if e.negative is None else 1 - e.negative.explained,
    )


Headline = tuple[Outcome, str, str]


def _leakage(e: Evidence, p: Tensor) -> Headline | None:
    """A comparison that claims it; without one, likely candidates of a method that reads its control."""
    if e.comparison is not None and e.comparison.outcome is Outcome.LEAKAGE:
        return Outcome.LEAKAGE, e.comparison.sentence, ""
    alone = len(p) == 1 and e.readable is False  # one estimate does not carry a claim where the method fails
    if e.compared or not e.moved or alone or not bool((p >= CERTAIN).any()):
        return None
    caveat = "" if e.readable else " No positive control confirms the estimate."
    return Outcome.LEAKAGE, f"Leakage: {_candidates(p)}.{caveat}", ""


def _no_verdict(e: Evidence) -> Headline | None:
    if not e.moved:
        sentence = "No verdict: the initial weights equal the trained ones."
        return Outcome.NO_VERDICT, sentence, "Check the two files."
    if e.accuracy is not None and e.accuracy < FITTED:
        return (
            Outcome.NO_VERDICT,
            f"No verdict: the network classifies only {e.accuracy:.0%} of the given training images correctly.",
            "Check the images and their classes, and the mean and standard deviation that training used.",
        )
    if e.floor is not None and e.floor > DESCRIBED:
        return (
            Outcome.NO_VERDICT,
            "No verdict: the method does not describe this training. The training images leave"
            f" {e.floor:.0%} of its target unexplained.",
            "Check the mean and standard deviation that training used; Adam and long training have the same effect.",
        )
    if e.negative is None:
        sentence = "No verdict: the audit did not read two restarts and a negative control."
        return Outcome.NO_VERDICT, sentence, "Run the same command again with more --minutes."
    return None


def _undecided(e: Evidence, p: Tensor) -> Headline | None:
    reason = _ambiguous(e, p) or _unproven(e)
    return None if reason is None else (Outcome.UNDECIDED, f"Undecided: {reason[0]}.", reason[1])


def _ambiguous(e: Evidence, p: Tensor) -> tuple[str, str] | None:
    """Something was found, but not enough for a claim."""
    more = "Audit again in a new folder with more --minutes."
    if e.compared:
        assert e.comparison is not None
        assert e.comparison.p_value is not None
        if e.comparison.p_value <= SUGGESTIVE or e.comparison.recovered > MANY:
            count = f"{e.comparison.recovered} of {e.comparison.total} training images recovered"
            return (
                f"{count}, which chance can explain (p = {e.comparison.p_value:.2g})",
                f"Hold out more images. {more}",
            )
        if len(p):
            return f"{_candidates(p)}, but they match none of the given training images beyond chance", more
        return None
    if len(p):
        why = f"no estimate reaches {CERTAIN:.0%}" if len(p) > 1 else "one estimate does not carry a claim"
        return f"{_candidates(p)}, but {why}", f"Look at the pictures. {more}"
    if e.surplus >= 1:
        return f"about {e.surplus:.0f} more candidates are expected to be real than by chance, but none is likely", more
    return None


def _unproven(e: Evidence) -> tuple[str, str] | None:
    """Nothing was found, and nothing shows that it would have been."""
    nothing, more = f"nothing was read{_count(e)}", "Audit again in a new folder with more --minutes."
    if e.positive is None or e.readable is None:
        return f"{nothing}, and no positive control was read", more
    if not e.readable:
        return f"{nothing}, but the same effort does not read the positive control either", more
    if e.positive.easier:
        return f"{nothing}, but the positive control may be easier to read: {e.positive.easier}", more
    return None


def _no_evidence(e: Evidence) -> Headline:
    assert e.positive is not None
    control = f"The same effort reads a control that is as hard: {e.positive.images} images, moved as far"
    return Outcome.NO_EVIDENCE, f"No evidence of leakage: nothing was read{_count(e)}. {control}.", ""


def _count(e: Evidence) -> str:
    if not e.compared:
        return ""
    assert e.comparison is not None
    assert e.comparison.p_value is not None
    recovered = f"{e.comparison.recovered} of {e.comparison.total} training images recovered"
    return f" beyond chance ({recovered}, p = {e.comparison.p_value:.2g})"


def _candidates(p: Tensor) -> str:
    if len(p) == 1:
        return f"restarts agree on one candidate, with an estimated probability of {float(p[0]):.0%}"
    return f"restarts agree on {len(p)} candidates, of which an estimated {round(float(p.sum()))} show training images"
