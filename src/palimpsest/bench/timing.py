"""Time contenders in turns, at one shape and over shapes that differ in one respect."""

import gc
import math
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from palimpsest.bench.steps import Run, Shape, automatic, contenders, estimated_megabytes
from palimpsest.errors import InvalidInputError
from palimpsest.files.versions import versions

WARM_UP = 5  # steps
REFERENCES = ("published float64", "published float32")
Tick = Callable[[str], None]
"""Called with the name of each contender before it is prepared, and before each of its turns."""


@dataclass(frozen=True)
class Timing:
    """One contender."""

    name: str
    milliseconds: float  # median over the turns
    fastest: float
    megabytes: float | None  # peak memory of tensors and intermediate results on CUDA


@dataclass(frozen=True)
class Effort:
    """The number of turns, and the approximate seconds of each contender in a turn."""

    turns: int = 7
    seconds: float = 0.25

    def __post_init__(self) -> None:
        if self.turns < 1 or not self.seconds > 0:
            raise InvalidInputError(f"turns is {self.turns} and seconds {self.seconds}; give positive numbers")


def measure(
    shape: Shape,
    device: torch.device,
    effort: Effort,
    *,
    only: Sequence[str] | None = None,
    tick: Tick = lambda name: None,
) -> list[Timing]:
    """Time every contender, or only some, in turns."""
    runs, counts, memory = {}, {}, {}
    for name, make in contenders(shape, device).items():
        if only is None or name in only:
            tick(name)
            runs[name], memory[name] = _ready(make, device)
            counts[name] = max(3, int(effort.seconds * WARM_UP / _seconds(runs[name], WARM_UP, device)))
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(effort.turns):
        for name, run in runs.items():
            tick(name)
            times[name].append(1e3 * _seconds(run, counts[name], device) / counts[name])
    return [Timing(name, statistics.median(t), min(t), memory[name]) for name, t in times.items()]


def ratios(timings: Sequence[Timing]) -> list[dict[str, Any]]:
    """Each contender with its time relative to the floor and to the published method."""
    of = {t.name: t.milliseconds for t in timings}
    return [
        asdict(t)
        | {"of the floor": t.milliseconds / of["floor"]}
        | {f"faster than {name}": of[name] / t.milliseconds for name in REFERENCES if name in of}
        for t in timings
    ]


def variations(base: Shape) -> dict[str, dict[int, Shape]]:
    """Shapes that differ from the base in one respect, under its values."""

    def scaled(value: int, factor: float) -> int:
        return max(1, round(value * factor))

    (channels, *sides), width, depth = base.image, base.hidden[0], len(base.hidden)
    images = [(channels, *(scaled(side, factor) for side in sides)) for factor in (0.5, 1, 2, 4)]
    numbers = [scaled(base.candidates, factor) for factor in (0.25, 0.5, 1, 2, 4)]
    widths = [scaled(width, factor) for factor in (0.25, 0.5, 1, 2)]
    return {
        "candidates k": {k: replace(base, candidates=k) for k in numbers},
        "width m": {m: replace(base, hidden=(m,) * depth) for m in widths},
        "hidden layers": {layers: replace(base, hidden=(width,) * layers) for layers in (1, 2, 3, 4)},
        "input size d": {math.prod(image): replace(base, image=image) for image in images},
    }


def compare(
    base: Shape, device: torch.device, effort: Effort, *, sweep: bool = True, tick: Tick = lambda name: None
) -> dict[str, Any]:
    """Everything that `palimpsest bench` writes: all contenders at one shape, and three of them over its variations."""
    rows = ratios(measure(base, device, effort, tick=tick))

    def point(value: int, shape: Shape) -> dict[str, Any]:
        timings = measure(shape, device, effort, only=_swept(device), tick=tick)
        facts = {"value": value, "shape": asdict(shape), "estimated megabytes": estimated_megabytes(shape)}
        return facts | {"timings": ratios(timings)}

    return {
        "versions": versions(),
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "effort": asdict(effort),
        "automatic": automatic(device),
        "shape": asdict(base) | {"estimated megabytes": estimated_megabytes(base)},
        "steps": {base.name: rows},
        "sweep": {
            respect: [point(value, shape) for value, shape in shapes.items()]
            for respect, shapes in (variations(base) if sweep else {}).items()
        },
    }


def ticks(base: Shape, device: torch.device, effort: Effort, *, sweep: bool = True) -> int:
    """The number of ticks of :func:`compare`."""
    points = sum(map(len, variations(base).values())) if sweep else 0
    return (1 + effort.turns) * (len(contenders(base, device)) + points * len(_swept(device)))


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _swept(device: torch.device) -> tuple[str, ...]:
    return "published float32", automatic(device), "floor"


def _ready(make: Callable[[], Run], device: torch.device) -> tuple[Run, float | None]:
    """A contender after its first steps, and their peak memory. A graph takes its memory when it is captured."""
    cuda, before = device.type == "cuda", 0
    if cuda:
        gc.collect()  # frees the memory of earlier contenders, which would be counted for this one
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
    run = make()
    run(WARM_UP)
    return run, (torch.cuda.max_memory_allocated(device) - before) / 1e6 if cuda else None


def _seconds(run: Run, steps: int, device: torch.device) -> float:
    _wait(device)
    began = time.perf_counter()
    run(steps)
    _wait(device)
    return time.perf_counter() - began


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
