"""The page of a membership test: the share of images named at each rate of false positives, and the images."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from palimpsest.files.versions import versions
from palimpsest.report.figures import roc
from palimpsest.report.page import page
from palimpsest.report.pictures import Picture, data_uri
from palimpsest.runs.journal import printable

if TYPE_CHECKING:
    from palimpsest.auditing.told_apart import Membership

MOST = 40  # images shown from either end


def render_membership(found: Membership, images: Tensor, name: str) -> str:
    """The whole page as text."""
    order = found.traces.argsort(descending=True, stable=True).tolist()
    most = min(MOST, (len(order) + 1) // 2)
    return page(
        "membership.html",
        title=f"{printable(name)}: which images was the network trained on?",
        outcome=found.outcome,
        sentence=found.sentence,
        found=found,
        verdict=found.rates.verdict,
        surest=_plate(found, images, order[:most]),
        least=_plate(found, images, order[most:][-most:]),
        roc=roc(found.rates, found.level),
        width=images.shape[-1],
        settings={
            "Test": {
                "known": found.knowledge,
                "statistic": found.statistic,
                "layer": found.layer,
                "given images": len(found.names),
                "held-out images": len(found.held_out),
            },
            "Versions": versions(),
        },
    )


def _plate(found: Membership, images: Tensor, rows: list[int]) -> list[list[Picture]]:
    columns = []
    for i in rows:
        p, named = float(found.rates.p_values[i]), bool(found.named[i])
        alt = f"Image {found.names[i]}, p = {p:.3g}{', named as a training image' if named else ''}"
        columns.append([Picture(data_uri(images[i]), alt, f"{p:.2g}", "recovered" if named else "")])
    return columns
