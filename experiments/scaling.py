"""How the cost of a reconstruction grows, for docs/scaling.md: candidates, parameters, pixels, processes.

    python experiments/scaling.py --out docs/results/scaling.json    # two processes of one thread each: minutes
    python experiments/scaling.py                                    # docs/results → the page and its figure
    python experiments/scaling.py --check                            # fails if the page differs

Measure on an idle machine with two cores or more. Both processes live throughout: while the first runs alone, the
second waits. The extrapolation to GPUs is computed from a stated model, not measured.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from performance import shown
from provenance import made_by
from tables import DOCS, END, START, markdown
from torch import nn

import palimpsest as pal
from palimpsest.bench.timing import device_name
from palimpsest.execution.allocator import keep_freed_memory
from palimpsest.files.versions import versions
from palimpsest.objectives.spaces import Everywhere
from palimpsest.solver.loop import STRETCH, Solver
from palimpsest.solver.memory import bytes_per_candidate
from palimpsest.solver.settings import Settings

RESULTS, PAGE, FIGURE = DOCS / "results" / "scaling.json", DOCS / "scaling.md", DOCS / "figures" / "scaling.png"
TURNS = 3  # measurements, of which the median counts; each is a stretch of a long run, with its record
MILLION = 1_000_000
BUSY, REDUCTIONS = 0.02, 30  # seconds of computing before an all-reduce, and all-reduces in a measurement

# --- the model of a GPU, for the extrapolation ---------------------------------------------------------
# ResNet-18 with 32×32 pixels on one H200, as a graph: seconds of a step by (candidates, tangent points). Each point
# costs a + b·k. The first is from performance-h200.json. The second is the mean of the whole run resnet-100-seed0.json
# in experiments/results/networks-in-use, with whitening and cosines.
STEPS, RUN_STEPS, PER_IMAGE = {(20, 2): 0.0119, (200, 1): 0.0265}, 3000, 2
PARAMETERS = 11_173_962
BUS = {8: 300e9, 64: 40e9}  # assumed bytes per second of an all-reduce, by GPUs: within one host, and between eight
ROOM = 70e9  # bytes of a GPU for the intermediate results of a step: half of its memory


def convolutional(channels: int = 32) -> nn.Module:
    layers = (nn.Conv2d(3, channels, 3, 2, 1), nn.ReLU(), nn.Conv2d(channels, channels, 3, 2, 1), nn.ReLU())
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * channels, 1))


def solver_of(make: Callable[[], nn.Module], shape: tuple[int, ...], k: int, group: dist.ProcessGroup | None) -> Solver:
    """A solver with k candidates, for the change between two random networks."""
    torch.manual_seed(0)
    initial, final = make(), make()
    objective = pal.NTK(final, initial.state_dict())
    settings = Settings(candidates=k, steps=10**6, record_every=STRETCH)
    return Solver(objective, Everywhere(shape), settings, pal.Execution(processes=group))


def milliseconds(solver: Solver, steps: int = STRETCH) -> float:
    """Of one step, on all processes of the solver."""
    state = solver.descend(solver.share(solver.init()), steps)
    seconds = []
    for _ in range(TURNS):
        began = time.perf_counter()
        state = solver.descend(state, steps)
        seconds.append((time.perf_counter() - began) / steps)
    return 1e3 * statistics.median(seconds)


# --- measurements with one process, while the other one waits ------------------------------------------


def dense(width: int = 500, pixels: int = 25) -> Callable[[], nn.Module]:
    return lambda: pal.networks.MLP((1, pixels, pixels), (width, width))


def by_candidates() -> dict[str, float]:
    return {str(k): milliseconds(solver_of(dense(), (1, 25, 25), k, None)) for k in (20, 40, 80, 160, 320)}


def by_parameters() -> dict[str, float]:
    """By the number of parameters, for hidden layers of 125 to 1,000 units."""
    networks = [dense(width) for width in (125, 250, 500, 1000)]
    counts = [sum(p.numel() for p in make().parameters()) for make in networks]
    times = [milliseconds(solver_of(make, (1, 25, 25), 80, None)) for make in networks]
    return dict(zip(map(str, counts), times, strict=True))


def by_pixels() -> dict[str, float]:
    sides = (14, 28, 56)
    return {str(s * s): milliseconds(solver_of(dense(500, s), (1, s, s), 80, None)) for s in sides}


def chunks() -> dict[str, float]:
    """A convolutional step at once, and in four chunks."""
    at_once, in_chunks = (solver_of(convolutional, (3, 32, 32), 64, None) for _ in range(2))
    each = bytes_per_candidate(in_chunks.first(), in_chunks.init().x)
    in_chunks.execution = pal.Execution(memory=16.5 * each / 1e9)
    return {"at once": milliseconds(at_once), "in chunks": milliseconds(in_chunks)}


# --- measurements with both processes ------------------------------------------------------------------

PROBLEMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {  # network, image, candidates per process
    "dense 625–500–500–1": (dense(), (1, 25, 25), 320),
    "convolutional": (convolutional, (3, 32, 32), 64),
}
LARGER = 4  # times as many candidates, in a second measurement


def weak(rank: int) -> list[dict[str, Any]]:
    """As many candidates for each process, on one and on two, in turns. Two separate ones show the machine's loss."""
    rows = []
    for (name, (make, shape, few)), times in product(PROBLEMS.items(), (1, LARGER)):
        k, steps = times * few, STRETCH // times
        turns: dict[str, list[float]] = {"1 process": [], "2 separate": [], "2 processes": []}
        for _ in range(3):
            if rank == 0:
                turns["1 process"].append(milliseconds(solver_of(make, shape, k, None), steps))
            dist.barrier()
            turns["2 separate"].append(_slower(milliseconds(solver_of(make, shape, k, None), steps)))
            turns["2 processes"].append(_slower(milliseconds(solver_of(make, shape, 2 * k, dist.group.WORLD), steps)))
        if rank == 0:
            best = {column: min(each) for column, each in turns.items()}
            efficiency = best["1 process"] / best["2 processes"]
            rows.append({"network": name, "candidates per process": k, **best, "efficiency": efficiency})
    return rows


