"""Is the verdict right? How often it claims leakage where there is none, and what it recovers where there is some.

    python experiments/calibration.py        writes docs/results/calibration.json

**False claims.** Candidates that know nothing of the training images are scored as if they had been read: noise, smooth
noise, blurred held-out images, and real reconstructions of a network that was trained on other images. This is repeated
for each data set, number n of training images and mean that a user may give. A claim is false by construction, so at
most 1 % of all draws may make one.

**Recovered images.** Networks trained and read as in the demo, and as on the scoreboard's row NTK CIFAR-10, n = 100.

CIFAR-10 is looked for in PALIMPSEST_DATA. A GPU is used if there is one; all cores are.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from zlib import crc32

import processes
import torch
from provenance import made_by
from reproduce import experiment
from torch import Tensor

import palimpsest as pal
from palimpsest.runs.reconstruct import ReconstructOptions
from palimpsest.runs.train import TrainOptions
from palimpsest.scoring.metrics import gaussian_blur

ROOT = Path(__file__).resolve().parents[1]
SCRATCH = ROOT / "runs" / "calibration"
DATA = ("faces", "digits", "cifar10")
SIZES = (4, 10, 20, 40, 100)
FEWEST_HELD_OUT = 20
MEANS: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor | float]]] = {  # (mean, standard deviation)
    "training": lambda x, y: (x.mean(0), 1.0),
    "channels": lambda x, y: (_channels(x.mean((0, 2, 3)), x), _channels(x.std((0, 2, 3)), x)),
    "pixels": lambda x, y: (x.mean(0), x.std(0) + 0.01),
    "constant": lambda x, y: (torch.full_like(x[0], 0.5), 0.5),
    "none": lambda x, y: (torch.zeros_like(x[0]), 1.0),
    "all": lambda x, y: (torch.cat([x, y]).mean(0), 1.0),
}
SYNTHETIC = ("noise", "smooth noise", "blurred held-out images")


def _channels(values: Tensor, x: Tensor) -> Tensor:
    return values[:, None, None].expand(x.shape[1:])


# --- false claims --------------------------------------------------------------------------------


@cache
def images_of(name: str) -> Tensor:
    """Images to draw from."""
    most = {"faces": 50, "digits": 400, "cifar10": 800}[name]
    data = pal.datasets.load(name, per_class=most, held_out_per_class=most, seed=1234, task="binary")
    return torch.cat([data.train.images, data.held_out.images])


def false_claims(cell: tuple[str, int, str, str, int]) -> dict:
    """How often leakage is claimed for candidates that are independent of the training images."""
    torch.set_num_threads(1)
    name, n, mean, kind, draws = cell
    claims = sum(_claimed(name, n, mean, kind, draw) for draw in range(draws))
    return {"data": name, "n": n, "mean": mean, "candidates": kind, "draws": draws, "claims": claims}


def _claimed(name: str, n: int, mean: str, kind: str, draw: int) -> bool:
    generator = torch.Generator().manual_seed(crc32(repr((name, n, mean, kind, draw)).encode()))
    pool, candidates = images_of(name), None
    if kind == "reconstructions":
        used, candidates = torch.load(_stored(name, n), weights_only=True).values()
        unused = torch.ones(len(pool), dtype=torch.bool)
        unused[used] = False
        pool = pool[unused]
        n = min(n, len(pool) // 2)
    order = torch.randperm(len(pool), generator=generator)
    x, y = pool[order[:n]], pool[order[n : n + max(n, FEWEST_HELD_OUT)]]
    m, std = MEANS[mean](x, y)
    if candidates is None:
        candidates = _synthetic(kind, y, m, std, max(2 * n, 20), generator)
    truth = pal.auditing.Truth(x, torch.zeros(n), y, mean=m, std=std)
    return truth.score(candidates).verdict.outcome is pal.scoring.Outcome.LEAKAGE


def _synthetic(kind: str, y: Tensor, m: Tensor, std: Tensor | float, k: int, generator: torch.Generator) -> Tensor:
    if kind == "blurred held-out images":
        return (gaussian_blur(y, sigma=min(y.shape[2:]) / 16) - m) / std
    noise = torch.randn(k, *y.shape[1:], generator=generator)
    return 0.2 * (gaussian_blur(noise, sigma=min(y.shape[2:]) / 12) if kind == "smooth noise" else noise)


def _stored(name: str, n: int) -> Path:
    return SCRATCH / f"{name}-{n}.pt"


def reconstruct_others(job: tuple[str, int, int]) -> str:
    """Train a network on n images of the pool, centred by their mean, and keep what is read out of it."""
    name, n, steps = job
    pool = images_of(name)
    used = torch.randperm(len(pool), generator=torch.Generator().manual_seed(n))[:n]
    x, y = pool[used], 2 * (torch.arange(n) % 2) - 1
    torch.manual_seed(n)
    model = pal.networks.MLP(tuple(x.shape[1:]), hidden=(500, 500)).to(_device())
    fit = pal.train(model, x - x.mean(0), y)
    objective, within = ReconstructOptions().problem(fit.model, fit.initial, "squared")
    rec = pal.reconstruct(
        objective, image_shape=tuple(x.shape[1:]), within=within, candidates=2 * n, steps=steps, progress=False
    )
    torch.save({"used": used, "candidates": rec.images.cpu()}, _stored(name, n))
    return f"{name} {n}: {fit.summary}"


# --- recovered images ----------------------------------------------------------------------------


def demo(seed: int) -> dict:
    """A network trained and read as in the demo."""
    training, reading = TrainOptions(seed=seed), ReconstructOptions(seed=seed)
    data = training.load()
    fit = pal.train(training.network(data).to(_device()), data.centred(data.train.images), data.train.labels)
    objective, within = reading.problem(fit.model, fit.initial, training.loss)
    effort = {"candidates": reading.candidates, "steps": reading.steps, "within": within, "seed": seed}
    verdicts = {}
    for name, splitting in (("without", None), ("with", reading.splitting)):
        rec = pal.reconstruct(
            objective, image_shape=data.image_shape, splitting=splitting, progress=False, **effort
        )  # fmt: skip
        verdicts[name] = _recovered(rec.images.cpu(), data, looks=2)
    return {"what": "demo", "seed": seed} | verdicts


def cifar10(seed: int) -> dict:
    """The scoreboard's row NTK CIFAR-10, n = 100, ours, without splitting."""
    described = experiment.load("ntk-cifar10")
    training, column = described.training, described.columns["ours"]
    data = training.load(seed)
    model = training.network(data, seed).to(_device())
    fit = pal.train(model, data.centred(data.train.images), data.train.labels, steps=training.steps)
    objective, within = column.problem(fit.model, fit.initial, training.loss)
    rec = pal.reconstruct(
        objective,
        image_shape=data.image_shape,
        within=within,
        candidates=200,
        steps=column.steps,
        seed=seed,
        progress=False,
        **column.settings(data.mean),
    )
    return {"what": "ntk-cifar10", "seed": seed, "without": _recovered(rec.images.cpu(), data, looks=1)}


