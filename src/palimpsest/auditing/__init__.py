"""Audit a network that was trained elsewhere, without its training images and without changes to its code."""

from palimpsest.auditing.audit import audit
from palimpsest.auditing.compare import Changes, compare
from palimpsest.auditing.evidence import Evidence
from palimpsest.auditing.gate import Decision, Gate
from palimpsest.auditing.given import Given
from palimpsest.auditing.ladder import Attacker
from palimpsest.auditing.membership import membership
from palimpsest.auditing.noise import recovery_under_noise
from palimpsest.auditing.options import Options
from palimpsest.auditing.preflight import Preflight, preflight
from palimpsest.auditing.publication import Answer, Publication
from palimpsest.auditing.record import AuditRecord, load
from palimpsest.auditing.result import Audit, Reading, Rung
from palimpsest.auditing.subject import Subject, subject
from palimpsest.auditing.told_apart import Membership
from palimpsest.auditing.truth import Truth

__all__ = [
    "Answer", "Attacker", "Audit", "AuditRecord", "Changes", "Decision", "Evidence", "Gate", "Given", "Membership",
    "Options", "Preflight", "Publication", "Reading", "Rung", "Subject", "Truth", "audit", "compare", "load",
    "membership", "preflight", "recovery_under_noise", "subject",
]  # fmt: skip
