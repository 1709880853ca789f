"""Sums up the parts of an experiment: means over seeds, paired tests, goals; every number goes into one JSON file."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from scipy.stats import binomtest

from palimpsest.reproduce import figures
from palimpsest.reproduce.experiment import VARIANTS, Goal
from palimpsest.reproduce.runner import PICTURED, Part, Runner
from palimpsest.storage import write_atomically

FORMAT = 2  # of the file, by which a scoreboard knows its own
TOP = 25  # images on which the paper counts improvements
Result = dict[str, Any]


def _above(bar: float) -> Callable[[Result], float]:
    return lambda result: sum(value > bar for value in result["ssim"])


def _best_l2(count: int) -> Callable[[Result], float]:
    return lambda result: fmean(sorted(result["l2"])[:count])


MEASURES: dict[str, Callable[[Result], float]] = {
    "mean SSIM": lambda result: fmean(result["ssim"]),
    "above 0.4": _above(0.4),
    "above 0.6": _above(0.6),
    "above 0.9": _above(0.9),
    "mean L2": lambda result: fmean(result["l2"]),
    "best-25 L2": _best_l2(25),
    "best-10 L2": _best_l2(10),
    "held-out above 0.4": lambda result: sum(value > 0.4 for value in result["held-out ssim"]),
    "recovered": lambda result: result["recovered"],
    "loss": lambda result: result["loss"],
    "final candidates": lambda result: result["final candidates"],
    "seconds": lambda result: result["seconds"],
}
IMPROVED = "% better than unsplit"  # of the images; what a goal may ask for besides
Results = dict[Part, Result]


def write(runner: Runner, folder: Path, options: str = "") -> Path:
    """Write NAME.json and its figures into a folder; ``options`` are those of the command that made the parts."""
    folder.mkdir(parents=True, exist_ok=True)
    experiment = runner.experiment
    results = {part: result for part in runner.parts() if (result := runner.done(part)) is not None}
    rows, tests = _rows(runner, results), _tests(results, experiment.metric)
    content = {
        "scoreboard": FORMAT,
        "experiment": experiment.name,
        "title": experiment.title,
        "paper": experiment.paper,
        "metric": experiment.metric,
        "command": f"palimpsest reproduce {experiment.name}" + options,
        "devices": sorted({result["device"] for result in results.values()}),
        "training": asdict(experiment.training),
        "columns": {name: asdict(column) for name, column in experiment.columns.items()},
        "networks": _networks(results),
        "rows": rows,
        "missing": _missing(runner.parts(), results),
        "tests": tests,
        "goals": [asdict(goal) | {"measured": _measured(goal, rows, tests)} for goal in experiment.goals],
        "figures": figures.write(runner, results, folder),
    }
    parts = [json.dumps(_kept(part, result, experiment.metric)) for part, result in results.items()]
    text = json.dumps(content, indent=1, ensure_ascii=False)[:-2] + ',\n "parts": [\n' + ",\n".join(parts) + "\n]}\n"
    path = folder / f"{experiment.name}.json"
    write_atomically(path, text.encode())
    return path


def _networks(results: Results) -> list[dict[str, Any]]:
    """The trainings that parts were read from, one for each seed unless a device was changed in between."""
    trained = [(part.seed, result["training"]) for part, result in results.items()]
    networks = {(seed, facts["weights"]): {"seed": seed} | facts for seed, facts in trained}
    return [networks[key] for key in sorted(networks)]


def _missing(parts: Sequence[Part], results: Results) -> dict[str, dict[str, int]]:
    """How many parts of each column and variant were not run."""
    missing: dict[str, dict[str, int]] = {}
    for part in parts:
        if part not in results:
            of_column = missing.setdefault(part.column, {})
            of_column[part.variant] = 1 + of_column.get(part.variant, 0)
    return missing


def _kept(part: Part, result: Result, metric: str) -> Result:
    """A part as the results hold it: the experiment's own metric for every image; curves where figures show them."""
    result = result | {"weights": result["training"]["weights"]}
    left_out = {"asked", "training", "ssim", "l2", "held-out ssim", "trajectories"} - {metric}
    left_out |= set() if part.variant in PICTURED else {"curve"}
    return asdict(part) | {name: value for name, value in result.items() if name not in left_out | {"candidates"}}


