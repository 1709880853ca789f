"""Sums up the parts of an experiment: means over seeds, paired tests, goals; every number goes into one JSON file."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from scipy.stats import binomtest

from palimpsest.errors import InvalidInputError
from palimpsest.reproduce import figures, soundness
from palimpsest.reproduce.experiment import VARIANTS, Goal
from palimpsest.reproduce.runner import PICTURED, Part, Result, Results, Runner
from palimpsest.storage import write_atomically

FORMAT = 5  # of the file, by which a scoreboard knows its own
KEYS = {"experiment", "title", "paper", "metric", "seeds", "command", "devices", "training", "columns", "networks",
        "rows", "missing", "tests", "goals", "figures", "parts"}  # fmt: skip
TOP = 25  # images on which the paper counts improvements
CERTAIN = 0.01  # p below which a difference may be called one


def _above(bar: float) -> Callable[[Result], float]:
    return lambda result: sum(value > bar for value in result["ssim"])


def _l2(of: str, best: int | None = None) -> Callable[[Result], float | None]:
    """The mean L2 of the nearest images, all if no number is given; None where L2 was not kept of such images."""
    return lambda result: fmean(sorted(result[of])[:best]) if of in result else None


MEASURES: dict[str, Callable[[Result], float | None]] = {
    "mean SSIM": lambda result: fmean(result["ssim"]),
    "above 0.4": _above(0.4),
    "above 0.6": _above(0.6),
    "above 0.9": _above(0.9),
    "mean L2": _l2("l2"),
    "held-out mean L2": _l2("held-out l2"),
    "best-25 L2": _l2("l2", 25),
    "held-out best-25 L2": _l2("held-out l2", 25),
    "held-out above 0.4": lambda result: sum(value > 0.4 for value in result["held-out ssim"]),
    "recovered": lambda result: result["recovered"],
    "loss": lambda result: result["loss"],
    "final candidates": lambda result: result["final candidates"],
    "seconds": lambda result: result["seconds"],
    "million candidate-steps": lambda result: result["candidate-steps"] / 1e6,
}
IMPROVED = "% better than unsplit"  # of a row's images: its other measure, which compares it with another row
MEASURED = (*MEASURES, IMPROVED)


def write(runner: Runner, folder: Path, options: str = "") -> Path:
    """Write NAME.json and its figures into a folder; ``options`` are those of the command that made the parts."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{runner.experiment.name}.json"
    results, before = runner.results(), _loaded(path)
    of_before = before.get("figures", {}) if before is not None and before["scoreboard"] == FORMAT else {}
    drawn = figures.write(runner, results, folder, of_before)
    content = summed_up(runner, results, options) | {"figures": drawn}
    parts = [json.dumps(_kept(part, result)) for part, result in results.items()]
    text = json.dumps(content, indent=1, ensure_ascii=False)[:-2] + ',\n "parts": [\n' + ",\n".join(parts) + "\n]}\n"
    write_atomically(path, text.encode())
    return path


def read(path: Path) -> dict[str, Any] | None:
    """What `write` wrote, None if there is no such file or it is of another kind."""
    content = _loaded(path)
    if content is not None and content["scoreboard"] != FORMAT:
        raise InvalidInputError(f"{path} is of another version; delete it, and sum up its experiment again")
    if content is not None and (missing := KEYS - content.keys()):
        raise InvalidInputError(f"{path} lacks {min(missing)!r}; restore it, or delete it")
    return content


