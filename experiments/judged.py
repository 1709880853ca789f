"""An audit judged as if its training images had not been given, and its numbers for a file of results."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from palimpsest.auditing import Audit
from palimpsest.auditing.result import Reading
from palimpsest.auditing.verdict import judge

DIGITS = 3


def without_images(found: Audit) -> Audit:
    """The same readings without all that the training images served for, except for their number."""

    def blind(reading: Reading) -> Reading:
        reading = replace(reading, comparison=None, floor=None, accuracy=None, majority=0.0, score=None)
        return replace(reading, verdict=replace(judge(reading), of=reading.attacker.name))

    rungs = (rung if rung.reading is None else replace(rung, reading=blind(rung.reading)) for rung in found.rungs)
    return Audit.of(tuple(rungs), found.preflight, found.report)


def numbers(found: Audit) -> dict[str, Any]:
    """Both verdicts, and everything behind them."""
    alone = without_images(found)
    recovered = [each.score.verdict.recovered for each in found.readings.values() if each.score is not None]
    return {
        "recovered": max(recovered, default=0),
        "with images": found.verdict.outcome.value,
        "without images": alone.verdict.outcome.value,
        "reason": found.verdict.reason,
        "reason without images": alone.verdict.reason,
        "rung": found.verdict.of,
        "rung without images": alone.verdict.of,
        "sentence": found.verdict.sentence,
        "sentence without images": alone.verdict.sentence,
        "accuracy": found.accuracy,
        "rungs": {name: _rung(each, alone.readings[name]) for name, each in found.readings.items()},
    }


def _rung(reading: Reading, alone: Reading) -> dict[str, Any]:
    rankings = {"network": reading.ranking, "negative control": reading.negative}
    rankings["positive control"] = None if reading.positive is None else reading.positive.ranking
    unexplained = {who: round(1 - r.explained, DIGITS) for who, r in rankings.items() if r is not None}
    return {
        "method": reading.method,
        "with images": reading.verdict.outcome.value,
        "without images": alone.verdict.outcome.value,
        "recovered": 0 if reading.score is None else reading.score.verdict.recovered,
        "likely candidates": alone.verdict.likely,
        "floor": None if reading.floor is None else round(reading.floor, DIGITS),
        "left unexplained": unexplained,
        "sentence": reading.verdict.sentence,
        "sentence without images": alone.verdict.sentence,
    }