def _rows(runner: Runner, results: Results) -> list[dict[str, Any]]:
    """Means over seeds, one row for each column, variant and number of candidates."""
    rows = []
    for name, column in runner.experiment.columns.items():
        for k in column.candidates:
            for variant in VARIANTS:
                parts = [Part(name, variant, k, seed) for seed in runner.seeds]
                if found := {part.seed: results[part] for part in parts if part in results}:
                    row = {"column": name, "variant": variant, "candidates": k, "seeds": sorted(found)}
                    row |= {m: float(f"{fmean(map(f, found.values())):.5g}") for m, f in MEASURES.items()}
                    rows.append(row)
    return rows


def _tests(results: Results, metric: str) -> list[dict[str, Any]]:
    """Splitting, and splitting with merging, against everything else: image by image, over all seeds they share."""
    tests = []
    for column, k in dict.fromkeys((part.column, part.candidates) for part in results):
        for variant in ("splitting", "merging"):
            for other in VARIANTS:
                pairs = _pairs(results, metric, [Part(column, v, k, 0) for v in (variant, other)])
                if pairs and other != variant:
                    test = {"column": column, "candidates": k, "variant": variant, "against": other}
                    tests.append(test | sign_test([gain for _, gain in pairs]) | _top(pairs))
    return tests


def _pairs(results: Results, metric: str, kinds: Sequence[Part]) -> list[tuple[tuple[int, float], float]]:
    """((seed, the better score of the two), gain of the first over the second) of every image; more is better."""
    sign = 1 if metric == "ssim" else -1
    pairs = []
    for seed in sorted({part.seed for part in results}):
        both = [results.get(Part(kind.column, kind.variant, kind.candidates, seed)) for kind in kinds]
        if None not in both:
            values = zip(*(result[metric] for result in both if result), strict=True)
            pairs += [((seed, max(sign * a, sign * b)), sign * (a - b)) for a, b in values]
    return pairs


def sign_test(gains: Sequence[float]) -> dict[str, float]:
    """How many gains are positive, how many negative, and how likely so uneven a count is by chance.

    >>> sign_test([1.0, 2.0, -1.0, 0.0, 3.0, 1.0, 0.5])
    {'better': 5, 'worse': 1, 'p': 0.21875}
    """
    better, worse = sum(gain > 0 for gain in gains), sum(gain < 0 for gain in gains)
    p = binomtest(better, better + worse).pvalue if better + worse else 1.0
    return {"better": better, "worse": worse, "p": float(p)}


def _top(pairs: Sequence[tuple[tuple[int, float], float]]) -> dict[str, int]:
    """The paper's count: of each seed's best images, by the better of both scores, how many gained."""
    seeds = dict.fromkeys(seed for (seed, _), _ in pairs)
    top = [pair for s in seeds for pair in sorted(pair for pair in pairs if pair[0][0] == s)[-TOP:]]
    return {"top": len(top), "top better": sum(gain > 0 for _, gain in top)}


def _measured(goal: Goal, rows: Sequence[dict[str, Any]], tests: Sequence[dict[str, Any]]) -> float | None:
    """What a row, or a comparison with no splitting, came to."""
    wanted = {"column": goal.column, "variant": goal.variant, "candidates": goal.candidates}
    if goal.measure == IMPROVED:
        shares = [{**t, IMPROVED: 100 * t["better"] / max(1, t["better"] + t["worse"])} for t in tests]
        rows, wanted = shares, wanted | {"against": "none"}
    return next((row[goal.measure] for row in rows if wanted.items() <= row.items()), None)
