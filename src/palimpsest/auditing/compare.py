"""Two audits side by side, rung by rung: what changed after a mitigation, and whether the two can be compared.

A rung is compared with itself alone. Another attacker knows other things, so its numbers say nothing about a change.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from palimpsest.auditing.ladder import EFFORT, MATERIAL
from palimpsest.auditing.record import AuditRecord, ReadingRecord, load

Value = str | float | None
NOT_READ = "not read"


@dataclass(frozen=True)
class Change:
    """One number or word of both audits. None means: not measured."""

    reading: str  # the rung; the empty string: the whole audit
    what: str
    old: Value
    new: Value


@dataclass(frozen=True)
class Changes:
    """The result of `compare`.

    Args:
        rows: the numbers of both audits, rung by rung. A rung that only one of them read has its outcome alone.
        hidden: the training images, by number, that only the old audit recovers. None if the images differ.
        exposed: those that only the new audit recovers.
        warnings: why the two audits may differ for other reasons than the mitigation.
    """

    rows: tuple[Change, ...]
    hidden: tuple[int, ...] | None
    exposed: tuple[int, ...] | None
    warnings: tuple[str, ...]

    @property
    def conclusion(self) -> str:
        """What changed, in one sentence."""
        both = {(row.reading, row.what): (_shown(row.old), _shown(row.new)) for row in self.rows}
        if ("", "headline") not in both:
            return "The two audits read different rungs, so only the rungs of both can be compared."
        old, new = both["", "headline"]
        counts = both["", "training images recovered"]
        recovered = "" if "–" in counts else f", and {counts[0]} → {counts[1]} training images are recovered"
        start = f"The headline is {old} in both" if old == new else f"The headline changes from {old} to {new}"
        return f"{start}{recovered}."

    def __str__(self) -> str:
        cells = [("", "old", "new")]
        for row in self.rows:
            name = f"{row.reading}: {row.what}" if row.reading else row.what
            cells.append((name, _shown(row.old), _shown(row.new)))
        widths = [max(len(row[i]) for row in cells) + 2 for i in range(3)]
        lines = ["".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
        if self.hidden is not None and self.exposed is not None:
            lines.append(f"{len(self.hidden)} images are no longer recovered, {len(self.exposed)} are newly recovered.")
        return "\n".join([self.conclusion, *lines, *(f"Warning: {warning}." for warning in self.warnings)])

    def to_json(self) -> str:
        return json.dumps({"schema": 1, "conclusion": self.conclusion} | asdict(self), indent=1) + "\n"


def compare(old: Path | str, new: Path | str) -> Changes:
    """Compare two finished audits, for example before and after a mitigation.

    Args:
        old: the folder of the first audit.
        new: the folder of the second audit.
    """
    before, after = load(old), load(new)
    rows: list[Change] = []
    if [*_rungs(before)] == [*_rungs(after)]:  # else the two headlines are those of other attackers
        rows += [
            Change("", "headline", *(f"{each.outcome} by {each.rung}" for each in (before.verdict, after.verdict)))
        ]
        rows += [Change("", "training images recovered", _recovered(before), _recovered(after))]
        told = [None if each.membership is None else each.membership.auc for each in (before, after)]
        rows += [Change("", "AUC of membership", *told)] if any(told) else []
    for name in (name for name in EFFORT if name in {*_rungs(before), *_rungs(after)}):
        rows += _changes(name, before, after)
    hidden = exposed = None
    same = before.inputs.images == after.inputs.images and [*_rungs(before)] == [*_rungs(after)]
    if same and before.images and after.images:
        was, now = before.images.recovered, after.images.recovered
        if was is not None and now is not None:
            hidden, exposed = tuple(sorted({*was} - {*now})), tuple(sorted({*now} - {*was}))
    return Changes(tuple(rows), hidden, exposed, tuple(_warnings(before, after)))


def _rungs(record: AuditRecord) -> dict[str, ReadingRecord]:
    return {each.name: each for each in record.readings}


def _changes(rung: str, before: AuditRecord, after: AuditRecord) -> list[Change]:
    """The rows of one rung. If one audit did not read it, there is nothing to compare."""
    old, new = (_rungs(record).get(rung) for record in (before, after))
    rows = [Change(rung, "outcome", *(NOT_READ if each is None else each.outcome for each in (old, new)))]
    if old is None or new is None:
        return rows
    exposes = [next(each.exposes for each in record.rungs if each.name == rung) for record in (before, after)]
    rows += [Change(rung, "training images or likely candidates exposed", *exposes)]
    return rows + [Change(rung, what, x, y) for (what, x), (_, y) in zip(_facts(old), _facts(new), strict=True)]


def _recovered(record: AuditRecord) -> str | None:
    images = record.images
    return None if images is None or images.recovered is None else f"{len(images.recovered)} of {images.total}"


def _facts(reading: ReadingRecord) -> list[tuple[str, Value]]:
    estimates, control = reading.estimates, reading.positive_control
    return [
        ("AUC", None if reading.comparison is None else reading.comparison.auc),
        ("likely candidates", estimates.likely),
        ("highest probability", estimates.highest),
        ("highest probability by chance", estimates.by_chance),
        ("share unexplained", reading.unexplained),
        ("floor at the training images", reading.floor),
        ("accuracy on the training images", reading.accuracy),
        ("positive control: images recovered", None if control is None else control.recovered),
    ]


def _warnings(old: AuditRecord, new: AuditRecord) -> Iterator[str]:
    """Everything but the weights should be the same."""
    a, b = old.inputs, new.inputs
    if a.weights == b.weights:
        yield "both audits read the same weights"
    if (a.image_shape, a.parameters, a.outputs) != (b.image_shape, b.parameters, b.outputs):
        yield "the networks differ in their shape"
    elif a.code != b.code:
        yield "the code of the networks differs"
    for what, x, y in (("training images", a.images, b.images), ("held-out images", a.held_out, b.held_out)):
        if x != y:
            yield f"the {what} {'differ' if x and y else 'were given to one audit only'}"
    was, now = _rungs(old), _rungs(new)
    adds = {str(name): words for name, words in MATERIAL.items()}
    for name in EFFORT:
        if (name in was) != (name in now):
            yield f"only the {'old' if name in was else 'new'} audit read {adds[name]} (rung {name})"
    for before, after in ((was[name], now[name]) for name in EFFORT if name in was and name in now):
        plans = [{"rule": "sgd"} | plan for plan in (before.plan, after.plan)]  # older audits knew no other rule
        if differing := [name for name in plans[0] | plans[1] if plans[0].get(name) != plans[1].get(name)]:
            values = [f"{name} {' and '.join(_plain(plan.get(name)) for plan in plans)}" for name in differing]
            yield f"the plans for rung {before.name} differ in {', '.join(values)}"
        if (before.finished, after.finished) != (True, True):
            yield f"an audit ran out of time on rung {before.name}"


def _plain(value: Any) -> str:
    return ", ".join(map(_plain, value)) or "none" if isinstance(value, list | tuple) else str(value)[:60]


def _shown(value: Value) -> str:
    return "–" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
