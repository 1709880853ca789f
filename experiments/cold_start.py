"""How long does a result take on a machine that has compiled nothing yet?

    python experiments/cold_start.py                              on a GPU: writes docs/results/cold-start.json
    python experiments/cold_start.py --parts audit --minutes 1    only these rows; the others stay in the file
    python experiments/cold_start.py --page                       docs/results → docs/performance.md
    python experiments/cold_start.py --small                      seconds on a CPU, without files; writes nothing there

**cold**: the reconstruction of docs/performance.md, 100 images of CIFAR-10 in 20,000 steps. Each row is a process of
its own, with an empty folder for compiled kernels, or with the folder that the row before it left.

**audit**: the command line audits a convolutional network of 50 images, with its initial weights, its training images
and others held out. Every audit begins with an empty folder for compiled kernels.

Networks are trained in other processes, and kept in --scratch. CIFAR-10 is found by PALIMPSEST_DATA.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tables
import torch
from networks_in_use import training
from networks_in_use.rows import ROWS
from provenance import made_by

import palimpsest as pal
from palimpsest.bench.timing import device_name
from palimpsest.execution import Execution, Executor, Mode
from palimpsest.files.storage import write_atomically

ROOT = Path(__file__).resolve().parents[1]
RESULTS, SCRATCH, PAGE = ROOT / "docs/results/cold-start.json", ROOT / "runs/cold-start", "performance.md"
NETWORK = ROOT / "experiments/networks_in_use/networks.py"
PARTS = ("cold", "audit")
BARS = (0.4, 0.6, 0.9)
KEPT = "kernels of the row before"
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Way:
    """A row of the first table."""

    says: str
    mode: Mode
    empty: bool
    """Whether the folder for compiled kernels is empty, or that of the row before."""
    goal: float | None = None
    """Seconds."""


WAYS = (
    Way("automatic, no kernels", "auto", True, goal=10),
    Way("compiled, no kernels", "compiled-graph", True),
    Way(f"compiled, {KEPT}", "compiled-graph", False, goal=5),
    Way(f"automatic, {KEPT}", "auto", False, goal=5),
)
AUDIT_GOAL = 60  # seconds, for --minutes 1
COLD, AUDITED = "cold start", "audit of a minute"  # the names of the tables in the page


@dataclass(frozen=True)
class Scale:
    """The sizes of an experiment."""

    small: bool

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.small else "cuda")

    @property
    def hidden(self) -> tuple[int, int]:
        return (20, 20) if self.small else (1000, 1000)

    @property
    def candidates(self) -> int:
        return 8 if self.small else 200

    @property
    def steps(self) -> int:
        return 20 if self.small else 20_000

    def mode(self, wanted: Mode) -> Mode:
        """There are no graphs on a CPU."""
        return "eager" if self.small and wanted != "auto" else wanted


# --- processes of their own ---------------------------------------------------------------------------


def run(stage: str, folder: Path, kernels: Path, scale: Scale, *options: str) -> float:
    """Run a stage of this script in a fresh process. The value is its seconds, from its start to its end."""
    began = time.monotonic()
    words = [sys.executable, __file__, "--stage", stage, "--scratch", str(folder), "--began", str(began), *options]
    subprocess.run(words + ["--small"] * scale.small, env=environment(kernels), check=True)
    return time.monotonic() - began


def environment(kernels: Path) -> dict[str, str]:
    """Of a process that finds compiled kernels in this folder alone."""
    folders = {f"{name.upper()}_CACHE_DIR": str(kernels / name) for name in ("torchinductor", "triton")}
    given = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    paths = [str(ROOT / "src"), *map(os.path.abspath, given)]  # a process may start in another folder
    return os.environ | folders | {"PYTHONPATH": os.pathsep.join(paths)}


def save_json(path: Path, content: Any) -> None:
    write_atomically(path, (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode())


def load_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


# --- from cold to a result ----------------------------------------------------------------------------


def train(folder: Path, scale: Scale) -> None:
    """Train the network of docs/performance.md, and keep its weights and images."""
    if scale.small:
        images, _ = training.source("cifar10", 16)
        images, held_out, mean = images[:4], images[4:12], images.mean(0)
        labels = torch.tensor([1, -1, 1, -1])
    else:
        data = pal.datasets.load("cifar10", per_class=50, seed=100, task="binary")
        images, held_out, mean = data.train.images, data.held_out.images[:500], data.mean
        labels = data.train.labels
    torch.manual_seed(100)
    model = pal.networks.MLP(images.shape[1:], scale.hidden).to(scale.device)
    fit = pal.train(model, images - mean, labels, loss="squared")
    weights = {"final": fit.model.state_dict(), "initial": fit.initial}
    torch.save({key: {name: t.cpu() for name, t in part.items()} for key, part in weights.items()}, folder / "mlp.pt")
    torch.save({"images": images, "held_out": held_out, "mean": mean}, folder / "images.pt")


def read(folder: Path, mode: Mode, scale: Scale, began: float) -> None:
    """Reconstruct, and keep the candidates and the times. The clock of a call starts before CUDA does."""
    imports = time.monotonic() - began
    weights = torch.load(folder / "mlp.pt", weights_only=True)
    shape = (3, 16, 16) if scale.small else (3, 32, 32)
    model = pal.networks.MLP(shape, scale.hidden)
    model.load_state_dict(weights["final"])
    execution = Watched(mode=mode)
    start = time.perf_counter()
    objective = pal.NTK(model, weights["initial"], at=0.5).to(scale.device, torch.float32)
    ready = time.perf_counter()
    rec = pal.reconstruct(
        objective, image_shape=shape, candidates=scale.candidates, steps=scale.steps, execution=execution,
        priors=(pal.priors.Box(), pal.priors.TotalVariation()), progress=False,
    )  # fmt: skip
    images = rec.images.cpu()  # waits for the device
    end = time.perf_counter()
    torch.save(images, folder / "candidates.pt")
    times = {"imports": imports, "start of CUDA": ready - start, "seconds": end - start}
    facts = {"mode at the end": executors[-1].mode, "device": device_name(scale.device)}
    save_json(folder / "read.json", {key: round(value, 2) for key, value in times.items()} | facts)


executors: list[Executor] = []


class Watched(Execution):
    """Keeps its executors, which know the mode that they came to."""

    def executor(self, *arguments: Any, **options: Any) -> Executor:
        executors.append(super().executor(*arguments, **options))
        return executors[-1]


def cold(folder: Path, scale: Scale) -> Rows:
    """Every way once."""
    rows: Rows = []
    with tempfile.TemporaryDirectory() as name:
        kernels = Path(name) / "training"
        if not (folder / "mlp.pt").exists():
            run("train", folder, kernels, scale)
        images = torch.load(folder / "images.pt", weights_only=True)
        for number, way in enumerate(WAYS):
            kernels = Path(name) / str(number) if way.empty else kernels
            seconds = run("read", folder, kernels, scale, "--mode", scale.mode(way.mode))
            found = pal.score(torch.load(folder / "candidates.pt", weights_only=True), **images)
            row = {"way": way.says, "mode": way.mode, "goal": way.goal, **load_json(folder / "read.json")}
            row |= {"process seconds": round(seconds, 2), "mean SSIM": round(float(found.ssim.mean()), 4)}
            row |= {f"above {bar}": int((found.ssim > bar).sum()) for bar in BARS}
            row |= {"compiled files": sum(path.is_file() for path in kernels.rglob("*"))}
            if way.goal is not None:
                row |= {"kept": row["seconds"] <= way.goal, "kept by the process": seconds <= way.goal}
            rows.append(row)
            print(json.dumps(row, ensure_ascii=False), flush=True)
    return rows


# --- an audit -----------------------------------------------------------------------------------------


def train_audited(folder: Path, seed: int, scale: Scale) -> None:
    """Train a network of `networks_in_use`, and write its weights and images as a user has them."""
    row = ROWS["cnn-50-torch-start"].small() if scale.small else ROWS["cnn-50-torch-start"]
    images = training.load(row, seed)
    model = training.before(row, seed, folder).to(scale.device)
    x, y = (images.train - images.mean).to(scale.device), images.labels.to(scale.device).float()
    began = time.perf_counter()
    model, (start, end), facts = training.train(model, x, y, row.training, seed)
    facts |= {"seconds": round(time.perf_counter() - began, 1), "device": device_name(scale.device)}
    for file, state in (("start", start), ("final", end)):
        torch.save({name: t.cpu() for name, t in state.items()}, folder / f"{file}.pt")
    np.save(folder / "mean.npy", images.mean.numpy())
    labels = (images.labels > 0).long().numpy()  # those held out are of the same classes
    for file, each in (("train", images.train), ("held-out", images.held_out)):
        np.savez(folder / f"{file}.npz", images=each.numpy(), labels=labels)
    network = {"side": row.side, "width": row.width, "he": False}
    save_json(folder / "network.json", {"arguments": network, "training": facts, "n": row.n})


def audit(folder: Path, minutes: float, seed: int, scale: Scale) -> dict[str, Any]:
    """One audit in a fresh process: its time, its events, and what audit.json says."""
    with tempfile.TemporaryDirectory() as name:
        if not (folder / "network.json").exists():
            folder.mkdir(parents=True, exist_ok=True)
            run("train-audited", folder, Path(name) / "training", scale, "--seeds", str(seed))
        made, out = load_json(folder / "network.json"), Path(name) / "audit"
        words, env = command(out, minutes, made, scale), environment(Path(name) / "kernels")
        status, seconds, log = followed(words, folder, env)
        row = {"minutes": minutes, "seed": seed, "seconds": round(seconds, 2), "status": status, "images": made["n"]}
        row |= {"training": made["training"], "said": said(out / "audit.json") if status == 0 else None, "log": log}
    if minutes == 1:
        row |= {"goal": AUDIT_GOAL, "kept": status == 0 and seconds <= AUDIT_GOAL}
    return row


def command(out: Path, minutes: float, made: Mapping[str, Any], scale: Scale) -> list[str]:
    """In the folder of the trained network, so that its events name files without a place."""
    side = made["arguments"]["side"]
    words = {
        "network": f"{NETWORK}:convolutional", "network-args": json.dumps(made["arguments"]),
        "weights": "final.pt", "initial": "start.pt", "data": "train.npz", "held-out": "held-out.npz",
        "mean": "mean.npy", "out": out, "shape": f"3,{side},{side}", "minutes": f"{minutes:g}",
        "device": scale.device.type,
    }  # fmt: skip
    if scale.small:
        words |= {"steps": 5, "restarts": 2, "tangents": 1, "control-steps": 10}
    options = [word for key, value in words.items() for word in (f"--{key}", str(value))]
    return [sys.executable, str(ROOT / "src/palimpsest_entry.py"), "audit", *options]


def followed(words: Sequence[str], folder: Path, env: Mapping[str, str]) -> tuple[int, float, list[str]]:
    """The status of a command in a folder, its seconds, and its events, each with the second at which it came."""
    began, pipe, nowhere = time.monotonic(), subprocess.PIPE, subprocess.DEVNULL
    with subprocess.Popen(words, cwd=folder, env=dict(env), stdout=nowhere, stderr=pipe, text=True) as process:
        assert process.stderr is not None
        log = [f"{time.monotonic() - began:.1f} {line.strip()}" for line in process.stderr]
        status = process.wait()
    return status, time.monotonic() - began, log


def said(file: Path) -> dict[str, Any]:
    """The fields of audit.json that show how good the answer is, and what it is worth."""
    content = load_json(file)
    parts = {name: content[name] for name in ("verdict", "readings", "doubts", "membership")}
    recovered = (content["images"] or {}).get("recovered")
    return parts | {"recovered": None if recovered is None else len(recovered)}


# --- the file and the page ----------------------------------------------------------------------------


def measure(options: argparse.Namespace, scale: Scale) -> None:
    """Measure the selected parts, and write the file after the first one and after each audit."""
    results = load_json(options.out) if options.out.exists() else {}
    results |= made_by("python experiments/cold_start.py" + " --small" * scale.small)
    results |= {"torch": str(torch.__version__), "cores": len(os.sched_getaffinity(0))}
    folder = options.scratch / "small" if scale.small else options.scratch
    folder.mkdir(parents=True, exist_ok=True)
    if "cold" in options.parts:
        results["cold"] = cold(folder, scale)
        results["device"] = results["cold"][-1]["device"]
        save_json(options.out, results)
    if "audit" in options.parts:
        for minutes, seed in [(minutes, seed) for minutes in options.minutes for seed in options.seeds]:
            row = audit(folder / f"audited-{seed}", minutes, seed, scale)
            others = [each for each in results.get("audit", []) if (each["minutes"], each["seed"]) != (minutes, seed)]
            results["audit"] = sorted([*others, row], key=lambda each: (each["minutes"], each["seed"]))
            results["device"] = row["training"]["device"]
            save_json(options.out, results)
            print(json.dumps(row | {"said": (row["said"] or {}).get("verdict")}, ensure_ascii=False), flush=True)


def cold_table(rows: Rows) -> str:
    columns = ["", "goal", "seconds of the call", "of the process", "mode at the end", "mean SSIM"]
    columns += [f"above {' / '.join(map(str, BARS))}"]
    return tables.markdown(columns, [_cold_cells(row) for row in rows])


def _cold_cells(row: Mapping[str, Any]) -> list[str]:
    goal = "–" if row["goal"] is None else f"{row['goal']:g}"
    seconds = [f"{row[key]:.1f}" for key in ("seconds", "process seconds")]
    above = " / ".join(str(row[f"above {bar}"]) for bar in BARS)
    return [row["way"], goal, *seconds, row["mode at the end"], f"{row['mean SSIM']:.3f}", above]


def audit_table(rows: Rows) -> str:
    columns = ["--minutes", "seed", "seconds", "outcome", "recovered"]
    return tables.markdown(columns, [_audit_cells(row) for row in rows])


def _audit_cells(row: Mapping[str, Any]) -> list[str]:
    cells = [f"{row['minutes']:g}", str(row["seed"]), f"{row['seconds']:.1f}"]
    if (found := row["said"]) is None:
        return [*cells, "none, it stopped", "–"]
    recovered = "–" if found["recovered"] is None else f"{found['recovered']} of {row['images']}"
    return [*cells, found["verdict"]["outcome"], recovered]


def write_page(file: Path) -> None:
    results = load_json(file) if file.exists() else {}
    for part, table, name in (("cold", cold_table, COLD), ("audit", audit_table, AUDITED)):
        tables.write(PAGE, table(results[part]) if part in results else tables.NOT_MEASURED, name)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=lambda text: text.split(","), default=PARTS, help="cold,audit")
    parser.add_argument("--minutes", type=float, nargs="+", default=[1.0, 2.0], help="of the audits")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(training.REPORTED), help="of the audits")
    parser.add_argument("--out", type=Path, help="file of the results")
    parser.add_argument("--scratch", type=Path, default=SCRATCH, help="folder for trained networks")
    parser.add_argument("--small", action="store_true", help="a version for a test, which does not need files")
    parser.add_argument("--page", action="store_true", help="write the tables into their page of the docs, and end")
    for name, kind in (("stage", str), ("mode", str), ("began", float)):  # of a process that this script starts
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"there is no part {', '.join(sorted(unknown))}; choose from {', '.join(PARTS)}")
    scale, options.scratch = Scale(options.small), options.scratch.resolve()
    options.out = options.out or (options.scratch / "small/cold-start.json" if scale.small else RESULTS)
    if options.stage == "train":
        train(options.scratch, scale)
    elif options.stage == "read":
        read(options.scratch, options.mode, scale, options.began)
    elif options.stage == "train-audited":
        train_audited(options.scratch, options.seeds[0], scale)
    elif options.page:
        write_page(options.out)
    else:
        measure(options, scale)
    return 0


if __name__ == "__main__":
    sys.exit(main())
