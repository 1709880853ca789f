"""Pictures for the page: what was read out, beside what it was read from, and how it came about."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from palimpsest.errors import InvalidInputError
from palimpsest.report.content import Content, Snapshot, Variant
from palimpsest.scoring import Score, metrics

LARGEST = 96  # pixels; larger pictures are reduced, for they are shown at about half of that
MOST = 240  # pictures shown in a row of the plate; of more, an even selection
FRAMES = 11  # of a trajectory
TRAJECTORIES = 4


@dataclass(frozen=True)
class Picture:
    """An image, its alternative text, and what is printed below it.

    Args:
        mark: ``"recovered"`` if the verdict counts it, ``"flat"`` if it shows no more than a blur would.
        split: whether the candidate was born of a split since the picture before.
    """

    source: str
    alt: str
    note: str = ""
    mark: Literal["", "recovered", "flat"] = ""
    split: bool = False


@dataclass(frozen=True)
class Trajectory:
    """How the reconstructions of one training image came about; without a truth, how one candidate did."""

    name: str
    truth: Picture | None
    rows: list[tuple[str, list[Picture | None]]]


def data_uri(image: Tensor) -> str:
    """An image (C, H, W) in [0, 1] as a PNG inside an address; grey unless it has three channels.

    >>> import torch
    >>> data_uri(torch.zeros(1, 2, 2))[:22]
    'data:image/png;base64,'
    """
    return "data:image/png;base64," + base64.b64encode(_png(image, largest=LARGEST)).decode()


def _png(image: Tensor, *, largest: int | None) -> bytes:
    pixels = image.detach().cpu().float().nan_to_num().clamp(0, 1)
    pixels = pixels.movedim(0, -1) if len(pixels) == 3 else pixels.mean(0)
    picture = Image.fromarray(np.uint8(np.round(255 * pixels.numpy())))
    if largest is not None:
        picture.thumbnail((largest, largest))
    file = io.BytesIO()
    picture.save(file, format="PNG", optimize=True)
    return file.getvalue()


def strip(content: Content, *, columns: int = 20, zoom: int = 2) -> bytes:
    """The best of the plate as one PNG: each variant's candidates, and the training images below them."""
    truth, score = content.truth, content.judged.score
    if truth is None or score is None:
        raise InvalidInputError("without the training images there is nothing to set the candidates beside")
    best = ranking(score)[:columns]
    rows = [
        torch.cat([metrics.minmax(v.images[v.score.match[i]][None].double())[0].float() for i in best], dim=-1)
        for v in content.variants
        if v.score is not None
    ]
    sheet = torch.cat([*rows, torch.cat([truth[i].float() for i in best], dim=-1)], dim=-2)
    return _png(sheet.repeat_interleave(zoom, -1).repeat_interleave(zoom, -2), largest=None)


def shown(candidate: Tensor) -> str:
    """A candidate as it is scored: stretched from black to white."""
    return data_uri(metrics.minmax(candidate[None].detach().cpu().double())[0])


def ranking(score: Score) -> list[int]:
    """Training images from the best score to the worst, as the verdict ranks them."""
    return score.evidence.argsort(descending=True, stable=True).tolist()


def evenly(n: int, most: int) -> list[int]:
    """At most so many of the places 0…n−1, evenly spread, the first and the last among them.

    >>> evenly(100, 3), evenly(2, 3), evenly(0, 3)
    ([0, 50, 99], [0, 1], [])
    """
    return sorted({round(i * (n - 1) / max(1, min(n, most) - 1)) for i in range(min(n, most))})


# --- the plate: all training images, each below its reconstructions ------------------------------


def plate(content: Content) -> list[list[Picture | None]]:
    """One column for each training image, best first: each variant's candidate, then the image itself."""
    truth, score = content.truth, content.judged.score
    if truth is None or score is None:
        images = content.judged.images
        return [[Picture(shown(images[i]), f"Candidate {i + 1}")] for i in evenly(len(images), MOST)]
    order = ranking(score)
    return [
        [
            *(_reconstruction(variant, i) for variant in content.variants),
            Picture(data_uri(truth[i]), f"Training image {i + 1}"),
        ]
        for i in (order[rank] for rank in evenly(len(order), MOST))
    ]


