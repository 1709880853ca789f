"""The report: from results to one HTML file."""

from palimpsest.report.content import Content, Snapshot, Variant
from palimpsest.report.page import render

__all__ = ["Content", "Snapshot", "Variant", "render"]
