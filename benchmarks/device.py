"""The timings of docs/performance.md beyond single steps, on whatever device there is.

    python benchmarks/device.py --out docs/results/performance-h200.json [--only lanczos,scoring,…]

Needs CIFAR-10 (PALIMPSEST_DATA) for the reconstructions.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import palimpsest as pal
from palimpsest.bench import Effort, Shape, contenders, measure, ratios
from palimpsest.execution import Execution
from palimpsest.objectives.spaces import Everywhere
from palimpsest.solver.loop import Settings, Solver
from palimpsest.solver.priors import Box, TotalVariation

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CIFAR, MNIST = (3, 32, 32), (1, 28, 28)
WIDE = (1000, 1000)


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    _wait()
    began = time.perf_counter()
    result = work()
    _wait()
    return time.perf_counter() - began, result


def _wait() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def steps() -> dict[str, Any]:
    """One step in every mode, against the published method and the floor."""
    shapes = [Shape(image, WIDE, k) for image in (MNIST, CIFAR) for k in (1000, 200)]
    return {shape.name: ratios(measure(shape, DEVICE, Effort(turns=5, seconds=0.15))) for shape in shapes}


def profile() -> dict[str, Any]:
    """Where the time of a step goes on CUDA, in microseconds: products, fused kernels, everything else."""
    rows = {}
    for shape in (Shape(MNIST, WIDE, 1000), Shape(CIFAR, WIDE, 1000), Shape(CIFAR, WIDE, 200)):
        run = contenders(shape, DEVICE)["compiled-graph"]()
        run(20)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
            run(100)
            _wait()
        kinds = {"matrix products": ("gemm", "gemv", "splitk"), "fused kernels": ("triton",), "other": ("",)}
        row = {kind: [0.0, 0.0] for kind in kinds}
        for event in seen.key_averages():
            kind = next(kind for kind, marks in kinds.items() if any(mark in event.key.lower() for mark in marks))
            if event.self_device_time_total > 0:
                row[kind][0] += event.self_device_time_total / 100
                row[kind][1] += event.count / 100
        rows[shape.name] = {kind: {"us": us, "kernels": n} for kind, (us, n) in row.items()}
    return rows


def scaling() -> dict[str, Any]:
    """Time and memory of a step against the number of candidates, CIFAR-10 shape."""
    rows = {}
    for k in (1_000, 4_000, 16_000, 64_000, 100_000):
        objective = _random_problem(CIFAR)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        solver = Solver(objective, Everywhere(CIFAR), Settings(candidates=k, steps=10**9, record_every=10**9))
        with solver.execution.matrix_precision(DEVICE):
            state = solver.descend(solver.init(), 3)
            seconds, _ = timed(lambda: solver.descend(state, 10))  # noqa: B023
        rows[k] = {
            "ms per step": 100 * seconds,
            "us per candidate": 1e5 * seconds / k,
            "peak GB": torch.cuda.max_memory_allocated() / 1e9,
            "chunk": solver.objective.chunk,
        }
    return rows


def lanczos() -> dict[str, float]:
    """20 iterations on 1,000 candidates of CIFAR-10 shape, and a split with its re-capture."""
    objective = _random_problem(CIFAR)
    objective.sharpness = 10.0
    x, λ = 0.2 * torch.randn(1000, *CIFAR, device=DEVICE), torch.randn(1000, device=DEVICE)
    with Execution().matrix_precision(DEVICE):
        start, _ = timed(lambda: x.flatten(1) @ x.flatten(1).T)  # loads the libraries, as in any program
        times = [timed(lambda: pal.splitting.min_eigenpairs(objective, x, λ, iterations=20))[0] for _ in range(4)]
        solver = Solver(
            objective,
            Everywhere(CIFAR),
            Settings(candidates=1000, steps=300, record_every=50, splitting=pal.Splitting(rounds=2)),
        )
        state, after = solver.init(), 0.0
        while not solver.done(state):
            before = state.round
            seconds, state = timed(lambda: solver.step(state))  # noqa: B023
            if state.round > before:
                splitting = seconds
                after, state = timed(lambda: solver.step(state))  # noqa: B023
    return {
        "first product of the process": start,
        "first": times[0],
        "warm": min(times[1:]),
        "whole split": splitting,
        "50 steps with re-capture": after,
    }


def scoring() -> dict[str, float]:
    """2,000 candidates against 1,000 images."""
    candidates, images = torch.rand(2000, *CIFAR, device=DEVICE), torch.rand(1000, *CIFAR, device=DEVICE)
    times = [timed(lambda: pal.score(candidates, images[:500], held_out=images[500:]))[0] for _ in range(3)]
    return {"first": times[0], "warm": min(times[1:])}


def training() -> dict[str, Any]:
    """Full-batch training on 500 images: microseconds a step, which is also the seconds of a million steps."""
    rows = {}
    for name, shape in (("mnist", MNIST), ("cifar10", CIFAR)):
        torch.manual_seed(0)
        images, labels = torch.randn(500, *shape), torch.where(torch.arange(500) % 2 == 0, 1, -1)
        model = pal.networks.MLP(shape, WIDE).to(DEVICE)
        for mode, tf32 in (("graph", True), ("compiled-graph", True), ("compiled-graph", False)):
            run = partial(
                pal.train,
                model,
                images,
                labels,
                loss="logistic",
                tolerance=1e-12,
                execution=Execution(mode=mode, tf32=tf32),
            )
            run(steps=200)
            seconds, fit = timed(partial(run, steps=10_000))
            key = f"{name}, {mode}, {'TF32' if tf32 else 'float32'}"
            rows[key] = {"us per step": 100 * seconds, "margin": fit.normalised_margin, "residual": fit.kkt_residual}
            print(key, rows[key], flush=True)
    return rows


def reconstruction() -> dict[str, Any]:
    """CIFAR-10, n = 100, k = 200, 20,000 steps, one node at the midpoint: time and images, in TF32 and float64."""
    data = pal.datasets.load("cifar10", per_class=50, seed=100, task="binary")
    torch.manual_seed(100)
    model = pal.networks.MLP(data.image_shape, WIDE).to(DEVICE)
    seconds, fit = timed(lambda: pal.train(model, data.centred(data.train.images), data.train.labels, loss="squared"))
    rows: dict[str, Any] = {"training": {"seconds": seconds, "loss": fit.loss, "steps": fit.history[-1]["step"]}}

    def run(dtype: torch.dtype, tf32: bool) -> dict[str, float]:
        objective = pal.NTK(fit.model, fit.initial, at=0.5).to(DEVICE, dtype)
        seconds, rec = timed(
            lambda: pal.reconstruct(
                objective,
                image_shape=data.image_shape,
                candidates=200,
                steps=20_000,
                execution=Execution(tf32=tf32),
                priors=(Box(), TotalVariation()),
                progress=False,
            )
        )
        score = pal.score(rec, data.train.images, held_out=data.held_out.images[:500], mean=data.mean)
        above = [int((score.ssim > bar).sum()) for bar in (0.4, 0.6, 0.9)]
        return {"seconds": seconds, "mean SSIM": float(score.ssim.mean()), "above": above, "loss": rec.loss}

    rows["tf32, first"] = run(torch.float32, True)
    rows["tf32"] = run(torch.float32, True)
    rows["float32"] = run(torch.float32, False)
    rows["float64"] = run(torch.float64, False)
    return rows


def _random_problem(image: tuple[int, ...]) -> pal.NTK:
    torch.manual_seed(0)
    initial, final = (pal.networks.MLP(image, WIDE).to(DEVICE) for _ in range(2))
    return pal.NTK(final, initial.state_dict())


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    part.__name__: part for part in (steps, profile, lanczos, scoring, reconstruction, scaling, training)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default=",".join(PARTS))
    options = parser.parse_args()
    results = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else {}
    results |= {
        "command": f"python {' '.join(sys.argv)}",
        "device": torch.cuda.get_device_name() if DEVICE.type == "cuda" else "cpu",
    }
    for name in options.only.split(","):
        seconds, results[name] = timed(PARTS[name])
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        print(f"{name}: {seconds:.1f} s\n{json.dumps(results[name], indent=1)}", flush=True)


if __name__ == "__main__":
    main()
