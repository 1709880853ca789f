"""Does a network trained by plain torch leak as much as the demo's?

`pal.train` moves the first layer in the span of the images, in float64, and rounds once. Other people's weights are
rounded at every step. Here the demo's network is trained both ways from the same start on the same images, and read
with the demo's settings.

    python experiments/plain_torch.py        writes docs/results/plain-torch.json
"""

from __future__ import annotations

import copy
import json
from pathlib import Path

import torch
from provenance import made_by
from torch import Tensor, nn

import palimpsest as pal
from palimpsest.datasets import DataSet
from palimpsest.runs.reconstruct import ReconstructOptions
from palimpsest.runs.train import TrainOptions

ROOT = Path(__file__).parents[1]
RATE, MOMENTUM, TOLERANCE = 1e-3, 0.95, 0.01  # the last two are the demo's


def trained_plainly(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[nn.Module, int]:
    """A trained copy, in float32 throughout, and the number of steps until no output is off by more than 0.01."""
    model = copy.deepcopy(model)
    optimiser = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    for step in range(20_000):
        errors = model(images).squeeze(1) - labels
        if errors.abs().max() < TOLERANCE:
            return model, step
        optimiser.zero_grad()
        errors.square().mean().backward()
        optimiser.step()
    raise RuntimeError("the training did not converge")


def read(model: nn.Module, initial: dict[str, Tensor], data: DataSet) -> dict[str, dict[str, float]]:
    """The demo's rows for these weights."""
    reading, rows = ReconstructOptions(), {}
    objective, within = reading.problem(model, initial, "squared")
    for name, splitting in (("without splitting", None), ("with splitting", reading.splitting)):
        rec = pal.reconstruct(
            objective, image_shape=data.image_shape, within=within, candidates=reading.candidates,
            steps=reading.steps, splitting=splitting, seed=reading.seed, progress=False,
        )  # fmt: skip
        score = pal.score(rec, data.train.images, held_out=data.held_out.images, mean=data.mean)
        above = {f"above {bar}": int((score.ssim > bar).sum()) for bar in (0.6, 0.9)}
        verdict = {"recovered": score.verdict.recovered, "verdict": score.verdict.outcome.value}
        rows[name] = {"mean SSIM": round(float(score.ssim.mean()), 3), **above, **verdict}
        print(name, rows[name], flush=True)
    return rows


def main() -> None:
    training = TrainOptions()
    data = training.load()
    model, images = training.network(data), data.centred(data.train.images)
    initial = copy.deepcopy(model.state_dict())
    plain, steps = trained_plainly(model, images, data.train.labels.float())
    ours = pal.train(model, images, data.train.labels, loss=training.loss).model
    written = {
        **made_by("python experiments/plain_torch.py"),
        "optimiser": f"torch.optim.SGD, rate {RATE:g}, momentum {MOMENTUM:g}, {steps} steps, float32",
        "images by the span": {
            "plain torch": pal.span(plain, initial).samples,
            "pal.train": pal.span(ours, initial).samples,
        },
        "plain torch": read(plain, initial, data),
        "pal.train": read(ours, initial, data),
    }
    (ROOT / "docs/results/plain-torch.json").write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
