"""What each file that a training leaves behind gives away.

Networks are trained by plain torch on 40 pictures, in mini-batches of 10, and read from their final weights, from the
weights before training too, from checkpoints, and from the optimiser's state in the last checkpoint. Settings are the
defaults of Palimpsest; nothing was chosen on these seeds.

    python experiments/left_behind.py            writes docs/results/left-behind.json and the table of its page
    python experiments/left_behind.py --small    a version of seconds, which writes nothing

Networks that are in the file already are not trained again.
"""

from __future__ import annotations

import argparse
import copy
import json
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import tables
import torch
from provenance import made_by
from torch import Tensor, nn

import palimpsest as pal
from palimpsest.datasets import DataSet
from palimpsest.runs.problems import problem

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "docs" / "results" / "left-behind.json", "what-not-to-publish.md"
BATCH, PER_CLASS, GOOD = 10, 20, 0.6
SEGMENTS = 3
KNOWN = (
    "final weights",
    "and initial weights",
    "and checkpoints",
    "final weights and optimiser's state",
    "and initial weights, Adam undone",
    "and initial weights, read as Adam",
    "and checkpoints, read as Adam",
)


@dataclass(frozen=True)
class Kind:
    """A network and how it is trained."""

    says: str
    dense: bool
    width: int
    optimiser: str
    rate: float
    seeds: tuple[int, ...]


KINDS = (
    Kind("dense, SGD with momentum", True, 500, "sgd", 5e-3, (60, 61, 62)),
    Kind("dense, Adam", True, 500, "adam", 2e-4, (60, 61, 62)),
    Kind("convolutional, SGD with momentum", False, 256, "sgd", 5e-4, (60,)),
    Kind("convolutional, Adam", False, 256, "adam", 2e-4, (60,)),
)


