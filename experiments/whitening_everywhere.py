"""Does it pay to whiten all layers where there is no span to search in?

    python experiments/whitening_everywhere.py           writes docs/results/whitening-everywhere.json and its table
    python experiments/whitening_everywhere.py --small   a version of seconds, which writes nothing there

Three networks of `outsiders.py`, from seeds that nothing was chosen on, are read by NTK at two tangent points, with and
without whitening, each at two degrees of smoothness. Candidates, steps and seeds are equal.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import processes
import tables
import torch
from audit_networks import CENTRE, trained, truth_of
from outsiders import outsiders
from provenance import made_by

import palimpsest as pal
from palimpsest.files.storage import write_atomically

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "docs" / "results" / "whitening-everywhere.json", "which-method.md"
PARTS = ROOT / "runs" / "whitening-everywhere"
SEEDS = (941, 942, 943)  # 900 to 904 were used to develop
NETWORKS = ("mlp-sgd", "cnn-sgd", "vit")
WAYS = [(0.0, 1.0), (0.0, 3.0), (1.0, 3.0), (1.0, 10.0)]
STEPS = 1000
BOX = pal.priors.Box(low=-CENTRE, high=CENTRE)


def read(name: str, seed: int, *, small: bool = False) -> list[dict[str, Any]]:
    """How well each way reads one network."""
    torch.set_num_threads(1)
    outsider = next(each for each in outsiders(small=small) if each.name == name)
    truth, images = truth_of(outsider, seed)
    left = trained(outsider, images, seed)
    rows = []
    for p, smoothness in WAYS:
        rec = pal.reconstruct(
            pal.NTK(left.model, left.initial, at=(0.25, 0.75), weights="auto", whitening=p),
            image_shape=truth.images.shape[1:], candidates=2 * len(truth.images),
            steps=3 if small else STEPS, priors=(BOX, pal.priors.TotalVariation()),
            prior_strength=(smoothness, smoothness), seed=seed, progress=False,
        )  # fmt: skip
        scores = pal.score(rec, truth.images, held_out=truth.held_out, mean=CENTRE)
        ssim = {"SSIM": float(scores.ssim.mean()), "held-out SSIM": float(scores.held_out.ssim.mean())}
        rows.append(
            {"network": outsider.network, "seed": seed, "whitening": p, "smoothness": smoothness}
            | {key: round(value, 4) for key, value in ssim.items()}
            | {"recovered": scores.verdict.recovered, "loss": round(rec.history[-1]["loss"], 5)}
        )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Means over seeds."""
    groups = defaultdict(list)
    for row in rows:
        groups[row["network"], row["whitening"], row["smoothness"]].append(row)
    shown = []
    for (network, p, smoothness), group in groups.items():
        means = [fmean(row[key] for row in group) for key in ("SSIM", "held-out SSIM")]
        recovered = fmean(row["recovered"] for row in group)
        shown.append([network, f"{p:g}", f"{smoothness:g}", *(f"{mean:.3f}" for mean in means), f"{recovered:.1f}"])
    return tables.markdown(["network", "p", "smoothness", "mean SSIM", "held-out", "recovered of 20"], shown)


def _run(name: str, seed: int, path: Path, small: bool) -> str:
    rows = read(name, seed, small=small)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (json.dumps(rows, indent=1) + "\n").encode())
    return table(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=NETWORKS)
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--parts", type=Path, default=PARTS)
    processes.add_arguments(parser)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    wanted = [(name, seed) for name in options.networks for seed in options.seeds]
    parts = {key: options.parts / f"{key[0]}-{key[1]}{'-small' * options.small}.json" for key in wanted}
    jobs = {f"{name} {seed}": partial(_run, name, seed, path, options.small)
            for (name, seed), path in parts.items() if not path.exists()}  # fmt: skip
    processes.run_all(jobs, options)
    rows = [row for path in parts.values() for row in json.loads(path.read_text(encoding="utf-8"))]
    print(table(rows))
    if not options.small and set(wanted) >= {(name, seed) for name in NETWORKS for seed in SEEDS}:
        content = made_by("python experiments/whitening_everywhere.py") | {"steps": STEPS, "rows": rows}
        write_atomically(RESULTS, (json.dumps(content, indent=1) + "\n").encode())
        tables.write(PAGE, table(rows), "whitening everywhere")


if __name__ == "__main__":
    main()
