"""audit.json: the result of an audit for other programs. `audit.schema.json` explains every field.

`SCHEMA` rises if a field goes away or changes its meaning. A new field does not raise it.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from torch import Tensor

from palimpsest import __version__
from palimpsest.auditing.case import Case
from palimpsest.auditing.images import ClassRecord, ImageAnswer, answers, by_class, table
from palimpsest.auditing.ladder import MISSING
from palimpsest.auditing.publication import Publication
from palimpsest.auditing.result import Audit, Reading, Rung
from palimpsest.auditing.told_apart import Membership
from palimpsest.errors import RunFolderError
from palimpsest.files.schema import built, without_unknown
from palimpsest.files.storage import LARGEST_JSON, load_json, open_regular, parse_json, tensor_digest, write_atomically
from palimpsest.objectives.binding import parameters_of
from palimpsest.scoring import Outcome

SCHEMA: Final = 1
Named = Literal["leakage", "no evidence", "undecided", "no verdict"]


@dataclass(frozen=True)
class HeadlineRecord:
    outcome: Named
    sentence: str
    advice: str
    rung: str
    finished: bool
    reason: str | None = None


@dataclass(frozen=True)
class InputRecord:
    network: str
    code: str | None
    image_shape: tuple[int, ...]
    parameters: int
    outputs: int
    samples: int | None
    weights: str
    initial: str | None
    checkpoints: str | None
    optimiser: str | None
    images: str | None
    held_out: str | None


@dataclass(frozen=True)
class EstimateRecord:
    calibrated: bool
    likely: int
    expected: float | None
    highest: float | None
    by_chance: float | None


@dataclass(frozen=True)
class ComparisonRecord:
    beyond_chance: bool | None
    recovered: int | None
    total: int
    interval: tuple[int, int] | None
    auc: float | None
    auc_interval: tuple[float, float] | None
    p_value: float | None
    threshold: float
    confidence: float


@dataclass(frozen=True)
class ControlRecord:
    read: bool | None
    easier: str | None
    images: int
    distance: float
    recovered: int | None
    auc: float | None


@dataclass(frozen=True)
class ReadingRecord:
    name: str
    method: str
    outcome: Named
    sentence: str
    finished: bool
    plan: dict[str, Any]
    floor: float | None
    accuracy: float | None
    unexplained: float
    unexplained_by_chance: float | None
    estimates: EstimateRecord
    comparison: ComparisonRecord | None
    positive_control: ControlRecord | None
    reason: str | None = None


@dataclass(frozen=True)
class ImagesRecord:
    total: int
    recovered: list[int] | None
    classes: list[ClassRecord]


@dataclass(frozen=True)
class RungRecord:
    name: str
    knowledge: str
    outcome: Named | None
    exposes: int | None
    adds: int | None
    reason: str


@dataclass(frozen=True)
class PublicationRecord:
    files: str
    rungs: list[str]
    answer: Literal["do not publish", "undecided", "not tested", "no evidence, not a clearance"]
    reason: str
    exposes: int | None


@dataclass(frozen=True)
class MembershipRecord:
    outcome: Named
    sentence: str
    tested: int
    held_out: int
    named: int
    level: float
    auc: float | None
    auc_interval: tuple[float, float] | None
    knowledge: str
    statistic: str


@dataclass(frozen=True)
class AuditRecord:
    """The content of audit.json. Fields with a default are younger than the schema's number."""

    schema: Literal[1]
    palimpsest: str
    verdict: HeadlineRecord
    inputs: InputRecord
    readings: list[ReadingRecord]
    images: ImagesRecord | None
    rungs: list[RungRecord]
    not_tried: list[str]
    publication: list[PublicationRecord] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    membership: MembershipRecord | None = None


def save(case: Case, audit: Audit) -> AuditRecord:
    """Write audit.json and, if the training images are known, images.csv."""
    rows = None if case.truth is None else answers(audit, case.truth)
    record = _record(case, audit, rows)
    if rows is not None:
        write_atomically(case.folder / "images.csv", table(rows).encode())
    write_atomically(case.folder / "audit.json", (json.dumps(_finite(asdict(record)), indent=1) + "\n").encode())
    return record


def load(folder: Path | str) -> AuditRecord:
    """Read the result of a finished audit. Fields that a later version added are ignored."""
    path = Path(folder) / "audit.json"
    again = "audit into a new folder"
    try:
        with open_regular(path) as file:
            content = parse_json(file.read(LARGEST_JSON))
        if content.get("schema") != SCHEMA:
            raise RunFolderError(f"{path} is of another version of Palimpsest; {again}")
        return built(AuditRecord, without_unknown(AuditRecord, content))
    except FileNotFoundError as error:
        raise RunFolderError(
            f"{folder} does not hold a finished audit; give the --out of `palimpsest audit`"
        ) from error
    except (OSError, ValueError) as error:
        raise RunFolderError(f"{path} is damaged ({error}); {again}") from error


