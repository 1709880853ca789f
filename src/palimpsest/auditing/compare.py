"""Two audits side by side: what changed after a mitigation, and whether the two can be compared."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from palimpsest.auditing.record import AuditRecord, ReadingRecord, load

Value = str | float | None


@dataclass(frozen=True)
class Change:
    """One number or word of both audits. None means: not measured."""

    reading: str  # the empty string: the whole audit
    what: str
    old: Value
    new: Value


@dataclass(frozen=True)
class Changes:
    """The result of `compare`.

    Args:
        rows: the numbers of both audits.
        hidden: the training images, by number, that only the old audit recovers. None if the images differ.
        exposed: those that only the new audit recovers.
        warnings: why the two audits may differ for other reasons than the mitigation.
    """

    rows: tuple[Change, ...]
    hidden: tuple[int, ...] | None
    exposed: tuple[int, ...] | None
    warnings: tuple[str, ...]

    def __str__(self) -> str:
        several = len({row.reading for row in self.rows}) > 2
        cells = [("", "old", "new")]
        for row in self.rows:
            name = f"{row.reading}: {row.what}" if several and row.reading else row.what
            cells.append((name, _shown(row.old), _shown(row.new)))
        widths = [max(len(row[i]) for row in cells) + 2 for i in range(3)]
        lines = ["".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
        if self.hidden is not None and self.exposed is not None:
            lines.append(f"{len(self.hidden)} images are no longer recovered, {len(self.exposed)} are newly recovered.")
        return "\n".join([*lines, *(f"Warning: {warning}." for warning in self.warnings)])

    def to_json(self) -> str:
        return json.dumps({"schema": 1} | asdict(self), indent=1) + "\n"


def compare(old: Path | str, new: Path | str) -> Changes:
    """Compare two finished audits, for example before and after a mitigation.

    Args:
        old: the folder of the first audit.
        new: the folder of the second audit.
    """
    before, after = load(old), load(new)
    rows = [Change("", "outcome", before.verdict.outcome, after.verdict.outcome)]
    rows += [Change("", "training images recovered", _recovered(before), _recovered(after))]
    pairs = list(_pairs(before, after))
    for a, b in pairs:
        rows += [Change(a.name, "outcome", a.outcome, b.outcome)] if len(pairs) > 1 else []
        rows += [Change(a.name, what, x, y) for (what, x), (_, y) in zip(_facts(a), _facts(b), strict=True)]
    hidden = exposed = None
    if before.inputs.images == after.inputs.images and before.images and after.images:
        was, now = before.images.recovered, after.images.recovered
        if was is not None and now is not None:
            hidden, exposed = tuple(sorted({*was} - {*now})), tuple(sorted({*now} - {*was}))
    return Changes(tuple(rows), hidden, exposed, tuple(_warnings(before, after)))


def _pairs(old: AuditRecord, new: AuditRecord) -> Iterator[tuple[ReadingRecord, ReadingRecord]]:
    after = {each.name: each for each in new.readings}
    return ((each, after[each.name]) for each in old.readings if each.name in after)


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
    for what, x, y in (("initial weights", a.initial, b.initial), ("checkpoints", a.checkpoints, b.checkpoints)):
        if bool(x) != bool(y):
            yield f"{what} were given to one audit only"
    for name in sorted({each.name for each in old.readings} ^ {each.name for each in new.readings}):
        yield f"only one audit read rung {name}"
    for before, after in _pairs(old, new):
        if differing := [name for name in before.plan if before.plan[name] != after.plan.get(name)]:
            values = [f"{name} {_plain(before.plan[name])} and {_plain(after.plan.get(name))}" for name in differing]
            yield f"the plans for rung {before.name} differ in {', '.join(values)}"
        if (before.finished, after.finished) != (True, True):
            yield f"an audit of the {before.name} ran out of time"


def _plain(value: Any) -> str:
    return ", ".join(map(_plain, value)) or "none" if isinstance(value, list | tuple) else str(value)[:60]


def _shown(value: Value) -> str:
    return "–" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