def _reconstruction(variant: Variant, i: int) -> Picture | None:
    """The candidate matched with training image i; None if there is none."""
    score = variant.score
    if score is None or score.match[i] < 0:
        return None
    likeness, mark = float(score.likeness[i]), _mark(score, i)
    told = {"recovered": ", recovered", "flat": ", no better than a blur", "": ""}[mark]
    alt = f"Reconstruction {variant.name} of training image {i + 1}, likeness {likeness:.2f}{told}"
    return Picture(shown(variant.images[int(score.match[i])]), alt, f"{likeness:.2f}", mark)


def _mark(score: Score, i: int) -> Literal["", "recovered", "flat"]:
    if score.recovered[i]:
        return "recovered"
    return "" if score.shows_detail[i] else "flat"


# --- trajectories --------------------------------------------------------------------------------


def trajectories(content: Content) -> list[Trajectory]:
    """A few candidates followed from noise to what they became, through the candidates they split from."""
    followed = [variant for variant in content.variants if len(variant.snapshots) > 1]
    score, steps = content.judged.score, frame_steps(content)
    if not followed:
        return []
    if content.truth is None or score is None:
        return [_candidate_over_time(followed[-1], i, steps) for i in evenly(len(content.judged.images), TRAJECTORIES)]
    matched = [i for i in ranking(score) if score.match[i] >= 0]
    chosen = [matched[rank] for rank in evenly(len(matched), TRAJECTORIES)]
    return [_image_over_time(followed, content.truth[i], i, steps) for i in chosen]


def frame_steps(content: Content) -> list[int]:
    """The steps at which candidates are shown, before the last."""
    snapshots = content.variants[-1].snapshots
    return [snapshots[j].step for j in evenly(len(snapshots), FRAMES)][:-1]


def _image_over_time(variants: list[Variant], truth: Tensor, i: int, steps: list[int]) -> Trajectory:
    rows = [
        (v.name, _frames(v, int(v.score.match[i]), truth, steps))
        for v in variants
        if v.score is not None and v.score.match[i] >= 0
    ]
    return Trajectory(f"Training image {i + 1}", Picture(data_uri(truth), f"Training image {i + 1}"), rows)


def _candidate_over_time(variant: Variant, i: int, steps: list[int]) -> Trajectory:
    return Trajectory(f"Candidate {i + 1}", None, [(variant.name, _frames(variant, i, None, steps))])


def _frames(variant: Variant, i: int, truth: Tensor | None, steps: list[int]) -> list[Picture | None]:
    """Final candidate i and its ancestors at these steps and at the end; below each its SSIM with the truth."""
    moments = [(step, min(variant.snapshots, key=lambda snapshot: abs(snapshot.step - step))) for step in steps]
    frames: list[Picture | None] = []
    before = None
    for step, snapshot in [*moments, (None, Snapshot(0, variant.ids, variant.images))]:
        place = variant.ancestor(int(variant.ids[i]), snapshot.ids)
        if place is None:
            frames.append(None)
            continue
        image, number = snapshot.images[place], int(snapshot.ids[place])
        ssim = "" if truth is None else f"{_ssim(image, truth):.2f}"
        when = "the end" if step is None else f"step {snapshot.step:,}"
        alt = f"Candidate {number} {variant.name} at {when}" + (f", SSIM {ssim}" if ssim else "")
        frames.append(Picture(shown(image), alt, ssim, split=before not in (None, number)))
        before = number
    return frames


def _ssim(candidate: Tensor, truth: Tensor) -> float:
    a, b = (x[None].detach().cpu().double() for x in (candidate, truth))
    return float(metrics.ssim(metrics.minmax(a), b))
