"""May I publish this? An answer for each set of files that an owner could publish, from the rungs of the ladder.

Files that are published let every attacker act who needs no others. So the answer for a set is that of the greatest
worry among its attackers:

do not publish                  one of them reads training images
undecided                       one of them may read some, or could not be tried to the end
not tested                      the attacker who knows most was not tried
no evidence, not a clearance    none of them reads anything, although the same effort reads a control
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from palimpsest.scoring import Outcome

if TYPE_CHECKING:
    from palimpsest.auditing.ladder import Name
    from palimpsest.auditing.result import Reading, Rung

WORRIES = (Outcome.NO_EVIDENCE, Outcome.NO_VERDICT, Outcome.UNDECIDED, Outcome.LEAKAGE)  # the least first
SETS: dict[str, tuple[Name, ...]] = {
    "the final weights alone": ("W",),
    "the final weights and the optimiser's state": ("W", "O"),
    "the final weights and the initial weights or the seed": ("W", "W0"),
    "these weights and the checkpoints or updates": ("W", "W0", "C"),
    "all weights and the optimiser's state": ("W", "W0", "C", "O"),
}


class Answer(StrEnum):
    """Whether a set of files may be published. No answer says that it is safe."""

    DO_NOT_PUBLISH = "do not publish"
    UNDECIDED = "undecided"
    NOT_TESTED = "not tested"
    NO_EVIDENCE = "no evidence, not a clearance"


@dataclass(frozen=True)
class Publication:
    """A set of files, and the answer.

    Args:
        files: the files, in words.
        rungs: the attackers that can act if these files are published.
        answer: whether they may be published.
        reason: why there is no better answer; empty for "no evidence".
        exposes: the number of training images that these attackers expose together, or of likely candidates without
            the training images. None if that is not known.
    """

    files: str
    rungs: tuple[Name, ...]
    answer: Answer
    reason: str
    exposes: int | None

    def __str__(self) -> str:
        return f"{self.answer}: {self.reason}" if self.reason else str(self.answer)


def publications(rungs: Sequence[Rung], doubts: Sequence[str] = ()) -> tuple[Publication, ...]:
    """The answer for each set of files. With ``doubts`` about the given files, finding nothing decides nothing."""
    every = {rung.attacker.name: rung for rung in rungs}
    found = []
    for files, names in SETS.items():
        answer, reason, exposes = _answer([every[name] for name in names if name in every], doubts)
        found.append(Publication(files, names, answer, reason, exposes))
    return tuple(found)


def decisive(readings: Sequence[Reading]) -> Reading:
    """The reading of the greatest worry: of equal ones the one that exposes most.

    Of several that still are equal, the rung that knows least gives the leakage. The rung that knows most gives the
    reason for another verdict, because what a lower one lacks was given.

    W, W0 and C know more and more about the same weights. If one of them found nothing, the next one counts.
    O reads the last gradients alone and does not replace the others.
    """
    last = [each.attacker.name for each in readings if each.attacker.name != "O"][-1:]
    counted = [each for each in readings if each.verdict.found or each.attacker.name in ("O", *last)]

    def worry(each: Reading) -> tuple[int, int, bool]:
        outcome = each.verdict.outcome
        knows_most = each.attacker.name in last and outcome is not Outcome.LEAKAGE
        return WORRIES.index(outcome), each.exposes or 0, knows_most

    return max(counted, key=worry)


def irreplaceable(rungs: Sequence[Rung]) -> list[Rung]:
    """The rungs that no other replaces: of W, W0 and C the one that knows most, and O."""
    chain = [rung for rung in rungs if rung.attacker.name != "O"]
    return [*chain[-1:], *(rung for rung in rungs if rung.attacker.name == "O")]


def _answer(rungs: Sequence[Rung], doubts: Sequence[str]) -> tuple[Answer, str, int | None]:
    """The answer for these attackers, the one that knows least first."""
    leaking = [rung.reading for rung in rungs if rung.reading is not None and rung.leaks]
    if leaking:
        return Answer.DO_NOT_PUBLISH, *exposed(leaking)
    strongest = irreplaceable(rungs)
    unread = [rung for rung in strongest if rung.reading is None and not rung.failed]
    if unread:
        return Answer.NOT_TESTED, min(unread, key=lambda rung: rung.late).reason, None
    read = [rung.reading for rung in rungs if rung.reading is not None]
    verdict = decisive(read).verdict if read else None
    if verdict is not None and verdict.found:
        return Answer.UNDECIDED, _plain(verdict.sentence), None
    for rung in strongest:
        if rung.failed:
            return Answer.UNDECIDED, f"{rung.attacker.adds} could not be read ({rung.reason})", None
    assert verdict is not None
    if verdict.outcome is not Outcome.NO_EVIDENCE:
        return Answer.UNDECIDED, _plain(verdict.sentence), None
    if not all(rung.reading is not None and rung.reading.finished for rung in strongest):
        return Answer.UNDECIDED, "nothing was read before the time ran out", None
    if doubts:
        return Answer.UNDECIDED, f"nothing was read, but {doubts[0]}", None
    return Answer.NO_EVIDENCE, "", 0


def exposed(leaking: Sequence[Reading]) -> tuple[str, int]:
    """The images that these readings expose together, in words and in number."""
    if all(each.as_a_whole for each in leaking):
        return "the weights hold a trace of the training set as a whole", 0
    single = [each for each in leaking if not each.as_a_whole]
    count = sum(each.beyond(single[:i]) or 0 if i else each.exposes or 0 for i, each in enumerate(single))
    comparison = single[0].comparison
    if single[0].compared and comparison is not None:
        return f"{count} of {comparison.total} training images exposed", count
    return f"{count} likely candidate{'' if count == 1 else 's'} exposed", count


def _plain(sentence: str) -> str:
    """The reason in a headline: its first sentence, without the outcome."""
    reason = sentence.partition(": ")[2] or sentence
    return reason.partition(". ")[0].removesuffix(".")
