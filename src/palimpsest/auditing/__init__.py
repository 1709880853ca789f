"""Auditing a network that was trained elsewhere: no truth needed, and nothing in the network's own code changed."""

from palimpsest.auditing.audit import Audit, Options, audit
from palimpsest.auditing.noise import recovery_under_noise
from palimpsest.auditing.preflight import Preflight, preflight
from palimpsest.auditing.subject import Subject, subject
from palimpsest.auditing.truth import Truth

__all__ = ["Audit", "Options", "Preflight", "Subject", "Truth", "audit", "preflight", "recovery_under_noise", "subject"]
