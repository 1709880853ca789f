"""The result of an audit: a reading for each rung of the ladder, what each adds, and the headline of all."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from palimpsest.auditing.agreement import ALIKE
from palimpsest.auditing.evidence import Evidence
from palimpsest.auditing.ladder import NO_TIME, NOT_CHOSEN, Attacker
from palimpsest.auditing.plan import Plan
from palimpsest.auditing.preflight import Preflight
from palimpsest.auditing.publication import Publication, decisive, exposed, irreplaceable, publications
from palimpsest.auditing.reading import AuditEffort
from palimpsest.auditing.reasons import Reason
from palimpsest.auditing.told_apart import Membership
from palimpsest.auditing.verdict import LONGER, OUT_OF_TIME, STRONGER, AuditVerdict
from palimpsest.scoring import Outcome, Score
from palimpsest.scoring.metrics import pairwise_ncc


@dataclass(frozen=True, kw_only=True)
class Reading(Evidence):
    """All stages from the plan to the verdict, for one rung.

    It also has all attributes of `pal.auditing.Evidence`, for example ``ranking``.

    Args:
        attacker: the rung: what this attacker knows.
        verdict: the verdict on this rung.
        plan: every choice of this reading.
        candidates: the candidates of all restarts, before any are merged.
        score: these candidates scored against the training images, if these were given.
        effort: the reconstructions, and the time they took.
    """

    attacker: Attacker
    verdict: AuditVerdict
    plan: Plan
    candidates: Tensor
    score: Score | None
    effort: AuditEffort

    @property
    def exposes(self) -> int | None:
        """The number of training images or likely candidates that this rung exposes. None if that is undecided."""
        if self.verdict.outcome is Outcome.LEAKAGE:
            return self.score.verdict.recovered if self.compared and self.score is not None else self.verdict.likely
        return 0 if self.verdict.outcome is Outcome.NO_EVIDENCE else None

    @property
    def as_a_whole(self) -> bool:
        """Whether the training set leaks as a whole, and no single image beyond chance."""
        return self.compared and self.comparison is not None and self.comparison.as_a_whole

    def beyond(self, lower: list["Reading"]) -> int | None:
        """How many of the exposed images no lower rung exposes. None if undecided, or if no lower rung was read."""
        if self.exposes is None or not lower:
            return None
        leaking = [each for each in lower if each.exposes]
        if not leaking or not self.exposes:
            return self.exposes
        if self.compared and self.score is not None:
            before = torch.stack([each.score.recovered for each in leaking if each.score is not None]).any(0)
            return int((self.score.recovered & ~before).sum())
        before = torch.cat([each.ranking.images[: each.verdict.likely] for each in leaking])
        ours = self.ranking.images[: self.verdict.likely]
        return int((pairwise_ncc(ours, before).amax(1) <= ALIKE).sum())


@dataclass(frozen=True)
class Rung:
    """A rung of the ladder, read or not.

    Args:
        attacker: what this attacker knows, and how the audit uses it.
        reading: the reading with this knowledge, or None.
        reason: why it was not read, or the empty string.
        exposes: the number of training images that it exposes, or of likely candidates without ``truth``. None if that
            is not known.
        adds: how many of these no lower rung exposes. None if that is not known, or if no lower rung was read.
        failed: whether a reading was tried, and could not be done.
        despite: the first lower rung that leaks, if this reading does not; this attacker can use that one, too.
    """

    attacker: Attacker
    reading: Reading | None
    reason: str
    exposes: int | None = None
    adds: int | None = None
    failed: bool = False
    despite: str = ""

    @property
    def leaks(self) -> bool:
        return self.reading is not None and self.reading.verdict.outcome is Outcome.LEAKAGE

    @property
    def late(self) -> bool:
        """Whether there was no time left for it."""
        return self.reason == NO_TIME

    @property
    def outcome(self) -> str:
        """The outcome of its own reading, in words; empty if there is none."""
        if self.reading is None:
            return ""
        return "leakage as a whole" if self.reading.as_a_whole else str(self.reading.verdict.outcome)


@dataclass(frozen=True, kw_only=True)
class Audit(Reading):
    """The result of an audit: the reading that the headline rests on, and all rungs of the ladder.

    It also has all attributes of `pal.auditing.Reading`: those of the rung with the greatest worry.

    Args:
        rungs: every rung of the ladder, the one that knows least first.
        preflight: the facts that were known before anything was reconstructed.
        report: the path of the report.
        doubts: signs that the given files or options are wrong, each a clause.
        membership: whether the training images can be told from held-out ones, if both and the change of the weights
            are known.
    """

    rungs: tuple[Rung, ...]
    preflight: Preflight
    report: Path
    doubts: tuple[str, ...] = ()
    membership: Membership | None = None

    @classmethod
    def of(
        cls,
        rungs: tuple[Rung, ...],
        preflight: Preflight,
        report: Path,
        doubts: tuple[str, ...] = (),
        membership: Membership | None = None,
    ) -> Self:
        """Fold the verdicts of all rungs into one headline."""
        read = [rung.reading for rung in rungs if rung.reading is not None]
        chosen = decisive(read)
        stopped = not all(each.finished for each in read) or any(rung.late for rung in rungs)
        verdict = replace(chosen.verdict, advice=_advice(chosen, read, rungs, stopped=stopped))
        tried = irreplaceable([rung for rung in rungs if rung.reading is not None or rung.failed or rung.late])
        failed = [rung for rung in tried if rung.failed]
        if verdict.outcome is Outcome.NO_EVIDENCE:
            if failed:  # an attacker who knows more was not heard
                words = f"the audit could not read {failed[0].attacker.adds} ({failed[0].reason})"
                verdict = _withheld(verdict, Reason.FAILED_RUNG, words)
            elif any(rung.late or (rung.reading is not None and not rung.reading.finished) for rung in tried):
                verdict = _withheld(verdict, Reason.OUT_OF_TIME, "nothing was read before the time ran out")
            elif doubts:
                verdict = _withheld(verdict, Reason.WRONG_FILES, f"nothing was read, but {doubts[0]}")
        if chosen.compared and verdict.outcome is Outcome.LEAKAGE:
            every = exposed([each for each in read if each.verdict.outcome is Outcome.LEAKAGE])[1]
            if every > (chosen.exposes or 0):
                verdict = replace(verdict, sentence=f"{verdict.sentence} All rungs together expose {every}.")
        fields = vars(chosen) | {"verdict": verdict, "finished": not stopped}
        return cls(**fields, rungs=rungs, preflight=preflight, report=report, doubts=doubts, membership=membership)

    @property
    def readings(self) -> dict[str, Reading]:
        """The reading of each rung that was tried, by its name. The one that knows least comes first."""
        return {rung.attacker.name: rung.reading for rung in self.rungs if rung.reading is not None}

    @property
    def publications(self) -> tuple[Publication, ...]:
        """For each set of files that could be published, whether it may be."""
        return publications(self.rungs, self.doubts)

    @property
    def membership_sentence(self) -> str:
        """Whether the training images can be told from held-out ones, and with what knowledge; empty if not tested."""
        if (found := self.membership) is None:
            return ""
        words = f"{found.sentence} This test knows {found.knowledge}."
        words += " It left out some images, to save time." if found.thinned else ""
        return words + (" It used the files and options that are in doubt." if self.doubts else "")

    @property
    def advice(self) -> str:
        """How to get a better answer, or the empty string."""
        return self.verdict.advice

    @property
    def summary(self) -> list[str]:
        """The headline, doubts about the files, whether each set of them may be published, membership, and advice."""
        width = max(len(each.files) for each in self.publications)
        answers = [f"  {each.files:<{width}}  {each}" for each in self.publications]
        doubts = [f"Check the files: {doubt}." for doubt in self.doubts]
        return [
            self.verdict.sentence,
            *doubts,
            "May these files be published?",
            *answers,
            *([self.membership_sentence] if self.membership_sentence else []),
            *([self.advice] if self.advice else []),
        ]


def _withheld(verdict: AuditVerdict, reason: Reason, words: str) -> AuditVerdict:
    """The headline, if nothing was read and that does not count as evidence."""
    return replace(verdict, outcome=Outcome.NO_VERDICT, reason=reason, sentence=f"No verdict: {words}.")


def _advice(chosen: Reading, read: Sequence[Reading], rungs: Sequence[Rung], *, stopped: bool) -> str:
    """How to get a better answer: to the headline or, if that is leakage, for the files that are still undecided."""
    advice = chosen.verdict.advice
    if chosen.verdict.outcome is Outcome.LEAKAGE:
        undecided = [each for each in read if each.verdict.outcome in (Outcome.UNDECIDED, Outcome.NO_VERDICT)]
        if undecided and (more := decisive(undecided).verdict.advice):
            advice = f"For the undecided files: {more}"
    stronger = [rung for rung in rungs if rung.attacker.name in ("W0", "C")]
    if any(rung.reading is not None for rung in stronger):
        advice = advice.replace(STRONGER, "")
    elif any(rung.reason == NOT_CHOSEN for rung in stronger):
        advice = advice.replace(STRONGER, "Without --rungs, the audit tests a stronger attacker.")
    advice = advice.replace(OUT_OF_TIME, "")
    if stopped:  # to continue this audit replaces a longer one in a new folder
        advice = f"{advice.replace(LONGER, '').strip().removesuffix('For the undecided files:')} {OUT_OF_TIME}"
    return " ".join(advice.split())
