"""Trains and reads the selected settings, each part once."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import peers
import processes
import tables
import torch
from provenance import made_by
from torch import Tensor

import palimpsest as pal
from palimpsest.datasets import DataSet
from palimpsest.errors import DivergenceError
from palimpsest.files.storage import load_tensors, save_tensors
from palimpsest.solver.reconstruction import Reconstruction
from published import claim, explained, readers
from published.recipes import PUBLISHED, SETTINGS, KKTRun, LooRun, Precision, Setting
from published.training import TUNING, Trained, device, load, train, trained, write_json

ROOT = Path(__file__).resolve().parents[2]
RESULTS, SCRATCH = ROOT / "experiments" / "results", Path("runs/published")
PAGE = "experiments/published.md"
DIGITS = 5  # of a number in the files
PICTURED = 30  # best images that are kept as pictures


@dataclass(frozen=True, kw_only=True)
class Lane:
    """One network and everything that reads it, in one process."""

    setting: Setting
    seed: int
    precision: Precision
    read_precision: Precision
    columns: tuple[str, ...]
    """Empty: all."""
    results: Path
    scratch: Path
    ends: float
    options: str
    """Of the command line, to name the command that makes a part."""

    @property
    def name(self) -> str:
        return f"{self.setting.name} seed {self.seed} {self.precision}"

    @property
    def folder(self) -> Path:
        return self.results / f"published-{self.setting.name}"

    def run(self) -> None:
        network = trained(self.setting, self.seed, self.precision, self.scratch, self.folder)
        data = load(self.setting, self.seed)
        for column, read in self._readers(network, data):
            if time.time() > self.ends:
                print(f"{self.name}: out of time before {column}", flush=True)
                return
            try:
                read()
            except DivergenceError as error:  # the other parts can still be run
                print(f"{self.name} {column}: {error}", flush=True)

    def _readers(self, network: Trained, data: DataSet) -> Iterator[tuple[str, Callable[[], object]]]:
        """The selected columns and what fills them: ours first, because it takes seconds."""
        setting, makers = self.setting, dict[str, Callable[[], Reconstruction]]()
        known = readers.OURS.get(setting.name)  # squared loss without weight decay has no KKT point
        if known is not None:
            own = readers.TRIALS if self.seed == TUNING else {"ours": known}
            for name, recipe in own.items():
                makers[name] = partial(readers.ours, setting, network, data, recipe, seed=self.seed)
        if change := readers.WITH_INITIAL.get(setting.name):
            makers["with-initial"] = partial(readers.with_initial, setting, network, data, change, seed=self.seed)
        for name, (steps, recipe, settings) in readers.WITH_CHECKPOINTS.items():
            if network.checkpoints.keys() >= set(steps) and setting.name in (settings or (setting.name,)):
                makers[name] = partial(
                    readers.with_initial, setting, network, data, recipe, seed=self.seed,
                    checkpoints=[network.checkpoints[step] for step in steps],
                )  # fmt: skip
        for column, make in makers.items():
            if not self.columns or {column, column.split("-")[0]} & set(self.columns):
                yield column, partial(self._part, column, "none", network, data, make)
        if not self.columns or setting.column in self.columns:
            yield setting.column, partial(self._published, network, data)
        if "claim" in self.columns:
            for variant, make in claim.variants(setting, network, data, self.read_precision, self.seed).items():
                yield f"claim {variant}", partial(self._part, "claim", variant, network, data, make)

    # --- parts -----------------------------------------------------------------------------------

    def _published(self, network: Trained, data: DataSet) -> None:
        """Each run of the authors, and both together."""
        suffix = "" if self.read_precision == self.precision else f"-{self.read_precision}"
        column, pool, results = self.setting.column + suffix, list[Tensor](), list[dict[str, Any]]()
        for run in self.setting.runs:
            variant = run.name if len(self.setting.runs) > 1 else "none"
            results.append(self._part(column, variant, network, data, partial(self._one_run, run, network, data)))
            pool.append(load_tensors(self._candidates(column, variant))[0]["images"])
        if self._file(column, "none").exists():
            return
        whole = results[0] | {"variant": "none", "runs": [run.name for run in self.setting.runs]}
        whole |= {name: sum(each[name] for each in results) for name in ("seconds", "final candidates")}
        self._write(column, "none", whole | judged(self.setting, data, torch.cat(pool)))

    def _one_run(self, run: KKTRun | LooRun, network: Trained, data: DataSet) -> Reconstruction:
        file = self._candidates(self.setting.column, run.name).with_suffix(f".{self.read_precision}.checkpoint")
        options: dict[str, Any] = {"precision": self.read_precision, "seed": self.seed, "checkpoint": file}
        rec = readers.published(self.setting, run, network, data, **options)
        file.unlink(missing_ok=True)
        return rec

    def _part(
        self, column: str, variant: str, network: Trained, data: DataSet, make: Callable[[], Reconstruction]
    ) -> dict[str, Any]:
        """The result of one reconstruction, which is made if its file is missing."""
        candidates = self._candidates(column, variant)
        if self._file(column, variant).exists() and candidates.exists():
            return json.loads(self._file(column, variant).read_bytes())
        began = time.perf_counter()
        rec = make()
        if rec.images.is_cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        candidates.parent.mkdir(parents=True, exist_ok=True)
        save_tensors(candidates, {"images": rec.images.float().cpu(), "multipliers": rec.multipliers.float().cpu()}, {})
        result = {"column": column, "variant": variant, "candidates": self.setting.candidates, "seed": self.seed}
        result |= made_by(f"python experiments/published {self.options}")
        result |= {"device": torch.cuda.get_device_name() if rec.images.is_cuda else "CPU"}
        result |= {"training": network.facts, "read in": self.read_precision, "differs": self.setting.differs}
        result |= {"seconds": round(seconds, 2)} | account(rec)
        result |= judged(self.setting, data, rec.images)
        self._write(column, variant, result)
        return result

    def _write(self, column: str, variant: str, result: dict[str, Any]) -> None:
        write_json(self._file(column, variant), result)
        peer = result["peer"]
        print(
            f"{self.name} {column} {variant}: mean SSIM {_mean(result['ssim']):.3f}, above 0.4 {_above(result['ssim'])}"
            f" (held out {_above(result['held-out ssim'])}), recovered {result['recovered']}, by the peer's measure"
            f" {_mean(peer['ssim']):.3f}, above 0.4 {_above(peer['ssim'])}, {result['seconds']:.0f} s",
            flush=True,
        )

    def _name(self, column: str, variant: str) -> str:
        usual = usual_precision(self.setting, self.seed) == self.precision
        suffix = "" if usual else f"-{self.precision}"
        return f"{column}-{variant}-k{self.setting.candidates}-seed{self.seed}{suffix}"

    def _file(self, column: str, variant: str) -> Path:
        return self.folder / f"{self._name(column, variant)}.json"

    def _candidates(self, column: str, variant: str) -> Path:
        folder = self.scratch / self.setting.name / "candidates"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{self._name(column, variant)}.safetensors"


def usual_precision(setting: Setting, seed: int) -> Precision:
    """That of the authors for the first seed, a faster one for the others; `agreement` compares them."""
    return setting.precision if seed == 1 else "tf32"


def judged(setting: Setting, data: DataSet, candidates: Tensor) -> dict[str, Any]:
    """The scores by our measure and by the peer's, for training images and for held-out ones."""
    candidates = candidates.to(device())
    score = pal.score(candidates, data.train.images, held_out=data.held_out.images, mean=data.mean.float())
    assert score.held_out is not None
    lists = {"ssim": score.ssim, "l2": score.l2, "likeness": score.likeness}
    lists |= {"held-out ssim": score.held_out.ssim, "held-out l2": score.held_out.l2}
    lists |= {"held-out likeness": score.held_out.likeness}
    result: dict[str, Any] = {name: _rounded(t) for name, t in lists.items()}
    result |= {"recovered": score.verdict.recovered, "verdict": score.verdict.outcome.value}
    result |= {"sentence": score.verdict.sentence, "auc": score.verdict.auc}
    of = {"": data.train.images, "held-out ": data.held_out.images}
    result["peer"] = {}
    for prefix, images in of.items():
        if setting.column == "loo":
            measured = peers.loo(candidates, images, data.mean)
        else:
            measured = peers.haim(candidates, images, data.mean, half=setting.half)
        result["peer"] |= {prefix + name: _rounded(t) for name, t in measured.items()}
    result["peer"]["best 25 l2"] = _mean(sorted(result["peer"]["l2"])[: peers.BEST])
    best = score.ssim.argsort(descending=True)[:PICTURED]
    result["pictured"] = best.tolist()
    return result


