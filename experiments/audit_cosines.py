"""Should audits of convolutional networks search by pixels or by cosines, and at which rate?

    python experiments/audit_cosines.py [--workers 2]    writes docs/results/audit-cosines.json and a table of its page
    python experiments/audit_cosines.py --small          a version of seconds, which writes nothing there

Three networks of `outsiders.py` on the seeds that audits are developed on. Each is read from start and end of its
training with the whitening, the smoothness and about the steps of an audit.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import outsiders
import processes
import tables
import torch
from audit_networks import CENTRE, trained, truth_of
from provenance import made_by

import palimpsest as pal
from palimpsest.auditing.plan import FEW_PIXELS, SMOOTHER, SMOOTHNESS, WHITENED

RESULTS, PAGE = Path(__file__).parents[1] / "docs" / "results" / "audit-cosines.json", "which-method.md"
NAMES, SEEDS, STEPS = ("cnn-sgd", "resnet-frozen", "vit"), (821, 822, 823), 250
WAYS = (("pixels", 0.02), ("cosines", 0.02), ("cosines", 0.03), ("cosines", 0.06))


def read(name: str, seed: int, *, small: bool) -> list[dict[str, Any]]:
    """One network, read in every way."""
    torch.set_num_threads(1)
    outsider = next(each for each in outsiders.outsiders(small=small) if each.name == name)
    truth, images = truth_of(outsider, seed)
    left = trained(outsider, images, seed)
    shape, n = tuple(truth.images.shape[1:]), len(truth.images)
    smoothness = SMOOTHNESS * min(truth.images[0].numel() / FEW_PIXELS, SMOOTHER)
    rows = []
    for space, rate in WAYS:
        objective = pal.NTK(left.model, left.initial, weights="auto", whitening=WHITENED)
        rec = pal.reconstruct(
            objective, image_shape=shape, candidates=2 * n if outsider.network == "CNN" else n,
            steps=5 if small else STEPS, within=pal.Cosines.of(shape) if space == "cosines" else None,
            optimiser=pal.optimisers.Adam(learning_rate=rate), seed=seed, progress=False,
            priors=(pal.priors.Box(), pal.priors.TotalVariation(weight=smoothness)),
        )  # fmt: skip
        score = pal.score(rec.images, truth.images, held_out=truth.held_out, mean=torch.full(shape, CENTRE))
        assert score.held_out is not None
        row = {"name": name, "network": outsider.network, "seed": seed, "searched": space, "rate": rate}
        row |= {"mean SSIM": round(float(score.ssim.mean()), 4), "recovered": score.verdict.recovered}
        row |= {"best held-out SSIM": round(float(score.held_out.ssim.max()), 4), "loss": round(rec.loss, 4)}
        rows.append(row)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Means over seeds."""
    numbers = ("mean SSIM", "recovered", "best held-out SSIM", "loss")
    lines = []
    for name in NAMES:
        for space, rate in WAYS:
            same = [row for row in rows if (row["name"], row["searched"], row["rate"]) == (name, space, rate)]
            means = [fmean(row[key] for row in same) for key in numbers]
            cells = [f"{means[0]:.3f}", f"{means[1]:.1f}", *(f"{mean:.2f}" for mean in means[2:])]
            lines.append([same[0]["network"], space, rate, *cells])
    return tables.markdown(["network", "searched by", "rate", "mean SSIM", "recovered of 20", *numbers[2:]], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    processes.add_arguments(parser)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    chosen = [(name, seed) for name in NAMES for seed in (SEEDS[:1] if options.small else SEEDS)]
    with processes.executor(options) as workers:
        parts = processes.results([partial(read, name, seed, small=options.small) for name, seed in chosen], workers)
    rows = [row for part in parts for row in part]
    print(table(rows))
    if not options.small:
        content = made_by("python experiments/audit_cosines.py") | {"steps": STEPS, "rows": rows}
        RESULTS.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        tables.write(PAGE, table(rows), "cosines")


if __name__ == "__main__":
    main()
