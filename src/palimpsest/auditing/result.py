"""The result of an audit: a reading for each rung of the ladder, what each adds, and the headline of all."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from palimpsest.auditing.agreement import ALIKE
from palimpsest.auditing.ladder import NO_TIME, Attacker
from palimpsest.auditing.plan import Plan
from palimpsest.auditing.preflight import Preflight
from palimpsest.auditing.reading import AuditEffort
from palimpsest.auditing.verdict import OUT_OF_TIME, AuditVerdict, Evidence
from palimpsest.scoring import Outcome, Score
from palimpsest.scoring.metrics import pairwise_ncc

WORRIES = (Outcome.NO_EVIDENCE, Outcome.NO_VERDICT, Outcome.UNDECIDED, Outcome.LEAKAGE)  # the least first


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
    """

    attacker: Attacker
    reading: Reading | None
    reason: str
    exposes: int | None = None
    adds: int | None = None
    failed: bool = False

    @property
    def leaks(self) -> bool:
        return self.reading is not None and self.reading.verdict.outcome is Outcome.LEAKAGE

    @property
    def sentence(self) -> str:
        """What this knowledge adds; empty if that is not known."""
        if self.adds is None or self.reading is None:
            return ""
        if self.leaks and not self.exposes:
            return f"Publishing {self.attacker.adds} gives away a trace of the training images as a whole."
        kind = "training image" if self.reading.compared else "likely candidate"
        count = f"{self.adds or 'no'} more {kind}{'' if self.adds == 1 else 's'}"
        all_of_them = "" if self.adds == self.exposes else f" ({self.exposes} in all)"
        return f"Publishing {self.attacker.adds} exposes {count}{all_of_them}."


@dataclass(frozen=True, kw_only=True)
class Audit(Reading):
    """The result of an audit: the reading that the headline rests on, and all rungs of the ladder.

    It also has all attributes of `pal.auditing.Reading`: those of the rung with the greatest worry.

    Args:
        rungs: every rung of the ladder, the one that knows least first.
        preflight: the facts that were known before anything was reconstructed.
        report: the path of the report.
    """

    rungs: tuple[Rung, ...]
    preflight: Preflight
    report: Path

    @classmethod
    def of(cls, rungs: tuple[Rung, ...], preflight: Preflight, report: Path) -> Self:
        """Fold the verdicts of all rungs into one headline."""
        read = [rung.reading for rung in rungs if rung.reading is not None]
        chosen = decisive(read)
        stopped = not all(each.finished for each in read) or any(rung.reason == NO_TIME for rung in rungs)
        withhold = [f"Do not publish {rung.attacker.adds}." for rung in rungs if rung.leaks]
        parts = [*withhold, chosen.verdict.advice.replace(OUT_OF_TIME, "").strip(), OUT_OF_TIME if stopped else ""]
        verdict = replace(chosen.verdict, advice=" ".join(part for part in parts if part))
        failed = [rung for rung in rungs if rung.failed]
        if verdict.outcome is Outcome.NO_EVIDENCE and failed:  # an attacker who knows more was not heard
            sentence = f"No verdict: the audit could not read {failed[0].attacker.adds} ({failed[0].reason})."
            verdict = replace(verdict, outcome=Outcome.NO_VERDICT, sentence=sentence)
        fields = vars(chosen) | {"verdict": verdict, "finished": not stopped}
        return cls(**fields, rungs=rungs, preflight=preflight, report=report)

    @property
    def readings(self) -> dict[str, Reading]:
        """The reading of each rung that was tried, by its name. The one that knows least comes first."""
        return {rung.attacker.name: rung.reading for rung in self.rungs if rung.reading is not None}

    @property
    def advice(self) -> str:
        """What not to publish and how to get a better answer, or the empty string."""
        return self.verdict.advice

    @property
    def summary(self) -> list[str]:
        """The headline, what each rung adds, and the advice."""
        return [line for line in (self.verdict.sentence, *(r.sentence for r in self.rungs), self.advice) if line]


def decisive(readings: list[Reading]) -> Reading:
    """The reading of the greatest worry: of equal ones the one that exposes most, then the one that knows least.

    W, W0 and C know more and more about the same weights. If one of them found nothing, the next one counts.
    O reads the last gradients alone and does not replace the others.
    """
    last = [each.attacker.name for each in readings if each.attacker.name != "O"][-1:]
    counted = [each for each in readings if each.verdict.found or each.attacker.name in ("O", *last)]
    return max(counted, key=lambda each: (WORRIES.index(each.verdict.outcome), each.exposes or 0))
