"""Which images was a network trained on? True positives at a known rate of false positives, without other networks.

Networks are trained by plain torch on CIFAR-10 images, in mini-batches of 10. The test gets the training images, images
that the network never saw, and 1,000 held-out images. The settings of the test were chosen on other images. As a
baseline, the same ranks are taken of the loss of each image, which needs the final weights and the labels.

    python experiments/membership.py            writes docs/results/membership.json and the table of its page
    python experiments/membership.py --small    a version of seconds, which writes nothing

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
from palimpsest.scoring.rates import rates

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "docs" / "results" / "membership.json", "membership.md"
BATCH, SEEDS = 10, (60, 61, 62)
TESTED, HELD_OUT = 600, 1000  # images to test, of which the network sees some, and held-out images
SEGMENTS = 4


@dataclass(frozen=True)
class Kind:
    """A network, how it is trained, and what the test knows."""

    says: str
    network: str
    images: int
    known: tuple[str, ...] = ("initial weights",)
    optimiser: str = "sgd"
    rate: float = 5e-3
    decay: float = 0.0
    epochs: int = 300
    classes: int = 2  # two are told apart by one output and the squared loss, more by an output each


KINDS = (
    Kind("MLP 3072–1000–1000–1", "mlp", 100, ("initial weights", "final weights only")),
    Kind("the same, Adam", "mlp", 100, optimiser="adam", rate=2e-4),
    Kind("CNN, two convolutions, two dense layers", "cnn", 50, ("initial weights", "final weights only")),
    Kind("the same, Adam", "cnn", 50, optimiser="adam", rate=2e-4),
    Kind("the same, weight decay 0.01", "cnn", 50, decay=1e-2),
    Kind("the same, 2 epochs", "cnn", 50, epochs=2),
    Kind("the same, 400 images for 256 units", "cnn", 400, epochs=100),
    Kind("CNN, three convolutions, average pooling", "pooled", 50, ("initial weights", "checkpoints")),
    Kind("MLP 3072–1000–1000–10", "mlp", 100, rate=0.02, classes=10),
    Kind("CNN, two convolutions, two dense layers, ten classes", "cnn", 50, rate=0.02, classes=10),
)


def network(kind: Kind, shape: tuple[int, ...], width: int) -> nn.Module:
    channels, side = shape[0], (shape[1] + 3) // 4  # after two strides of two
    outputs = 1 if kind.classes == 2 else kind.classes
    if kind.network == "mlp":
        return pal.networks.MLP(shape, hidden=(4 * width, 4 * width), outputs=outputs)
    if kind.network == "cnn":
        width = width * 256 // 250
        return nn.Sequential(
            nn.Conv2d(channels, width // 16, 5, 2, 2), nn.ReLU(),
            nn.Conv2d(width // 16, width // 8, 3, 2, 1), nn.ReLU(),
            nn.Flatten(), nn.Linear(width // 8 * side**2, width), nn.ReLU(), nn.Linear(width, outputs),
        )  # fmt: skip
    width = width // 8
    return nn.Sequential(
        nn.Conv2d(channels, width, 3, 2, 1), nn.ReLU(), nn.Conv2d(width, 2 * width, 3, 2, 1), nn.ReLU(),
        nn.Conv2d(2 * width, 4 * width, 3, 2, 1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, outputs),
    )  # fmt: skip


def loss(Φ: Tensor, y: Tensor) -> Tensor:
    """(n,) the squared loss of one output, or the cross-entropy of several."""
    return (Φ.flatten() - y).square() if Φ.shape[1] == 1 else nn.functional.cross_entropy(Φ, y, reduction="none")


def trained(model: nn.Module, kind: Kind, x: Tensor, y: Tensor, *, epochs: int) -> list[dict[str, Tensor]]:
    """Train in place, until every image is fitted; the weights before, after, and at equal times between."""
    fitted = 0.05**2 if kind.classes == 2 else 0.05  # the largest loss of a fitted image
    if kind.optimiser == "adam":
        rule: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=kind.rate)
    else:
        rule = torch.optim.SGD(model.parameters(), lr=kind.rate, momentum=0.9, weight_decay=kind.decay)
    states = [copy.deepcopy(model.state_dict())]
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(BATCH):
            rule.zero_grad()
            loss(model(x[rows]), y[rows]).mean().backward()
            rule.step()
        states.append(copy.deepcopy(model.state_dict()))
        if float(loss(model(x), y).detach().max()) < fitted:
            break
    last = len(states) - 1
    return [states[round(last * j / SEGMENTS)] for j in range(SEGMENTS + 1)] if last >= SEGMENTS else states


def drawn(kind: Kind, name: str, tested: int, seed: int, held_out: int = 120) -> DataSet:
    """Equally many images of each class, to test and held out."""
    counts = {"per_class": tested // kind.classes, "held_out_per_class": held_out // kind.classes}
    return pal.datasets.load(name, **counts, seed=seed, task="binary" if kind.classes == 2 else "classes")


def halves(data: DataSet, n: int) -> tuple[Tensor, Tensor]:
    """Rows of n training images, equally many of each class, and of the images that the network never sees."""
    classes = data.train.labels.unique()
    chosen = torch.cat([torch.where(data.train.labels == y)[0][: n // len(classes)] for y in classes])
    return chosen, torch.tensor([i for i in range(len(data.train)) if i not in set(chosen.tolist())])


def measured(kind: Kind, seed: int, data: DataSet, *, width: int, epochs: int) -> dict[str, Any]:
    rows, others = halves(data, kind.images)
    images, held_out = data.train.images, data.held_out.images
    torch.manual_seed(seed)
    model = network(kind, data.image_shape, width)
    labels = [part.labels.float() if kind.classes == 2 else part.labels for part in (data.train, data.held_out)]
    x, y = data.centred(images[rows]), labels[0][rows]
    states = trained(model, kind, x, y, epochs=epochs)
    row: dict[str, Any] = {"network": kind.says, "kind": kind.network, "images": kind.images, "seed": seed}
    row |= made_by("python experiments/membership.py") | {"unseen": len(others), "held out": len(held_out)}
    with torch.no_grad():
        losses = [-loss(model(data.centred(some)), y) for some, y in ((images[rows], y), (held_out, labels[1]))]
    found = rates(*losses)
    row["loss"] = {"auc": found.verdict.auc, **{f"{α:g}": share for α, share in found.named.items()}}
    for name in kind.known:
        material: dict[str, Any] = {"initial": states[0]} if name == "initial weights" else {}
        material = {"checkpoints": states} if name == "checkpoints" else material
        result = pal.auditing.membership(
            lambda: model, states[-1], images[torch.cat([rows, others])], held_out, mean=data.mean, **material
        )
        ours, unseen = result.traces.split([len(rows), len(others)])
        found, never = rates(ours, result.held_out), rates(unseen, result.held_out)
        row[name] = {
            "statistic": result.statistic,
            "auc": found.verdict.auc,
            "auc interval": found.verdict.auc_interval,
            "finest": found.finest,
            **{f"{α:g}": share for α, share in found.named.items()},
            "never saw": {"auc": never.verdict.auc, **{f"{α:g}": share for α, share in never.named.items()}},
        }
        print(kind.says, seed, name, row[name], "loss", row["loss"], flush=True)
    return row


def table(rows: list[dict[str, Any]]) -> str:
    """Means over seeds; the AUC with the widest of the intervals."""
    lines: list[list[object]] = []
    for kind in KINDS:
        of = [row for row in rows if (row["network"], row["kind"]) == (kind.says, kind.network)]
        for name in kind.known if of else ():
            parts = [row[name] for row in of]
            low, high = min(p["auc interval"][0] for p in parts), max(p["auc interval"][1] for p in parts)
            lines.append([
                kind.says, kind.images, name, parts[0]["statistic"],
                f"{fmean(p['auc'] for p in parts):.3f} ({low:.2f} to {high:.2f})",
                f"{fmean(p['0.01'] for p in parts):.2f}", f"{fmean(p['0.001'] for p in parts):.2f}",
                f"{fmean(p['never saw']['0.01'] for p in parts):.3f}",
                f"{fmean(row['loss']['0.01'] for row in of):.2f}",
            ])  # fmt: skip
    head = ["network", "images", "known", "statistic", "AUC (99 % interval)", "at 1 %", "at 0.1 %"]
    return tables.markdown([*head, "never seen, at 1 %", "loss, at 1 %"], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--page", action="store_true", help="write the table into its page, and end")
    options = parser.parse_args()
    if options.small:
        for kind in KINDS:
            measured(replace(kind, images=min(kind.images, 60)), 0, drawn(kind, "digits", 120, 0), width=32, epochs=5)
        return
    rows = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else []
    known = {(row["network"], row["kind"], row["seed"]) for row in rows}
    for kind in () if options.page else KINDS:
        for seed in SEEDS:
            if (kind.says, kind.network, seed) not in known:
                data = drawn(kind, "cifar10-test", TESTED, seed, HELD_OUT)
                rows.append(measured(kind, seed, data, width=250, epochs=kind.epochs))
                RESULTS.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    tables.write(PAGE, table(rows))


if __name__ == "__main__":
    main()
