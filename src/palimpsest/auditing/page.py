"""The report of an audit: verdict, evidence, preflight, controls, limits, and ways to lower the risk."""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib import resources
from typing import Any

from markupsafe import Markup

from palimpsest.auditing.result import Audit
from palimpsest.auditing.truth import Truth
from palimpsest.files.versions import versions
from palimpsest.report import figures
from palimpsest.report.findings import Figure, recovered
from palimpsest.report.page import page
from palimpsest.report.pictures import Picture, data_uri, shown
from palimpsest.report.words import number
from palimpsest.scoring import metrics

MOST = 100  # candidates shown
SMALL_MOVE = 0.1  # of the initial norm, below which the gradients hardly change
RELATED = {None: "not given", True: "belong to this training", False: "do not belong to this training"}


def render_audit(audit: Audit, truth: Truth | None, name: str) -> str:
    """The whole page as text. It does not depend on when or how often the audit was interrupted."""
    return page(
        "audit.html",
        title=f"{name}: an audit of what can be read out of the weights",
        outcome=audit.verdict.outcome,
        sentence=audit.verdict.sentence,
        figures=_key_figures(audit),
        audit=audit,
        held_out=0 if truth is None or truth.held_out is None else len(truth.held_out),
        plate=_plate(audit, truth),
        width=audit.ranking.images.shape[-1],
        probabilities=_probabilities(audit),
        preflight=_preflight(audit),
        advice=advice(),
        settings={
            "Plan": {name: value for name, value in asdict(audit.plan).items() if value != ()},
            "Versions": versions(),
        },
    )


def _key_figures(audit: Audit) -> list[Figure]:
    verdict, ranking = audit.verdict, audit.ranking
    best = float(ranking.probability[0]) if len(ranking) else 0.0
    unseen = "" if audit.score is None else "estimated without the training images: "
    expected = f"{unseen}about {verdict.expected:.0f} of them expected to be real"
    chosen = [
        Figure(str(verdict.likely), "likely candidates", expected),
        Figure(f"{best:.0%}", "the likeliest candidate", f"{unseen}probability of showing a training image"),
    ]
    if audit.score is not None:
        chosen.insert(0, recovered(audit.score.verdict, "compared with the training images you gave"))
    if verdict.bar is not None:
        chosen.append(Figure(f"{verdict.bar:.0%}", "by chance", "the likeliest candidate of the negative control"))
    if audit.positive is not None:
        count = f"{audit.positive.comparison.recovered} of {audit.positive.comparison.total}"
        chosen.append(Figure(count, "positive control", "public images recovered from a network of the same kind"))
    return chosen


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


def _probabilities(audit: Audit) -> Markup | None:
    if audit.negative is None or audit.verdict.bar is None or not len(audit.ranking):
        return None
    ours, chance = audit.ranking.probability, audit.negative.probability
    return figures.probabilities(ours, chance, audit.verdict.likely, audit.verdict.bar)


def _preflight(audit: Audit) -> dict[str, dict[str, Any]]:
    """The tables of facts that were known before the reconstruction."""
    found, plan = audit.preflight, audit.plan
    multipliers = max(1, len(plan.at)) * (found.outputs if plan.method == "ntk" else 1)
    unknowns = f"{plan.candidates * (found.pixels + multipliers):,} pixels and multipliers"
    source = "counted in the first layer" if found.samples == audit.samples else "as given"
    still = "units that never moved" if found.related and found.moved else "units whose weights are all zero"
    method = {"method": found.method, "because": found.why}
    if audit.floor is not None:
        method["floor at the truth"] = f"the training images leave {audit.floor:.0%} of the target unexplained"
    if audit.accuracy is not None:
        method["accuracy"] = f"{audit.accuracy:.0%} of the given training images classified correctly"
    return {
        "Equations": {
            "equations": f"{found.parameters:,} trained parameters",
            "unknowns": f"{unknowns} of {plan.candidates} candidates",
            "images determined by count": f"at most {found.images_determined:,}",
        },
        "The start": _start(audit),
        "The first layer": {
            "training images": "unknown; give --samples if you know it"
            if audit.samples is None
            else f"{audit.samples}, {source}",
            "why": found.span_reason,
            "directions in the change of the first layer": "–" if found.bound is None else f"{found.bound}",
            "its energy above the initial noise": "–" if found.beyond_noise is None else f"{found.beyond_noise:.0%}",
            still: f"{found.still_units} of {found.units}",
        },
        "The method": method,
    }


def _start(audit: Audit) -> dict[str, str]:
    related, correlation, moved = audit.preflight.related, audit.preflight.correlation, audit.preflight.moved
    if moved == 0:
        return {"initial weights": "equal to the trained weights, so training changed nothing"}
    if moved is None or correlation is None:
        return {"initial weights": RELATED[related]}
    gradients = "hardly changed" if moved < SMALL_MOVE else "changed during training"
    return {
        "initial weights": RELATED[related],
        "correlation with them": number(correlation, 2),
        "distance moved": f"{number(moved, 2)} of their norm, so the gradients {gradients}",
    }


def advice() -> list[list[str]]:
    """The measured effect of each way to lower the risk, a row per measure."""
    rows = json.loads(resources.files("palimpsest.auditing").joinpath("advice.json").read_text())["rows"]
    return [[row["measure"], f"{row['images']}", f"{row['recovered']}", f"{row['ssim']:.2f}"] for row in rows]
