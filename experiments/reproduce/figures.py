"""The figures of an experiment: the best images; loss and metric during the runs; single images during the runs."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from palimpsest.files.storage import load_tensors, write_atomically
from reproduce.experiment import Experiment
from reproduce.parts import PICTURED, Part, Results
from reproduce.runner import pictures_file

ZOOM = 2
RANKS = {  # single images, by their gain from splitting
    "the largest gain from splitting": 1.0,
    "the upper quartile": 0.75,
    "the median": 0.5,
    "the largest loss": 0.0,
}
STYLES = {"none": "--", "splitting": "-", "merging": ":"}
COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:red")

Pictures = dict[Part, dict[str, Tensor]]


def draw(experiment: Experiment, results: Results, scratch: Path, folder: Path) -> None:
    """Draw every figure whose data is there. Others keep their file: git does not keep the pictures of earlier runs."""
    files = {part: file for part in results if (file := pictures_file(scratch, part)).is_file()}
    pictures = {part: load_tensors(file)[0] for part, file in files.items()}
    shown, pairs = _shown(experiment, results), _followed(experiment, results)
    if columns := _columns(experiment, results):
        write_atomically(figure_file(folder, experiment, "curves"), _curves(experiment, results, columns))
    if shown and set(shown) <= pictures.keys():
        sheet = _plate(experiment, results, {part: pictures[part] for part in shown})
        write_atomically(figure_file(folder, experiment, "images"), sheet)
    if pairs and {part for pair in pairs for part in pair} <= pictures.keys():
        image = _trajectories(experiment, results, pairs, pictures)
        write_atomically(figure_file(folder, experiment, "trajectories"), image)


def figure_file(folder: Path, experiment: Experiment, kind: str) -> Path:
    return folder / f"{experiment.name}-{kind}.png"


def captions(experiment: Experiment, results: Results) -> dict[str, str]:
    """By the kind of the figure."""
    metric, seed, shown = experiment.metric.upper(), experiment.seeds[0], _shown(experiment, results)
    count = min(experiment.pictured, experiment.training.images)
    rows = "; ".join(f"{part.column}, {part.variant}, k = {part.candidates}" for part in shown)
    best = f"The {count} best images of seed {seed} in the rows of *{shown[-1].column}*." if shown else ""
    return {
        "images": f"{best} From the top: training images; {rows}.",
        "curves": (
            f"Left and middle: loss and mean {metric} of seed {seed} (dashed: without splitting; solid: with splitting;"
            " dotted: with merging too). Each split restarts the annealing with a smooth network, whose loss is larger."
            f" Right: {metric} of every image of every seed, with against without splitting."
        ),
        "trajectories": (
            f"{metric} of single images of seed {seed} (dashed: without splitting; solid: with splitting; vertical"
            f" lines: splits). From the left: {', '.join(RANKS)}."
        ),
    }


def _shown(experiment: Experiment, results: Results) -> list[Part]:
    """The pictured variants of each column, from the first number of candidates that its file names."""
    columns, seed = experiment.columns.items(), experiment.seeds[0]
    wanted = [Part(name, variant, c.candidates[0], seed) for name, c in columns for variant in PICTURED]
    return [part for part in wanted if part in results]


# --- the best images ----------------------------------------------------------------------------


def _plate(experiment: Experiment, results: Results, pictures: Pictures) -> bytes:
    """Rows of images, the best by their score in any row of the last column."""
    shown, metric = list(pictures), experiment.metric
    last = [part for part in shown if part.column == shown[-1].column]
    order = _best_first(np.array([results[part][metric] for part in last]), metric)
    rows = [pictures[shown[0]]["truth"], *(tensors["shown"] for tensors in pictures.values())]
    return _png(torch.cat([_row(images, order[: experiment.pictured]) for images in rows], dim=-2))


def _best_first(scores: np.ndarray, metric: str) -> np.ndarray:
    """Images in the order of their best score; there is a row of scores for each run.

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


def _columns(experiment: Experiment, results: Results) -> list[str]:
    """The columns that were run both with and without splitting, from some number of candidates."""
    pairs = {(p.column, p.candidates, p.seed) for p in results if p.variant == "none"}
    pairs &= {(p.column, p.candidates, p.seed) for p in results if p.variant == "splitting"}
    return [name for name in experiment.columns if any(column == name for column, _, _ in pairs)]


def _curves(experiment: Experiment, results: Results, columns: list[str]) -> bytes:
    """A row for each column: loss, metric, and each image without against with splitting."""
    from matplotlib.figure import Figure

    metric = experiment.metric
    figure = Figure(figsize=(11, 3.2 * len(columns)), layout="constrained")
    for row, name in zip(figure.subplots(len(columns), 3, squeeze=False), columns, strict=True):
        for colour, k in zip(COLOURS, experiment.columns[name].candidates, strict=False):
            for variant, style in STYLES.items():
                points = results.get(Part(name, variant, k, experiment.seeds[0]), {}).get("curve", [])
                for panel, of in zip(row, ("loss", metric), strict=False):
                    panel.plot([p["step"] for p in points], [p[of] for p in points], style, color=colour, lw=1)
            _scatter(row[2], experiment, results, Part(name, "none", k, 0), colour)
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


def _scatter(panel: Any, experiment: Experiment, results: Results, part: Part, colour: str) -> None:
    """Every image of every seed, without splitting against with it."""
    kinds = [
        [replace(part, variant=variant, seed=seed) for variant in ("none", "splitting")] for seed in experiment.seeds
    ]
    both = [[results[each][experiment.metric] for each in kind] for kind in kinds if set(kind) <= results.keys()]
    if both:
        without, with_ = np.concatenate(both, axis=1)
        panel.plot(without, with_, ".", ms=2, color=colour, label=f"k = {part.candidates}")


# --- trajectories -------------------------------------------------------------------------------


def _followed(experiment: Experiment, results: Results) -> list[tuple[Part, Part]]:
    """For each column, the last number of candidates that was run without and with splitting."""
    pairs = []
    for name, column in experiment.columns.items():
        both = [[Part(name, v, k, experiment.seeds[0]) for v in ("none", "splitting")] for k in column.candidates]
        pairs += [(without, with_) for without, with_ in both if {without, with_} <= results.keys()][-1:]
    return pairs


def _trajectories(
    experiment: Experiment, results: Results, pairs: list[tuple[Part, Part]], pictures: Pictures
) -> bytes:
    """A row for each column, a panel for each rank."""
    from matplotlib.figure import Figure

    metric = experiment.metric
    sign = 1 if metric == "ssim" else -1
    figure = Figure(figsize=(11, 2.4 * len(pairs)), layout="constrained")
    for row, pair in zip(figure.subplots(len(pairs), len(RANKS), squeeze=False), pairs, strict=True):
        without, with_ = (np.array(results[part][metric]) for part in pair)
        order = np.argsort(sign * (with_ - without), kind="stable")
        for panel, rank in zip(row, RANKS.values(), strict=True):
            image = order[round(rank * (len(order) - 1))]
            for part, style in zip(pair, ("--", "-"), strict=True):
                steps = [point["step"] for point in results[part]["curve"]]
                panel.plot(steps, pictures[part]["trajectories"][:, image], style, color=COLOURS[0])
            for step in (entry["step"] for entry in results[pair[1]]["splits"] if entry["split"]):
                panel.axvline(step, color="grey", lw=0.8, ls=":")
            panel.set(xlabel="step", title=f"image {image}")
        row[0].set(ylabel=f"{pair[0].column}, k = {pair[0].candidates}\n{metric.upper()}")
    return _saved(figure)
