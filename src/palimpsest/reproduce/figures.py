"""Pictures of an experiment: the best images; loss and metric on the way, with and without splitting; single images."""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from palimpsest.reproduce.runner import PICTURED, Part, Results, Runner
from palimpsest.storage import write_atomically

ZOOM = 2
RANKS = {  # by what they gain from splitting: which images stand for all
    "the one that splitting improves most": 1.0,
    "an upper quartile": 0.75,
    "the median": 0.5,
    "the one that it harms most": 0.0,
}
STYLES = {"none": "--", "splitting": "-", "merging": ":"}
COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:red")

Figures = dict[str, dict[str, Any]]  # by file name: a caption, and what was asked for of the parts that are shown


def write(runner: Runner, results: Results, folder: Path, before: Figures) -> Figures:
    """Write the figures of which everything is there; a figure from before stays if it shows parts that still are."""
    name = runner.experiment.name
    written = {
        file: figure
        for file, figure in before.items()
        if figure["of"].items() <= {part.name: result["asked"] for part, result in results.items()}.items()
    }

    def add(kind: str, image: bytes, parts: Iterable[Part], caption: str) -> None:
        write_atomically(folder / f"{name}-{kind}.png", image)
        of = {part.name: results[part]["asked"] for part in parts}
        written[f"{name}-{kind}.png"] = {"caption": caption, "of": of}

    shown = _shown(runner, results)
    pictures = {part: tensors for part in shown if (tensors := runner.pictures(part)) is not None}
    if shown and len(pictures) == len(shown):
        rows = "; ".join(f"{part.column}, {part.variant}, k = {part.candidates}" for part in shown)
        count = min(runner.experiment.pictured, runner.experiment.training.images)
        best = f"The {count} images of seed {shown[0].seed} that *{shown[-1].column}* shows best in any of its rows"
        caption = f"{best}. From above: training images; {rows}."
        add("images", _plate(runner, results, pictures), shown, caption)
    if drawn := _columns(runner, results):
        caption = (
            f"Loss and mean {runner.experiment.metric.upper()} on the way (seed {runner.seeds[0]}; dashed without,"
            " solid with splitting, dotted with merging too; after a split annealing begins anew, with a smooth network"
            " whose loss is larger), and every image of every seed without (across) against with splitting (up)."
        )
        of = [part for part in results if part.variant in PICTURED and part.column in drawn]
        add("curves", _curves(runner, results, drawn), of, caption)
    followed = _followed(runner, results)
    if followed and all("trajectories" in results[part] for pair in followed for part in pair):
        caption = (
            f"{runner.experiment.metric.upper()} of single images on the way (seed {runner.seeds[0]}; dashed without,"
            f" solid with splitting, which takes place at the dotted lines): {', '.join(RANKS)}."
        )
        of = [part for pair in followed for part in pair]
        add("trajectories", _trajectories(runner, results, followed), of, caption)
    return written


def _shown(runner: Runner, results: Results) -> list[Part]:
    """With and without splitting, of each column, from as many candidates as the column's file names first."""
    columns = runner.experiment.columns.items()
    parts = [Part(name, variant, c.candidates[0], runner.seeds[0]) for name, c in columns for variant in PICTURED]
    return [part for part in parts if part in results]


# --- the best images ----------------------------------------------------------------------------


def _plate(runner: Runner, results: Results, pictures: dict[Part, dict[str, Tensor]]) -> bytes:
    """Rows of images, chosen by the better score with and without splitting in the last column."""
    shown, metric = list(pictures), runner.experiment.metric
    last = [part for part in shown if part.column == shown[-1].column]
    order = _best_first(np.array([results[part][metric] for part in last]), metric)
    rows = [pictures[shown[0]]["truth"], *(tensors["shown"] for tensors in pictures.values())]
    return _png(torch.cat([_row(images, order[: runner.experiment.pictured]) for images in rows], dim=-2))


def _best_first(scores: np.ndarray, metric: str) -> np.ndarray:
    """Images by the best of their scores, of which there is a row for each run.

    >>> _best_first(np.array([[0.1, 0.5, 0.4], [0.6, 0.5, 0.1]]), "ssim").tolist()
    [0, 1, 2]
    >>> _best_first(np.array([[0.1, 0.5, 0.4], [0.6, 0.5, 0.3]]), "l2").tolist()
    [0, 2, 1]
    """
    return np.argsort(-scores.max(0) if metric == "ssim" else scores.min(0), kind="stable")


def _row(images: Tensor, order: np.ndarray) -> Tensor:
    return torch.cat([images[i].repeat_interleave(ZOOM, -1).repeat_interleave(ZOOM, -2) for i in order], dim=-1)


