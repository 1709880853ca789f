"""Does an audit keep its time, use it, and decide rightly within it?

Two networks are trained by plain torch on 40 faces, a dense and a convolutional one. The command line audits each with
its initial weights, its training images and others held out. The candidates in the run folder are then compared with
the training images once more, by `pal.score`. Nothing was chosen on these seeds.

    python experiments/audit_minutes.py                     writes docs/results/audit-minutes.json
    python experiments/audit_minutes.py --minutes 1 --out other.json

Run it on a machine that does nothing else: the load is in the file, and a busy machine reads less in the same time.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from provenance import made_by
from torch import Tensor, nn

import palimpsest as pal
from palimpsest.datasets import DataSet

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results" / "audit-minutes.json"
SEEDS = {"dense": 70, "convolutional": 71}
RATES = {"dense": 5e-3, "convolutional": 5e-4}
BATCH, EPOCHS, TOLERANCE = 10, 2000, 0.05
LATEST = 1.1  # of --minutes
NEGLIGIBLE = 1e-4  # share of the target up to which a candidate does not count


def dense() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(625, 500), nn.ReLU(), nn.Linear(500, 500), nn.ReLU(), nn.Linear(500, 1)
    )


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, 2, 2), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(),
        nn.Flatten(), nn.Linear(32 * 49, 256), nn.ReLU(), nn.Linear(256, 1),
    )  # fmt: skip


def trained(kind: str, data: DataSet, seed: int) -> tuple[dict[str, Tensor], nn.Module]:
    """The initial weights of a network, and the trained network."""
    torch.manual_seed(seed)
    model = {"dense": dense, "convolutional": convolutional}[kind]()
    start = copy.deepcopy(model.state_dict())
    rule = torch.optim.SGD(model.parameters(), lr=RATES[kind], momentum=0.9)
    x, y = data.centred(data.train.images), data.train.labels.float()
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(x)).split(BATCH):
            rule.zero_grad()
            (model(x[rows]).flatten() - y[rows]).square().mean().backward()
            rule.step()
        if float((model(x).flatten() - y).detach().abs().max()) < TOLERANCE:
            break
    return start, model


def prepared(kind: str, data: DataSet, folder: Path) -> None:
    """Train a network, and write its weights and images as a user has them."""
    start, model = trained(kind, data, SEEDS[kind])
    torch.save(start, folder / "start.pt")
    torch.save(model.state_dict(), folder / "final.pt")
    np.save(folder / "mean.npy", data.mean.numpy())
    for name, part in (("train", data.train), ("held-out", data.held_out)):
        np.savez(folder / f"{name}.npz", images=part.images.numpy(), labels=(part.labels > 0).long().numpy())


def audited(kind: str, folder: Path, minutes: float) -> float:
    """Run the command. The value is the number of seconds that it took."""
    words = ["--network", f"{__file__}:{kind}", "--shape", "1,25,25", "--minutes", f"{minutes:g}", "--device", "cpu"]
    for option, file in (("weights", "final.pt"), ("initial", "start.pt"), ("data", "train.npz"),
                         ("held-out", "held-out.npz"), ("mean", "mean.npy"), ("out", "audit")):  # fmt: skip
        words += [f"--{option}", str(folder / file)]
    began = time.monotonic()
    subprocess.run([sys.executable, str(ROOT / "src" / "palimpsest_entry.py"), "audit", *words], check=True)
    return time.monotonic() - began


def truly_recovered(rung: Path, data: DataSet, looks: int) -> int:
    """The number of training images that the rung's candidates recover, or 0 if chance explains them."""
    files = [pal.storage.load_tensors(path)[0] for path in sorted((rung / "runs").glob("subject-*.safetensors"))]
    candidates = torch.cat([file["images"][file["contributions"] > NEGLIGIBLE] for file in files])
    score = pal.score(candidates, data.train.images, held_out=data.held_out.images, mean=data.mean, looks=looks)
    return score.verdict.recovered if score.verdict.outcome.value == "leakage" else 0


def row(kind: str, minutes: float) -> dict:
    data = pal.datasets.load("faces", per_class=20, seed=SEEDS[kind])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepared(kind, data, folder)
        load = os.getloadavg()[0]
        seconds = audited(kind, folder, minutes)
        found = pal.auditing.load(folder / "audit")
        recovered = max(
            truly_recovered(folder / "audit" / each.name, data, len(found.readings)) for each in found.readings
        )
    return {
        "network": kind,
        "seconds": round(seconds, 1),
        "share of the time": round(seconds / (60 * minutes), 3),
        "kept": seconds <= LATEST * 60 * minutes,
        "outcome": found.verdict.outcome,
        "verdict": found.verdict.sentence,
        "finished": found.verdict.finished,
        "truly recovered": recovered,
        "agrees": (found.verdict.outcome == "leakage") == (recovered > 0),
        "load before": round(load, 2),
        "plans": {each.name: {key: each.plan[key] for key in ("at", "steps", "restarts")} for each in found.readings},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    rows = []
    for kind in SEEDS:
        rows.append(row(kind, options.minutes))
        print(json.dumps(rows[-1], indent=1), flush=True)
    machine = {"cores": len(os.sched_getaffinity(0)), "threads": torch.get_num_threads()}
    written = made_by("python experiments/audit_minutes.py") | machine | {"minutes": options.minutes, "rows": rows}
    options.out.write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    main()
