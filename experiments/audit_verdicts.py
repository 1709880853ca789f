"""Are the verdicts of audits right, on networks that hold nothing to read and on networks that leak?

    python experiments/audit_verdicts.py            writes docs/results/audit-verdicts.json and the table of its page
    python experiments/audit_verdicts.py --small    a version of seconds, which writes nothing there

**Empty**: 48 audits. The change of the weights is noise of the size of a training, or a real change with its entries
permuted, or the images given are not those that the network was trained on. None may be called leaking.

**Leaking**: 10 networks trained by plain torch, each audited with two efforts. None may be called "no evidence" if
the comparison with the training images finds more than five of them.

Every audit is judged twice: with the training images, and as if only their number had been given. Networks are of five
families, images digits and faces, means those that users subtract. Each audit climbs the whole ladder of attackers. It
is kept in --parts and not repeated; --again repeats all.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import judged
import outsiders
import processes
import tables
import torch
from provenance import made_by
from torch import Tensor, nn

import palimpsest as pal
from palimpsest.files.storage import write_atomically

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
import outsider  # noqa: E402

RESULTS, PAGE = ROOT / "docs" / "results" / "audit-verdicts.json", "verdicts.md"
PARTS = ROOT / "runs" / "audit-verdicts"
SEED = 5000  # of the first network; lower ones were used to develop
JUDGEMENTS = ("with images", "without images")
OUTCOMES = ("leakage", "no evidence", "undecided", "no verdict")
KINDS = {
    "noise": "noise",
    "permuted": "a training, permuted",
    "other images": "other images",
    "leaking": "these images",
}
MEANS = ("training", "channels", "constant", "none")
EMPTY, EMPTY_STEPS = 48, 200
LEAKING, EFFORTS = 10, (150, 500)  # networks, and steps of each of their audits
MANY = 5  # recovered images that forbid "no evidence"
TURNS = ("perceptron", "convolutional", "residual", "perceptron", "convolutional", "vit", "perceptron", "classes")
RATES = {"perceptron": 0.005, "convolutional": 0.0005, "residual": 0.0005, "vit": 0.005, "classes": 0.005}
FACTORIES: dict[str, Callable[[], nn.Module]] = {
    "perceptron": lambda: outsiders.Perceptron(625, 300),
    "convolutional": outsider.convolutional,
    "residual": outsider.residual,
    "vit": lambda: outsiders.ViT(8, 32, depth=2, patch=4),
    "classes": lambda: outsiders.Perceptron(64, 200, 10),
}


@dataclass(frozen=True)
class Case:
    number: int
    seed: int
    kind: str
    network: str
    mean: str
    images: int
    batch: int | None
    steps: int
    knows: tuple[str, ...] = ("start",)  # "start", "checkpoints"

    @property
    def faces(self) -> bool:
        return self.network == "perceptron"

    @property
    def outputs(self) -> int:
        return 10 if self.network == "classes" else 1


def cases(seed: int = SEED) -> list[Case]:
    empty = [
        Case(i, seed + i, list(KINDS)[i % 3], TURNS[i // 3 % 8], MEANS[i // 6 % 4], (10, 20)[i % 2], None, EMPTY_STEPS,
             () if i % 5 == 4 else ("start", "checkpoints") if i % 4 == 1 else ("start",))
        for i in range(EMPTY)
    ]  # fmt: skip
    leaking = [
        Case(EMPTY + len(EFFORTS) * i + j, seed + EMPTY + i, "leaking", TURNS[i % 2], MEANS[i // 2 % 4],
             (10, 20, 30)[i % 3], (None, 5)[i // 4 % 2], steps)
        for i in range(LEAKING) for j, steps in enumerate(EFFORTS)
    ]  # fmt: skip
    return empty + leaking


def audited(case: Case, *, small: bool = False) -> dict[str, Any]:
    torch.set_num_threads(1)
    began = time.process_time()
    make = FACTORIES[case.network]
    truth, states = trained(case, make, epochs=5 if small else 3000)
    states = emptied(case, states)
    if case.kind == "other images":
        truth = truth_of(replace(case, seed=case.seed + 500))
    with tempfile.TemporaryDirectory() as folder:
        found = pal.audit(
            make, states[-1], initial=states[0] if "start" in case.knows else None, truth=truth,
            checkpoints=states if "checkpoints" in case.knows else None, image_shape=truth.images.shape[1:],
            out=Path(folder) / "audit", steps=5 if small else case.steps, control_steps=5 if small else 2000,
            restarts=2, tangents=1, seed=case.seed, minutes=600.0,
        )  # fmt: skip
    return vars(case) | judged.numbers(found) | {"CPU seconds": round(time.process_time() - began)}


def truth_of(case: Case) -> pal.auditing.Truth:
    """Training images with labels, as many held-out images and twenty more, and the mean that a user subtracts."""
    name, task, classes = (
        ("faces" if case.faces else "digits"),
        "classes" if case.outputs > 1 else "binary",
        max(2, case.outputs),
    )
    each = case.images // classes
    data = pal.datasets.load(name, per_class=each, held_out_per_class=each + 20 // classes, seed=case.seed, task=task)
    x = data.train.images
    mean, std = {
        "training": (x.mean(0), torch.ones_like(x[0])),
        "channels": (x.mean((0, 2, 3))[:, None, None].expand(x.shape[1:]), x.std().expand(x.shape[1:])),
        "constant": (torch.full_like(x[0], 0.5), torch.full_like(x[0], 0.5)),
        "none": (torch.zeros_like(x[0]), torch.ones_like(x[0])),
    }[case.mean]
    return pal.auditing.Truth(x, data.train.labels.clamp_min(0), data.held_out.images, mean=mean, std=std)


def trained(
    case: Case, make: Callable[[], nn.Module], *, epochs: int
) -> tuple[pal.auditing.Truth, list[dict[str, Tensor]]]:
    """The truth, and the weights before, during and after a training by plain torch with squared loss."""
    truth = truth_of(case)
    torch.manual_seed(case.seed)
    model = make().eval()
    x, y = truth.seen, truth.labels_for(case.outputs).float()[:, None]
    if case.outputs > 1:
        y = nn.functional.one_hot(truth.labels, case.outputs).float()
    states = [{name: t.clone() for name, t in model.state_dict().items()}]
    optimiser = torch.optim.SGD(model.parameters(), lr=RATES[case.network], momentum=0.9)
    for _ in range(epochs):
        for batch in torch.randperm(len(x)).split(case.batch or len(x)):
            loss = (model(x[batch]) - y[batch]).square().mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        states.append({name: t.clone() for name, t in model.state_dict().items()})
        with torch.no_grad():
            if (model(x) - y).abs().max() < 0.02:
                break
    return truth, outsiders.Left(model, states).checkpoints


def emptied(case: Case, states: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """The states with the change of each segment replaced by noise of its size, or with its entries permuted."""
    generator = torch.Generator().manual_seed(case.seed)
    made = states[:1]
    for before, after in pairwise(states):
        change = {name: after[name] - before[name] for name in after}
        if case.kind == "noise":
            change = {name: _noise_like(t, generator) for name, t in change.items()}
        if case.kind == "permuted":
            change = {name: _permuted(t, generator) for name, t in change.items()}
        made.append({name: made[-1][name] + t for name, t in change.items()})
    return made


def _noise_like(change: Tensor, generator: torch.Generator) -> Tensor:
    if not change.is_floating_point():
        return change
    return change.square().mean().sqrt() * torch.randn(change.shape, generator=generator)


def _permuted(change: Tensor, generator: torch.Generator) -> Tensor:
    return change.flatten()[torch.randperm(change.numel(), generator=generator)].view_as(change)


# --- the result -------------------------------------------------------------------------------------------------------


def false_claims(rows: list[dict[str, Any]]) -> int:
    """Empty networks called leaking. A network trained on other images does leak if it is judged without images."""
    empty = [row for row in rows if row["kind"] != "leaking"]
    named = [row["with images"] for row in empty]
    named += [row["without images"] for row in empty if row["kind"] != "other images"]
    return named.count("leakage")


def missed(rows: list[dict[str, Any]]) -> int:
    """Networks called "no evidence" although the comparison finds more than five training images."""
    return sum(row["recovered"] > MANY and "no evidence" in (row[j] for j in JUDGEMENTS) for row in rows)


def table(rows: list[dict[str, Any]]) -> str:
    columns = ["the weights hold", "steps", "audits", "judged", *OUTCOMES]
    groups = Counter((row["kind"], row["steps"]) for row in rows)
    shown = []
    for (kind, steps), count in groups.items():
        for judgement in JUDGEMENTS:
            outcomes = Counter(row[judgement] for row in rows if (row["kind"], row["steps"]) == (kind, steps))
            shown.append([KINDS[kind], steps, count, judgement, *(outcomes[name] for name in OUTCOMES)])
    return tables.markdown(columns, shown)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=int, nargs="+", help="numbers of audits")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--parts", type=Path, default=PARTS)
    parser.add_argument("--again", action="store_true", help="repeat audits that are in --parts")
    processes.add_arguments(parser)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    every = cases(options.seed)
    chosen = every if options.only is None else [every[i] for i in options.only]
    parts = {case: options.parts / f"{case.number}-{case.seed}{'-small' * options.small}.json" for case in chosen}
    todo = {case: path for case, path in parts.items() if options.again or not path.exists()}
    processes.run_all(
        {str(case.number): partial(_run, case, path, options.small) for case, path in todo.items()}, options
    )
    rows = [json.loads(path.read_text(encoding="utf-8")) for path in parts.values()]
    shown = table(rows)
    counts = {"empty networks called leaking": false_claims(rows), "leaking networks called no evidence": missed(rows)}
    print(shown, json.dumps(counts, indent=1), sep="\n")
    if not options.small and options.seed == SEED and len(rows) == len(every):
        content = made_by("python experiments/audit_verdicts.py") | counts | {"audits": rows}
        RESULTS.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        tables.write(PAGE, shown, "verdicts")


def _run(case: Case, path: Path, small: bool) -> str:
    row = audited(case, small=small) | made_by(f"python experiments/audit_verdicts.py --only {case.number}")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (json.dumps(row, indent=1) + "\n").encode())
    outcomes = ", ".join(row[judgement] for judgement in JUDGEMENTS)
    return f"{case.number}: {case.kind}, {case.network}: {outcomes}, {row['CPU seconds']} s"


if __name__ == "__main__":
    main()