def _slower(mine: float) -> float:
    """The larger number of the two processes."""
    both = torch.tensor([mine], dtype=torch.float64)
    dist.all_reduce(both, dist.ReduceOp.MAX)
    return float(both)


def memory(rank: int) -> dict[str, float]:
    """Megabytes that a run adds to each process: the same candidates on two processes, then on one."""
    make, shape, k = PROBLEMS["convolutional"]
    k = 4 * k
    milliseconds(solver_of(make, shape, 2, dist.group.WORLD))
    base, added = _peak(reset=True), {}
    milliseconds(solver_of(make, shape, k, dist.group.WORLD))
    both = [torch.zeros(1) for _ in range(2)]
    dist.all_gather(both, torch.tensor([float(_peak() - base)]))
    added["2 processes"] = max(map(float, both)) / 1e6
    if rank == 0:
        milliseconds(solver_of(make, shape, k, None))
        added["1 process"] = (_peak() - base) / 1e6
    dist.barrier()
    return {"candidates": k, **added}


def _peak(*, reset: bool = False) -> int:
    """The most bytes that this process has held since the last reset."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))


def all_reduce(rank: int) -> dict[str, list[float]]:
    """Milliseconds of gloo between the two processes, by float32 numbers: at once, and after computing as in a step."""
    counts = (MILLION // 100, MILLION // 10, MILLION, 4 * MILLION, 16 * MILLION)
    return {str(count): [_reduced(count, busy) for busy in (0.0, BUSY)] for count in counts}


def _reduced(count: int, busy: float) -> float:
    """The mean over all-reduces, each after this many seconds of matrix products."""
    numbers, factor, seconds = torch.zeros(count), torch.randn(400, 400), []
    for _ in range(REDUCTIONS):
        dist.barrier()
        ends = time.perf_counter() + busy
        while time.perf_counter() < ends:
            factor @ factor
        began = time.perf_counter()
        dist.all_reduce(numbers)
        seconds.append(time.perf_counter() - began)
    return 1e3 * statistics.fmean(seconds[2:])


ALONE = {"by candidates": by_candidates, "by parameters": by_parameters, "by pixels": by_pixels, "chunks": chunks}
TOGETHER = {
    "memory": memory,
    "weak scaling": weak,
    "all-reduce": all_reduce,
}  # memory first: a process keeps what it frees


def measure(rank: int, out: Path, only: str, port: int) -> None:
    """One of the two processes."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    keep_freed_memory()  # as the command line does
    dist.init_process_group("gloo", rank=rank, world_size=2)
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8")) if only and out.exists() else {}
    found |= made_by("python experiments/scaling.py --out docs/results/scaling.json")
    found |= {"device": device_name(torch.device("cpu")), "threads of a process": 1, "versions": versions()}
    for name in only.split(",") if only else (*TOGETHER, *ALONE):
        result = TOGETHER[name](rank) if name in TOGETHER else ALONE[name]() if rank == 0 else {}
        dist.barrier()
        if rank == 0:
            found[name] = result
            out.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
            print(name, json.dumps(result, ensure_ascii=False), flush=True)
    dist.destroy_process_group()


