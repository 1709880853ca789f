"""How many images of the last mini-batches can be read from a final checkpoint that holds the optimiser's state?

Networks are trained by plain torch on 100 CIFAR-10 images, for a fixed number of epochs. The attack sees the final
weights and the first moment of Adam, or the momentum of SGD. It does not see earlier weights. The settings of dense
and small convolutional networks were chosen on seed 11. Those of ResNets are as in `networks_in_use`.

    python experiments/optimiser_state.py [--rows …] [--seeds …]   writes experiments/results/optimiser-state
    python experiments/optimiser_state.py --page                   writes the table of its page, and ends

Parts that exist are not made again.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import processes
import tables
import torch
from networks_in_use import reading, training
from networks_in_use.rows import RESNET_READING, Kind, Reading, Row, Training
from provenance import made_by
from torch import Tensor, nn

import palimpsest as pal
from palimpsest.files.storage import write_atomically
from palimpsest.runs.problems import problem

ROOT = Path(__file__).resolve().parents[1]
RESULTS, SCRATCH = ROOT / "experiments/results/optimiser-state", ROOT / "runs/networks-in-use"
PAGE = "experiments/optimiser-state.md"
LAST = (1, 2, 5)  # batches
FORGOTTEN = 0.9  # β of SGD's momentum and of Adam's first moment
SMALL_SHARE = 0.05
SHARES = ((0.0, 0.02), (0.02, 0.05), (0.05, 0.1), (0.1, 1.0))

DENSE = Reading(steps=600)  # problem() adds the span of the first layer's moment, and whitens it
# On the tuning seed, images recovered of 100 from small networks after 600 steps: 2 (momentum) and 1 (Adam) with p = 0,
# 35 and 9 with p = 1.
CONVOLUTIONAL = Reading(steps=1500, strength=(10.0, 3.0), whitening=1.0)
SMALL_READING = replace(CONVOLUTIONAL, steps=600)
RESIDUAL = replace(RESNET_READING, per_image=1.0, steps=1500)


def rows_of(
    kind: Kind, says: str, width: int, read: Reading, epochs: dict[tuple[str, int], tuple[float, int]], name: str = ""
) -> list[Row]:
    """A row for each optimiser and size of batches, by its rate and its epochs."""
    return [
        Row(name=f"{name or kind}-{optimiser}-{batch}", kind=kind, says=says, n=100, width=width, reading=read,
            training=Training(optimiser=optimiser, rate=rate, epochs=count, batch=batch))  # type: ignore[arg-type]
        for (optimiser, batch), (rate, count) in epochs.items()
    ]  # fmt: skip


# Epochs of dense networks: of 5, 10 and 20 the first after which the mean loss is below 0.1, on seed 11.
# Small convolutional networks end with losses of 0.02 to 0.17 there. The others have rates and epochs that nobody has
# chosen yet.
MLP = {("adam", 10): (1e-4, 5), ("adam", 50): (1e-4, 5), ("momentum", 10): (1e-3, 5), ("momentum", 50): (1e-3, 20)}
LONGER = {("adam", 10): (1e-4, 20), ("momentum", 10): (1e-3, 20)}
SMALL = {("adam", 10): (3e-4, 20), ("adam", 50): (1e-3, 20), ("momentum", 10): (5e-3, 20), ("momentum", 50): (1e-2, 40)}
CNN = {("adam", 10): (1e-4, 5), ("adam", 50): (1e-4, 5), ("momentum", 10): (1e-4, 10), ("momentum", 50): (1e-4, 20)}
RESNET = {("adam", 10): (1e-4, 5), ("adam", 50): (1e-4, 5), ("momentum", 10): (1e-3, 5), ("momentum", 50): (1e-3, 5)}
ROWS = {
    row.name: row
    for row in (
        *rows_of("mlp", "dense", 128, DENSE, MLP),
        *(replace(row, name=f"{row.name}-longer") for row in rows_of("mlp", "dense", 128, DENSE, LONGER)),
        *rows_of("cnn, torch's start", "convolutional, width 32", 32, SMALL_READING, SMALL, "small-cnn"),
        *rows_of("cnn", "convolutional", 128, CONVOLUTIONAL, CNN),
        *rows_of("resnet", "ResNet-18, pretrained, batch norm fixed", 64, RESIDUAL, RESNET),
    )
}


@dataclass(frozen=True)
class Left:
    """What a training leaves in its final checkpoint, and facts that only scoring sees."""

    model: nn.Module
    optimiser: dict[str, Any]
    batches: list[Tensor]
    """Rows of the images of the last mini-batches, the last one first."""
    shares: Tensor
    """‖Σ_j βʲ ∂ℓ_j/∂Φ(x_i)‖ of each image i over the steps, j = 0 for the last: how much of it the moment holds."""
    loss: float
    """The mean of the last epoch."""


def trained(model: nn.Module, x: Tensor, y: Tensor, recipe: Training, seed: int) -> Left:
    assert recipe.batch is not None
    optimiser = training.optimiser_of(model, recipe.optimiser, recipe.rate)
    order = torch.Generator().manual_seed(seed)
    held, batches, loss = torch.zeros_like(model(x).detach()), [], 0.0
    for _ in range(recipe.epochs):
        loss = 0.0
        for rows in torch.randperm(len(x), generator=order).split(recipe.batch):
            outputs = model(x[rows])
            outputs.retain_grad()
            error = training.loss_of(outputs, y[rows])
            optimiser.zero_grad()
            error.backward()
            optimiser.step()
            held *= FORGOTTEN
            held[rows] += outputs.grad
            batches.append(rows)
            loss += error.item() * len(rows) / len(x)
    return Left(model, optimiser.state_dict(), batches[: -max(LAST) - 1 : -1], held.norm(dim=1).cpu(), loss)


def read(left: Left, row: Row, images: training.Images, seed: int) -> Tensor:
    """Candidates, from the final checkpoint alone."""
    shape, how = images.mean.shape, row.reading
    gradient = pal.moments(left.model, left.optimiser)
    objective, within = problem(
        "gradient", left.model, gradient=gradient, image_shape=shape, weights=how.weights, within=None,
        whitening=how.whitening or None,
    )  # fmt: skip
    within = pal.Cosines.of(shape) if how.cosines else within
    box = pal.priors.Box.around(images.mean.to(objective.device))
    return pal.reconstruct(
        objective, image_shape=shape, candidates=round(how.per_image * row.n), steps=how.steps, within=within,
        priors=(box, pal.priors.TotalVariation(weight=how.smoothness)), prior_strength=how.strength,
        optimiser=pal.optimisers.Adam(learning_rate=how.rate), seed=seed, progress=False,
    ).images.cpu()  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Part:
    """One network and its reading."""

    row: Row
    seed: int
    small: bool
    results: Path
    scratch: Path

    @property
    def file(self) -> Path:
        return self.results / f"{self.row.name}-seed{self.seed}.json"

    def run(self) -> str:
        row, seed, device = self.row, self.seed, reading.device()
        images = training.load(row, seed)
        model = training.before(row, seed, self.scratch).to(device).eval()  # batch norm, if any, is fixed
        x, y = images.train - images.mean, training.targets(row, images)
        left = trained(model, x.to(device), y.to(device), row.training, seed)
        began = time.perf_counter()
        found = read(left, row, images, seed)
        seconds = time.perf_counter() - began
        score = pal.score(found, images.train, held_out=images.held_out, mean=images.mean)
        assert score.held_out is not None
        command = f"python experiments/optimiser_state.py --rows {row.name} --seeds {seed}" + " --small" * self.small
        result = {"row": row.name, "seed": seed} | made_by(command)
        result |= {"device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU"}
        result |= {"parameters": sum(p.numel() for p in model.parameters())}
        result |= {"training": asdict(row.training) | {"loss": left.loss}}
        result |= {"reading": asdict(row.reading) | {"seconds": round(seconds, 1)}}
        result |= {"batches": [rows.tolist() for rows in left.batches], "shares": rounded(left.shares)}
        result |= {"ssim": rounded(score.ssim), "recovered": score.recovered.tolist()}
        result |= {"held-out ssim": rounded(score.held_out.ssim), "verdict": score.verdict.sentence}
        self.results.mkdir(parents=True, exist_ok=True)
        write_atomically(self.file, (json.dumps(result, separators=(",", ":")) + "\n").encode())
        return f"{row.name} seed {seed}, loss {left.loss:.3f}, {seconds:.0f} s: {counts(result)}"


def rounded(values: Tensor) -> list[float]:
    return [float(f"{v:.4g}") for v in values.tolist()]


# --- the table ------------------------------------------------------------------------------------


def counts(part: dict[str, Any]) -> dict[str, float]:
    """Of one network: images of the last batches that are read, and how many of them the moment holds."""
    found: dict[str, float] = {}
    largest = max(part["shares"])
    for batches in LAST:
        chosen = {i for rows in part["batches"][:batches] for i in rows}
        found[f"{batches} of"] = len(chosen)
        found[f"{batches} held"] = sum(part["shares"][i] > SMALL_SHARE * largest for i in chosen)
        found[f"{batches} above 0.4"] = sum(part["ssim"][i] > 0.4 for i in chosen)
        found[f"{batches} above 0.6"] = sum(part["ssim"][i] > 0.6 for i in chosen)
        found[f"{batches} recovered"] = sum(part["recovered"][i] for i in chosen)
    found["held-out above 0.4"] = sum(v > 0.4 for v in part["held-out ssim"])
    return found


def load(results: Path) -> dict[str, list[dict[str, Any]]]:
    """The parts of each row."""
    parts = defaultdict(list)
    for file in sorted(results.glob("*.json")):
        part = json.loads(file.read_bytes())
        parts[part["row"]].append(part)
    return parts


def table(results: Path) -> str:
    """Means over seeds, and how the images' shares in the moment decide whether they are read."""
    parts = load(results)
    columns = ["network", "optimiser", "batch", "epochs", "loss", "seeds", "last batch: in the moment", "above 0.4"]
    columns += ["above 0.6", "recovered", "last 2 batches: above 0.6", "recovered", "last 5: above 0.6", "recovered"]
    rows = [row for row in ROWS.values() if parts[row.name]]
    counted = tables.markdown([*columns, "held-out above 0.4"], [_cells(row, parts[row.name]) for row in rows])
    columns = ["network", "optimiser", "batch", "epochs", *(f"share {low:.0%} to {high:.0%}" for low, high in SHARES)]
    shared = [[*_training(row), *(_read(parts[row.name], *between) for between in SHARES)] for row in rows]
    return counted + "\n" + tables.markdown(columns, shared)


