"""Audit a network that was trained elsewhere, without its training images and without changes to its code."""

from palimpsest.auditing.audit import audit
from palimpsest.auditing.given import Given
from palimpsest.auditing.ladder import Attacker
from palimpsest.auditing.membership import Membership, membership
from palimpsest.auditing.noise import recovery_under_noise
from palimpsest.auditing.options import Options
from palimpsest.auditing.preflight import Preflight, preflight
from palimpsest.auditing.result import Audit, Reading, Rung
from palimpsest.auditing.subject import Subject, subject
from palimpsest.auditing.truth import Truth
from palimpsest.auditing.verdict import Evidence

__all__ = [
    "Attacker", "Audit", "Evidence", "Given", "Membership", "Options", "Preflight", "Reading", "Rung", "Subject",
    "Truth", "audit", "membership",
    "preflight", "recovery_under_noise", "subject",
]  # fmt: skip
