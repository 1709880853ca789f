"""Does it pay to seek images in the span of the first layer's change, and to whiten it?

Five networks like the demo's, from seeds that nothing was chosen on, are read everywhere and within the span, with
several degrees of whitening; everything else is as in the demo.

    python experiments/whitening.py        writes docs/results/whitening.json and the table in docs/which-method.md
"""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import palimpsest as pal
from palimpsest.runs.reconstruct import ReconstructOptions
from palimpsest.runs.train import TrainOptions

ROOT = Path(__file__).parents[1]
SEEDS = range(20, 25)
WAYS = {
    "everywhere": ReconstructOptions(within="everywhere"),
    "span": ReconstructOptions(within="span", whitening=0.0),
    "span, p = 0.5": ReconstructOptions(within="span", whitening=0.5),
    "span, p = 0.7": ReconstructOptions(within="span", whitening=0.7),
    "span, p = 1": ReconstructOptions(within="span", whitening=1.0),
}


def read(seed: int) -> dict[str, dict[str, float]]:
    """How well each way reads one network."""
    training = TrainOptions(seed=seed)
    data = training.load()
    fit = pal.train(training.network(data), data.centred(data.train.images), data.train.labels, loss=training.loss)
    rows = {}
    for name, reading in WAYS.items():
        objective, within = reading.problem(fit.model, fit.initial, training.loss)
        began = time.monotonic()
        rec = pal.reconstruct(
            objective, image_shape=data.image_shape, within=within, candidates=reading.candidates,
            steps=reading.steps, seed=seed, progress=False,
        )  # fmt: skip
        seconds = time.monotonic() - began
        score = pal.score(rec, data.train.images, held_out=data.held_out.images, mean=data.mean)
        above = {f"above {bar}": int((score.ssim > bar).sum()) for bar in (0.6, 0.9)}
        held_out = float(score.held_out.ssim.max())
        rows[name] = {"mean SSIM": float(score.ssim.mean()), **above, "best held-out": held_out, "seconds": seconds}
        print(seed, name, rows[name], flush=True)
    return rows


def table(networks: dict[str, dict[str, dict[str, float]]]) -> str:
    """Means over networks; times as multiples of the first way's, for only those mean anything."""
    lines = ["| sought | mean SSIM | above 0.6 | above 0.9 | best held-out SSIM | time |", "|---|---|---|---|---|---|"]
    for name in WAYS:
        rows = [ways[name] for ways in networks.values()]
        mean = {key: sum(row[key] for row in rows) / len(rows) for key in rows[0]}
        share = sum(row["seconds"] for row in rows) / sum(ways["everywhere"]["seconds"] for ways in networks.values())
        lines.append(
            f"| {name} | {mean['mean SSIM']:.3f} | {mean['above 0.6']:.1f} | {mean['above 0.9']:.1f} "
            f"| {mean['best held-out']:.2f} | {share:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    networks = {str(seed): read(seed) for seed in SEEDS}
    written = {"command": "python experiments/whitening.py", "networks by seed": networks}
    (ROOT / "docs/results/whitening.json").write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    page = ROOT / "docs/which-method.md"
    block = f"<!-- whitening -->\n{table(networks)}\n<!-- end of whitening -->"
    text = page.read_text(encoding="utf-8")
    text = re.sub(r"<!-- whitening -->.*?<!-- end of whitening -->", lambda _: block, text, flags=re.S)
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
