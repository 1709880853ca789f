"""Are verdicts right on networks that people train? Each network of `outsiders.py` is audited with all it left behind.

    python experiments/audit_networks.py              writes docs/results/audit-networks.json and the table of its page
    python experiments/audit_networks.py --small      a version of seconds, which writes nothing there

Each audit is kept in --parts and not repeated; --again repeats all. Its effort is a number of steps, so its result does
not depend on the speed of the machine. Each is judged twice: with the training images, and as if only their number had
been given. A verdict is right if it is leakage where the weights hold the images, or if it is not a claim and names a
true reason. Which reasons are true stands here, by their names and not by sentences.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import judged
import outsiders
import processes
import tables
import torch
from outsiders import Images, Left, Outsider, State
from provenance import made_by
from torch import Tensor, nn
from torch.func import functional_call

import palimpsest as pal
from palimpsest.auditing.reasons import Reason
from palimpsest.auditing.verdict import DESCRIBED
from palimpsest.files.storage import write_atomically

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "docs" / "results" / "audit-networks.json", "verdicts.md"
PARTS = ROOT / "runs" / "audit-networks"
SEEDS = (831, 832, 833)  # 800 to 830 were used to develop
CENTRE = 0.5  # subtracted from every pixel
EFFORT: dict[str, dict[str, int]] = {
    "MLP": {"steps": 500},
    "CNN": {"steps": 250},
    "ResNet-18": {"steps": 250, "candidates": 20},
    "ViT": {"steps": 250, "candidates": 20},
}
COMMON: dict[str, Any] = {"restarts": 2, "tangents": 1, "control_steps": 2000, "minutes": 600.0}
SMALL: dict[str, Any] = {"steps": 5, "candidates": 10, "control_steps": 5}
JUDGEMENTS = ("with images", "without images")
NODES = {"one point": (0.5,), "two points": (0.15, 0.85)}  # of the floors
SEGMENTS = 10  # of the training, for a floor


def truth_of(outsider: Outsider, seed: int) -> tuple[pal.auditing.Truth, Images]:
    """The images that the auditor gives, and those that the author has. Some faces are left for pretraining."""
    digits = outsider.data == "digits"
    counts = {"per_class": 2, "held_out_per_class": 4} if digits else {"per_class": 10, "held_out_per_class": 60}
    data = pal.datasets.load(outsider.data, **counts, seed=seed, task="classes" if digits else "binary")  # type: ignore[arg-type]
    y, other_y = (part.labels.clamp_min(0) for part in (data.train, data.held_out))
    every = torch.arange(len(other_y))
    held_out = every if digits else every[every % 60 < 20]
    other = every if digits else every[every % 60 >= 20]
    truth = pal.auditing.Truth(data.train.images, y, data.held_out.images[held_out], mean=CENTRE)
    return truth, Images(truth.seen, y, data.held_out.images[other] - CENTRE, other_y[other])


def trained(outsider: Outsider, images: Images, seed: int) -> Left:
    torch.manual_seed(seed)
    return outsider.fit(outsider.make(), images)


def audited(outsider: Outsider, *, seed: int, small: bool = False, **options: Any) -> dict[str, Any]:
    torch.set_num_threads(1)
    began = time.process_time()
    truth, images = truth_of(outsider, seed)
    left = trained(outsider, images, seed)
    effort = COMMON | EFFORT[outsider.network.split(",")[0]] | (SMALL if small else {}) | options
    weights: Any = left.final
    if "optimiser" in outsider.keeps:
        weights = {"model": left.final, "optimizer": left.optimiser}
    with tempfile.TemporaryDirectory() as folder:
        found = pal.audit(
            outsider.make, weights, initial=left.initial, image_shape=truth.images.shape[1:], truth=truth,
            checkpoints=left.checkpoints if "checkpoints" in outsider.keeps else None, out=Path(folder) / "audit",
            seed=seed, optimiser=rule(outsider.training), **effort,
        )  # fmt: skip
    row = {
        "name": outsider.name,
        "network": outsider.network,
        "training": outsider.training,
        "seed": seed,
        "images": len(truth.images),
        "holds them": outsider.holds,
        "steps": effort["steps"],
        **judged.numbers(found),
        "detour": round(left.detour, judged.DIGITS),
        "floors": {} if small else floors(left, truth.seen),
    }
    return row | {"CPU seconds": round(time.process_time() - began)}


def rule(training: str) -> Literal["sgd", "adam"]:
    """The optimiser, as its author tells the auditor."""
    return "adam" if training.startswith("Adam") else "sgd"


def floors(left: Left, x: Tensor) -> dict[str, float]:
    """The share of the change of the weights that the given images leave unexplained, by how it is read."""
    n = len(left.states) - 1
    ways = {
        "segments": [left.states[round(n * j / min(n, SEGMENTS))] for j in range(min(n, SEGMENTS) + 1)],
        "checkpoints": left.checkpoints,  # those that the audit is given
    }
    found = {number: unexplained(left.model, left.initial, left.final, x, at=at) for number, at in NODES.items()}
    for name, way in ways.items():
        found[name] = fmean(unexplained(left.model, *ends, x, at=(0.5,)) for ends in pairwise(way))
    return {name: round(value, judged.DIGITS) for name, value in found.items()}


def unexplained(model: nn.Module, start: State, end: State, x: Tensor, *, at: Sequence[float]) -> float:
    """min_λ ‖T − Σ λ f‖² / ‖T‖² with T = θ − θ_0 and the gradients f of each output at each tangent point."""
    θ = [name for name, _ in model.named_parameters()]
    T = torch.cat([(end[name] - start[name]).flatten() for name in θ]).double()
    rows: list[Tensor] = []
    for t in at:
        point = {name: torch.lerp(start[name], end[name], t).requires_grad_() for name in θ}
        outputs = functional_call(model, dict(end) | point, (x,)).flatten()
        gradients = (torch.autograd.grad(φ, list(point.values()), retain_graph=True) for φ in outputs)
        rows += [torch.cat([part.flatten() for part in f]) for f in gradients]
    f = torch.stack(rows).double()
    b = f @ T
    λ = torch.linalg.pinv(f @ f.T, hermitian=True) @ b
    return float(1 - (b @ λ) / (T @ T))


# --- is the verdict right? --------------------------------------------------------------------------------------------

EFFORT_ALONE = {  # the audit found something or nothing, and the same effort does not suffice to decide
    Reason.CHANCE, Reason.UNCERTAIN, Reason.UNCONFIRMED, Reason.CROWDED, Reason.FAINT, Reason.UNREAD_CONTROL,
    Reason.EASIER_CONTROL,
}  # fmt: skip
METHOD = {Reason.UNDESCRIBED, Reason.UNEXPLAINED}  # true if the floor of the method that read this rung is high
FLOORS = {"W0": "one point", "C": "checkpoints"}  # by rung, as this script computes them
WITHHELD: dict[str, set[Reason]] = {
    "cnn-noise": {Reason.OTHER_IMAGES, Reason.WRONG_ANSWERS},
    "mlp-private": {Reason.NOISE},
}  # networks that do not hold the given images: the only reasons that are true
NAMES = ("mlp-sgd", "mlp-adam", "mlp-classes", "cnn-sgd", "cnn-adam", "resnet-frozen", "vit", "resnet-live", *WITHHELD)
MANY = 5  # recovered images that forbid "no evidence"


def right(row: dict[str, Any], judgement: str) -> bool:
    """Whether a verdict is true, or withheld for a true reason.

    A network trained on noise holds that noise. Nobody compared it, so "no evidence" is not known to be true there.
    """
    other = judgement == "without images" and row["name"] == "cnn-noise"
    holds = row["holds them"] or other
    if row[judgement] == "leakage":
        return holds
    if row[judgement] == "no evidence":
        return row["recovered"] <= MANY and not other
    reason = _of(row, "reason", judgement)
    if not holds:
        return reason in WITHHELD[row["name"]]
    return reason in EFFORT_ALONE or (reason in METHOD and _floor(row, judgement) > DESCRIBED)


def _of(row: dict[str, Any], what: str, judgement: str) -> Any:
    return row[what if judgement == "with images" else f"{what} without images"]


def _floor(row: dict[str, Any], judgement: str) -> float:
    """Of the rung that the verdict rests on. Here, the floors describe SGD on single images; others are the audit's."""
    rung = _of(row, "rung", judgement)
    if rung not in FLOORS or rule(row["training"]) == "adam" or "live" in row["training"]:
        return row["rungs"][rung]["floor"]
    return row["floors"].get(FLOORS[rung], 0.0)