def _loaded(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    except ValueError as error:
        raise InvalidInputError(f"{path} is not JSON ({error}); restore it, or delete it") from error
    return content if isinstance(content, dict) and "scoreboard" in content else None


def known(path: Path) -> Results:
    """The parts that such a file holds, without the images that were kept of them; what was asked is said by each."""
    content = _loaded(path)
    if content is None:
        return {}
    names = [f.name for f in fields(Part)]
    try:
        training = {network["weights"]: {"training": network} for network in content["networks"]}
        found = {Part(**{n: kept[n] for n in names}): kept | training[kept["weights"]] for kept in content["parts"]}
        for result in found.values():
            soundness.check_result(result, content["training"]["images"])
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidInputError(f"{path} is not what --summarise writes ({error}); restore it, or delete it") from error
    return found


def summed_up(runner: Runner, results: Results, options: str = "") -> dict[str, Any]:
    """Everything that follows from the parts."""
    experiment, rows = runner.experiment, _rows(runner, results)
    return {
        "scoreboard": FORMAT,
        "experiment": experiment.name,
        "title": experiment.title,
        "paper": experiment.paper,
        "metric": experiment.metric,
        "seeds": runner.seeds,
        "command": f"palimpsest reproduce {shlex.quote(experiment.called)}" + options,
        "devices": sorted({result["device"] for result in results.values()}),
        "training": asdict(experiment.training),
        "columns": {name: asdict(column) for name, column in experiment.columns.items()},
        "networks": _networks(results),
        "rows": rows,
        "missing": _missing(runner.parts(), results),
        "tests": _tests(results, experiment.metric),
        "goals": [asdict(goal) | _measured(goal, rows) for goal in experiment.goals],
    }


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


def _kept(part: Part, result: Result) -> Result:
    """A part as the results hold it: every score of every image, and curves where figures show them."""
    result = result | {"weights": result["training"]["weights"]}
    left_out = {"training", "trajectories", "candidates"} | (set() if part.variant in PICTURED else {"curve"})
    return asdict(part) | {name: value for name, value in result.items() if name not in left_out}


def _rows(runner: Runner, results: Results) -> list[dict[str, Any]]:
    """Means over seeds, one row for each column, variant and number of candidates."""
    rows = []
    for name, column in runner.experiment.columns.items():
        for k in column.candidates:
            for variant in VARIANTS:
                parts = [Part(name, variant, k, seed) for seed in runner.seeds]
                if found := {part.seed: results[part] for part in parts if part in results}:
                    row = {"column": name, "variant": variant, "candidates": k, "seeds": sorted(found)}
                    row |= {measure: _mean(measure, found.values()) for measure in MEASURES}
                    rows.append(row | {IMPROVED: _improved(results, runner.experiment.metric, parts)})
    return rows


def _improved(results: Results, metric: str, parts: Sequence[Part]) -> float | None:
    """On how many of 100 images parts are better than without splitting; None unless all were read from its weights."""
    part = parts[0]
    pairs = _pairs(results, metric, [part, replace(part, variant="none")])
    if part.variant == "none" or len(pairs) < sum(part in results for part in parts):
        return None
    return float(f"{100 * fmean(pair.gain > 0 for of_seed in pairs.values() for pair in of_seed):.5g}")


def _tests(results: Results, metric: str) -> list[dict[str, Any]]:
    """Splitting, and splitting with merging, against everything else: image by image, over all seeds they share."""
    tests = []
    for column, k in dict.fromkeys((part.column, part.candidates) for part in results):
        for variant in ("splitting", "merging"):
            for other in VARIANTS:
                pairs = _pairs(results, metric, [Part(column, v, k, 0) for v in (variant, other)])
                if pairs and other != variant:
                    test = {"column": column, "candidates": k, "variant": variant, "against": other}
                    with_, without = ([results[Part(column, v, k, seed)] for seed in pairs] for v in (variant, other))
                    test["unsplit"] = sum(not any(entry["split"] for entry in result["splits"]) for result in with_)
                    for name in ("mean " + metric.upper(), "recovered"):
                        test[name] = [_mean(name, without), _mean(name, with_)]
                    tests.append(test | _compared(pairs))
    return tests


def _mean(measure: str, results: Iterable[Result]) -> float | None:
    """None unless all of them were measured."""
    values = [MEASURES[measure](result) for result in results]
    measured = [value for value in values if value is not None]
    return float(f"{fmean(measured):.5g}") if len(measured) == len(values) else None


class Pair(NamedTuple):
    """One image in two runs."""

    best: float
    """The better of its two scores; of scores and gains more is better, whatever the metric."""
    gain: float
    """Of the first run over the second."""
    read: bool
    """Whether its SSIM in either run is above that of every held-out image in both."""


def _pairs(results: Results, metric: str, kinds: Sequence[Part]) -> dict[int, list[Pair]]:
    """Every image, by seed, where both kinds were read from the same weights."""
    sign = 1 if metric == "ssim" else -1
    pairs = {}
    for seed in sorted({part.seed for part in results}):
        both = [results[part] for kind in kinds if (part := replace(kind, seed=seed)) in results]
        if len(both) == 2 and len({result["training"]["weights"] for result in both}) == 1:
            scores = zip(*(result[metric] for result in both), strict=True)
            bar = max(value for result in both for value in result["held-out ssim"])
            read = [max(values) > bar for values in zip(*(result["ssim"] for result in both), strict=True)]
            pairs[seed] = [
                Pair(max(sign * a, sign * b), sign * (a - b), is_read)
                for (a, b), is_read in zip(scores, read, strict=True)
            ]
    return pairs


def _compared(pairs: Mapping[int, Sequence[Pair]]) -> dict[str, Any]:
    """The sign test over the images that were read, what it comes to, and the paper's count on each seed's best images.

    Of more candidates one comes nearer to any image, trained on or not; where it comes nearer than to all that were
    held out, that says something. Images of one network are not independent of each other, and p is too small: a
    difference is one only if every seed points the same way.
    """
    read = {seed: [pair.gain for pair in of_seed if pair.read] for seed, of_seed in pairs.items()}
    test = sign_test([gain for gains in read.values() for gain in gains])
    by_seed = [sign_test(gains) for gains in read.values()]
    verdict = "even"
    for word, other in (("better", "worse"), ("worse", "better")):
        if test["p"] < CERTAIN and len(by_seed) > 1 and all(seed[word] > seed[other] for seed in by_seed):
            verdict = word
    every = sign_test([pair.gain for of_seed in pairs.values() for pair in of_seed])
    best = [pair for of_seed in pairs.values() for pair in sorted(of_seed, key=lambda pair: -pair.best)[:TOP]]
    return {
        **test,
        "verdict": verdict,
        "by seed": [[seed["better"], seed["worse"]] for seed in by_seed],
        "of all": [every["better"], every["worse"]],
        "top": sum(pair.gain != 0 for pair in best),
        "top better": sum(pair.gain > 0 for pair in best),
    }


def sign_test(gains: Sequence[float]) -> dict[str, float]:
    """How many gains are positive, how many negative, and how likely so uneven a count is by chance.

    >>> sign_test([1.0, 2.0, -1.0, 0.0, 3.0, 1.0, 0.5])
    {'better': 5, 'worse': 1, 'p': 0.21875}
    """
    better, worse = sum(gain > 0 for gain in gains), sum(gain < 0 for gain in gains)
    p = binomtest(better, better + worse).pvalue if better + worse else 1.0
    return {"better": better, "worse": worse, "p": float(p)}


def _measured(goal: Goal, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What a row came to, and on how many seeds."""
    wanted = {"column": goal.column, "variant": goal.variant, "candidates": goal.candidates}
    nothing: dict[str, Any] = {"seeds": []}
    row = next((row for row in rows if wanted.items() <= row.items()), nothing)
    return {"measured": row.get(goal.measure), "on seeds": len(row["seeds"])}