def network(kind: Kind, data: DataSet) -> nn.Module:
    width = kind.width
    if kind.dense:
        return pal.networks.MLP(data.image_shape, hidden=(width, width))
    side = (data.image_shape[1] + 3) // 4  # after two strides of two
    return nn.Sequential(
        nn.Conv2d(data.image_shape[0], width // 16, 5, 2, 2), nn.ReLU(),
        nn.Conv2d(width // 16, width // 8, 3, 2, 1), nn.ReLU(),
        nn.Flatten(), nn.Linear(width // 8 * side**2, width), nn.ReLU(), nn.Linear(width, 1),
    )  # fmt: skip


@dataclass(frozen=True)
class Left:
    """What a training left behind."""

    model: nn.Module
    checkpoints: list[dict[str, Tensor]]
    optimiser: dict[str, Any]
    last: Tensor  # rows of the last mini-batch


def trained(kind: Kind, data: DataSet, seed: int, *, epochs: int) -> Left:
    torch.manual_seed(seed)
    model = network(kind, data)
    x, y = data.centred(data.train.images), data.train.labels.float()
    if kind.optimiser == "adam":
        rule: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=kind.rate)
    else:
        rule = torch.optim.SGD(model.parameters(), lr=kind.rate, momentum=0.9)
    states, rows = [copy.deepcopy(model.state_dict())], torch.arange(0)
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(BATCH):
            rule.zero_grad()
            (model(x[rows]).flatten() - y[rows]).square().mean().backward()
            rule.step()
        states.append(copy.deepcopy(model.state_dict()))
        if float((model(x).flatten() - y).detach().abs().max()) < 0.05:
            break
    return Left(model.eval(), equally_far(states), rule.state_dict(), rows)


def equally_far(states: list[dict[str, Tensor]], segments: int = SEGMENTS) -> list[dict[str, Tensor]]:
    """The first and the last of the states, and different ones between that divide the way into nearly equal parts."""
    moved = [sum(float((s[name] - t).square().sum()) for name, t in states[0].items()) ** 0.5 for s in states]
    chosen = [0]
    for j in range(1, segments):
        later = range(chosen[-1] + 1, len(states) - 1)
        chosen += [min(later, key=lambda i: abs(moved[i] - moved[-1] * j / segments))] if later else []
    return [*(states[i] for i in chosen), states[-1]]


def objectives(kind: Kind, left: Left) -> dict[str, tuple[Any, Any]]:
    """The objective for each kind of knowledge, and where to search."""
    model, (first, *_, end) = left.model, left.checkpoints
    span = pal.span(model, first).subspace if kind.dense else None
    spans = pal.span(model, left.checkpoints).subspace if kind.dense else None
    white = 0.5 if kind.dense else 0.0
    found = {
        KNOWN[0]: (pal.KKT(model, signed=True, weights="auto"), None),
        KNOWN[1]: (pal.NTK(model, first, at=(0.15, 0.85), weights="auto", whitening=white if span else 0.0), span),
        KNOWN[2]: (pal.Path(model, left.checkpoints, weights="auto", whitening=white if spans else 0.0), spans),
    }
    found[KNOWN[3]] = problem("gradient", model, gradient=pal.moments(model, left.optimiser), within=None)
    if kind.optimiser == "adam":
        middle = {name: (first[name] + end[name]) / 2 for name in end}
        undone = pal.undo_adam(model, first, left.optimiser)
        found[KNOWN[4]] = (pal.Gradient(model, undone, tangent=middle, weights="auto"), None)
        found[KNOWN[5]] = (pal.AdamPath(model, [first, end], weights="auto"), None)
        found[KNOWN[6]] = (pal.AdamPath(model, left.checkpoints, at=(0.25, 0.75), weights="auto"), None)
    return found


def read(kind: Kind, seed: int, *, steps: int, epochs: int) -> dict[str, Any]:
    data = pal.datasets.load("faces", per_class=PER_CLASS, seed=seed)
    left = trained(kind, data, seed, epochs=epochs)
    row: dict[str, Any] = {"network": kind.says, "seed": seed} | made_by("python experiments/left_behind.py")
    for name, (objective, within) in objectives(kind, left).items():
        rec = pal.reconstruct(
            objective, image_shape=data.image_shape, candidates=2 * len(data.train), steps=steps, within=within,
            seed=seed, progress=False,
        )  # fmt: skip
        score = pal.score(rec, data.train.images, held_out=data.held_out.images, mean=data.mean)
        assert score.held_out is not None
        row[name] = {
            "mean SSIM": round(float(score.ssim.mean()), 3),
            "recovered": score.verdict.recovered,
            "above": int((score.ssim > GOOD).sum()),
            "above, held out": int((score.held_out.ssim > GOOD).sum()),
            "above, last batch": int((score.ssim[left.last] > GOOD).sum()),
        }
        print(kind.says, seed, name, row[name], flush=True)
    return row


def table(rows: list[dict[str, Any]]) -> str:
    """Recovered images for each kind of knowledge, means over seeds, and those of the last mini-batch."""
    lines = []
    for kind in KINDS:
        of = [row for row in rows if row["network"] == kind.says]
        cells: list[object] = [kind.says, len(of)]
        for name in KNOWN:
            known = [row[name] for row in of if name in row]
            mean = (
                {key: fmean(part[key] for part in known) for key in ("recovered", "above, last batch")} if known else {}
            )
            last = f"; last batch {mean['above, last batch']:.0f} of {BATCH}" if mean and name == KNOWN[3] else ""
            cells.append(f"{mean['recovered']:.0f}{last}" if mean else "")
        lines.append(cells)
    return tables.markdown(["network", "seeds", *KNOWN], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--page", action="store_true", help="write the table into its page, and end")
    options = parser.parse_args()
    if options.small:
        for kind in KINDS:
            read(replace(kind, width=32), kind.seeds[0], steps=3, epochs=4)
        return
    rows = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else []
    known = {(row["network"], row["seed"]) for row in rows}
    for kind in () if options.page else KINDS:
        for seed in kind.seeds:
            if (kind.says, seed) not in known:
                rows.append(read(kind, seed, steps=1500, epochs=300))
                RESULTS.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    tables.write(PAGE, table(rows))


if __name__ == "__main__":
    main()