def _recovered(candidates: Tensor, data: pal.datasets.DataSet, *, looks: int) -> dict:
    score = pal.score(candidates, data.train.images, held_out=data.held_out.images, mean=data.mean, looks=looks)
    return {
        "outcome": score.verdict.outcome.value,
        "recovered": score.verdict.recovered,
        "of": score.verdict.total,
        "mean ssim": float(score.ssim.mean()),
        "best held-out ssim": float(score.held_out.ssim.max()),
    }


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=40, help="of each case")
    parser.add_argument("--steps", type=int, default=1000, help="of each reconstruction of other images")
    parser.add_argument("--data", nargs="+", default=DATA)
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES)
    parser.add_argument("--demo-seeds", type=int, default=10)
    parser.add_argument("--cifar10-seeds", type=int, default=3)
    processes.add_arguments(parser, workers=os.cpu_count())
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / "calibration.json")
    options = parser.parse_args()
    SCRATCH.mkdir(parents=True, exist_ok=True)
    kinds = (*SYNTHETIC, "reconstructions")
    with processes.executor(options) as workers:
        others = [(name, n, options.steps) for name in options.data for n in options.sizes]
        for line in processes.results([partial(reconstruct_others, other) for other in others], workers):
            print(line, flush=True)
        readings = [partial(demo, seed) for seed in range(options.demo_seeds)]
        readings += [partial(cifar10, seed) for seed in range(options.cifar10_seeds)]
        recovered = processes.results(readings, workers)
        cells = [
            (name, n, mean, kind, options.draws)
            for name in options.data for n in options.sizes for mean in MEANS for kind in kinds
        ]  # fmt: skip
        rows = processes.results([partial(false_claims, cell) for cell in cells], workers)
    draws, claims = (sum(row[key] for row in rows) for key in ("draws", "claims"))
    result = {
        **made_by("python experiments/calibration.py"),
        "draws without leakage": draws,
        "false claims": claims,
        "false claims by mean": {m: sum(row["claims"] for row in rows if row["mean"] == m) for m in MEANS},
        "false claims by n": {n: sum(row["claims"] for row in rows if row["n"] == n) for n in options.sizes},
        "false claims by candidates": {k: sum(r["claims"] for r in rows if r["candidates"] == k) for k in kinds},
        "recovered": recovered,
        "cells": rows,
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for row in recovered:
        print(row)
    print({key: value for key, value in result.items() if key.startswith(("draws", "false"))})


if __name__ == "__main__":
    import calibration  # workers find its functions under this name

    calibration.main()
