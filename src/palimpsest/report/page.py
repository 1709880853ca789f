"""The report: one HTML file that needs no network, no script and no other file."""

import re
from collections.abc import Mapping
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from palimpsest.report import figures, pictures, words
from palimpsest.report.content import Content, comparison, counted
from palimpsest.scoring import Outcome

CELL, FRAME = 50, 75  # approximate width of a picture on the page and in a trajectory, in pixels
PLATE, MOST_COLUMNS = 1040, 20  # the largest width of a row of pictures, and their number

# Invisible characters that hide, reverse or break the text beside them.
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
ENVIRONMENT.filters |= {name: getattr(words, name) for name in ("fact", "label", "number", "p_value", "raised")}
ENVIRONMENT.filters["percent"] = "{:.0%}".format
ENVIRONMENT.tests["nested"] = lambda value: isinstance(value, Mapping) and bool(value)


def render(content: Content) -> str:
    """The whole page as text."""
    judged = content.judged
    width, score = judged.images.shape[-1], judged.score
    count = f"{len(judged.images)} candidates were reconstructed"
    return page(
        "report.html",
        title=content.title,
        outcome=score.verdict.outcome if score else Outcome.NO_VERDICT,
        sentence=score.verdict.sentence if score else f"No verdict: {count}, but no training images were given.",
        content=content,
        plate=pictures.plate(content),
        width=width,
        frame=_whole_multiple(min(width, pictures.LARGEST), FRAME),
        trajectories=pictures.trajectories(content),
        frame_steps=pictures.frame_steps(content),
        splits=content.variants[-1].splits,
        comparison=comparison(content.variants),
        settings=_settings(content),
        **_drawings(content),
    )


def page(template: str, *, width: int, **values: Any) -> str:
    """The filled template, for pictures of this width in pixels. Invisible characters are replaced."""
    cell = _whole_multiple(min(width, pictures.LARGEST), CELL)
    columns = max(1, min(MOST_COLUMNS, PLATE // (cell + 2)))
    text = ENVIRONMENT.get_template(template).render(cell=cell, columns=columns, **values)
    return INVISIBLE.sub("\N{REPLACEMENT CHARACTER}", text)


def _whole_multiple(pixels: int, about: int) -> int:
    """A width near the wanted one at which every pixel of a small picture is equally wide."""
    return pixels * max(1, round(about / pixels)) if pixels < 1.3 * about else about


def _drawings(content: Content) -> dict[str, Markup | list[Markup] | int | None]:
    """The drawings that make sense for this content."""
    variants, score = content.variants, content.judged.score
    scores = [v.score for v in variants if v.score is not None]
    two = len(scores) == 2
    curves = [figures.loss_curves(variants)] if all(v.records for v in variants) else []
    if score is not None and all(v.metrics for v in variants):
        curves.append(figures.metric_curves(variants, "ssim", "mean SSIM"))
        curves.append(figures.metric_curves(variants, "recovered", f"images {counted(score)}"))
    return {
        "distribution": figures.distribution(score) if score and score.held_out else None,
        "scatter": figures.scatter([v.name for v in variants], scores) if two else None,
        "improved": figures.improved(scores) if two else None,
        "curves": curves,
        "eigenvalues": figures.eigenvalues(variants[-1].splits),
    }


def _settings(content: Content) -> dict[str, Mapping[str, Any]]:
    """The tables at the end, without empty ones. The template leaves out options that are None."""
    tables: dict[str, Mapping[str, Any]] = {
        "Configuration": content.configuration,
        "Training": content.training,
        "Seeds": content.seeds,
        "Time spent": {stage: words.duration(seconds) for stage, seconds in content.seconds.items()},
        "Versions": content.versions,
    }
    return {name: table for name, table in tables.items() if table}
