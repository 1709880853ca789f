"""Measure the tables of docs/performance.md, and write them into the page.

    python experiments/performance.py --out docs/results/performance-h200.json    # on a GPU: every table, minutes
    python experiments/performance.py --out docs/results/performance-cpu.json     # on a CPU: single steps, a minute
    python experiments/performance.py                                             # docs/results → the page
    python experiments/performance.py --check                                     # fails if the page differs

``--only scaling,lanczos`` measures these parts again and keeps the others of the file. The reconstruction needs
CIFAR-10 (PALIMPSEST_DATA). This script does not change the numbers in the page's text: compare them with the tables.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import convolutional_floor
import torch
from networks_in_use import reading
from networks_in_use import training as in_use
from networks_in_use.rows import ROWS, Row
from provenance import made_by
from torch import nn

import palimpsest as pal
from palimpsest.bench import Effort, Shape, contenders, measure, ratios
from palimpsest.bench.timing import device_name
from palimpsest.execution import Execution, Mode
from palimpsest.files.versions import versions
from palimpsest.objectives import convolution
from palimpsest.objectives.spaces import Everywhere
from palimpsest.solver.loop import Solver
from palimpsest.solver.priors import Box, TotalVariation
from palimpsest.solver.settings import Settings

PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
TABLE = re.compile(r"(<!-- table: (\w+) (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TANGENTS = (0.25, 0.75)  # of a step of ResNet-18
CIFAR, MNIST, WIDE = (3, 32, 32), (1, 28, 28), (1000, 1000)
Rows = dict[str, dict[str, Any]]
"""A table: columns by row."""


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    wait = torch.cuda.synchronize if DEVICE.type == "cuda" else lambda: None
    wait()
    began = time.perf_counter()
    result = work()
    wait()
    return time.perf_counter() - began, result


# --- what is measured ---------------------------------------------------------------------------------


def steps() -> dict[str, Any]:
    """One step in every mode, against the published method and the floor."""
    shapes = [Shape(), Shape.usual(DEVICE)]
    if DEVICE.type == "cuda":
        shapes = [Shape(image, WIDE, k) for image in (MNIST, CIFAR) for k in (1000, 200)]
    return {shape.name: ratios(measure(shape, DEVICE, Effort(turns=5, seconds=0.15))) for shape in shapes}


def profile() -> Rows:
    """Microseconds of a step in matrix products, fused kernels and everything else (number of kernels)."""
    kinds = {"matrix products": ("gemm", "gemv", "splitk"), "fused kernels": ("triton",), "other": ("",)}
    rows = {}
    for shape in (Shape(MNIST, WIDE, 1000), Shape(CIFAR, WIDE, 1000), Shape(CIFAR, WIDE, 200)):
        run = contenders(shape, DEVICE)["compiled-graph"]()
        run(20)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
            run(100)
            torch.cuda.synchronize()
        time_, count = dict.fromkeys(kinds, 0.0), dict.fromkeys(kinds, 0.0)
        for event in seen.key_averages():
            kind = next(kind for kind, marks in kinds.items() if any(mark in event.key.lower() for mark in marks))
            if event.self_device_time_total > 0:
                time_[kind] += event.self_device_time_total / 100
                count[kind] += event.count / 100
        total = sum(time_.values())
        cells = {kind: f"{us:.1f} ({us / total:.0%}; {count[kind]:.0f})" for kind, us in time_.items()}
        rows[shape.name] = cells | {"together": total}
    return rows


def scaling() -> Rows:
    """Time and memory of a step against the number of candidates."""
    rows = {}
    for k in (1_000, 4_000, 16_000, 64_000, 100_000):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        settings = Settings(candidates=k, steps=10**9, record_every=10**9)
        solver = Solver(_random_problem(), Everywhere(CIFAR), settings)
        with solver.execution.matrix_precision(DEVICE):
            state = solver.descend(solver.init(), 3)
            seconds, _ = timed(partial(solver.descend, state, 10))
        rows[f"k = {k:,}"] = {
            "ms per step": 100 * seconds,
            "µs per candidate": 1e5 * seconds / k,
            "peak GB": torch.cuda.max_memory_allocated() / 1e9,
            "in chunks of": solver.objective.chunk,
        }
    return rows


def segments() -> Rows:
    """A step with checkpoints, and its time relative to as many steps without: in turns, the fastest of each."""
    small = DEVICE.type == "cpu"
    image, width, k = ((1, 25, 25), 500, 80) if small else (CIFAR, 1000, 200)
    networks: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
        "dense": (lambda: pal.networks.MLP(image, (width, width)), image, k),
        "convolutional": (_convolutional, CIFAR, k // 4 if small else k),
    }
    rows: Rows = {f"{m} segment{'s' * (m > 1)}": {} for m in (1, 2, 4, 8)}
    for name, (make, shape, candidates) in networks.items():
        torch.manual_seed(0)
        states = [make().to(DEVICE).state_dict() for _ in range(9)]
        model = make().to(DEVICE)
        runs: dict[int, Callable[[int], float]] = {}
        for m in (1, 2, 4, 8):
            model.load_state_dict(states[m])
            objective = pal.Path(model, states[: m + 1])
            settings = Settings(candidates=candidates, steps=10**9, record_every=10**9)
            runs[m] = _timer(Solver(objective, Everywhere(shape), settings))
        fastest = {m: min(run(40 // m) for _ in range(7)) for m, run in runs.items()}
        for m, row in zip(runs, rows.values(), strict=True):
            row[f"{name}, ms"] = 1e3 * fastest[m]
            row[f"{name}, relative to m steps"] = fastest[m] / (m * fastest[1])
    return rows


def _timer(solver: Solver) -> Callable[[int], float]:
    """Seconds of a step, as a function of the number of steps to time."""
    state = solver.init()

    def run(steps: int) -> float:
        nonlocal state
        with solver.execution.matrix_precision(DEVICE):
            seconds, state = timed(partial(solver.descend, state, steps))
        return seconds / steps

    run(5)
    return run


def _convolutional() -> nn.Module:
    layers = (nn.Conv2d(3, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 32, 3, 2, 1), nn.ReLU(), nn.Flatten())
    return nn.Sequential(*layers, nn.Linear(2048, 1))


def residual(*, small: bool = DEVICE.type == "cpu") -> Rows:
    """One step of ResNet-18, two tangent points, and its convolutions alone: in turns, the fastest of each."""
    row, modes = _resnet(small), _modes(small)
    numbers, turns, steps = ((2, 3), 1, 2) if small else ((20,), 5, 20)  # compiling takes 90 s for each number
    torch.manual_seed(0)
    before, after = (_as_read(in_use.fresh(row)) for _ in range(2))
    objective = pal.Path(after, [before.state_dict(), after.state_dict()], at=TANGENTS)
    rows: Rows = {name: {} for name in (*modes, "floor")}
    for k in numbers:
        gc.collect()  # to free an earlier graph during a capture would break it
        runs = {"floor": _floor(after, torch.randn(k, 3, row.side, row.side, device=DEVICE), len(objective.tangents))}
        for mode in modes:
            settings = Settings(candidates=k, steps=10**9, record_every=10**9, priors=(Box(), TotalVariation()))
            solver = Solver(objective, Everywhere((3, row.side, row.side)), settings, Execution(mode=mode))
            runs[mode] = _timer(solver)
        times = [{name: run(steps) for name, run in runs.items()} for _ in range(turns)]
        fastest = {name: min(seconds[name] for seconds in times) for name in runs}
        for name, cells in rows.items():
            cells[f"{k} candidates, ms"] = 1e3 * fastest[name]
            cells[f"{k} candidates, relative to the floor"] = fastest[name] / fastest["floor"]
    return rows


def _resnet(small: bool) -> Row:
    row = ROWS["resnet-20"]
    # With fewer than 16 channels, channels last, a CPU's gradient of a strided 1×1 convolution writes past its memory.
    return replace(row.small(), width=16) if small else row


def _modes(small: bool) -> tuple[Mode, ...]:
    return ("eager",) if small else ("graph", "compiled-graph")


def _as_read(model: nn.Module) -> nn.Module:
    """In the memory format in which `networks_in_use` reads ResNets."""
    return model.to(DEVICE).eval().to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def _floor(network: nn.Module, images: torch.Tensor, points: int) -> Callable[[int], float]:
    """Seconds of the products of a step, as a function of the number of steps to time."""
    products = convolutional_floor.products(convolutional_floor.recorded(network, images), points)
    run = convolutional_floor.runner(products, DEVICE)
    run(5)
    return lambda steps: timed(partial(run, steps))[0] / steps


def same_images(*, small: bool = DEVICE.type == "cpu") -> Rows:
    """ResNet-18 of 20 images, read in 1,000 steps from the same start: does what is faster read the same?"""
    row, seed = _resnet(small), in_use.TUNING
    row = row if small else replace(row, reading=replace(row.reading, steps=1000))
    with TemporaryDirectory() as folder:
        in_use.pretrain(row, Path(folder), DEVICE)
        model = _as_read(in_use.before(row, seed, Path(folder)))
    images = in_use.load(row, seed)
    x, y = (images.train - images.mean).to(DEVICE), images.labels.to(DEVICE)
    model, checkpoints, _ = in_use.train(model, x, y, row.training, seed)

    def read(mode: Mode, *, ours: bool) -> dict[str, float]:
        with mock.patch.object(convolution, "faster_on", return_value=ours):
            whole = partial(reading.read, model, checkpoints, row, images, seed=seed, ends=float("inf"), mode=mode)
            seconds, (rec, _) = timed(whole)
        score = pal.score(rec.images.cpu(), images.train, mean=images.mean)
        return {"mean SSIM": float(score.ssim.mean()), "seconds": seconds}

    graph, compiled = _modes(small)[0], _modes(small)[-1]
    return {
        "torch's convolutions, graph": read(graph, ours=False),
        "our convolutions, graph": read(graph, ours=True),
        "our convolutions, compiled-graph": read(compiled, ours=True),
    }


def lanczos() -> Rows:
    """20 iterations on 1,000 candidates, a split, and the first steps after it."""
    objective = _random_problem()
    objective.sharpness = 10.0
    x, λ = 0.2 * torch.randn(1000, *CIFAR, device=DEVICE), torch.randn(1000, device=DEVICE)
    with Execution().matrix_precision(DEVICE):
        first, *later = (
            timed(lambda: pal.splitting.min_eigenpairs(objective, x, λ, iterations=20))[0] for _ in range(4)
        )
        settings = Settings(candidates=1000, steps=300, record_every=50, splitting=pal.Splitting(rounds=2))
        solver = Solver(objective, Everywhere(CIFAR), settings)
        state, splitting, after = solver.init(), 0.0, 0.0
        while not solver.done(state):
            before = state.round
            seconds, state = timed(partial(solver.step, state))
            if state.round > before:
                splitting = seconds
                after, state = timed(partial(solver.step, state))
    return {
        "20 iterations, first call": {"seconds": first},
        "20 iterations, later calls": {"seconds": min(later)},
        "whole split": {"seconds": splitting},
        "first 50 steps after a split": {"seconds": after},
    }


def scoring() -> Rows:
    """2,000 candidates against 1,000 images."""
    candidates, images = torch.rand(2000, *CIFAR, device=DEVICE), torch.rand(1000, *CIFAR, device=DEVICE)
    first, *later = (timed(lambda: pal.score(candidates, images[:500], held_out=images[500:]))[0] for _ in range(3))
    return {"first call": {"seconds": first}, "later calls": {"seconds": min(later)}}


def training() -> Rows:
    """Full-batch training on 500 images: microseconds a step, which is also the seconds of a million steps."""
    rows = {}
    for name, shape in (("MNIST", MNIST), ("CIFAR-10", CIFAR)):
        torch.manual_seed(0)
        images, labels = torch.randn(500, *shape), torch.where(torch.arange(500) % 2 == 0, 1, -1)
        model = pal.networks.MLP(shape, WIDE).to(DEVICE)
        for mode, tf32 in (("graph", True), ("compiled-graph", True), ("compiled-graph", False)):
            execution = Execution(mode=mode, tf32=tf32)
            run = partial(pal.train, model, images, labels, loss="logistic", tolerance=1e-12, execution=execution)
            run(steps=200)
            seconds, fit = timed(partial(run, steps=10_000))
            rows[f"{name}, {mode}, {'TF32' if tf32 else 'float32'}"] = {
                "µs per step": 100 * seconds,
                "normalised margin": fit.normalised_margin,
                "KKT residual": fit.kkt_residual,
            }
    return rows


def reconstruction() -> Rows:
    """CIFAR-10, n = 100, k = 200, 20,000 steps, one node at the midpoint: time and images by number format."""
    data = pal.datasets.load("cifar10", per_class=50, seed=100, task="binary")
    torch.manual_seed(100)
    model = pal.networks.MLP(data.image_shape, WIDE).to(DEVICE)
    fit = pal.train(model, data.centred(data.train.images), data.train.labels, loss="squared")

    def run(dtype: torch.dtype, tf32: bool, mode: Mode = "auto") -> dict[str, Any]:
        objective = pal.NTK(fit.model, fit.initial, at=0.5).to(DEVICE, dtype)
        priors, execution = (Box(), TotalVariation()), Execution(mode=mode, tf32=tf32)
        seconds, rec = timed(
            lambda: pal.reconstruct(
                objective, image_shape=data.image_shape, candidates=200, steps=20_000, execution=execution,
                priors=priors, progress=False,
            )
        )  # fmt: skip
        score = pal.score(rec, data.train.images, held_out=data.held_out.images[:500], mean=data.mean)
        above = " / ".join(str(int((score.ssim > bar).sum())) for bar in (0.4, 0.6, 0.9))
        return {"seconds": seconds, "mean SSIM": float(score.ssim.mean()), "images above 0.4 / 0.6 / 0.9": above}

    return {
        "TF32, first run on a machine": run(torch.float32, True),
        "TF32, told to compile": run(torch.float32, True, "compiled-graph"),
        "TF32, kernels compiled before": run(torch.float32, True),
        "float32": run(torch.float32, False),
        "float64": run(torch.float64, False),
    }


def _random_problem() -> pal.NTK:
    torch.manual_seed(0)
    initial, final = (pal.networks.MLP(CIFAR, WIDE).to(DEVICE) for _ in range(2))
    return pal.NTK(final, initial.state_dict())


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    part.__name__: part
    for part in (
        reconstruction, steps, segments, profile, residual, same_images, scaling, lanczos, scoring, training,
    )
}  # fmt: skip
ON_A_CPU = ("steps", "segments")


def write(out: Path, only: str) -> None:
    """Measure the parts, and write the file after each."""
    results = json.loads(out.read_text(encoding="utf-8")) if only and out.exists() else {}
    results |= {"device": device_name(DEVICE), "threads": torch.get_num_threads(), "versions": versions()}
    for name in only.split(",") if only else PARTS if DEVICE.type == "cuda" else ON_A_CPU:
        began = time.perf_counter()
        results[name] = PARTS[name]()
        results.setdefault("parts", {})[name] = made_by(f"python experiments/performance.py --out {out} --only {name}")
        out.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(f"{name}: {time.perf_counter() - began:.0f} s", json.dumps(results[name], ensure_ascii=False), flush=True)


# --- the page -----------------------------------------------------------------------------------------


def device(results: Mapping[str, Any]) -> str:
    return f"{results['device']}, threads: {results['threads']}, torch {results['versions']['torch']}."


def step_table(shapes: Mapping[str, list[dict[str, Any]]]) -> str:
    """Contenders downwards, shapes across: milliseconds, speed-up over the published method, multiple of the floor."""
    rows: Rows = {}
    for shape, timings in shapes.items():
        for t in timings:
            speed_up, floor = t["faster than published float64"], t["of the floor"]
            rows.setdefault(t["name"], {})[shape] = f"{t['milliseconds']:.3f} ({speed_up:.1f}; {floor:.2f})"
    return table(rows)


def table(rows: Rows) -> str:
    columns = list(next(iter(rows.values())))
    lines = [["", *columns], ["---"] * (1 + len(columns))]
    lines += [[name, *(shown(row[column]) for column in columns)] for name, row in rows.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def shown(value: Any) -> str:
    """Three significant digits, thousands separated, – for None."""
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}"
    return "–" if value is None else value if isinstance(value, str) else f"{value:,}"


def rewritten(page: str) -> str:
    """The page with every table made again from the file of its machine. What it does not have is left as it is."""

    def made(match: re.Match[str]) -> str:
        file = PAGE.parent / "results" / f"performance-{match[2]}.json"
        results = json.loads(file.read_text(encoding="utf-8"))
        if match[3] == "device":
            body = device(results)
        elif match[3] not in results:
            return match[0]
        else:
            body = (step_table if match[3] == "steps" else table)(results[match[3]])
        return f"{match[1]}{body}\n{match[4]}"

    return TABLE.sub(made, page)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    if options.out:
        write(options.out, options.only)
        return 0
    page = PAGE.read_text(encoding="utf-8")
    if options.check:
        return int(rewritten(page) != page)
    PAGE.write_text(rewritten(page), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
