"""Everything that a headline rests on: the ranking of a network's candidates, of its two controls, and the images."""

from dataclasses import dataclass, replace

from scipy.stats import binom
from torch import Tensor

from palimpsest.auditing.plan import MOST_PUBLIC_IMAGES
from palimpsest.auditing.ranking import Ranking
from palimpsest.scoring import Outcome, Verdict

LIKELY = 0.5  # probability from which a candidate counts
CERTAIN = 0.8  # probability that one candidate must reach for a claim
FEWEST = 5  # likely candidates of the control that can confirm the estimates
CONFIRMED = 0.8  # share of the control's likely candidates that must be real
LUCK = 0.1  # highest probability of that number if only half of such candidates were real
READ = 0.75  # a network that was read leaves less than this share of the negative control's unexplained part
DETERMINED = 0.75  # share that the negative control leaves unexplained if the equations determine images
NO_MORE = 0.95  # of the same part: such a network explains no more than the negative control does
AS_FAR = 0.9  # of the subject's distance: a control that moved less is easier to read
CHANGES = ("ntk", "path", "gradient")  # methods whose target is a change, not the weights with their start
LIMITED = f"A control holds at most {MOST_PUBLIC_IMAGES} images, one per candidate, so only a leak can be shown here."


@dataclass(frozen=True)
class PositiveControl:
    """A network of the same kind that holds public images, read with the same effort."""

    ranking: Ranking  # its candidates, ranked like those of the subject
    comparison: Verdict  # these candidates compared with the public images
    images: int  # the number of images it holds
    samples: int | None  # the number of images the subject holds, if known
    way: float  # the distance it moved, relative to the subject's
    likely: int = 0  # the number of its candidates from `LIKELY` on
    real: int = 0  # how many of those show a public image
    live: bool = False  # whether it was trained with live batch normalisation, on full batches

    @property
    def confirms(self) -> bool | None:
        """Whether its likely candidates are real. None if there are too few of them to tell."""
        if self.likely < FEWEST:
            return None
        if self.real < CONFIRMED * self.likely:
            return False
        return True if binom.sf(self.real - 1, self.likely, 0.5) <= LUCK else None

    @property
    def easier(self) -> tuple[str, str] | None:
        """Why it may be easier to read than the subject, and the remedy."""
        if self.samples is None:
            return "the number of training images is unknown", "Give it by --samples."
        if self.images < self.samples:
            return f"it holds {self.images} images, not {self.samples}", LIMITED
        if self.way < AS_FAR:
            reason = f"it moved only {self.way:.2g} times as far from its start"
            return reason, "Audit again in a new folder with more --minutes or more --control-steps."
        if self.live:
            reason = "mini-batches with live batch normalisation are harder to read than its full batches"
            return reason, "Give the training images by --data. They decide."
        return None


@dataclass(frozen=True)
class Evidence:
    """Everything that a headline rests on. None means: not measured.

    Args:
        ranking: the distinct candidates, the most likely first, as the network sees images.
        negative: the candidates of the negative control.
        positive: the positive control.
        comparison: the candidates compared with the training images, if these were given.
        floor: the share of the target that the training images leave unexplained.
        accuracy: the share of the training images that the network classifies correctly.
        majority: the share of their commonest class.
        method: the method that read the weights.
        rule: the optimiser of the training that this method assumed.
        samples: the number of training images, as given or as counted.
        controls: whether a positive control was asked for.
        finished: whether there was time for everything that was planned.
        looks: the number of readings of the same weights that are compared with the training images.
        trace: the p-value of the traces that the training images left in the weights, against those of held-out ones.
        rule_known: whether the optimiser was given, or is known by its state.
        live: whether batch normalisation used the statistics of each batch in training, and the method does not.
    """

    ranking: Ranking
    negative: Ranking | None = None
    positive: PositiveControl | None = None
    comparison: Verdict | None = None
    floor: float | None = None
    accuracy: float | None = None
    majority: float = 0.0
    method: str = "ntk"
    rule: str = "sgd"
    samples: int | None = None
    controls: bool = True
    finished: bool = True
    looks: int = 1
    trace: float | None = None
    live: bool = False
    rule_known: bool = False

    @property
    def compared(self) -> bool:
        """Whether training images and enough held-out images were given. Their comparison then decides."""
        return self.comparison is not None and self.comparison.outcome is not Outcome.NO_VERDICT

    def likely(self, ranking: Ranking) -> Tensor:
        """The probabilities that count: at least `LIKELY`, and higher than any of the negative control."""
        p = ranking.probability
        return p[(p >= LIKELY) & (p > self.bar)] if self.explains(ranking) else p[:0]

    def explains(self, ranking: Ranking) -> bool:
        """Whether candidates explain clearly more than those of the negative control."""
        return self.negative is not None and 1 - ranking.explained < READ * (1 - self.negative.explained)

    def certain(self, ranking: Ranking) -> bool:
        """Whether a likely candidate reaches `CERTAIN`."""
        return bool((self.likely(ranking) >= CERTAIN).any())

    @property
    def determined(self) -> bool:
        """Whether candidates cannot explain just any change. If they can, those of the network need not be images."""
        return determines(self.negative)

    @property
    def holds(self) -> bool:
        """Whether likely candidates can be taken for real."""
        return self.determined and self.positive is not None and bool(self.positive.confirms)

    @property
    def noisy(self) -> bool:
        """Whether the change of the weights looks like noise: the same effort explains the positive control alone."""
        if self.method not in CHANGES or self.positive is None or self.negative is None:
            return False
        ours, chance = (1 - ranking.explained for ranking in (self.ranking, self.negative))
        return self.explains(self.positive.ranking) and ours >= NO_MORE * chance

    @property
    def bar(self) -> float:
        """The highest probability of a candidate of the negative control."""
        return bar(self.negative)

    @property
    def surplus(self) -> float:
        """Expected number of real candidates, minus that of as many candidates of the negative control.

        The network may have been read more often than its control, and every restart adds candidates.
        """
        chance = 0.0
        if self.negative is not None and len(self.negative):
            chance = len(self.ranking) * float(self.negative.probability.mean())
        return float(self.ranking.probability.sum()) - chance

    @property
    def readable(self) -> bool | None:
        """Whether the control was read, by the same judgement as the subject. None without a control.

        Its images are public, so a control also shows whether likely candidates are real in networks of this kind.
        """
        if self.positive is None or self.positive.comparison.outcome is Outcome.NO_VERDICT:
            return None
        claimed = self.positive.comparison.outcome is Outcome.LEAKAGE
        return claimed and (self.compared or self.certain(self.positive.ranking))


def bar(negative: Ranking | None) -> float:
    """The highest probability of a candidate of a negative control."""
    return float(negative.probability.max()) if negative is not None and len(negative) else 0.0


def determines(negative: Ranking | None) -> bool:
    """Whether the candidates of a negative control leave most of the permuted change unexplained."""
    return negative is not None and 1 - negative.explained >= DETERMINED


def believed(ranking: Ranking, negative: Ranking | None, positive: PositiveControl | None) -> Ranking:
    """The ranking, whose probabilities count as such only if neither control speaks against them."""
    refuted = positive is not None and positive.confirms is False
    return replace(ranking, calibrated=ranking.calibrated and determines(negative) and not refuted)
