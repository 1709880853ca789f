"""What lowers the risk? A network trained in one way and then changed by one measure at a time, read on each rung.

    python experiments/advice.py            writes docs/results/advice.json and the tables made from it
    python experiments/advice.py --small    a version of seconds, which writes nothing
    python experiments/advice.py --tables   makes the tables again: a page of the docs, and that of audit reports

Networks are trained by plain torch in mini-batches of 10 with momentum, and DP-SGD by Opacus (`pip install
palimpsest[dp]`). Rungs are those of an audit: W the final weights, W0 and the initial weights, C and checkpoints, O the
final weights and the optimiser's state. The attacker knows the recipe, so weight decay is undone. The search stays in
the span of the images if a dense first layer shows it. If noise hides the span, the better of two searches counts: of
all images, and of the strongest directions in the change of that layer. Rows in the file are not made again.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import tables
import torch
from left_behind import Kind, equally_far, network
from provenance import made_by
from torch import Tensor, nn

import palimpsest as pal
from palimpsest.auditing.noise import noisy
from palimpsest.datasets import DataSet
from palimpsest.objectives.spaces import Subspace
from palimpsest.runs.problems import problem

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "docs" / "results" / "advice.json", "lowering-the-risk.md"
SHIPPED = ROOT / "src" / "palimpsest" / "auditing" / "advice.json"
COMMAND = "python experiments/advice.py"
STEPS = 800  # of a reading
BATCH, MOMENTUM, CLOSE, EPOCHS, LONG = 10, 0.9, 0.05, 300, 1000
SCORED = 20  # held-out images of each class that a recovered image must beat; the accuracy is on all of them
δ, CLIP, DP_EPOCHS, DP_RATE = 1e-3, 0.1, 10, 0.2  # of DP-SGD; chosen for accuracy on seeds 90 and 91
SEGMENTS = 2  # of rung C: one checkpoint on the way


@dataclass(frozen=True)
class Measure:
    """One change of the training or of the published files. Everything else is as in the baseline."""

    says: str
    rungs: tuple[str, ...] = ("W0", "C", "O")
    weight_decay: float = 0.0
    epochs: int | None = None  # None trains until every output is close to its label
    batch: int = BATCH
    times: int = 1  # as many images
    layers: int | None = None  # the number of trained layers, counted from the last
    noise: float = 0.0  # on the published weights, in units of the change by training
    ε: float | None = None  # of DP-SGD; infinity leaves its noise out


BASELINE = Measure("none", ("W", "W0", "C2", "C4", "C8", "O"))
MEASURES = (
    BASELINE,
    Measure("DP-SGD, ε = 8", ε=8.0, epochs=DP_EPOCHS),
    Measure("DP-SGD, ε = 1", ε=1.0, epochs=DP_EPOCHS),
    Measure("the steps and clipping of DP-SGD, without its noise", ε=math.inf, epochs=DP_EPOCHS),
    Measure("train the last two layers alone", layers=2),
    Measure("stop after 5 epochs", epochs=5),
    Measure("noise as large as the change on published weights", ("W0", "C"), noise=1.0),
    Measure("weight decay 0.001", ("W", "W0", "C", "O"), weight_decay=1e-3, epochs=LONG),
    Measure("noise of 0.3 times the change on published weights", ("W0", "C"), noise=0.3),
    Measure("train the last layer alone", layers=1),
    Measure("weight decay 0.0001", weight_decay=1e-4, epochs=LONG),
    Measure("four times as many images", times=4),
    Measure("weight decay 0.01", weight_decay=1e-2, epochs=LONG),
    Measure("noise of 3 times the change on published weights", ("W0", "C"), noise=3.0),
    Measure("full batches", batch=1000),
)
DENSE = Kind("dense", True, 500, "sgd", 5e-3, (70,))
CONVOLUTIONAL = Kind("convolutional", False, 256, "sgd", 5e-4, (70,))
PER_CLASS = {"dense": 20, "convolutional": 10}
MAIN = ("W", "W0", "O")  # read first: the other rungs take most of the time
JOBS = [
    *((DENSE, 70, measure, MAIN) for measure in MEASURES[:8]),
    (DENSE, 70, BASELINE, ("C2", "C4")),
    *((DENSE, 70, measure, MAIN) for measure in MEASURES[8:12]),
    *((CONVOLUTIONAL, 70, measure, MAIN) for measure in MEASURES[:8]),
    *((DENSE, 70, measure, measure.rungs) for measure in MEASURES),
    (CONVOLUTIONAL, 70, BASELINE, ("C2", "C4")),
    *((DENSE, 71, measure, measure.rungs) for measure in MEASURES),
]  # in this order, so that a run that is cut short has measured every kind of measure once


@dataclass(frozen=True)
class Left:
    """What a training leaves behind."""

    model: nn.Module
    states: list[dict[str, Tensor]]  # from the initial to the final weights
    kept: list[float]  # c: what weight decay left of the initial weights in each state
    optimiser: dict[str, Any]
    facts: dict[str, float] = field(default_factory=dict)

    def segments(self, number: int) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
        """Pairs (c_j θ_{j−1}, θ_j). The recipe of the training says c_j."""
        chosen = equally_far(self.states, number) if number > 1 else [self.states[0], self.states[-1]]
        c = [next(k for s, k in zip(self.states, self.kept, strict=True) if s is state) for state in chosen]
        factors = [after / before for before, after in pairwise(c)]
        starts = [{name: f * t for name, t in s.items()} for f, s in zip(factors, chosen[:-1], strict=True)]
        return list(zip(starts, chosen[1:], strict=True))


def trained(kind: Kind, data: DataSet, seed: int, measure: Measure, *, epochs: int) -> Left:
    torch.manual_seed(seed)
    model = network(kind, data)
    for each in [] if measure.layers is None else layers(model)[: -measure.layers]:
        each.requires_grad_(False)
    x, y = data.centred(data.train.images), data.train.labels.float()
    δ_w, η = measure.weight_decay, kind.rate if measure.ε is None else DP_RATE
    parameters = [p for p in model.parameters() if p.requires_grad]
    rule: Any = torch.optim.SGD(parameters, lr=η, momentum=MOMENTUM, weight_decay=δ_w)
    pictures = torch.utils.data.TensorDataset(x, y)
    loader = torch.utils.data.DataLoader(pictures, batch_size=measure.batch, shuffle=True)
    unhooked, seen, facts = copy.deepcopy(model), model, {}  # Opacus leaves hooks in the model
    if measure.ε is not None:
        seen, rule, loader, facts = private(model, rule, pictures, measure.ε, epochs)
    states, kept, c, v = [copy.deepcopy(model.state_dict())], [1.0], 1.0, 0.0
    for epoch in range(1, epochs + 1):
        for images, labels in loader:
            rule.zero_grad()
            (seen(images).flatten() - labels).square().mean().backward()
            rule.step()
            v = MOMENTUM * v + δ_w * c  # θ and its momentum, without the images
            c -= η * v
        done = epoch == epochs or (measure.epochs is None and error(model, x, y) < CLOSE)
        if done or epoch <= 100 or epoch % max(1, epochs // 100) == 0:  # the weights move most at first
            states.append(copy.deepcopy(model.state_dict()))
            kept.append(c)
        if done:
            break
    unhooked.load_state_dict(states[-1])
    return published(Left(unhooked.eval(), states, kept, rule.state_dict(), facts | {"epochs": epoch}), measure.noise)


def layers(model: nn.Module) -> list[nn.Module]:
    return [each for each in model.modules() if isinstance(each, nn.Linear | nn.Conv2d)]


@torch.no_grad()
def error(model: nn.Module, x: Tensor, y: Tensor) -> float:
    return float((model(x).flatten() - y).abs().max())


def private(model: nn.Module, rule: Any, pictures: Any, ε: float, epochs: int) -> tuple[Any, Any, Any, dict]:
    """DP-SGD on all images in every step, with the noise that gives ε at δ after these epochs.

    The optimiser's state and all checkpoints follow from the noisy gradients, so ε holds on every rung.
    """
    from opacus import PrivacyEngine

    engine = PrivacyEngine(accountant="rdp")
    loader = torch.utils.data.DataLoader(pictures, batch_size=len(pictures))
    given = {"module": model, "optimizer": rule, "data_loader": loader, "max_grad_norm": CLIP}
    if ε == math.inf:
        seen, rule, loader = engine.make_private(**given, noise_multiplier=0.0)
        return seen, rule, loader, {"noise multiplier": 0.0}
    seen, rule, loader = engine.make_private_with_epsilon(**given, target_epsilon=ε, target_delta=δ, epochs=epochs)
    return seen, rule, loader, {"ε": ε, "δ": δ, "noise multiplier": round(rule.noise_multiplier, 2)}


def published(left: Left, level: float) -> Left:
    """The same with noise on the weights after training and on every checkpoint."""
    if not level:
        return left
    first, *rest = left.states
    states = [first, *(noisy(state, first, level, seed=j) for j, state in enumerate(rest))]
    left.model.load_state_dict(states[-1])
    return replace(left, states=states)


def ways(rung: str, left: Left, images: int) -> Iterator[tuple[str, Any, Subspace | None]]:
    """The objectives of a rung, and the space to search: the ways that may be the best."""
    model = left.model
    if rung == "W":
        yield "everywhere", *problem("kkt-signed", model)
        return
    options: dict[str, Any] = {}
    if rung == "O":
        options = {"method": "gradient", "gradient": pal.moments(model, left.optimiser)}
    elif rung == "W0":
        ((start, _),) = left.segments(1)
        options = {"method": "ntk", "initial": start}
    else:
        options = {"method": "path", "checkpoints": left.segments(int(rung[1:] or SEGMENTS))}
    two = {"at": (0.15, 0.85)} if rung == "W0" else {}
    objective, within = problem(model=model, within=None, **options | two)
    if within is not None:
        yield "span", objective, within
        return
    yield "everywhere", *problem(model=model, **options)
    if (within := strongest(objective, images)) is not None:
        objective.whitening = 0.5
        yield "strongest directions", objective, within


def strongest(objective: Any, images: int) -> Subspace | None:
    """The span of the images where noise hides it: as many of the strongest directions of a dense first layer."""
    T = objective.target.get("layers.0.weight")
    if T is None or not T.any():
        return None
    rows = torch.linalg.svd(T.reshape(-1, T.shape[-1]), full_matrices=False)[2][:images]
    return Subspace(torch.zeros_like(rows[0]), rows)


def read(
    kind: Kind, seed: int, measure: Measure, chosen: Sequence[str], *, steps: int, epochs: int = LONG
) -> dict[str, Any]:
    """Train with a measure, and read the chosen rungs."""
    per_class = PER_CLASS[kind.says] * measure.times
    data = pal.datasets.load("faces", per_class=per_class, held_out_per_class=min(80, 100 - per_class), seed=seed)
    left = trained(kind, data, seed, measure, epochs=min(epochs, measure.epochs or EPOCHS))
    y = data.held_out.labels
    compared = data.held_out.images[torch.cat([torch.nonzero(y == value)[:SCORED, 0] for value in y.unique()])]
    rungs = {}
    for rung in chosen:
        found = []
        for way, objective, within in ways(rung, left, len(data.train)):
            rec = pal.reconstruct(
                objective, image_shape=data.image_shape, candidates=2 * len(data.train), steps=steps, within=within,
                seed=seed, progress=False,
            )  # fmt: skip
            score = pal.score(rec, data.train.images, held_out=compared, mean=data.mean)
            found.append({"recovered": score.verdict.recovered, "ssim": round(float(score.ssim.mean()), 3), "way": way})
            print(kind.says, seed, measure.says, rung, found[-1], flush=True)
        best = max(found, key=lambda each: (each["recovered"], each["ssim"]))
        rungs[rung] = best | {"ways": len(found)} | made_by(COMMAND)
    parts = {"training": data.train, "held out": data.held_out}
    return (
        {"network": kind.says, "measure": measure.says, "seed": seed, "images": len(data.train)}
        | {"accuracy": {name: accuracy(left.model, data, part) for name, part in parts.items()}}
        | {"c": round(left.kept[-1], 3)} | left.facts | {"rungs": rungs}
    )  # fmt: skip


@torch.no_grad()
def accuracy(model: nn.Module, data: DataSet, part: Any) -> float:
    return round(float((model(data.centred(part.images)).flatten() * part.labels > 0).double().mean()), 3)


# --- tables --------------------------------------------------------------------------------------------

Rows = list[dict[str, Any]]
WITHHELD = {
    "O": [("strip the optimiser's state", "O", "W")],
    "W0": [("withhold the initial weights and the seed", "W0", "W")],
    "C": [
        ("withhold all checkpoints; before: three of them", "C4", "W0"),
        ("publish one checkpoint on the way instead of three", "C4", "C2"),
        ("publish three checkpoints on the way instead of seven", "C8", "C4"),
    ],
}  # measures that change which rung an attacker stands on: before and after, in the baseline


def cell(rows: Rows, network: str, before: tuple[str, str], after: tuple[str, str]) -> dict[str, Any] | None:
    """Recovered images and accuracy for two pairs of measure and rung: means over the seeds that have both."""
    of = {(row["measure"], row["seed"]): row for row in rows if row["network"] == network}
    pairs = [(of[before[0], seed], row) for (says, seed), row in of.items() if says == after[0]]
    pairs = [(a, b) for a, b in pairs if before[1] in a["rungs"] and after[1] in b["rungs"]]
    if not pairs:
        return None

    def count(row_rungs: list[tuple[dict, str]]) -> list[float]:
        recovered = fmean(row["rungs"][rung]["recovered"] for row, rung in row_rungs)
        return [round(recovered, 1), row_rungs[0][0]["images"]]

    firsts, seconds = zip(*pairs, strict=True)
    return {
        "before": count([(row, before[1]) for row in firsts]),
        "after": count([(row, after[1]) for row in seconds]),
        "accuracy": [round(fmean(row["accuracy"]["held out"] for row in part), 3) for part in (firsts, seconds)],
    }


def shipped(rows: Rows) -> dict[str, Any]:
    """The table of audit reports; `palimpsest.auditing.advice` says what it holds."""
    none = BASELINE.says
    rungs = {}
    for rung, withheld in WITHHELD.items():
        at = "C2" if rung == "C" else rung
        pairs = [(says, (none, a), (none, b)) for says, a, b in withheld]
        pairs += [(m.says, (none, at), (m.says, rung)) for m in MEASURES[1:] if m.ε != math.inf]
        found = []
        for says, before, after in pairs:
            networks = {name: cell(rows, name, before, after) for name in PER_CLASS}
            if any(networks.values()):
                found.append({"measure": says, "networks": {k: v for k, v in networks.items() if v}})
        rungs[rung] = sorted(found, key=left_over)
    return made_by_rows(rows) | {"rungs": rungs}


def left_over(row: dict[str, Any]) -> float:
    """The share of the images that a measure leaves to the attacker, on the worse network."""
    return max(each["after"][0] / each["after"][1] for each in row["networks"].values())


def made_by_rows(rows: Rows) -> dict[str, Any]:
    return {"command": COMMAND, "commits": sorted({each["commit"] for row in rows for each in row["rungs"].values()})}


RUNGS = {"W": ("W",), "W0": ("W0",), "C, 1 on the way": ("C", "C2"), "C, 3": ("C4",), "C, 7": ("C8",), "O": ("O",)}


def page(rows: Rows) -> str:
    """All measures: recovered images on each rung that was read, and the accuracy."""
    read_at = {rung for row in rows for rung in row["rungs"]}
    shown = {says: rungs for says, rungs in RUNGS.items() if read_at & set(rungs)}
    lines = []
    for name in PER_CLASS:
        for measure in MEASURES:
            of = [row for row in rows if row["network"] == name and row["measure"] == measure.says]
            if of:
                says = f"{name}, {measure.says}" if measure is not BASELINE else f"**{name}, no measure**"
                lines.append([says, len(of), of[0]["images"], *recovered(of, shown.values()), *accuracies(of)])
    return tables.markdown(
        ["network, measure", "seeds", "images", *shown, "accuracy, new images", "accuracy, training images"], lines
    )


def recovered(of: Rows, rungs: Iterable[Sequence[str]]) -> Iterator[str]:
    for names in rungs:
        found = [row["rungs"][name]["recovered"] for row in of for name in names if name in row["rungs"]]
        yield f"{fmean(found):g}" if found else ""


def accuracies(of: Rows) -> Iterator[str]:
    for part in ("held out", "training"):
        yield f"{100 * fmean(row['accuracy'][part] for row in of):.0f} %"


def write_tables(rows: Rows) -> None:
    tables.write(PAGE, page(rows))
    SHIPPED.write_text(json.dumps(shipped(rows), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--tables", action="store_true")
    options = parser.parse_args()
    if not options.tables and find_spec("opacus") is None:
        parser.error("DP-SGD needs Opacus; run pip install palimpsest[dp]")
    if options.small:
        for measure in MEASURES:
            read(replace(DENSE, width=32), 0, measure, measure.rungs, steps=2, epochs=9)
        return
    rows = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else []
    for kind, seed, measure, rungs in [] if options.tables else JOBS:
        same = [r for r in rows if (r["network"], r["seed"], r["measure"]) == (kind.says, seed, measure.says)]
        known = same[0]["rungs"] if same else {}
        if missing := [rung for rung in rungs if rung in measure.rungs and rung not in known]:
            row = read(kind, seed, measure, missing, steps=STEPS)
            rows = [r for r in rows if r not in same] + [row | {"rungs": known | row["rungs"]}]
            RESULTS.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    write_tables(rows)


if __name__ == "__main__":
    main()
