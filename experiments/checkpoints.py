"""How much more can be read if weights on the way are known, too?

Networks like the demo's are trained from seeds that nothing was chosen on. Each is read from its first and last
weights, and from checkpoints that are equally far apart, everywhere and within the span.

    python experiments/checkpoints.py      writes docs/results/checkpoints.json and the table in docs/checkpoints.md
"""

from __future__ import annotations

import functools
import json
import re
from bisect import bisect
from pathlib import Path
from typing import Any

import palimpsest as pal
from palimpsest.runs.train import TrainOptions

ROOT = Path(__file__).parents[1]
SEEDS = range(52, 55)
CANDIDATES, STEPS = 80, 1500
WAYS = {  # name: (segments, options of the method, whether to search the span)
    "first and last weights": (1, {}, False),
    "first and last weights, two tangent points": (1, {"at": (0.15, 0.85)}, False),
    "3 segments": (3, {}, False),
    "first and last weights, span": (1, {"whitening": 0.5}, True),
    "first and last weights, two tangent points, span": (1, {"at": (0.15, 0.85), "whitening": 0.5}, True),
    "3 segments, span": (3, {"whitening": 0.5}, True),
}


def read(seed: int) -> dict[str, dict[str, float]]:
    """How well each way reads one network."""
    training = TrainOptions(seed=seed)
    data = training.load()

    @functools.cache
    def trained(steps: int) -> Any:
        images, labels = data.centred(data.train.images), data.train.labels
        return pal.train(training.network(data), images, labels, loss=training.loss, steps=steps)

    fit, rows = trained(training.steps), {}

    def moved(steps: int) -> float:
        """‖θ − θ_0‖ after a number of steps."""
        θ = trained(steps).model.state_dict()
        return sum(float((θ[name] - t).square().sum()) for name, t in fit.initial.items()) ** 0.5

    last, far = int(fit.history[-1]["step"]), moved(training.steps)
    for name, (segments, options, in_span) in WAYS.items():
        steps = [1 + bisect(range(1, last), far * j / segments, key=moved) for j in range(1, segments)]
        checkpoints = [fit.initial, *(trained(step).model.state_dict() for step in steps), fit.model.state_dict()]
        objective = pal.Path(fit.model, checkpoints, weights="auto", **options)
        space = pal.span(fit.model, checkpoints).subspace if in_span else None
        rec = pal.reconstruct(
            objective, image_shape=data.image_shape, within=space, candidates=CANDIDATES, steps=STEPS, seed=seed,
            progress=False,
        )  # fmt: skip
        score = pal.score(rec, data.train.images, held_out=data.held_out.images, mean=data.mean)
        above = {f"above {bar}": int((score.ssim > bar).sum()) for bar in (0.6, 0.9)}
        held_out = float(score.held_out.ssim.max())
        rows[name] = {"mean SSIM": float(score.ssim.mean()), **above, "best held-out": held_out}
        print(seed, name, rows[name], flush=True)
    return rows


def table(networks: dict[str, dict[str, dict[str, float]]]) -> str:
    """Means over networks."""
    lines = ["| known | mean SSIM | above 0.6 | above 0.9 | best held-out SSIM |", "|---|---|---|---|---|"]
    for name in WAYS:
        rows = [ways[name] for ways in networks.values()]
        mean = {key: sum(row[key] for row in rows) / len(rows) for key in rows[0]}
        lines.append(
            f"| {name} | {mean['mean SSIM']:.3f} | {mean['above 0.6']:.1f} | {mean['above 0.9']:.1f} "
            f"| {mean['best held-out']:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    networks = {str(seed): read(seed) for seed in SEEDS}
    written = {"command": "python experiments/checkpoints.py", "networks by seed": networks}
    (ROOT / "docs/results/checkpoints.json").write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    page = ROOT / "docs/checkpoints.md"
    block = f"<!-- checkpoints -->\n{table(networks)}\n<!-- end of checkpoints -->"
    text = page.read_text(encoding="utf-8")
    text = re.sub(r"<!-- checkpoints -->.*?<!-- end of checkpoints -->", lambda _: block, text, flags=re.S)
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
