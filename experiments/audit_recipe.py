"""Which recipe reads most in the time of an audit: one, two or three tangent points, a constant or a falling prior?

Networks of 40 faces like those of audit_minutes.py, from seeds on which the recipe is chosen and nothing is reported.
All recipes of a row do the same work: a step with two tangent points costs two. The dense network is searched in its
span, whitened, and the convolutional one everywhere, as an audit does.

    python experiments/audit_recipe.py            writes docs/results/audit-recipe.json, in half an hour on one core

Rows that are in the file already are not computed again.
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import product
from pathlib import Path
from statistics import fmean

import audit_minutes
import torch
from provenance import made_by

import palimpsest as pal
from palimpsest.auditing.plan import NODES, RECORD_EVERY
from palimpsest.runs.problems import problem
from palimpsest.solver.priors import Box, TotalVariation

RESULTS = Path(__file__).parents[1] / "docs" / "results" / "audit-recipe.json"
SEEDS = (30, 31)
WORK = {"dense": (3000, 9000), "convolutional": (700, 3000)}  # steps with one tangent point: 3 and 10 minutes of audit
TANGENTS = NODES | {3: (0.1, 0.5, 0.9)}
FALLS = (1.0, 0.1)  # the strength of the priors at the end, relative to the start
CANDIDATES = 80


def read(kind: str, seed: int, work: int, nodes: int, falls: float) -> dict:
    data = pal.datasets.load("faces", per_class=20, seed=seed)
    start, model = audit_minutes.trained(kind, data, seed)
    at, steps = TANGENTS[nodes], work // nodes
    objective, space = problem("ntk", model, start, image_shape=data.image_shape, at=at, within=None)
    began = time.process_time()
    rec = pal.reconstruct(
        objective, image_shape=data.image_shape, within=space, candidates=CANDIDATES, steps=steps,
        priors=(Box(), TotalVariation()), prior_strength=(1.0, falls), record_every=max(RECORD_EVERY, steps // 200),
        seed=seed, progress=False,
    )  # fmt: skip
    score = pal.score(rec, data.train.images, held_out=data.held_out.images, mean=data.mean)
    return {
        "mean SSIM": round(float(score.ssim.mean()), 4),
        "recovered": score.verdict.recovered,
        "CPU seconds": round(time.process_time() - began, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = json.loads(options.out.read_text())["rows"] if options.out.exists() else {}
    made = made_by("python experiments/audit_recipe.py")
    for kind, level, nodes, falls, seed in product(WORK, (0, 1), TANGENTS, FALLS, SEEDS):
        name = f"{kind}, {WORK[kind][level]} steps' work, {nodes} tangent points, prior to {falls:g}, seed {seed}"
        if name not in rows:
            rows[name] = read(kind, seed, WORK[kind][level], nodes, falls)
            options.out.write_text(json.dumps(made | {"rows": rows}, indent=1) + "\n")
            print(name, rows[name], flush=True)
    for kind, level, nodes, falls in product(WORK, (0, 1), TANGENTS, FALLS):
        start = f"{kind}, {WORK[kind][level]} steps' work, {nodes} tangent points, prior to {falls:g},"
        same = [row for name, row in rows.items() if name.startswith(start)]
        print(start, *(f"{key} {fmean(row[key] for row in same):.3f}" for key in ("mean SSIM", "recovered")))


if __name__ == "__main__":
    main()