# --- the extrapolation, and the page ----------------------------------------------------------------------


def line() -> tuple[float, float]:
    """(a, b) of t = a + b·k seconds per step and tangent point, through the measured steps of one H200."""
    b, a = statistics.linear_regression([k for k, _ in STEPS], [t / points for (_, points), t in STEPS.items()])
    return a, b


def communication(gpus: int) -> float:
    """Seconds of one all-reduce of float32 numbers for all parameters: 2 (P − 1)/P · bytes / bandwidth."""
    return 2 * (gpus - 1) / gpus * 4 * PARAMETERS / BUS[gpus]


def extrapolated(images: int, gpus: int, found: dict[str, Any]) -> dict[str, float]:
    """A step, and a run of 3,000, with two candidates for each image. Chunks cost as much as they do on the CPU."""
    a, b = line()
    share = -(-PER_IMAGE * images // gpus)
    chunked = share * found["bytes of a ResNet-18 candidate"] > ROOM
    factor = found["chunks"]["in chunks"] / found["chunks"]["at once"] if chunked else 1.0
    compute, wait = a + factor * b * share, communication(gpus)
    step = compute + wait
    return {"step": step, "hours": RUN_STEPS * step / 3600, "communication": wait / step, "chunked": chunked}


def resnet_bytes() -> float:
    """The estimate of memory for each candidate of ResNet-18, with one tangent point, as the solver makes it."""
    from networks_in_use.networks import ResNet18

    network = ResNet18(64)
    objective = pal.NTK(network, {n: t + 0.01 for n, t in network.state_dict().items()}, at=0.5)
    return float(bytes_per_candidate(objective, torch.zeros(1, 3, 32, 32)))


def tables(found: dict[str, Any]) -> str:
    times = ("1 process", "2 separate", "2 processes")
    weak_rows = [
        [row["network"], f"{row['candidates per process']:,}", *(f"{row[t]:.1f}" for t in times),
         f"{row['efficiency']:.0%}", f"{row['2 separate'] / row['2 processes']:.0%}"]
        for row in found["weak scaling"]
    ]  # fmt: skip
    columns = ["network", "candidates per process", "1 process, ms", "2 separate ones, ms", "2 processes, ms"]
    columns += ["efficiency", "compared with separate ones"]
    parts = ["### Two processes\n", markdown(columns, weak_rows)]
    m = found["memory"]
    row = [f"{m['candidates']:,}", f"{m['1 process']:.0f}", f"{m['2 processes']:.0f}"]
    row.append(f"{m['2 processes'] / m['1 process']:.2f}")
    parts += [markdown(["candidates", "MB of one process", "MB of each of two", "ratio"], [row])]
    for name, unit in (("by candidates", "candidates"), ("by parameters", "parameters"), ("by pixels", "pixels")):
        cells = [[f"{int(n):,}", f"{ms:.1f}", shown(1e3 * ms / int(n))] for n, ms in found[name].items()]
        parts += [f"### A step {name}\n", markdown([unit, "ms", f"µs per {unit[:-1]}"], cells)]
    c = found["chunks"]
    parts += [
        "### Chunks and all-reduce\n",
        markdown(["at once, ms", "in four chunks, ms", "ratio"],
                 [[f"{c['at once']:.1f}", f"{c['in chunks']:.1f}", f"{c['in chunks'] / c['at once']:.2f}"]]),
        markdown(["float32 numbers", "all-reduce at once, ms", "after 20 ms of computing, ms"],
                 [[f"{int(n):,}", *(f"{ms:.2f}" for ms in both)] for n, both in found["all-reduce"].items()]),
    ]  # fmt: skip
    rows = []
    for images in (1000, 10_000, 50_000):
        for gpus in BUS:
            e = extrapolated(images, gpus, found)
            cells = [f"{images:,}", gpus, f"{e['step']:.3f}", "yes" if e["chunked"] else "no", f"{e['hours']:.2f}"]
            rows.append([*cells, f"{gpus * e['hours']:.1f}", f"{e['communication']:.1%}"])
    columns = ["images", "GPUs", "s per step", "in chunks", "hours", "GPU hours", "share of communication"]
    parts += ["### Extrapolated, not measured: ResNet-18 on H200\n", markdown(columns, rows)]
    (a, b), waits = line(), [(gpus, communication(gpus)) for gpus in BUS]
    rows = [["fixed cost of a step", "", f"{1e3 * a:.1f}", f"{a / b:.0f}"]]
    rows += [[f"all-reduce, {p} GPUs", f"{BUS[p] / 1e9:.0f}", f"{1e3 * t:.2f}", f"{t / b:.1f}"] for p, t in waits]
    parts += [markdown(["part of a step", "assumed GB/s", "ms", "takes as long as this many candidates"], rows)]
    return "\n".join(parts)


def figure(found: dict[str, Any]) -> None:
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(10, 3.2), layout="constrained")
    panels = drawn.subplots(1, 3)
    for panel, name in zip(panels, ("by candidates", "by parameters"), strict=False):
        panel.plot([int(n) for n in found[name]], list(found[name].values()), "o-")
        panel.set(xlabel=name.removeprefix("by "), ylabel="ms per step", title="measured on a CPU", xlim=0, ylim=0)
    shares = [2**j for j in range(13)]
    a, b = line()
    for gpus in BUS:
        steps = [a + b * share + communication(gpus) for share in shares]
        panels[2].semilogx(
            shares, [b * share / t for share, t in zip(shares, steps, strict=True)], label=f"{gpus} GPUs"
        )
    panels[2].set(
        xlabel="candidates per GPU", ylabel="share of useful work", title="extrapolated: ResNet-18", ylim=(0, 1)
    )
    panels[2].legend(frameon=False)
    drawn.savefig(FIGURE, dpi=120)


def rewritten(page: str) -> str:
    before, _, rest = page.partition(START)
    return before + START + tables(json.loads(RESULTS.read_text(encoding="utf-8"))) + END + rest.partition(END)[2]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="", help="measure these parts again, separated by commas")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    page = PAGE.read_text(encoding="utf-8") if PAGE.exists() else START + END
    if options.check:
        return int(rewritten(page) != page)
    if options.out:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        torch.multiprocessing.spawn(measure, (options.out, options.only, port), nprocs=2)
        found = json.loads(options.out.read_text(encoding="utf-8")) | {"bytes of a ResNet-18 candidate": resnet_bytes()}
        found["model"] = {
            "seconds of a step on one H200 by candidates and tangent points": {str(key): t for key, t in STEPS.items()},
            "steps": RUN_STEPS,
            "assumed bytes per second": BUS,
        }
        options.out.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        return 0
    PAGE.write_text(rewritten(page), encoding="utf-8")
    figure(json.loads(RESULTS.read_text(encoding="utf-8")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