def _png(sheet: Tensor) -> bytes:
    """A (C, H, W) sheet of bytes as a small PNG: grey, or a palette of 256 colours."""
    pixels = sheet.permute(1, 2, 0).numpy()
    grey = pixels.shape[2] == 1
    image = Image.fromarray(pixels[..., 0]) if grey else Image.fromarray(pixels).quantize(256)
    buffer = io.BytesIO()
    image.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


# --- curves -------------------------------------------------------------------------------------


def _columns(runner: Runner, results: Results) -> list[str]:
    """The columns of which some number of candidates was run both with and without splitting."""
    pairs = {(p.column, p.candidates, p.seed) for p in results if p.variant == "none"}
    pairs &= {(p.column, p.candidates, p.seed) for p in results if p.variant == "splitting"}
    return [name for name in runner.experiment.columns if any(column == name for column, _, _ in pairs)]


def _curves(runner: Runner, results: Results, columns: list[str]) -> bytes:
    """A row for each column: loss, metric, and each image without against with splitting."""
    from matplotlib.figure import Figure

    metric = runner.experiment.metric
    figure = Figure(figsize=(11, 3.2 * len(columns)), layout="constrained")
    for row, name in zip(figure.subplots(len(columns), 3, squeeze=False), columns, strict=True):
        for colour, k in zip(COLOURS, runner.experiment.columns[name].candidates, strict=False):
            for variant, style in STYLES.items():
                points = results.get(Part(name, variant, k, runner.seeds[0]), {}).get("curve", [])
                for panel, of in zip(row, ("loss", metric), strict=False):
                    panel.plot([p["step"] for p in points], [p[of] for p in points], style, color=colour, lw=1)
            _scatter(row[2], runner, results, Part(name, "none", k, 0), colour)
        row[0].set(title=name, xlabel="step", ylabel="L / ‖T‖²", yscale="log")
        row[1].set(xlabel="step", ylabel=f"mean {metric.upper()}")
        row[2].axline((0, 0), slope=1, color="grey", lw=0.5)
        row[2].set(xlabel=f"{metric.upper()} without splitting", ylabel="with splitting")
        row[2].legend(fontsize="small")
    return _saved(figure)


def _saved(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=80)
    return buffer.getvalue()


def _scatter(panel: Any, runner: Runner, results: Results, part: Part, colour: str) -> None:
    """Every image of every seed, without splitting against with it."""
    kinds = [[replace(part, variant=variant, seed=seed) for variant in ("none", "splitting")] for seed in runner.seeds]
    both = [[results[each][runner.experiment.metric] for each in kind] for kind in kinds if set(kind) <= results.keys()]
    if both:
        without, with_ = np.concatenate(both, axis=1)
        panel.plot(without, with_, ".", ms=2, color=colour, label=f"k = {part.candidates}")


# --- trajectories -------------------------------------------------------------------------------


def _followed(runner: Runner, results: Results) -> list[tuple[Part, Part]]:
    """Of each column the last number of candidates that was run without and with splitting."""
    pairs = []
    for name, column in runner.experiment.columns.items():
        both = [[Part(name, v, k, runner.seeds[0]) for v in ("none", "splitting")] for k in column.candidates]
        pairs += [(without, with_) for without, with_ in both if {without, with_} <= results.keys()][-1:]
    return pairs


def _trajectories(runner: Runner, results: Results, pairs: list[tuple[Part, Part]]) -> bytes:
    """A row for each column, a panel for each of the images that stand for all."""
    from matplotlib.figure import Figure

    metric = runner.experiment.metric
    sign = 1 if metric == "ssim" else -1
    figure = Figure(figsize=(11, 2.4 * len(pairs)), layout="constrained")
    for row, pair in zip(figure.subplots(len(pairs), len(RANKS), squeeze=False), pairs, strict=True):
        without, with_ = (np.array(results[part][metric]) for part in pair)
        order = np.argsort(sign * (with_ - without), kind="stable")
        for panel, rank in zip(row, RANKS.values(), strict=True):
            image = order[round(rank * (len(order) - 1))]
            for part, style in zip(pair, ("--", "-"), strict=True):
                steps = [point["step"] for point in results[part]["curve"]]
                panel.plot(steps, [values[image] for values in results[part]["trajectories"]], style, color=COLOURS[0])
            for step in (entry["step"] for entry in results[pair[1]]["splits"] if entry["split"]):
                panel.axvline(step, color="grey", lw=0.8, ls=":")
            panel.set(xlabel="step", title=f"image {image}")
        row[0].set(ylabel=f"{pair[0].column}, k = {pair[0].candidates}\n{metric.upper()}")
    return _saved(figure)
