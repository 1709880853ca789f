"""What lowers the risk? The demonstration's face detector, changed in one way at a time, read and scored.

    python experiments/advice.py [--device cuda]      writes docs/results/advice.json and the table of audit reports

Weight decay, more data, fewer steps, and noise on the weights before they are published.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from provenance import made_by

import palimpsest as pal
from palimpsest.auditing.noise import recovery_under_noise
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
    found = recovery_under_noise(
        fit.model, fit.initial, truth, levels=levels, steps=options.steps, candidates=80, progress=False
    )
    return [{"images": len(labels), "recovered": r.recovered, "ssim": r.ssim, "accuracy": r.accuracy, "noise": r.level}
            for r in found]  # fmt: skip


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
