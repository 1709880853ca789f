"""Are the verdicts of audits right, on networks that hold nothing to read and on networks that leak?

    python experiments/audit_verdicts.py        writes docs/results/audit-verdicts.json

**Empty**: 40 audits. The change of the weights is noise of the size of a training, or a real change with its entries
permuted, or the images given are not those that the network was trained on. None may be called leaking.

**Leaking**: 20 networks trained by plain torch, each audited with three efforts. None may be called "no evidence" if
the comparison with the training images finds more than five of them.

Every audit is judged twice: with the training images, and as if they had not been given. Networks are perceptrons and
convolutional networks, images digits and faces, means those that users subtract.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import Tensor, nn

import palimpsest as pal
from palimpsest.auditing import controls
from palimpsest.auditing.subject import subject
from palimpsest.auditing.verdict import Evidence, judge

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from provenance import made_by  # noqa: E402

import outsider  # noqa: E402

MEANS = ("training", "channels", "constant", "none")
EFFORTS = (150, 500, 1500)  # steps
LEARNING_RATE = {"perceptron": 0.005, "convolutional": 0.0005}


def perceptron() -> nn.Module:
    """For faces."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(625, 300), nn.ReLU(), nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 1)
    )


FACTORIES = {"perceptron": perceptron, "convolutional": outsider.convolutional}
DATA = {"perceptron": "faces", "convolutional": "digits"}


@dataclass(frozen=True)
class Case:
    number: int
    kind: str
    network: str
    mean: str
    images: int
    batch: int | None
    steps: int
    knows_start: bool = True


def cases() -> list[Case]:
    kinds, networks = ("noise", "permuted", "other images"), tuple(FACTORIES)
    empty = [
        Case(i, kinds[i % 3], networks[i // 3 % 2], MEANS[i // 6 % 4], (10, 20)[i % 2], None, 400, i % 5 != 4)
        for i in range(40)
    ]
    leaking = [
        Case(i, "leaking", networks[i % 2], MEANS[i // 2 % 4], (10, 20, 30)[i % 3], (None, 5)[i // 4 % 2], steps)
        for i in range(20)
        for steps in EFFORTS
    ]
    return empty + leaking


def run(case: Case) -> dict:
    torch.set_num_threads(1)
    make = FACTORIES[case.network]
    truth, start, final = trained(case, make)
    if case.kind == "noise":
        generator = torch.Generator().manual_seed(case.number)
        final = {name: start[name] + _like(final[name] - start[name], generator) for name in final}
    if case.kind == "permuted":
        ours = subject(make, final, initial=start, image_shape=tuple(truth.images.shape[1:]))
        final = controls.shuffled(ours, "ntk", seed=1000 + case.number).model.state_dict()
    if case.kind == "other images":
        truth = truth_of(replace(case, number=500 + case.number))
    with tempfile.TemporaryDirectory() as folder:
        found = pal.audit(
            make, final, initial=start if case.knows_start else None, image_shape=tuple(truth.images.shape[1:]),
            out=Path(folder) / "audit", truth=truth, samples=case.images, steps=case.steps, restarts=2, tangents=1,
            control_steps=2000, seed=case.number, rungs=("W0" if case.knows_start else "W",),
        )  # fmt: skip
    alone = judge(Evidence(found.ranking, found.negative, found.positive))
    return vars(case) | {
        "recovered": found.score.verdict.recovered if found.score else 0,
        "with images": found.verdict.outcome.value,
        "without images": alone.outcome.value,
        "sentence": found.verdict.sentence,
        "sentence without images": alone.sentence,
        "floor": found.floor,
        "accuracy": found.accuracy,
    }


def _like(change: Tensor, generator: torch.Generator) -> Tensor:
    return change.square().mean().sqrt() * torch.randn(change.shape, generator=generator)


def truth_of(case: Case) -> pal.auditing.Truth:
    """Training images with labels, as many held-out images and twenty more, and the mean that a user subtracts."""
    half = case.images // 2
    data = pal.datasets.load(DATA[case.network], per_class=half, held_out_per_class=half + 10, seed=case.number)
    x = data.train.images
    mean, std = {
        "training": (x.mean(0), torch.ones_like(x[0])),
        "channels": (x.mean((0, 2, 3))[:, None, None].expand(x.shape[1:]), x.std().expand(x.shape[1:])),
        "constant": (torch.full_like(x[0], 0.5), torch.full_like(x[0], 0.5)),
        "none": (torch.zeros_like(x[0]), torch.ones_like(x[0])),
    }[case.mean]
    return pal.auditing.Truth(x, (data.train.labels > 0).long(), data.held_out.images, mean=mean, std=std)


def trained(case: Case, make) -> tuple[pal.auditing.Truth, dict[str, Tensor], dict[str, Tensor]]:
    """The truth, and the weights before and after a training by plain torch."""
    truth = truth_of(case)
    torch.manual_seed(case.number)
    model = make().eval()
    start = {name: t.clone() for name, t in model.state_dict().items()}
    x, y = truth.seen, truth.labels_for(1).float()
    optimiser = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE[case.network], momentum=0.9)
    for _ in range(3000):
        for batch in torch.randperm(len(x)).split(case.batch or len(x)):
            loss = (model(x[batch]).squeeze(1) - y[batch]).square().mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        with torch.no_grad():
            if (model(x).squeeze(1) - y).abs().max() < 0.02:
                break
    return truth, start, model.state_dict()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--only", type=int, nargs="+", help="numbers of cases to run")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / "audit-verdicts.json")
    options = parser.parse_args()
    chosen = cases() if options.only is None else [cases()[i] for i in options.only]
    with ProcessPoolExecutor(options.workers, mp_context=get_context("spawn")) as pool:
        rows = []
        for row in pool.map(run, chosen):
            rows.append(row)
            print(json.dumps(row), flush=True)
    empty, leaking = ([r for r in rows if (r["kind"] == "leaking") is which] for which in (False, True))
    judgements = ("with images", "without images")
    held = [r for r in empty if r["kind"] != "other images"]  # without its images such a network does leak
    false_claims = sum(r["with images"] == "leakage" for r in empty)
    false_claims += sum(r["without images"] == "leakage" for r in held)
    missed = sum(r["recovered"] > 5 and "no evidence" in (r[j] for j in judgements) for r in leaking)
    result = {
        **made_by("python experiments/audit_verdicts.py"),
        "empty networks called leaking": false_claims,
        "leaking networks called no evidence": missed,
        "empty": {j: Counter(r[j] for r in empty) for j in judgements},
        "leaking": {f"{s} steps": {j: Counter(r[j] for r in leaking if r["steps"] == s) for j in judgements}
                    for s in EFFORTS},
        "audits": rows,
    }  # fmt: skip
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({name: value for name, value in result.items() if name != "audits"}, indent=1))


if __name__ == "__main__":
    main()
