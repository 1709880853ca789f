"""Reads the networks, each once; then fits the map on some, tries it on the others, and ships it.

python experiments/ranking_map                  reads the networks that --results does not have yet
python experiments/ranking_map --part 0 2       every second one, for one of two processes
python experiments/ranking_map --fit            writes calibration.json, docs/results/ranking.json and the page
python experiments/ranking_map --small          a version of seconds, which ships nothing
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import tables
from provenance import made_by

from palimpsest.files.storage import write_atomically
from ranking_map import fitting, networks, page, reading
from ranking_map.networks import Network

ROOT = Path(__file__).resolve().parents[2]
RESULTS, SCRATCH = ROOT / "experiments/results/ranking-map", ROOT / "runs/ranking-map"
SHIPPED, TABLE = ROOT / "src/palimpsest/auditing/calibration.json", ROOT / "docs/results/ranking.json"
FIGURE = ROOT / "docs/figures/ranking.png"
COMMAND = "python experiments/ranking_map --fit"
AS_GOOD = 0.002  # of log loss: a feature that gains less goes


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="where finished networks are kept")
    parser.add_argument("--scratch", type=Path, default=SCRATCH, help="where unfinished networks are kept")
    parser.add_argument("--part", type=int, nargs=2, default=(0, 1), metavar=("I", "OF"), help="every OF-th network")
    parser.add_argument("--small", action="store_true", help="two tiny networks")
    parser.add_argument("--fit", action="store_true", help="fit and try the map, and ship it")
    options = parser.parse_args(arguments)
    options.results.mkdir(parents=True, exist_ok=True)
    if options.fit:
        ship(finished(options.results))
        return
    pairs = zip_longest(networks.FIT, networks.VALIDATION)  # if the time runs out, both parts have some
    every = [network for pair in pairs for network in pair if network]
    every = [tiny(network) for network in every[:2]] if options.small else every
    for network in every[options.part[0] :: options.part[1]]:
        path = options.results / f"{network.name}.json"
        if not path.exists():
            print(read(network, path, options.scratch / network.name), flush=True)


def tiny(network: Network) -> Network:
    return replace(network, data="digits", per_class=2, width=20, epochs=5, steps=5, restarts=2)


def read(network: Network, path: Path, scratch: Path) -> str:
    began = time.monotonic()
    rows = reading.read(network, scratch)
    content = {"network": asdict(network), "rows": rows} | made_by("python experiments/ranking_map")
    write_atomically(path, (json.dumps(content, separators=(",", ":")) + "\n").encode())
    counts = [f"{sum(row['real'])} of {len(row['real'])} candidates are real" for row in rows]
    return f"{network.name}: {', '.join(counts)}, {time.monotonic() - began:.0f} s"


def finished(folder: Path) -> list[fitting.Read]:
    contents = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    return [fitting.Read.of(content["network"], row) for content in contents for row in content["rows"]]


def ship(every: Sequence[fitting.Read]) -> None:
    fit, others = parts(every)
    names = chosen(fit)
    b = fitting.fit_map(fit, names)
    kinds = by_kind(others, fit, b)
    for row in kinds:
        print(row["kind"], "calibrated" if row["calibrated"] else "ranks", row["bins"])
    made = made_by(COMMAND) | {"fit": counts(fit), "validation": counts(others)}
    passed = [row["kind"] for row in kinds if row["calibrated"]]
    _write(SHIPPED, {"coefficients": b, "kinds": passed} | made)
    _write(TABLE, made | {"kinds": kinds, "empty networks": empty(others, b), "coefficients": b})
    page.figure(kinds, FIGURE)
    tables.write("ranking.md", page.table(kinds))


def parts(every: Sequence[fitting.Read]) -> tuple[list[fitting.Read], list[fitting.Read]]:
    """The networks of the fit, and those of the validation."""
    fit = [each for each in every if each.network["seed"] in networks.FIT_SEEDS]
    return fit, [each for each in every if each.network["seed"] in networks.VALIDATION_SEEDS]


def chosen(fit: Sequence[fitting.Read]) -> tuple[str, ...]:
    """Features are left out one after the other, as long as networks that were left out do not lose by it."""
    names: tuple[str, ...] = fitting.FEATURES
    loss = fitting.left_out(fit, names)
    while True:
        fewer = [tuple(n for n in names if n != name) for name in names[1:]]
        losses = {some: fitting.left_out(fit, some) for some in fewer}
        best = min(losses, key=losses.__getitem__)
        if losses[best] > loss + AS_GOOD:
            return names
        names, loss = best, min(loss, losses[best])
        print(f"{losses[best]:.4f} log loss on networks left out, with {', '.join(names[1:])}")


def by_kind(others: Sequence[fitting.Read], fit: Sequence[fitting.Read], b: dict[str, float]) -> list[dict[str, Any]]:
    """A row for each kind in the validation. Errors of opposite sign would cancel if kinds were mixed."""
    rows = []
    for kind in sorted({each.kind for each in others}, key=str):
        these = [each for each in others if each.kind == kind]
        bins, configurations = fitting.bins(these, b), len({each.configuration for each in these})
        rows.append({
            "kind": vars(kind), "networks": len(these), "configurations": configurations,
            "in fit": sum(each.kind == kind for each in fit),
            "candidates": sum(int(each.shown.sum()) for each in these), "bins": bins,
            "calibrated": fitting.calibrated(bins, configurations),
        })  # fmt: skip
    return rows


def counts(every: Sequence[fitting.Read]) -> dict[str, int]:
    shown = [each.real[each.shown] for each in every]
    return {"readings": len(every), "candidates": sum(map(len, shown)), "real": int(sum(map(sum, shown))),
            "exchanged": sum(each.exchanged for each in every)}  # fmt: skip


def empty(others: Sequence[fitting.Read], b: dict[str, float]) -> dict[str, Any]:
    p = [each.probability(b) for each in others if each.empty]
    return {"readings": len(p), "candidates": sum(map(len, p)), "highest": max(float(x.max()) for x in p if len(x))}


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
