"""`palimpsest bench`."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro

from palimpsest import bench as benchmark
from palimpsest.cli.shared import Device, bar, image_shape, torch_device
from palimpsest.files.storage import write_atomically
from palimpsest.runs.journal import printable


@dataclass
class Bench:
    """Time a reconstruction step in every mode, against the published method and the minimum of the hardware.

    Close other programs first. All modes are timed in turns; compare only numbers of the same run. Writes bench.json
    and, from the sweep, bench.png: time and memory against candidates, width, depth and input size.

        palimpsest bench
        palimpsest bench --no-sweep --image 1,28,28 --hidden 1000 1000 --candidates 500
    """

    out: Path = Path("runs/bench")
    """The folder to write to."""
    image: Annotated[str | None, tyro.conf.arg(metavar="C,H,W")] = None
    """Channels, height and width of an image. If omitted: 1,25,25, or 3,32,32 on CUDA."""
    hidden: tuple[int, ...] | None = None
    """Widths of the hidden layers. If omitted: 500 500, or 1000 1000 on CUDA."""
    candidates: int | None = None
    """Number of candidates. If omitted: 80, or 1000 on CUDA."""
    sweep: bool = True
    """Also vary each of these numbers for the published method in float32, the automatic mode and the floor."""
    turns: int = 7
    """Timing turns per mode; the median is reported."""
    seconds: float = 0.25
    """Seconds per turn."""
    device: Device = "auto"
    """Device to compute on. auto: CUDA if available."""

    def run(self) -> None:
        device, effort = torch_device(self.device), benchmark.Effort(self.turns, self.seconds)
        shape = self._shape(device)
        self.out.mkdir(parents=True, exist_ok=True)
        with bar(benchmark.ticks(shape, device, effort, sweep=self.sweep), unit="") as progress:

            def tick(name: str) -> None:
                progress.set_description(f"{name:20s}")
                progress.update()

            results = benchmark.compare(shape, device, effort, sweep=self.sweep, tick=tick)
        self._write(results)
        _print_timings(results)
        print("\n" + printable(f"The figures are in {self.out}"))

    def _write(self, results: Mapping[str, Any]) -> None:
        from palimpsest.bench.figure import draw  # no other command should wait for matplotlib

        picture = self.out / "bench.png"
        picture.unlink(missing_ok=True)  # one of another run would not belong to these numbers
        write_atomically(self.out / "bench.json", (json.dumps(results, indent=1) + "\n").encode())
        if self.sweep:
            write_atomically(picture, draw(results))

    def _shape(self, device: torch.device) -> benchmark.Shape:
        usual = benchmark.Shape.usual(device)
        return replace(
            usual,
            image=usual.image if self.image is None else image_shape(self.image),
            hidden=usual.hidden if self.hidden is None else self.hidden,
            candidates=usual.candidates if self.candidates is None else self.candidates,
        )


def _print_timings(results: Mapping[str, Any]) -> None:
    ((shape, rows),) = results["steps"].items()
    print(f"{shape}; {results['device']}, threads: {results['threads']}\n")
    print(f"{'':20s}{'ms per step':>11s}{'of the floor':>14s}{'times faster than published':>29s}")
    print(f"{'':45s}{'float64':>15s}{'float32':>14s}")
    for row in rows:
        faster = (row[f"faster than published {dtype}"] for dtype in ("float64", "float32"))
        times = "".join(f"{ratio:{width}.2f}" for ratio, width in zip(faster, (15, 14), strict=True))
        print(f"{row['name']:20s}{row['milliseconds']:11.3f}{row['of the floor']:14.2f}{times}")
    print(f"\nLong runs use {results['automatic']} mode on this device by default.")
