"""Sums up the parts of an experiment: means over seeds, paired tests, goals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from statistics import fmean
from typing import Any, NamedTuple

from scipy.stats import binomtest

from reproduce import parts
from reproduce.experiment import VARIANTS, Experiment, Goal
from reproduce.parts import Part, Result, Results

TOP = 25  # images on which the paper counts improvements
CERTAIN = 0.01  # p below which a difference can be significant


def _above(bar: float) -> Callable[[Result], float]:
    return lambda result: sum(value > bar for value in result["ssim"])


def _l2(of: str, best: int | None = None) -> Callable[[Result], float | None]:
    """The mean L2 of the best images, or of all of them; None if the part does not hold these distances."""
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
IMPROVED = "% better than unsplit"  # the one measure that compares a row with another
MEASURED = (*MEASURES, IMPROVED)


def summed_up(experiment: Experiment, results: Results) -> dict[str, Any]:
    """Everything that the pages show of an experiment."""
    rows = _rows(experiment, results)
    return {
        "networks": _networks(results),
        "rows": rows,
        "missing": Counter((part.column, part.variant) for part in parts.of(experiment) if part not in results),
        "tests": _tests(results, experiment.metric),
        "goals": [asdict(goal) | _measured(goal, rows) for goal in experiment.goals],
    }


def _networks(results: Results) -> list[dict[str, Any]]:
    """The training of each network behind the parts: one for each seed, unless the device was changed."""
    trained = [(part.seed, result["training"]) for part, result in results.items()]
    networks = {(seed, facts["weights"]): {"seed": seed} | facts for seed, facts in trained}
    return [networks[key] for key in sorted(networks)]


def _rows(experiment: Experiment, results: Results) -> list[dict[str, Any]]:
    """Means over seeds, one row for each column, variant and number of candidates."""
    rows = []
    for name, column in experiment.columns.items():
        for k in column.candidates:
            for variant in VARIANTS:
                of_row = [Part(name, variant, k, seed) for seed in experiment.seeds]
                if found := {part.seed: results[part] for part in of_row if part in results}:
                    row = {"column": name, "variant": variant, "candidates": k, "seeds": sorted(found)}
                    row |= {measure: _mean(measure, found.values()) for measure in MEASURES}
                    rows.append(row | {IMPROVED: _improved(results, experiment.metric, of_row)})
    return rows


def _improved(results: Results, metric: str, of_row: Sequence[Part]) -> float | None:
    """The percentage of images that are better than without splitting; None unless both read the same weights."""
    part = of_row[0]
    pairs = _pairs(results, metric, [part, replace(part, variant="none")])
    if part.variant == "none" or len(pairs) < sum(part in results for part in of_row):
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
                    splits = [results[Part(column, variant, k, seed)]["splits"] for seed in pairs]
                    test["unsplit"] = sum(not any(entry["split"] for entry in of_seed) for of_seed in splits)
                    tests.append(test | _compared(pairs))
    return tests


def _mean(measure: str, results: Iterable[Result]) -> float | None:
    """None unless all results have the measure."""
    values = [MEASURES[measure](result) for result in results]
    measured = [value for value in values if value is not None]
    return float(f"{fmean(measured):.5g}") if len(measured) == len(values) else None


class Pair(NamedTuple):
    """The scores of one image in two runs. A larger score is better, whatever the metric."""

    best: float
    """The better of its two scores."""
    gain: float
    """Of the first run over the second."""
    read: bool
    """Whether its SSIM in either run is above that of every held-out image in both."""


def _pairs(results: Results, metric: str, kinds: Sequence[Part]) -> dict[int, list[Pair]]:
    """Every image, by seed, if both kinds read the same weights."""
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
    """The sign test over the images that were read, its verdict, and the paper's count on each seed's best images.

    With more candidates, one of them is closer to any image, trained on or not. So an image counts only if it is closer
    than every held-out image. Images of one network are not independent, which makes p too small. So a difference is
    significant only if all seeds agree.
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
    """How many gains are positive, how many are negative, and the two-sided p of such a count.

    >>> sign_test([1.0, 2.0, -1.0, 0.0, 3.0, 1.0, 0.5])
    {'better': 5, 'worse': 1, 'p': 0.21875}
    """
    better, worse = sum(gain > 0 for gain in gains), sum(gain < 0 for gain in gains)
    p = binomtest(better, better + worse).pvalue if better + worse else 1.0
    return {"better": better, "worse": worse, "p": float(p)}


def _measured(goal: Goal, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The value in the goal's row, and the number of its seeds."""
    wanted = {"column": goal.column, "variant": goal.variant, "candidates": goal.candidates}
    nothing: dict[str, Any] = {"seeds": []}
    row = next((row for row in rows if wanted.items() <= row.items()), nothing)
    return {"measured": row.get(goal.measure), "on seeds": len(row["seeds"])}
