"""Twenty networks that hold nothing to read: does an audit say so?

    python experiments/no_evidence.py [--device cuda]      writes docs/results/no-evidence.json

Half of them are untrained; half were trained on digits, and what they learnt was put in disorder. Perceptrons and
convolutional networks, with and without the initial weights.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import torch

import palimpsest as pal
from palimpsest.auditing import controls
from palimpsest.auditing.subject import subject

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
import outsider  # noqa: E402

SHAPE = (1, 8, 8)


def perceptron() -> torch.nn.Module:
    return pal.networks.MLP(SHAPE, hidden=(200, 200))


def empty(number: int) -> tuple:
    """(factory, weights, initial weights or None) of a network without anything to read."""
    make = (perceptron, outsider.convolutional)[number % 2]
    torch.manual_seed(number)
    initial = make()
    start = {name: t.clone() for name, t in initial.state_dict().items()}
    if number < 10:
        return make, make().state_dict(), start if number % 4 < 2 else None
    data = pal.datasets.load("digits", per_class=5, seed=number)
    fit = pal.train(initial, data.train.images - 0.5, data.train.labels, steps=300)
    trained = subject(make, fit.model.state_dict(), initial=start, image_shape=SHAPE)
    return make, controls.shuffled(trained, "ntk", seed=number).state_dict(), start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    rows = []
    for number in range(20):
        make, weights, initial = empty(number)
        with tempfile.TemporaryDirectory() as folder:
            found = pal.audit(
                make, weights, initial=initial, image_shape=SHAPE, out=Path(folder) / "audit", device=options.device,
                samples=10, steps=options.steps, restarts=2, tangents=1, control_steps=1, controls=False, seed=number,
            )  # fmt: skip
        best = float(found.ranking.probability.max()) if len(found.ranking) else 0.0
        rows.append({"network": number, "method": found.plan.method, "outcome": found.verdict.outcome.value,
                     "likeliest": best, "by chance": found.verdict.bar})  # fmt: skip
        print(rows[-1], flush=True)
    silent = sum(row["outcome"] == "no evidence" for row in rows)
    print(f"{silent} of {len(rows)}: no evidence")
    result = {
        "command": f"python experiments/no_evidence.py --steps {options.steps}",
        "no evidence": silent,
        "rows": rows,
    }
    (ROOT / "docs/results/no-evidence.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
