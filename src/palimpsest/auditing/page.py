"""The report of an audit: verdict, evidence, preflight, controls, limits, and ways to lower the risk."""

import json
from dataclasses import asdict, replace
from importlib import resources

from palimpsest.auditing.images import answers, by_class
from palimpsest.auditing.truth import Truth
from palimpsest.auditing.verdict import Audit, judge
from palimpsest.files.versions import versions
from palimpsest.report.figures import probabilities
from palimpsest.report.page import page
from palimpsest.report.pictures import Picture, data_uri, shown
from palimpsest.scoring import metrics

MOST = 100  # candidates shown


def render_audit(audit: Audit, truth: Truth | None, name: str) -> str:
    """The whole page as text. It does not depend on when or how often the audit was interrupted."""
    verdict, headline, optimiser = audit.verdict, audit.advice, audit.optimiser
    classes = [] if truth is None else by_class(answers(audit, truth))
    other = (
        None
        if optimiser is None
        else replace(audit, verdict=judge(audit))
        if audit.decisive is optimiser
        else optimiser
    )
    audit = audit.decisive  # the page shows its numbers, and the other reading in a section of its own
    ranking, drawing = audit.ranking, None
    plan = asdict(audit.plan) | {"at": None, "tangent points": audit.plan.at or None}
    if audit.negative is not None and len(ranking):
        drawing = probabilities(ranking.probability, audit.negative.probability, verdict.likely, audit.bar)
    return page(
        "audit.html",
        title=f"{name}: an audit of what can be read out of the weights",
        outcome=verdict.outcome,
        sentence=verdict.sentence,
        headline_advice=headline,
        audit=audit,
        other=other,
        classes=classes,
        held_out=0 if truth is None or truth.held_out is None else len(truth.held_out),
        plate=_plate(audit, truth),
        other_plate=[] if other is None else _plate(other, truth),
        likeliest=float(ranking.probability[0]) if len(ranking) else 0.0,
        width=ranking.images.shape[-1],
        probabilities=drawing,
        advice=json.loads(resources.files("palimpsest.auditing").joinpath("advice.json").read_text())["rows"],
        settings={"Plan": plan, "Versions": versions()},
    )


def _plate(audit: Audit, truth: Truth | None) -> list[list[Picture]]:
    """A column per candidate, the likeliest first: its picture, and the nearest training image if there are any."""
    ranking, likely = audit.ranking, audit.verdict.likely
    mean, std = (0.0, 1.0) if truth is None else (truth.mean, truth.std)
    images = ranking.images[:MOST] * std + mean
    columns = []
    for i, (image, p, agreement) in enumerate(zip(images, ranking.probability, ranking.agreement, strict=False)):
        alt = f"Candidate {i + 1}, probability {float(p):.0%}, agreement {float(agreement):.2f}"
        columns.append([Picture(shown(image), alt, f"{float(p):.0%}", "recovered" if i < likely else "")])
    if truth is not None and len(images):
        nearest = metrics.pairwise_ncc(images - mean, truth.images - mean).argmax(1)
        ssim = metrics.ssim(metrics.minmax(images.double()), truth.images[nearest].double())
        for column, i, value in zip(columns, nearest.tolist(), ssim.tolist(), strict=True):
            alt = f"Training image {i + 1}, SSIM {value:.2f}"
            column.append(Picture(data_uri(truth.images[i]), alt, f"{value:.2f}"))
    return columns
