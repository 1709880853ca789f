"""Whether a network may pass: the exit status of `palimpsest audit --gate`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

from palimpsest.auditing.ladder import MATERIAL, Name
from palimpsest.auditing.options import RungName
from palimpsest.auditing.publication import SETS, Answer
from palimpsest.auditing.record import AuditRecord, ReadingRecord
from palimpsest.files.schema import Range, Share
from palimpsest.scoring import Outcome

PASS, LEAKS, UNDECIDED = 0, 3, 4  # 1 and 2 are failed commands and wrong use
OUTCOMES: dict[str, Outcome] = {
    Answer.DO_NOT_PUBLISH: Outcome.LEAKAGE,
    Answer.UNDECIDED: Outcome.UNDECIDED,
    Answer.NOT_TESTED: Outcome.NO_VERDICT,
    Answer.NO_EVIDENCE: Outcome.NO_EVIDENCE,
}


@dataclass(frozen=True)
class Decision:
    """The exit status and the reason for it."""

    status: int
    reason: str


@dataclass(frozen=True)
class Gate:
    """Limits for a pipeline. They decide in this order; without limits, the headline alone decides.

    1. A limit is exceeded: 3.
    2. The headline is undecided or no verdict, a limit cannot be checked, or nothing was found before the time ran
       out: 4.
    3. The headline is leakage: 3, unless the limit on its evidence was given. ``max_recovered`` limits the comparison
       with the training images, ``max_probability`` the estimates.
    4. All other results: 0.

    Args:
        max_recovered: the number of training images that may be recovered, by all readings together.
        max_probability: the highest probability that a candidate may have, in any reading. It cannot be checked if the
            probabilities of a reading are not calibrated.
        publish: the files to be published, by the rung that needs them all: ``"W"``, ``"O"``, ``"W0"`` or ``"C"``.
            Their answer then takes the place of the headline. None: all files that the audit was given.

    Examples:
        >>> Gate(max_recovered=2)
        Gate(max_recovered=2, max_probability=None, publish=None)
    """

    max_recovered: Annotated[int, Range(least=0)] | None = None
    max_probability: Share | None = None
    publish: RungName | None = None

    def decide(self, record: AuditRecord) -> Decision:
        """The exit status for the result of an audit, from `pal.auditing.load`."""
        return next(self._reasons(record))

    def _reasons(self, record: AuditRecord) -> Iterator[Decision]:
        names, outcome, recovered = self._judged(record)
        readings = [each for each in record.readings if each.name in names]
        highest = max((each.estimates.highest or 0.0 for each in readings), default=0.0)
        if self.max_recovered is not None and recovered is not None and recovered > self.max_recovered:
            yield Decision(LEAKS, f"{recovered} training images are recovered, more than {self.max_recovered}")
        if self.max_probability is not None and highest > self.max_probability:
            limit = f"more than {self.max_probability:.0%}"
            yield Decision(LEAKS, f"a candidate has an estimated probability of {highest:.0%}, {limit}")
        if outcome in (Outcome.UNDECIDED, Outcome.NO_VERDICT):
            yield Decision(UNDECIDED, f"the answer is {outcome}")
        if self.max_recovered is not None and recovered is None:
            yield Decision(UNDECIDED, "the recovered images could not be counted without enough held-out images")
        if outcome == Outcome.LEAKAGE and not self._allows(readings):
            yield Decision(LEAKS, "the answer is leakage")
        ranks = [each.name for each in readings if not each.estimates.calibrated]
        if self.max_probability is not None and ranks:
            yield Decision(UNDECIDED, f"the probabilities of rung {ranks[0]} are not calibrated")
        if not (record.verdict.finished if self.publish is None else all(each.finished for each in readings)):
            yield Decision(UNDECIDED, "the audit is not finished")
        yield Decision(PASS, "within the limits" if outcome == Outcome.LEAKAGE else f"the answer is {outcome}")

    def _judged(self, record: AuditRecord) -> tuple[tuple[Name, ...], str, int | None]:
        """The rungs that can act, the outcome, and the number of recovered images if that was counted."""
        counted = record.images is not None and record.images.recovered is not None
        if self.publish is None:
            recovered = len(record.images.recovered or ()) if counted and record.images is not None else None
            return tuple(MATERIAL), record.verdict.outcome, recovered
        names = next(rungs for rungs in SETS.values() if rungs[-1] == self.publish)
        for each in record.publication:
            if tuple(each.rungs) == names:
                return names, OUTCOMES[each.answer], each.exposes or 0 if counted else None
        return names, Outcome.NO_VERDICT, None  # of an older version

    def _allows(self, readings: Sequence[ReadingRecord]) -> bool:
        """Whether a limit was given on every kind of evidence that claims leakage."""
        leaking = [each for each in readings if each.outcome == Outcome.LEAKAGE]
        by_comparison = [each.comparison is not None and bool(each.comparison.beyond_chance) for each in leaking]
        limits = [self.max_recovered if compared else self.max_probability for compared in by_comparison]
        return None not in limits
