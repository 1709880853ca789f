"""The headline of an audit: one outcome, from everything that the audit measured.

Leakage       Training images can be read out of the weights.
No evidence   Nothing was read, although the same effort reads a control that is as hard to read.
Undecided     The audit ran to its end, and what it found supports neither of the two.
No verdict    Something that a verdict needs is missing, or an assumption of the method does not hold.

The rules apply in this order. A comparison with given training images that claims leakage is the headline, because its
rate of false claims is known. Data that do not fit the network, or a method that does not describe its training, give
no verdict. Without a comparison, estimated probabilities may claim leakage. Everything else only weakens the claim
that nothing was read.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from palimpsest.auditing.ranking import Ranking
from palimpsest.scoring import Outcome, Verdict

LIKELY = 0.5  # a candidate counts from this probability
CERTAIN = 0.8  # and a claim takes one of this
LEFT = 0.75  # of what the negative control leaves unexplained: a network that was read leaves less
DESCRIBED = 0.5  # share of the target that may stay unexplained if the method describes the training
AS_FAR = 0.9  # of the subject's way: a control that moved less is easier to read
CROWD = 2.0  # times as many likely candidates as training images: the estimates do not hold for this network
MORE = "Audit again in a new folder with more --minutes."
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
    def easier(self) -> tuple[str, str] | None:
        """Why it may be easier to read than the subject, and what to do about it."""
        if self.samples is None:
            return "the number of training images is unknown", "Give it by --samples."
        if self.images < self.samples:
            return f"it holds {self.images} images, not {self.samples}", MORE
        if self.way < AS_FAR:
            return f"it moved only {self.way:.2g} times as far from its start", f"{MORE} Or give more --control-steps."
        return None


@dataclass(frozen=True)
class Evidence:
    """Everything that a headline rests on; None where it was not measured.

    Args:
        ranking, negative: the candidates of the subject and of the negative control.
        positive: the positive control.
        comparison: the subject's candidates compared with its training images.
        floor: share of the target that the training images leave unexplained.
        accuracy: of the network on the training images.
        majority: share of their commonest class.
        moved: whether the trained weights differ from the initial ones.
        method: by which the weights were read.
        samples: number of training images, if known.
    """

    ranking: Ranking
    negative: Ranking | None = None
    positive: PositiveControl | None = None
    comparison: Verdict | None = None
    floor: float | None = None
    accuracy: float | None = None
    majority: float = 0.0
    moved: bool = True
    method: str = "ntk"
    samples: int | None = None

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
        """Whether the control was read, by the same judgement as the subject; None without a control.

        Its images are public, so a control also shows whether likely candidates are real in networks of this kind.
        """
        if self.positive is None or self.positive.comparison.outcome is Outcome.NO_VERDICT:
            return None
        found = self.positive.comparison.outcome is Outcome.LEAKAGE
        return found and (self.compared or bool((self.likely(self.positive.ranking) >= CERTAIN).any()))


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
    headline = _compared(e) or _no_verdict(e) or _estimated(e, p) or _undecided(e, p) or _no_evidence(e)
    outcome, sentence, advice = headline
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


def _compared(e: Evidence) -> Headline | None:
    """A comparison that claims leakage."""
    if e.comparison is None or e.comparison.outcome is not Outcome.LEAKAGE:
        return None
    return Outcome.LEAKAGE, e.comparison.sentence, ""


def _estimated(e: Evidence, p: Tensor) -> Headline | None:
    """Without a comparison, likely candidates in a network of a kind whose likely candidates are real."""
    if e.compared or not e.readable or _crowded(e, p) or not bool((p >= CERTAIN).any()):
        return None
    return Outcome.LEAKAGE, f"Leakage: {_candidates(e, p)}.", ""


def _crowded(e: Evidence, p: Tensor) -> bool:
    return e.samples is not None and len(p) > CROWD * e.samples


def _no_verdict(e: Evidence) -> Headline | None:
    if not e.moved:
        sentence = "No verdict: the initial weights equal the trained ones."
        return Outcome.NO_VERDICT, sentence, "Check the two files."
    if e.accuracy is not None and e.accuracy < (1 + e.majority) / 2:  # half-way from looking at nothing to knowing all
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
            "Check the mean and standard deviation that training used; Adam and long training have the same effect."
            if e.method == "ntk"
            else "Give the initial weights by --initial. Without them a network must have been trained for very long.",
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
    if e.compared:
        assert e.comparison is not None
        assert e.comparison.p_value is not None
        if e.comparison.p_value <= SUGGESTIVE or e.comparison.recovered > MANY:
            count = f"{e.comparison.recovered} of {e.comparison.total} training images recovered"
            reason = f"{count}, which chance can explain (p = {e.comparison.p_value:.2g})"
            return reason, f"Hold out more images. {MORE}"
        return (f"{_candidates(e, p)}, but no given training image is matched beyond chance", MORE) if len(p) else None
    if len(p):
        return f"{_candidates(e, p)}, but {_doubt(e, p)}", f"Look at the pictures. {MORE}"
    if e.surplus >= 1:
        return f"about {e.surplus:.0f} more candidates are expected to be real than by chance, but none is likely", MORE
    return None


def _doubt(e: Evidence, p: Tensor) -> str:
    """Why likely candidates are not a claim."""
    if _crowded(e, p):
        return f"there are only {e.samples} training images, so the estimates do not hold here"
    if not bool((p >= CERTAIN).any()):
        return f"no estimate reaches {CERTAIN:.0%}"
    return (
        "no positive control was read" if e.readable is None else "the positive control is not read by the same effort"
    )


def _unproven(e: Evidence) -> tuple[str, str] | None:
    """Nothing was found, and nothing shows that it would have been."""
    nothing = f"nothing was read{_count(e)}"
    if e.positive is None or e.readable is None:
        return f"{nothing}, and no positive control was read", MORE
    if not e.readable:
        return f"{nothing}, but the same effort does not read the positive control either", MORE
    if e.positive.easier:
        reason, advice = e.positive.easier
        return f"{nothing}, but the positive control may be easier to read: {reason}", advice
    unexplained, control = 1 - e.ranking.explained, 1 - e.positive.ranking.explained
    if e.floor is None and unexplained > DESCRIBED >= control:
        reason = f"{nothing}, and the method may not describe this training: it leaves {unexplained:.0%} unexplained"
        return f"{reason}, and {control:.0%} of the control", "Give the training images by --data: they decide it."
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


def _candidates(e: Evidence, p: Tensor) -> str:
    if len(p) == 1:
        return f"restarts agree on one candidate, with an estimated probability of {float(p[0]):.0%}"
    real = min(round(float(p.sum())), e.samples or len(p))
    return f"restarts agree on {len(p)} candidates, and an estimated {real} of them are training images"
