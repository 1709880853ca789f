"""Trains and reads the selected rows, each (row, seed) once, and prints them as a table."""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import processes
import tables
import torch
from provenance import made_by

from networks_in_use import reading, training
from networks_in_use.rows import ROWS, Row
from palimpsest.execution import MODES, Mode
from palimpsest.files.storage import write_atomically

ROOT = Path(__file__).resolve().parents[2]
RESULTS, SCRATCH = ROOT / "experiments/results/networks-in-use", ROOT / "runs/networks-in-use"
PAGE = "experiments/networks-in-use.md"
GOOD = 0.4  # the SSIM above which the literature counts an image


@dataclass(frozen=True, kw_only=True)
class Part:
    """One network and its reading."""

    row: Row
    seed: int
    small: bool
    results: Path
    scratch: Path
    ends: float
    mode: Mode

    @property
    def file(self) -> Path:
        return self.results / f"{self.row.name}-seed{self.seed}.json"

    def run(self) -> str:
        if time.time() > self.ends:
            return f"{self.row.name} seed {self.seed}: out of time"
        row, seed, device = self.row, self.seed, reading.device()
        images = training.load(row, seed)
        model = training.before(row, seed, self.scratch).to(device).eval()
        if row.kind == "resnet":
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        x = (images.train - images.mean).to(device)
        y = training.targets(row, images).to(device)
        began = time.perf_counter()
        model, checkpoints, trained = training.train(model, x, y, row.training, seed, row.reading.segments)
        trained["seconds"] = round(time.perf_counter() - began, 1)
        try:
            rec, read = reading.read(model, checkpoints, row, images, seed=seed, ends=self.ends, mode=self.mode)
        except reading.OutOfTimeError as stopped:
            return f"{row.name} seed {seed}: {stopped}"
        command = f"python experiments/networks_in_use --rows {row.name} --seeds {seed}" + " --small" * self.small
        command += f" --mode {self.mode}" * (self.mode != "auto")
        result = {"row": row.name, "says": row.says, "n": row.n, "seed": seed} | made_by(command)
        result |= {"device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU"}
        result |= {"parameters": sum(p.numel() for p in model.parameters() if p.requires_grad)}
        result |= {"training": asdict(row.training) | trained, "reading": asdict(row.reading) | read}
        result |= reading.scored(rec.images, images, by_simudy=row.kind == "resnet")
        self.results.mkdir(parents=True, exist_ok=True)
        write_atomically(self.file, (json.dumps(result, separators=(",", ":")) + "\n").encode())
        return line(result)


def line(result: dict[str, Any]) -> str:
    peer = result.get("ssim as SimuDy measures it")
    return (
        f"{result['row']} seed {result['seed']}: mean SSIM {_mean(result['ssim']):.3f}"
        + (f" ({_mean(peer):.3f} as SimuDy measures it)" if peer else "")
        + f", above 0.4 {_good(result['ssim'])} of {result['n']}, recovered {result['recovered']}, held-out at most"
        f" {max(result['held-out ssim']):.2f}, trained in {result['training']['seconds']:.0f} s, read in"
        f" {result['reading']['seconds']:.0f} s"
    )


def table(results: Path) -> str:
    """The results, averaged over seeds."""
    parts = defaultdict(list)
    for file in results.glob("*.json"):
        part = json.loads(file.read_bytes())
        parts[part["row"]].append(part)
    columns = ["network", "images", "seeds", "mean SSIM", "by SimuDy's measure", "above 0.4", "held-out above 0.4"]
    columns += ["recovered", "seconds to train", "seconds to read"]
    return tables.markdown(columns, [_cells(row, parts[row.name]) for row in ROWS.values() if parts[row.name]])


def _cells(row: Row, seeds: Sequence[dict[str, Any]]) -> list[object]:
    peer = [_mean(part["ssim as SimuDy measures it"]) for part in seeds if row.kind == "resnet"]
    return [
        row.says,
        row.n,
        len(seeds),
        f"{_mean([_mean(part['ssim']) for part in seeds]):.3f}",
        f"{_mean(peer):.3f}" if peer else "",
        f"{_mean([_good(part['ssim']) for part in seeds]):.0f}",
        f"{_mean([_good(part['held-out ssim']) for part in seeds]):.1f}",
        f"{_mean([part['recovered'] for part in seeds]):.0f}",
        f"{_mean([part['training']['seconds'] for part in seeds]):.0f}",
        f"{_mean([part['reading']['seconds'] for part in seeds]):.0f}",
    ]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _good(values: Sequence[float]) -> int:
    return sum(value > GOOD for value in values)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="networks_in_use", description="Train and read networks as people use them.")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(training.REPORTED))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time")
    processes.add_arguments(parser)
    parser.add_argument("--mode", choices=("auto", *MODES), default="auto", help="how the steps of a reading run")
    parser.add_argument("--results", type=Path, help="folder for the results")
    parser.add_argument("--scratch", type=Path, default=SCRATCH, help="folder for pretrained networks")
    parser.add_argument("--small", action="store_true", help="a version for a test, which does not need files")
    parser.add_argument("--table", action="store_true", help="print the results as a table, and end")
    parser.add_argument("--page", action="store_true", help="write the table into its page of the docs, and end")
    options = parser.parse_args(arguments)
    results = options.results or (SCRATCH / "small" if options.small else RESULTS)
    if options.table or options.page:
        tables.write(PAGE, table(results)) if options.page else print(table(results), end="")
        return 0
    ends = time.time() + options.seconds
    parts = [
        Part(row=ROWS[name].small() if options.small else ROWS[name], seed=seed, small=options.small, results=results,
             scratch=options.scratch, ends=ends, mode=options.mode)
        for name in options.rows for seed in options.seeds
    ]  # fmt: skip
    parts = [part for part in parts if not part.file.exists()]
    for part in parts:
        training.pretrain(part.row, options.scratch, reading.device())
    return processes.run_all({f"{part.row.name} seed {part.seed}": part.run for part in parts}, options)