def account(rec: Reconstruction) -> dict[str, Any]:
    """Loss, candidates and splits, with the spread of the curvature on which a split was decided."""
    records = [entry for entry in rec.history if "loss" in entry]
    steps = [entry["step"] for entry in records]
    splits = []
    for entry in rec.history:
        if "split" in entry:
            λ = torch.tensor(entry["eigenvalues"], dtype=torch.float64)
            kept = {name: entry[name] for name in ("step", "split", "eta", "before", "after")}
            splits.append(
                kept | {"λ_min / ‖T‖²": [float(f"{q:.4g}") for q in λ.quantile(torch.linspace(0, 1, 5).double())]}
            )
    return {
        "loss": float(f"{rec.loss:.{DIGITS}g}"),
        "steps": steps[-1],
        "final candidates": len(rec.images),
        "candidate-steps": round(steps[-1] * sum(entry["candidates"] for entry in records) / len(records)),
        "splits": splits,
        "curve": [[entry["step"], float(f"{entry['loss']:.4g}")] for entry in records[:: max(1, len(records) // 40)]],
    }


def _rounded(values: Tensor) -> list[float]:
    return [round(value, DIGITS) for value in values.tolist()]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _above(values: Sequence[float]) -> int:
    return sum(value > 0.4 for value in values)


# --- agreement of precisions ----------------------------------------------------------------------


def agreement(results: Path) -> None:
    """By how much the trainings of one seed in different precisions differ, relative to float64."""
    for setting in SETTINGS:
        folder, rows = results / f"published-{setting.name}", []
        for file in sorted(folder.glob("training-seed*-float64.json")):
            exact = json.loads(file.read_bytes())
            for other in ("float32", "tf32"):
                twin = file.with_name(file.name.replace("float64", other))
                if twin.exists():
                    rough = json.loads(twin.read_bytes())
                    names = [name for name in ("margin", "normalised margin", "kkt residual", "loss") if exact[name]]
                    row = {name: round(rough[name] / exact[name] - 1, 5) for name in names}
                    rows.append({"training": file.stem, "against": other} | row)
        if rows:
            agrees = all(abs(row[name]) < 0.02 for row in rows for name in ("margin", "kkt residual") if name in row)
            write_json(folder / "agreement.json", made_by("python experiments/published --agreement")
                       | {"rows": rows, "within 2 %": agrees})  # fmt: skip
            print(f"{setting.name}: {rows}, within 2 %: {agrees}", flush=True)


# --- tables ---------------------------------------------------------------------------------------


def table(results: Path) -> str:
    """One row for each part."""
    columns = ["setting", "column", "variant", "seed", "trained in", "mean SSIM", "above 0.4", "held-out above 0.4"]
    columns += ["recovered", "peer's SSIM", "peer's above 0.4", "peer's L2, best 25", "the same, held out", "seconds"]
    return tables.markdown(columns, list(_rows(results)))


def _rows(results: Path) -> Iterator[list[object]]:
    for setting in SETTINGS:
        for file in sorted((results / f"published-{setting.name}").glob("*-k*-seed*.json")):
            part = json.loads(file.read_bytes())
            if part["column"] == "claim":
                continue
            peer, held_out = part["peer"], sorted(part["peer"]["held-out l2"])[: peers.BEST]
            row = [setting.name, part["column"], part["variant"], part["seed"], part["training"]["precision"]]
            row += [f"{_mean(part['ssim']):.3f}", _above(part["ssim"]), _above(part["held-out ssim"])]
            row += [part["recovered"], f"{_mean(peer['ssim']):.3f}", _above(peer["ssim"])]
            row += [f"{peer['best 25 l2']:.2f}", f"{_mean(held_out):.2f}", f"{part['seconds']:.0f}"]
            yield row


# --- the command line -----------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Train and read the published settings.")
    names = [setting.name for setting in SETTINGS]
    parser.add_argument("--setting", nargs="+", choices=names, default=[setting.name for setting in PUBLISHED],
                        help="all published ones if none is given")  # fmt: skip
    parser.add_argument("--seed", nargs="+", type=int, default=[1], help=f"{TUNING} is for tuning")
    parser.add_argument("--column", nargs="+", default=[], help="haim, buzaglo, loo, ours, with-initial,"
                        " with-checkpoints, with-early-checkpoints, claim, or training, which reads nothing; all but"
                        " claim if none is given")  # fmt: skip
    precisions = ("float64", "float32", "tf32")
    parser.add_argument("--precision", choices=precisions, help="of the training; for seed 1 that of the authors, else"
                        " tf32")  # fmt: skip
    parser.add_argument("--read-precision", choices=precisions, help="of the published reconstruction; that of the"
                        " training if not given")  # fmt: skip
    processes.add_arguments(parser)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="no part is begun after this time")
    parser.add_argument("--results", type=Path, help="folder for the results")
    parser.add_argument("--scratch", type=Path, default=SCRATCH, help="folder for networks and candidates")
    parser.add_argument("--small", action="store_true", help="a version for a test, which needs no files")
    parser.add_argument("--agreement", action="store_true", help="compare trainings of different precision, and end")
    parser.add_argument("--table", action="store_true", help="print the results as tables, and end")
    parser.add_argument("--page", action="store_true", help="write the tables into their page of the docs, and end")
    parser.add_argument("--explained", action="store_true", help="how much of each trained network its own images"
                        " explain, and end")  # fmt: skip
    parser.add_argument("--claims", action="store_true", help="sum up the paper's claim from its parts, and end")
    options = parser.parse_args(arguments)
    results = options.results or (SCRATCH / "small" if options.small else RESULTS)
    if options.table or options.page:
        for name, each in (("", table(results)), ("claim", claim.table(results))):
            tables.write(PAGE, each, name) if options.page else print(each)
        return 0
    if options.agreement or options.claims:
        (agreement if options.agreement else claim.summed_up)(results)
        return 0
    if options.explained:
        explained.write(results, options.scratch)
        return 0
    lanes = [
        _lane(options, small(setting) if options.small else setting, seed, results)
        for seed in options.seed
        for setting in SETTINGS
        if setting.name in options.setting
    ]
    groups: dict[tuple[str, Precision], list[Lane]] = {}
    for lane in lanes:
        groups.setdefault((lane.setting.name, lane.precision), []).append(lane)
    trainings = {f"{name} {precision}": partial(_train, group) for (name, precision), group in groups.items()}
    status = processes.run_all(trainings, options)
    return status or processes.run_all({lane.name: lane.run for lane in lanes}, options)


def _train(lanes: list[Lane]) -> None:
    """Train the networks of one setting together, in seeds' order."""
    first = lanes[0]
    train(first.setting, [lane.seed for lane in lanes], first.precision, first.scratch, first.folder)


def _lane(options: argparse.Namespace, setting: Setting, seed: int, results: Path) -> Lane:
    precision = options.precision or usual_precision(setting, seed)
    read_precision = options.read_precision or precision
    said = f"--setting {setting.name} --seed {seed} --precision {precision} --read-precision {read_precision}"
    return Lane(
        setting=setting,
        seed=seed,
        precision=precision,
        read_precision=read_precision,
        columns=tuple(options.column),
        results=results,
        scratch=options.scratch / "small" if options.small else options.scratch,
        ends=time.time() + 60 * options.minutes,
        options=said + " --small" * options.small,
    )


def small(setting: Setting) -> Setting:
    """The same recipe for a network of seconds, on images that come with Palimpsest's dependencies."""
    data, per_class = ("faces", 4) if setting.task == "binary" else ("digits", 2)
    count = 2 * per_class * setting.classes
    sizes = {"hidden": (24, 20), "training_steps": 40, "candidates": count, "steps": 30, "own_steps": 30}
    return replace(setting, data=data, per_class=per_class, half=False, **sizes)  # type: ignore[arg-type]
