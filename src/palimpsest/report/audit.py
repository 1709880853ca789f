"""The report of an audit: verdict, evidence, preflight, controls, limits, and what would lower the risk."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

from markupsafe import Markup
from torch import Tensor

from palimpsest.report import figures
from palimpsest.report.findings import Figure, Finding, means_of
from palimpsest.report.page import ENVIRONMENT, INVISIBLE, cell_and_columns
from palimpsest.report.pictures import Picture, data_uri, shown
from palimpsest.report.words import number
from palimpsest.runs import versions
from palimpsest.scoring import Outcome, Verdict, metrics

if TYPE_CHECKING:
    from palimpsest.auditing import Audit, Preflight, Truth
    from palimpsest.auditing.verdict import AuditVerdict

MOST = 100  # candidates shown
MARGIN = (
    "The weights are taken to have reached a point of maximum margin. That takes long training on a loss that only"
    " separation brings to zero; most networks stop before it."
)
BETTER = "For a better reading, audit in a new folder with more --minutes, or with the initial weights if left out."
RELATED = {None: "not given", True: "belong to this training", False: "do not belong to this training"}


@dataclass(frozen=True)
class Control:
    name: str
    text: str


def render_audit(audit: Audit, truth: Truth | None, name: str) -> str:
    """The whole page as text; nothing on it depends on when or how often the audit was interrupted."""
    cell, columns = cell_and_columns(audit.ranking.images.shape[-1])
    page = ENVIRONMENT.get_template("audit.html").render(
        title=f"{name}: an audit of what can be read out of the weights",
        audit=audit,
        finding=finding(audit, truth),
        plate=_plate(audit, truth),
        cell=cell,
        columns=columns,
        probabilities=_probabilities(audit),
        preflight=_preflight(audit),
        controls=_controls(audit),
        assumptions=_assumptions(audit),
        advice=advice(),
        settings=[("Plan", _plan(audit)), ("Versions", versions())],
    )
    return INVISIBLE.sub("\N{REPLACEMENT CHARACTER}", page)


def _plan(audit: Audit) -> dict[str, Any]:
    """Only the NTK method has tangent points."""
    choices = audit.plan.to_json()
    at = choices.pop("at")
    return choices | {"tangent points": at} if at else choices


def _probabilities(audit: Audit) -> Markup | None:
    if audit.negative is None or audit.verdict.bar is None or not len(audit.ranking):
        return None
    return figures.probabilities(audit.ranking, audit.negative, audit.verdict.likely, audit.verdict.bar)


# --- the verdict ---------------------------------------------------------------------------------


def finding(audit: Audit, truth: Truth | None) -> Finding:
    """The calibrated verdict where training and held-out images are given, else the one without the truth."""
    verdict: AuditVerdict | Verdict = audit.verdict
    means, does_not_mean = _meaning(audit)
    if audit.compared and audit.score is not None and truth is not None and truth.held_out is not None:
        verdict = audit.score.verdict
        means, does_not_mean = means_of(verdict, len(truth.held_out))
    beside = [line for line in audit.told if verdict.sentence not in line]
    return Finding(_kind(verdict.outcome), verdict.sentence, _figures(audit), [*means, *beside], does_not_mean)


def _kind(outcome: Outcome) -> str:
    return outcome.value.replace(" ", "-")


def _meaning(audit: Audit) -> tuple[list[str], list[str]]:
    if audit.verdict.outcome is Outcome.LEAKAGE:
        return [
            "Candidates that started from different noise ended as the same pictures: the weights led them there, and"
            " those of a shuffled network do not.",
            "Whoever knows the training images can confirm it by looking at the pictures below.",
        ], [
            "Not that every picture below is a training image: a probability stands below each.",
            "Not that images which are not shown are safe.",
        ]
    if audit.verdict.outcome is Outcome.NO_EVIDENCE:
        control = {
            True: "The same method, with the same effort, does read a network of this kind that was trained on public"
            " images; so that nothing was read here is a finding.",
            False: "The same method could not read a network of this kind trained on public images either; so that"
            " nothing was read here says little.",
            None: "There was no positive control, so it is not known whether anything could have been read.",
        }[audit.verdict.readable]
        beware = [f"Beware: {audit.preflight.warning}."] if audit.preflight.warning else []
        better = [BETTER] if audit.verdict.readable is False and audit.finished else []
        return [*beware, control, *better], [
            "Not that the training images are safe. It is a statement about this method with this effort: a stronger"
            " attack, more time, or the initial weights where they were not given, may succeed.",
        ]
    neither = ["Neither that training images leaked nor that they did not."]
    if audit.negative is None:
        return ["Too little was read to tell."], neither
    return [
        "A single candidate is likely, and probabilities were calibrated on networks that the method can read. It could"
        " not read its positive control, so the estimate may not hold here.",
        "Whoever knows the training images can settle it by looking at the first picture below.",
        *([BETTER] if audit.finished else []),
    ], neither


def _figures(audit: Audit) -> list[Figure]:
    verdict, ranking = audit.verdict, audit.ranking
    best = float(ranking.probability[0]) if len(ranking) else 0.0
    shown = [] if audit.score is None else [_compared(audit.score.verdict, audit.compared)]
    unseen = "" if audit.score is None else "estimated without the training images: "
    shown += [
        Figure(
            str(verdict.likely),
            "likely candidates",
            f"{unseen}about {verdict.expected:.0f} of them expected to be real",
        ),
        Figure(f"{best:.0%}", "the likeliest candidate", f"{unseen}probability of showing a training image"),
    ]
    if verdict.bar is not None:
        shown.append(Figure(f"{verdict.bar:.0%}", "by chance", "the likeliest candidate of the negative control"))
    if audit.positive is not None:
        recovered = f"{audit.positive.verdict.recovered} of {audit.positive.verdict.total}"
        shown.append(Figure(recovered, "positive control", "public images read from a network of the same kind"))
    return shown


def _compared(verdict: Verdict, calibrated: bool) -> Figure:
    count = f"{verdict.recovered} of {verdict.total}"
    if calibrated:
        return Figure(count, "training images recovered", "compared with the training images you gave")
    return Figure(count, "training images with a good match", "better than a blur, which proves nothing")


# --- the pictures --------------------------------------------------------------------------------


def _plate(audit: Audit, truth: Truth | None) -> list[list[Picture]]:
    ranking = audit.ranking
    mean, std = (0.0, 1.0) if truth is None else (truth.mean, truth.std)
    images = ranking.images[:MOST] * std + mean
    columns = [[_candidate(audit, i, images[i])] for i in range(len(images))]
    if truth is not None and len(images):
        nearest = metrics.pairwise_ncc(images - mean, truth.images - mean).argmax(1)
        ssim = metrics.ssim(metrics.minmax(images.double()), truth.images[nearest].double())
        for column, i, value in zip(columns, nearest.tolist(), ssim.tolist(), strict=True):
            column.append(
                Picture(data_uri(truth.images[i]), f"Training image {i + 1}, SSIM {value:.2f}", f"{value:.2f}")
            )
    return columns


def _candidate(audit: Audit, i: int, image: Tensor) -> Picture:
    p, agreement = float(audit.ranking.probability[i]), float(audit.ranking.agreement[i])
    counts = i < audit.verdict.likely  # candidates are in the order of their probabilities
    alt = f"Candidate {i + 1}, probability {p:.0%}, agreement {agreement:.2f}"
    return Picture(shown(image), alt, f"{p:.0%}", "recovered" if counts else "")


# --- the tables ----------------------------------------------------------------------------------


def _preflight(audit: Audit) -> list[tuple[str, dict[str, Any]]]:
    found, plan = audit.preflight, audit.plan
    unknowns = plan.candidates * (found.pixels + max(1, len(plan.at)) * (found.outputs if plan.method == "ntk" else 1))
    equations = {
        "equations": f"{found.parameters:,} trained parameters",
        "unknowns": f"{unknowns:,} pixels and multipliers of {plan.candidates} candidates",
        "images determined by count": f"at most {found.images_determined:,}",
    }
    layer = {
        "training images": f"{found.samples}, counted in the first layer" if found.samples else "cannot be counted",
        "why": found.span_reason,
        "directions the first layer speaks of": "–" if found.bound is None else f"{found.bound}",
        "of its energy beyond initial noise": "–" if found.beyond_noise is None else f"{found.beyond_noise:.0%}",
        _still(found): f"{found.still_units} of {found.units}",
    }
    method = {"method": found.method, "because": found.why}
    if audit.floor is not None:
        method["floor at the truth"] = f"the training images leave {audit.floor:.0%} of the target unexplained"
    return [("Equations", equations), ("The start", _start(found)), ("The first layer", layer), ("The method", method)]


def _start(found: Preflight) -> dict[str, str]:
    if found.moved == 0:
        return {"initial weights": "the same as the trained ones, so nothing was learnt between them"}
    return {
        "initial weights": RELATED[found.related],
        "correlation with them": "–" if found.correlation is None else number(found.correlation, 2),
        "distance moved": "–" if found.moved is None else f"{number(found.moved, 2)} of their norm{_lazy(found.moved)}",
    }


def _still(found: Preflight) -> str:
    """What was counted: units that never moved, or where the start is not known, those that hold nothing."""
    return "units that never moved" if found.related and found.moved else "units whose weights are all zero"


def _lazy(moved: float) -> str:
    return ", so its gradients hardly changed" if moved < 0.1 else ", so its gradients changed on the way"


def _controls(audit: Audit) -> list[Control]:
    if audit.negative is None:
        negative = "Not run: time did not suffice."
    else:
        negative = (
            "The same network, what it learnt put in disorder, was read with the same plan. Its candidates leave"
            f" {1 - audit.negative.explained:.0%} of the target unexplained, those of the network itself"
            f" {audit.verdict.unexplained:.0%}; the likeliest has a probability of {audit.verdict.bar:.0%}."
        )
    if audit.positive is None:
        positive = "Not run, or the network could not be trained on public images."
    else:
        positive = (
            f"A network of the same kind was trained on {audit.positive.verdict.total} public images and read with the"
            f" same plan. {audit.positive.verdict.sentence}"
        )
    return [Control("Negative control", negative), Control("Positive control", positive)]


def _assumptions(audit: Audit) -> list[str]:
    method = {
        "ntk": "The change of the weights is taken to be a sum of gradients at the training images, at a point between"
        " start and end. That holds for gradient descent, and the better the less the network moved; Adam and long"
        " training weaken it.",
        "kkt": MARGIN,
        "multiclass": MARGIN,
        "kkt-signed": "The weights are taken to be stationary under weight decay.",
    }[audit.plan.method]
    return [
        method,
        "Batch normalisation and dropout are taken as they are in evaluation mode. A network trained with live batch"
        " statistics is read less well than one with fixed ones.",
        "Probabilities were calibrated on networks whose training images are known. On a network unlike these they are"
        " a ranking rather than a frequency.",
        "Images are sought pixel by pixel. What can be inferred from a network's answers is another question.",
    ]


def advice() -> list[list[str]]:
    """What was measured of ways to lower the risk: one row for each."""
    content = json.loads(resources.files("palimpsest.auditing").joinpath("advice.json").read_text())
    return [
        [row["measure"], str(row["images"]), str(row["recovered"]), f"{row['ssim']:.2f}"] for row in content["rows"]
    ]
