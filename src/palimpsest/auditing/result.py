"""The result of an audit."""

from dataclasses import dataclass
from pathlib import Path

from palimpsest.auditing.plan import Plan
from palimpsest.auditing.preflight import Preflight
from palimpsest.auditing.verdict import AuditVerdict, Evidence
from palimpsest.scoring import Score


@dataclass(frozen=True, kw_only=True)
class Audit(Evidence):
    """The result of an audit: the verdict, and the evidence that it rests on.

    It also has all attributes of `pal.auditing.Evidence`, for example ``ranking``.

    Args:
        verdict: the headline. It takes everything else into account.
        preflight: the facts that were known before anything was reconstructed.
        plan: every choice of this audit.
        score: the candidates scored against the training images, if these were given.
        report: the path of the report.
    """

    verdict: AuditVerdict
    preflight: Preflight
    plan: Plan
    score: Score | None
    report: Path

    @property
    def advice(self) -> str:
        """How to get a better answer, or the empty string."""
        return self.verdict.advice

    @property
    def summary(self) -> list[str]:
        """The headline, and how to get a better answer."""
        return [line for line in (self.verdict.sentence, self.advice) if line]
