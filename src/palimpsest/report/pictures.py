"""Pictures for the page: candidates beside the training images, and their way from noise to image."""

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

LARGEST = 96  # pixels; larger pictures are reduced, because the page shows them at about half of that
MOST = 240  # pictures in a row of the plate; of more, an even selection
FRAMES = 11  # of a trajectory
TRAJECTORIES = 4


@dataclass(frozen=True)
class Picture:
    """An image, its alternative text, and the note below it."""

    source: str
    alt: str
    note: str = ""
    mark: Literal["", "recovered", "flat"] = ""  # counted by the verdict, or only as good as a blurred copy
    split: bool = False  # whether the candidate was split since the previous picture


@dataclass(frozen=True)
class Trajectory:
    """The way of the reconstructions of one training image or, without training images, of one candidate."""

    name: str
    truth: Picture | None
    rows: list[tuple[str, list[Picture | None]]]


def data_uri(image: Tensor) -> str:
    """An image (C, H, W) in [0, 1] as a PNG inside an address; grey unless it has three channels."""
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


def _stretched(candidate: Tensor) -> Tensor:
    """A candidate as it is scored: stretched from black to white."""
    return metrics.minmax(candidate[None].detach().cpu().double())[0]


def shown(candidate: Tensor) -> str:
    return data_uri(_stretched(candidate))


def strip(content: Content, *, columns: int = 20, zoom: int = 2) -> bytes:
    """The best of the plate as one PNG: each variant's candidates, and the training images below them."""
    truth, score = content.truth, content.judged.score
    if truth is None or score is None:
        raise InvalidInputError("there are no training images to compare the candidates with; give them")
    best = _best_first(score)[:columns]
    rows = [[_stretched(v.images[v.score.match[i]]).float() for i in best] for v in content.variants if v.score]
    rows.append([truth[i].float() for i in best])
    sheet = torch.cat([torch.cat(row, dim=-1) for row in rows], dim=-2)
    return _png(sheet.repeat_interleave(zoom, -1).repeat_interleave(zoom, -2), largest=None)


def _best_first(score: Score) -> list[int]:
    """Training images from the best score to the worst, as the verdict ranks them."""
    return score.evidence.argsort(descending=True, stable=True).tolist()


def evenly(n: int, most: int) -> list[int]:
    """At most ``most`` of the places 0…n−1, evenly spread, including the first and the last.

    >>> evenly(100, 3), evenly(2, 3), evenly(0, 3)
    ([0, 50, 99], [0, 1], [])
    """
    return sorted({round(i * (n - 1) / max(1, min(n, most) - 1)) for i in range(min(n, most))})


def plate(content: Content) -> list[list[Picture | None]]:
    """A column per training image, best first: each variant's candidate, then the image itself."""
    truth, score = content.truth, content.judged.score
    if truth is None or score is None:
        images = content.judged.images
        return [[Picture(shown(images[i]), f"Candidate {i + 1}")] for i in evenly(len(images), MOST)]
    order = _best_first(score)
    return [
        [*(_reconstruction(variant, i) for variant in content.variants), _training_image(truth, i)]
        for i in (order[rank] for rank in evenly(len(order), MOST))
    ]


def _training_image(truth: Tensor, i: int) -> Picture:
    return Picture(data_uri(truth[i]), f"Training image {i + 1}")


def _reconstruction(variant: Variant, i: int) -> Picture | None:
    """The candidate matched with training image i; None if there is none."""
    score = variant.score
    if score is None or score.match[i] < 0:
        return None
    likeness = float(score.likeness[i])
    alt = f"Reconstruction {variant.name} of training image {i + 1}, likeness {likeness:.2f}"
    source, note = shown(variant.images[int(score.match[i])]), f"{likeness:.2f}"
    if score.recovered[i]:
        return Picture(source, f"{alt}, recovered", note, "recovered")
    return Picture(source, alt, note) if score.shows_detail[i] else Picture(source, f"{alt}, a blur", note, "flat")


def trajectories(content: Content) -> list[Trajectory]:
    """A few candidates from noise to the final image, through the candidates they split from."""
    followed = [variant for variant in content.variants if len(variant.snapshots) > 1]
    truth, score, steps = content.truth, content.judged.score, frame_steps(content)
    if not followed:
        return []
    if truth is None or score is None:
        last, chosen = followed[-1], evenly(len(content.judged.images), TRAJECTORIES)
        return [Trajectory(f"Candidate {i + 1}", None, [(last.name, _frames(last, i, None, steps))]) for i in chosen]
    matched = [i for i in _best_first(score) if score.match[i] >= 0]
    return [_trajectory(followed, truth, matched[rank], steps) for rank in evenly(len(matched), TRAJECTORIES)]


def frame_steps(content: Content) -> list[int]:
    """The steps at which candidates are shown, before the last."""
    snapshots = content.variants[-1].snapshots
    return [snapshots[j].step for j in evenly(len(snapshots), FRAMES)][:-1]


def _trajectory(variants: list[Variant], truth: Tensor, i: int, steps: list[int]) -> Trajectory:
    rows = [
        (v.name, _frames(v, int(v.score.match[i]), truth[i], steps))
        for v in variants
        if v.score is not None and v.score.match[i] >= 0
    ]
    return Trajectory(f"Training image {i + 1}", _training_image(truth, i), rows)


def _frames(variant: Variant, i: int, truth: Tensor | None, steps: list[int]) -> list[Picture | None]:
    """Final candidate i and its ancestors at these steps and at the end, each with its SSIM."""
    moments = [min(variant.snapshots, key=lambda snapshot: abs(snapshot.step - step)) for step in steps]
    frames: list[Picture | None] = []
    before = None
    for snapshot in [*moments, Snapshot(-1, variant.ids, variant.images)]:
        place = variant.ancestor(int(variant.ids[i]), snapshot.ids)
        if place is None:
            frames.append(None)
            continue
        image, number = snapshot.images[place], int(snapshot.ids[place])
        when = "the end" if snapshot.step < 0 else f"step {snapshot.step:,}"
        alt, note = f"Candidate {number} {variant.name} at {when}", ""
        if truth is not None:
            note = f"{float(metrics.ssim(_stretched(image)[None], truth[None].detach().cpu().double())):.2f}"
            alt += f", SSIM {note}"
        frames.append(Picture(shown(image), alt, note, split=before not in (None, number)))
        before = number
    return frames
