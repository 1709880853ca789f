"""The report: one HTML file that needs no network, no script and no other file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from palimpsest.report import figures, findings, pictures, words
from palimpsest.report.content import Content

CELL = 50  # about how wide a picture is on the page, in pixels
FRAME = 75  # the same in a trajectory
PLATE = 1040  # how wide a row of pictures may become

# Characters that nobody sees but that hide, reverse or break what stands beside them.
INVISIBLE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)

ENVIRONMENT = Environment(
    loader=PackageLoader("palimpsest.report", ""),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
ENVIRONMENT.filters |= {"fact": words.fact, "label": words.label, "raised": words.raised}
ENVIRONMENT.tests["nested"] = lambda value: isinstance(value, Mapping) and bool(value)


def render(content: Content) -> str:
    """The whole page as text.

    >>> import torch
    >>> from palimpsest.report import Variant
    >>> images = torch.rand(3, 1, 8, 8)
    >>> page = render(Content("A model", [Variant("", images, torch.arange(3), -torch.ones(3).long(), [])]))
    >>> "No verdict" in page
    True
    """
    pixels = min(content.judged.images.shape[-1], pictures.LARGEST)
    cell, columns = cell_and_columns(content.judged.images.shape[-1])
    page = ENVIRONMENT.get_template("report.html").render(
        title=content.title,
        content=content,
        finding=findings.finding(content),
        plate=pictures.plate(content),
        cell=cell,
        columns=columns,
        frame=_whole_multiple(pixels, FRAME),
        trajectories=pictures.trajectories(content),
        frame_steps=pictures.frame_steps(content),
        rounds=findings.rounds(content.variants[-1]),
        comparison=findings.comparison(content.variants),
        settings=_settings(content),
        **_figures(content),
    )
    return INVISIBLE.sub("\N{REPLACEMENT CHARACTER}", page)


def cell_and_columns(width: int) -> tuple[int, int]:
    """How wide a picture of so many pixels is shown on a plate, and how many stand in a row."""
    cell = _whole_multiple(min(width, pictures.LARGEST), CELL)
    return cell, max(1, min(20, PLATE // (cell + 2)))


def _whole_multiple(pixels: int, about: int) -> int:
    """A width near the wanted one at which every pixel of a small picture is equally wide."""
    return pixels * max(1, round(about / pixels)) if pixels < 1.3 * about else about


def _figures(content: Content) -> dict[str, Markup | list[Markup] | int | None]:
    """The drawings that make sense for this content."""
    variants, judged, last = content.variants, content.judged, content.variants[-1]
    scored = [v for v in variants if v.score is not None]
    curves = [figures.loss_curves(variants)] if all(v.records for v in variants) else []
    if judged.score is not None and all(v.metrics for v in variants):
        curves.append(figures.metric_curves(variants, "ssim", "mean SSIM"))
        curves.append(figures.metric_curves(variants, "recovered", f"images {findings.counted(judged.score)}"))
    return {
        "distribution": figures.distribution(judged.score) if judged.score and judged.score.held_out else None,
        "scatter": figures.scatter(*scored) if len(scored) == 2 else None,
        "improved": figures.improved(*scored) if len(scored) == 2 else None,
        "curves": curves,
        "eigenvalues": figures.eigenvalues(last) if figures.has_negative_eigenvalues(last) else None,
    }


def _settings(content: Content) -> list[tuple[str, Mapping[str, Any]]]:
    """The tables at the end, those that say something; an option that was left open says nothing."""
    tables: dict[str, Mapping[str, Any]] = {
        "Configuration": content.configuration,
        "Training": content.training,
        "Seeds": content.seeds,
        "Time spent": {stage: words.duration(seconds) for stage, seconds in content.seconds.items()},
        "Versions": content.versions,
    }
    return [(name, said) for name, table in tables.items() if (said := _said(table))]


def _said(table: Mapping[str, Any]) -> Mapping[str, Any]:
    return {
        key: _said(value) if isinstance(value, Mapping) else value for key, value in table.items() if value is not None
    }
