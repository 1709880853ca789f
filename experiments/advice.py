"""What lowers the risk? The demonstration's face detector, changed in one way at a time, read and scored.

    python experiments/advice.py [--device cuda]      writes docs/results/advice.json and the table of audit reports

Weight decay, more data, fewer steps, and noise on the weights before they are published. Each network is read in two
ways, and the better one counts: everywhere with one tangent point; and with two, from the initial weights as weight
decay has shrunk them, within the span of the images if the first layer shows it.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from provenance import made_by
from torch import Tensor, nn

import palimpsest as pal
from palimpsest.auditing.noise import noisy, recovery_under_noise
from palimpsest.auditing.truth import Truth

ROOT = Path(__file__).parents[1]
BASE = {"per_class": 20, "steps": 10_000, "weight_decay": 0.0}
CHANGES = {
    "as in the demonstration": {},
    "weight decay 0.0001": {"weight_decay": 1e-4},
    "weight decay 0.001": {"weight_decay": 1e-3},
    "four times as many images": {"per_class": 80},
    "20 steps of training": {"steps": 20},
}
CANDIDATES = 80
LEVELS = (0.03, 0.1, 0.3, 1.0)


def measured(changes: dict, levels: tuple[float, ...], options: argparse.Namespace) -> list[dict]:
    """Train with these changes, then read at each level of noise."""
    choices = BASE | changes
    per_class = choices["per_class"]
    data = pal.datasets.load("faces", per_class=per_class, held_out_per_class=min(20, 100 - per_class), seed=0)
    torch.manual_seed(0)
    start = pal.networks.MLP(data.image_shape, hidden=(500, 500), outputs=1).to(options.device)
    fit = pal.train(
        start, data.centred(data.train.images), data.train.labels,
        steps=choices["steps"], weight_decay=choices["weight_decay"],
    )  # fmt: skip
    labels = (data.train.labels > 0).long()
    truth = Truth(data.train.images, labels, data.held_out.images, mean=data.mean)
    settings = {"steps": options.steps, "candidates": CANDIDATES, "progress": False}
    rows = []
    for r in recovery_under_noise(fit.model, fit.initial, truth, levels=levels, **settings):
        model = copy.deepcopy(fit.model)
        model.load_state_dict(noisy(fit.model.state_dict(), fit.initial, r.level))
        first = {"recovered": r.recovered, "ssim": r.ssim}
        second, facts = attacked(model, fit.initial, truth, settings)
        better = max(first, second, key=lambda found: found["recovered"])
        both = {"first attack": first, "second attack": second | facts}
        rows.append({"images": len(labels)} | better | {"accuracy": r.accuracy, "noise": r.level} | both)
    return rows


def attacked(
    model: nn.Module, initial: Mapping[str, Tensor], truth: Truth, settings: dict[str, Any]
) -> tuple[dict, dict]:
    """The second attack, from c·θ_0 and within the span of W_1 − c·W_1(0) if it can be read, and facts about both."""
    span = pal.span(model, initial)
    whitening = 0.0 if span.subspace is None else 0.5
    rec = pal.reconstruct(
        pal.NTK(model, span.shrunk(initial), at=(0.15, 0.85), weights="auto", whitening=whitening),
        image_shape=tuple(truth.images.shape[1:]), within=span.subspace, **settings,
    )  # fmt: skip
    score = truth.score(rec.images)
    found = {"recovered": score.verdict.recovered, "ssim": float(score.ssim.mean())}
    return found, {"within the span": span.subspace is not None, "shrinkage": span.shrinkage}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=1500)
    options = parser.parse_args()
    rows = [{"measure": name} | measured(changes, (0.0,), options)[0] for name, changes in CHANGES.items()]
    disturbed = measured({}, LEVELS, options)
    rows += [
        {"measure": f"noise of {row['noise']:g} times the change, added to the weights"} | row for row in disturbed
    ]
    for row in rows:
        print(f"{row['measure']:60s} {row['recovered']:3d} of {row['images']:3d}  mean SSIM {row['ssim']:.2f}"
              f"  accuracy {row['accuracy']:.2f}", flush=True)  # fmt: skip
    result = made_by(f"python experiments/advice.py --steps {options.steps}") | {"rows": rows}
    for path in ("docs/results/advice.json", "src/palimpsest/auditing/advice.json"):
        (ROOT / path).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