def _record(case: Case, audit: Audit, rows: list[ImageAnswer] | None) -> AuditRecord:
    return AuditRecord(
        schema=SCHEMA,
        palimpsest=__version__,
        verdict=_headline(audit),
        inputs=_inputs(case),
        readings=[_reading(name, each) for name, each in audit.readings.items()],
        images=None if rows is None else _images(rows),
        rungs=[_rung(each) for each in audit.rungs],
        not_tried=list(MISSING),
        publication=[_publication(each) for each in audit.publications],
        doubts=list(audit.doubts),
        membership=None if audit.membership is None else _membership(audit.membership),
    )


def _headline(audit: Audit) -> HeadlineRecord:
    found = audit.verdict
    return HeadlineRecord(found.outcome.value, found.sentence, found.advice, found.of, audit.finished, found.reason)


def _publication(each: Publication) -> PublicationRecord:
    return PublicationRecord(each.files, list(each.rungs), each.answer.value, each.reason, each.exposes)


def _images(rows: list[ImageAnswer]) -> ImagesRecord:
    known = all(row.recovered is not None for row in rows)
    return ImagesRecord(len(rows), [row.image for row in rows if row.recovered] if known else None, by_class(rows))


def _membership(found: Membership) -> MembershipRecord:
    return MembershipRecord(
        outcome=found.outcome.value,
        sentence=found.sentence,
        tested=len(found.names),
        held_out=len(found.held_out),
        named=int(found.named.sum()),
        level=found.level,
        auc=found.rates.verdict.auc,
        auc_interval=found.rates.verdict.auc_interval,
        knowledge=found.knowledge,
        statistic=found.statistic,
    )


def _rung(rung: Rung) -> RungRecord:
    outcome: Named | None = None if rung.reading is None else rung.reading.verdict.outcome.value
    return RungRecord(rung.attacker.name, rung.attacker.knows, outcome, rung.exposes, rung.adds, rung.reason)


def _reading(name: str, audit: Reading) -> ReadingRecord:
    verdict = audit.verdict
    return ReadingRecord(
        name=name,
        method=audit.plan.method,
        outcome=verdict.outcome.value,
        sentence=verdict.sentence,
        finished=audit.finished,
        plan=asdict(audit.plan),
        floor=audit.floor,
        accuracy=audit.accuracy,
        unexplained=verdict.unexplained,
        unexplained_by_chance=verdict.unexplained_by_chance,
        estimates=_estimates(audit),
        comparison=_comparison(audit),
        positive_control=_control(audit),
        reason=verdict.reason,
    )


def _estimates(audit: Reading) -> EstimateRecord:
    """Without a number that could be taken for a probability, if these are not calibrated."""
    verdict, ranking = audit.verdict, audit.ranking
    highest = float(ranking.probability.max()) if ranking.calibrated and len(ranking) else None
    by_chance = verdict.bar if ranking.calibrated else None
    return EstimateRecord(ranking.calibrated, verdict.likely, verdict.expected, highest, by_chance)


def _comparison(audit: Reading) -> ComparisonRecord | None:
    if (found := audit.comparison) is None:
        return None
    values = {name: getattr(found, name) for name in ("total", "interval", "auc", "auc_interval", "p_value")}
    return ComparisonRecord(
        beyond_chance=found.outcome is Outcome.LEAKAGE if audit.compared else None,
        recovered=found.recovered if audit.compared else None,
        threshold=found.threshold,
        confidence=found.confidence,
        **values,
    )


def _control(audit: Reading) -> ControlRecord | None:
    if (control := audit.positive) is None:
        return None
    found, easier = control.comparison, control.easier
    recovered = None if found.outcome is Outcome.NO_VERDICT else found.recovered
    reason = None if easier is None else easier[0]
    return ControlRecord(audit.readable, reason, control.images, control.way, recovered, found.auc)


def _inputs(case: Case) -> InputRecord:
    """The checksums of everything that the audit was given."""
    subject, truth = case.subject, case.truth
    code = load_json(case.folder / "config.json")["audit"]["network"]["code"]
    states = [θ for ends in subject.segments for θ in ends]
    way = {f"{j} {name}": t for j, θ in enumerate(states) for name, t in θ.items()}
    return InputRecord(
        network=code["name"],
        code=code["sha256"],
        image_shape=tuple(subject.image_shape),
        parameters=sum(t.numel() for t in parameters_of(subject.model).values()),
        outputs=subject.outputs,
        samples=case.options.samples,
        weights=_checksum(subject.model.state_dict()) or "",
        initial=_checksum(subject.initial),
        checkpoints=_checksum(way or None),
        optimiser=_checksum(subject.moment),
        images=None if truth is None else _checksum({"images": truth.seen, "labels": truth.labels}),
        held_out=None if truth is None or truth.held_out is None else _checksum({"images": truth.held_out}),
    )


def _checksum(tensors: Mapping[str, Tensor] | None) -> str | None:
    return None if tensors is None else tensor_digest({n: t.detach().cpu().contiguous() for n, t in tensors.items()})


def _finite(value: Any) -> Any:
    """JSON does not have NaN and infinity. They become null."""
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
