"""The report of an audit: a summary to hand over, evidence, preflight, controls, limits, advice, and checksums."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from markupsafe import Markup

from palimpsest.auditing.advice import applicable
from palimpsest.auditing.checksums import Checksums
from palimpsest.auditing.handover import counted, summary
from palimpsest.auditing.images import answers, by_class
from palimpsest.auditing.ranking import Ranking
from palimpsest.auditing.result import Audit, Reading
from palimpsest.auditing.truth import Truth
from palimpsest.files.versions import source_digest, versions
from palimpsest.report.figures import AGREEMENT, PROBABILITY, histograms
from palimpsest.report.page import page
from palimpsest.report.pictures import Picture, data_uri, shown
from palimpsest.scoring import metrics

WITHOUT_PICTURES = ", without pictures"  # in the title of a redacted report
MOST, FEW = 100, 20  # candidates shown, of the rung behind the headline and of the others


def render_audit(
    audit: Audit,
    truth: Truth | None,
    name: str,
    *,
    given: Checksums | None = None,
    settings: Mapping[str, Any] | None = None,
    redact: bool = False,
) -> str:
    """The whole page as text. Apart from times, it does not depend on when or how often the audit was interrupted.

    With ``redact`` it does not show any candidate or training image.
    """
    verdict, given, readings = audit.verdict, given or {}, audit.readings
    others = [each for name, each in readings.items() if name != audit.attacker.name]
    classes = [] if truth is None else by_class(answers(audit, truth))
    if redact:  # a folder of images may be named after a person
        classes = [replace(each, name=str(number)) for number, each in enumerate(classes, 1)]
    ranking, drawing = audit.ranking, None
    plan = asdict(audit.plan) | {"at": None, "tangent points": audit.plan.at or None, "rule": None}  # see the method
    if audit.negative is not None and len(ranking):
        drawing = _histogram(ranking, audit.negative, verdict.likely)
    code = versions() | {"source of palimpsest, SHA-256": source_digest()}
    return page(
        "audit.html",
        title=f"{name}: an audit of what can be read out of the weights{WITHOUT_PICTURES if redact else ''}",
        outcome=verdict.outcome,
        sentence=verdict.sentence,
        audit=audit,
        readings=readings,
        others=[(each, _plate(each, truth, FEW, redact)) for each in others],
        calibrated=ranking.calibrated,
        redacted=redact,
        given=given,
        summary=summary(audit, given),
        counted=counted(audit, audit.preflight),
        classes=classes,
        held_out=0 if truth is None or truth.held_out is None else len(truth.held_out),
        plate=_plate(audit, truth, MOST, redact),
        likeliest=float(ranking.probability[0]) if len(ranking) else 0.0,
        width=ranking.images.shape[-1],
        probabilities=drawing,
        advice=applicable(audit),
        settings={"Plan": plan},
        files={**given, "settings": settings or {}, "versions": code},
    )


def _histogram(ranking: Ranking, negative: Ranking, likely: int) -> Markup:
    """By probability or, if that is not calibrated, by agreement."""
    if ranking.calibrated:
        return histograms(ranking.probability, negative.probability, likely, PROBABILITY)
    return histograms(ranking.agreement, negative.agreement, likely, AGREEMENT)


def _plate(audit: Reading, truth: Truth | None, most: int, redact: bool) -> list[list[Picture]]:
    """A column per candidate, the likeliest first: its picture, and the nearest training image if there are any."""
    ranking, likely = audit.ranking, audit.verdict.likely
    mean, std = (0.0, 1.0) if truth is None else (truth.mean, truth.std)
    images = ranking.images[:most] * std + mean
    columns = []
    for i, (image, p, agreement) in enumerate(zip(images, ranking.probability, ranking.agreement, strict=False)):
        value = f"{float(p):.0%}" if ranking.calibrated else f"{i + 1}"
        probability = f"probability {value}, " if ranking.calibrated else ""
        alt = f"Candidate {i + 1}, {probability}agreement {float(agreement):.2f}"
        source = "" if redact else shown(image)
        columns.append([Picture(source, alt, value, "recovered" if i < likely else "")])
    if truth is not None and len(images):
        nearest = metrics.pairwise_ncc(images - mean, truth.images - mean).argmax(1)
        ssim = metrics.ssim(metrics.minmax(images.double()), truth.images[nearest].double())
        for column, i, value in zip(columns, nearest.tolist(), ssim.tolist(), strict=True):
            alt = f"Training image {i + 1}, SSIM {value:.2f}"
            column.append(Picture("" if redact else data_uri(truth.images[i]), alt, f"{value:.2f}"))
    return columns