def table(rows: list[dict[str, Any]]) -> str:
    columns = ["network", "training", "recovered of 20", "with images", "without images", "right"]
    return tables.markdown(columns, [_cells(seeds) for seeds in _by_network(rows)])


def _by_network(rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    every = ([row for row in rows if row["name"] == name] for name in NAMES)
    return [seeds for seeds in every if seeds]


def _cells(seeds: list[dict[str, Any]]) -> list[object]:
    correct = sum(right(row, judgement) for row in seeds for judgement in JUDGEMENTS)
    verdicts = [_counted([_short(row, judgement) for row in seeds]) for judgement in JUDGEMENTS]
    recovered = ", ".join(str(row["recovered"]) for row in seeds)
    return [seeds[0]["network"], seeds[0]["training"], recovered, *verdicts, f"{correct} of {2 * len(seeds)}"]


def _counted(verdicts: list[str]) -> str:
    """
    >>> _counted(["leakage", "undecided (chance)", "leakage"])
    '2 leakage, 1 undecided (chance)'
    """
    return ", ".join(f"{count} {verdict}" for verdict, count in Counter(verdicts).items())


def _short(row: dict[str, Any], judgement: str) -> str:
    """The outcome, and the reason if it is not a claim."""
    reason = _of(row, "reason", judgement)
    return row[judgement] if reason is None else f"{row[judgement]} ({reason})"


def table_of_floors(rows: list[dict[str, Any]]) -> str:
    columns = ["network", "training", *NODES, f"{SEGMENTS} segments", "detour"]
    return tables.markdown(columns, [_floors(seeds) for seeds in _by_network(rows)])


def _floors(seeds: list[dict[str, Any]]) -> list[object]:
    means = [f"{fmean(row['floors'][name] for row in seeds):.0%}" for name in (*NODES, "segments")]
    return [seeds[0]["network"], seeds[0]["training"], *means, f"{fmean(row['detour'] for row in seeds):.1f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, metavar="NAME", help="names of networks")
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--parts", type=Path, default=PARTS)
    parser.add_argument("--again", action="store_true", help="repeat audits that are in --parts")
    processes.add_arguments(parser)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    chosen = [(name, seed) for seed in options.seeds for name in NAMES if name in options.only]
    parts = {each: options.parts / f"{each[0]}-{each[1]}{'-small' * options.small}.json" for each in chosen}
    todo = {each: path for each, path in parts.items() if options.again or not path.exists()}
    processes.run_all(
        {f"{name} {seed}": partial(_run, name, path, seed, options.small) for (name, seed), path in todo.items()},
        options,
    )
    rows = [json.loads(path.read_text(encoding="utf-8")) for path in parts.values()]
    print(table(rows))
    if not options.small:
        print(table_of_floors(rows))
    if not options.small and tuple(options.seeds) == SEEDS and len(rows) == len(SEEDS) * len(NAMES):
        wrong = sum(not right(row, judgement) for row in rows for judgement in JUDGEMENTS)
        content = made_by("python experiments/audit_networks.py") | {"wrong verdicts": wrong, "rows": rows}
        RESULTS.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        tables.write(PAGE, table(rows), "networks")
        tables.write(PAGE, table_of_floors(rows), "floors")


def _run(name: str, path: Path, seed: int, small: bool) -> str:
    outsider = next(each for each in outsiders.outsiders(small=small) if each.name == name)
    command = f"python experiments/audit_networks.py --only {name} --seeds {seed}"
    row = audited(outsider, seed=seed, small=small) | made_by(command)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (json.dumps(row, indent=1) + "\n").encode())
    return f"{name} {seed}: {', '.join(_short(row, each) for each in JUDGEMENTS)}, {row['CPU seconds']} s"


if __name__ == "__main__":
    main()
