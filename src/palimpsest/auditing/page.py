"""The report of an audit: verdict, evidence, preflight, controls, limits, and what would lower the risk."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

from markupsafe import Markup
from torch import Tensor

from palimpsest.auditing.preflight import Preflight
from palimpsest.auditing.truth import Truth
from palimpsest.files.versions import versions
from palimpsest.report import figures
from palimpsest.report.findings import Figure, Finding, means_of
from palimpsest.report.page import ENVIRONMENT, INVISIBLE, cell_and_columns
from palimpsest.report.pictures import Picture, data_uri, shown
from palimpsest.report.words import number
from palimpsest.scoring import Outcome, Verdict, metrics

if TYPE_CHECKING:  # audit.py renders this page
    from palimpsest.auditing.audit import Audit

MOST = 100  # candidates shown
MARGIN = (
    "The method assumes that the weights have reached a point of maximum margin. This needs long training with a"
    " classification loss; most networks stop earlier."
)
NOT_SAFE = "The training images are not proven safe. A stronger attack, more time or more knowledge may recover them."
NEITHER = "This proves neither that training images leaked nor that they did not."
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
    """The headline, and what follows from it."""
    verdict = audit.verdict
    if audit.score is not None and verdict.outcome is Outcome.LEAKAGE and audit.compared:
        means, does_not_mean = means_of(audit.score.verdict, 0 if truth is None else _held_out(truth))
    else:
        means, does_not_mean = _meaning(audit)
    kind = verdict.outcome.value.replace(" ", "-")
    return Finding(kind, verdict.sentence, _figures(audit), [*means, *audit.told[1:]], does_not_mean)


def _held_out(truth: Truth) -> int:
    return 0 if truth.held_out is None else len(truth.held_out)


def _meaning(audit: Audit) -> tuple[list[str], list[str]]:
    return {
        Outcome.LEAKAGE: (
            [
                "Candidates that started from different noise ended as the same pictures. The weights caused this: a"
                " network with permuted weights does not lead to the same pictures.",
                "Compare the pictures below with the training images to confirm the result.",
            ],
            [
                "Not every picture below is a training image. Each picture shows its probability.",
                "Training images that are not shown may leak too.",
            ],
        ),
        Outcome.NO_EVIDENCE: (
            ["The audit recovers images from an equally hard control, but finds no evidence in this network."],
            [NOT_SAFE],
        ),
        Outcome.UNDECIDED: (["The audit is complete. Its findings do not support a claim."], [NEITHER, NOT_SAFE]),
        Outcome.NO_VERDICT: (["The audit cannot judge this network."], [NEITHER, NOT_SAFE]),
    }[audit.verdict.outcome]


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
        recovered = f"{audit.positive.comparison.recovered} of {audit.positive.comparison.total}"
        shown.append(Figure(recovered, "positive control", "public images recovered from a network of the same kind"))
    return shown


def _compared(verdict: Verdict, calibrated: bool) -> Figure:
    count = f"{verdict.recovered} of {verdict.total}"
    if calibrated:
        return Figure(count, "training images recovered", "compared with the training images you gave")
    return Figure(count, "training images with a good match", "better than a blurred copy, which proves nothing")


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
        "training images": _number(audit),
        "why": found.span_reason,
        "directions in the change of the first layer": "–" if found.bound is None else f"{found.bound}",
        "its energy above the initial noise": "–" if found.beyond_noise is None else f"{found.beyond_noise:.0%}",
        _still(found): f"{found.still_units} of {found.units}",
    }
    method = {"method": found.method, "because": found.why}
    if audit.floor is not None:
        method["floor at the truth"] = f"the training images leave {audit.floor:.0%} of the target unexplained"
    if audit.accuracy is not None:
        method["accuracy"] = f"{audit.accuracy:.0%} of the given training images classified correctly"
    return [("Equations", equations), ("The start", _start(found)), ("The first layer", layer), ("The method", method)]


def _number(audit: Audit) -> str:
    if audit.preflight.samples == audit.samples:
        return "unknown" if audit.samples is None else f"{audit.samples}, counted in the first layer"
    return f"{audit.samples}, as given"


def _start(found: Preflight) -> dict[str, str]:
    if found.moved == 0:
        return {"initial weights": "equal to the trained weights, so training changed nothing"}
    return {
        "initial weights": RELATED[found.related],
        "correlation with them": "–" if found.correlation is None else number(found.correlation, 2),
        "distance moved": "–" if found.moved is None else f"{number(found.moved, 2)} of their norm{_lazy(found.moved)}",
    }


def _still(found: Preflight) -> str:
    """The name of the counted units: those that never moved or, if the start is not known, those with zero weights."""
    return "units that never moved" if found.related and found.moved else "units whose weights are all zero"


def _lazy(moved: float) -> str:
    return ", so the gradients hardly changed" if moved < 0.1 else ", so the gradients changed during training"


def _controls(audit: Audit) -> list[Control]:
    return [Control("Negative control", _negative(audit)), Control("Positive control", _positive(audit))]


def _negative(audit: Audit) -> str:
    if audit.negative is None:
        return "Not run: time ran out."
    return (
        "The audit ran the same plan on this network with the change of its weights randomly permuted. The candidates"
        f" of the control leave {1 - audit.negative.explained:.0%} of the target unexplained; those of the network"
        f" leave {audit.verdict.unexplained:.0%}. The likeliest candidate of the control has a probability of"
        f" {audit.verdict.bar:.0%}."
    )


def _positive(audit: Audit) -> str:
    control = audit.positive
    if control is None:
        return "Not available: it was not run, or the network could not be trained on public images."
    reason = f"It may be easier to read than this network: {control.easier[0]}." if control.easier else ""
    easier = reason or "It is as hard to read as this network."
    return (
        f"The audit trained a network of the same kind on {control.images} public images and ran the same plan on it."
        f" {easier} {control.comparison.sentence}"
    )


def _assumptions(audit: Audit) -> list[str]:
    method = {
        "ntk": "The method assumes that the change of the weights is a sum of gradients at the training images, at a"
        " point between start and end. This holds for gradient descent. It holds better if the weights moved little,"
        " and worse with Adam or long training.",
        "kkt": MARGIN,
        "multiclass": MARGIN,
        "kkt-signed": "The method assumes that the weights are stationary under weight decay.",
    }[audit.plan.method]
    return [
        method,
        "The audit uses batch normalisation and dropout in evaluation mode. It recovers less from networks that were"
        " trained with live batch statistics.",
        "Probabilities were calibrated on networks with known training images. On a very different network, use them as"
        " a ranking only.",
        "The audit searches for images pixel by pixel. It does not test leaks through the outputs of the network.",
    ]


def advice() -> list[list[str]]:
    """Measured effect of each way to lower the risk, one row per measure."""
    content = json.loads(resources.files("palimpsest.auditing").joinpath("advice.json").read_text())
    return [
        [row["measure"], str(row["images"]), str(row["recovered"]), f"{row['ssim']:.2f}"] for row in content["rows"]
    ]
