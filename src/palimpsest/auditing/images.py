"""One answer for each training image: `images.csv`, and a summary for each class."""

import csv
import io
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from statistics import fmean

from palimpsest.auditing.agreement import ALIKE
from palimpsest.auditing.result import Audit, Reading
from palimpsest.auditing.truth import Truth
from palimpsest.runs.journal import printable
from palimpsest.scoring import Outcome
from palimpsest.scoring.metrics import pairwise_ncc

COLUMNS = ("image", "name", "class", "ssim", "recovered", "rung", "candidate", "membership_p_value")
WORDS = {True: "yes", False: "no", None: ""}


@dataclass(frozen=True)
class ImageAnswer:
    """A row of images.csv. None means: not known."""

    image: int  # its number, from 1
    name: str  # of its file; empty if it does not have one
    label: str  # the name of its class
    ssim: float | None  # with its best candidate
    recovered: bool | None  # None without enough held-out images
    rung: str  # the first rung that recovers it, or the empty string
    candidate: int | None  # the number, in the ranking of that rung, of the picture that shows it, if it is recovered
    membership_p_value: float | None = None  # of its traces in the weights; None if it was not tested


@dataclass(frozen=True)
class ClassRecord:
    """The images of one class."""

    name: str
    images: int
    recovered: int | None
    ssim: float | None  # mean


def answers(audit: Audit, truth: Truth) -> list[ImageAnswer]:
    """The best candidate of each training image on all rungs. A rung that recovers it comes before others."""
    read = audit.readings
    scores = {name: each.score for name, each in read.items() if each.score is not None}
    compared = [name for name in scores if read[name].compared]
    leaking = [name for name in compared if read[name].verdict.outcome is Outcome.LEAKAGE]  # else it may be chance
    shown = {name: _shown(read[name]) for name in scores}
    p = {} if audit.membership is None else audit.membership.p_values
    found = []
    for i, label in enumerate(truth.labels.tolist()):
        exposed = [name for name in leaking if bool(scores[name].recovered[i])]
        best = exposed[0] if exposed else max(scores, key=lambda name: float(scores[name].ssim[i]), default=None)
        found.append(
            ImageAnswer(
                image=i + 1,
                name=printable(truth.names[i]) if truth.names else "",
                label=printable(truth.classes[label]) if truth.classes else str(label),
                ssim=None if best is None else float(scores[best].ssim[i]),
                recovered=bool(exposed) if compared else None,
                rung=exposed[0] if exposed else "",
                candidate=shown[exposed[0]][i] if exposed else None,
                membership_p_value=p.get(str(i + 1)),
            )
        )
    return found


def _shown(audit: Reading) -> list[int | None]:
    """The number of the ranked candidate that stands for each image's best one; None if the ranking left it out."""
    assert audit.score is not None
    if not len(audit.ranking):
        return [None] * len(audit.score.match)
    likeness, place = pairwise_ncc(audit.candidates[audit.score.match], audit.ranking.images).max(1)
    return [i + 1 if alike else None for i, alike in zip(place.tolist(), likeness > ALIKE, strict=True)]


def by_class(rows: Sequence[ImageAnswer]) -> list[ClassRecord]:
    """How many images of each class are recovered, and how well they are shown."""
    found = []
    for name in sorted({row.label for row in rows}, key=lambda name: name.zfill(9) if name.isdecimal() else name):
        those = [row for row in rows if row.label == name]
        ssim = [row.ssim for row in those if row.ssim is not None]
        known = all(row.recovered is not None for row in those)
        count = sum(bool(row.recovered) for row in those) if known else None
        found.append(ClassRecord(name, len(those), count, fmean(ssim) if ssim else None))
    return found


def shielded(text: str) -> str:
    """A cell that a spreadsheet does not run as a formula."""
    return f"'{text}" if text[:1] in tuple("=+-@") else text


def table(rows: Sequence[ImageAnswer]) -> str:
    """The rows as CSV."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in rows:
        ssim = "" if row.ssim is None else f"{row.ssim:.4f}"
        p = "" if row.membership_p_value is None else f"{row.membership_p_value:.4g}"
        safe = replace(row, name=shielded(row.name), label=shielded(row.label))
        writer.writerow(astuple(replace(safe, ssim=ssim, recovered=WORDS[row.recovered], membership_p_value=p)))  # type: ignore[arg-type]
    return text.getvalue()