def _training(row: Row) -> list[object]:
    optimiser = "Adam" if row.training.optimiser == "adam" else "SGD, momentum"
    return [row.says, optimiser, row.training.batch, row.training.epochs]


def _read(seeds: Sequence[dict[str, Any]], low: float, high: float) -> str:
    """How many of the images with such a share in the moment, relative to the largest, have an SSIM above 0.6."""
    values = [
        ssim
        for part in seeds
        for share, ssim in zip(part["shares"], part["ssim"], strict=True)
        if low <= share / max(part["shares"]) and (share / max(part["shares"]) < high or high == 1)
    ]
    return f"{sum(v > 0.6 for v in values)} of {len(values)}"


def _cells(row: Row, seeds: Sequence[dict[str, Any]]) -> list[object]:
    counted = [counts(part) for part in seeds]
    mean = {key: fmean(part[key] for part in counted) for key in counted[0]}

    def of(batches: int, what: str) -> str:
        return f"{mean[f'{batches} {what}']:.1f} of {mean[f'{batches} of']:.0f}"

    cells = [*_training(row), f"{fmean(p['training']['loss'] for p in seeds):.2g}"]
    cells += [len(seeds), *(of(1, what) for what in ("held", "above 0.4", "above 0.6", "recovered"))]
    cells += [of(batches, what) for batches in LAST[1:] for what in ("above 0.6", "recovered")]
    return [*cells, f"{mean['held-out above 0.4']:.1f}"]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(training.REPORTED))
    processes.add_arguments(parser)
    parser.add_argument("--results", type=Path, help="folder for the results")
    parser.add_argument("--scratch", type=Path, default=SCRATCH, help="folder for pretrained networks")
    parser.add_argument("--small", action="store_true", help="a version for a test, which does not need files")
    parser.add_argument("--table", action="store_true", help="print the results as a table, and end")
    parser.add_argument("--page", action="store_true", help="write the table into its page of the docs, and end")
    options = parser.parse_args(arguments)
    results = options.results or (SCRATCH / "small" if options.small else RESULTS)
    if options.table or options.page:
        tables.write(PAGE, table(results)) if options.page else print(table(results), end="")
        return 0
    parts = [
        Part(row=ROWS[name].small() if options.small else ROWS[name], seed=seed, small=options.small, results=results,
             scratch=options.scratch)
        for name in options.rows for seed in options.seeds
    ]  # fmt: skip
    parts = [part for part in parts if not part.file.exists()]
    for part in parts:
        training.pretrain(part.row, options.scratch, reading.device())
    return processes.run_all({part.file.stem: part.run for part in parts}, options)


if __name__ == "__main__":
    raise SystemExit(main())
