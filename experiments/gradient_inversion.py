"""One gradient of an untrained network, in the setting of the library *breaching*: which images does it give away?

The setting is breaching's case 1: a network of eight convolutions (width 64) with torch's start and batch normalisation
in evaluation mode, and one gradient of the cross-entropy on a few CIFAR-10 test images. The labels are unknown, and the
size of the batch is known.

    python experiments/gradient_inversion.py [--device cuda] [--workers 4]    writes results/gradient-inversion
    python experiments/gradient_inversion.py --landscape           measures how the gradient changes near an image
    python experiments/gradient_inversion.py --page                writes the tables of its page, and ends

Parts that exist are not made again. With ``--seconds``, no part begins later than this.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import processes
import tables
import torch
import torch.nn.functional as F
from networks_in_use.training import source
from provenance import made_by
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

import palimpsest as pal
from palimpsest.execution import Execution, Executor, Mode
from palimpsest.execution.precision import matrix_products
from palimpsest.files.storage import write_atomically
from palimpsest.objectives.labels import Classes
from palimpsest.objectives.weighting import Weights

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "experiments/results/gradient-inversion", "experiments/gradient-inversion.md"
MEAN = torch.tensor((0.4914672, 0.4822617, 0.4467701)).view(3, 1, 1)
STD = torch.tensor((0.2470322, 0.2434851, 0.2615879)).view(3, 1, 1)
BATCHES, WIDTH, SEEDS, TUNING = (1, 4, 8, 16), 64, (0, 1, 2), 11
PUBLISHED_STEPS, PUBLISHED_RATE, BETAS = 24_000, 0.1, (0.9, 0.999)  # Adam's usual averages
NOISE = (0.001, 0.005, 0.02)  # standard deviations per pixel, for the landscape
# What breaching's notebooks print for one image. Its own SSIM is another measure, so it is not repeated here.
# A step of its L-BFGS takes up to 20 gradients.
PRINTED = {"Deep Leakage, labels unknown": (23.41, 1200), "Beyond Inferring, labels known": (24.06, 400)}


# --- the setting ----------------------------------------------------------------------------------


class Normalised(nn.Module):
    """Divides centred pixels by the channels' deviations."""

    std: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("std", STD.clone())

    def forward(self, x: Tensor) -> Tensor:
        return x / self.std


def network(width: int) -> nn.Sequential:
    """Eight convolutions, each with batch normalisation and ReLU; pools of 3 after the sixth and the eighth."""
    channels = [3, width, 2 * width, 2 * width, *[4 * width] * 5]
    layers: list[nn.Module] = [Normalised()]
    for number in range(8):
        layers += [nn.Conv2d(channels[number], channels[number + 1], 3, padding=1)]
        layers += [nn.BatchNorm2d(channels[number + 1]), nn.ReLU()]
        layers += [nn.MaxPool2d(3)] if number in (5, 7) else []
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(36 * width, 10))


def images_of(seed: int, batch: int, *, small: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Images of the test file, their classes, and as many held-out images. Seeds may share images."""
    side = 16 if small else 32
    images, classes = source("cifar10" if seed == TUNING else "cifar10-test", side)
    images = F.interpolate(images[:2000], size=(32, 32)) if small else images
    rows = torch.randperm(2000, generator=torch.Generator().manual_seed(seed))[: 2 * batch]
    return images[rows[:batch]], classes[rows[:batch]], images[rows[batch:]]


def gradient_of(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(F.cross_entropy(model(x), y), parameters), strict=True))


def labels_from_bias(of_bias: Tensor, batch: int) -> Tensor:
    """The last bias has the gradient Σ_i (p_i − y_i) / n. Outputs p of an untrained network are about equal.

    >>> labels_from_bias(torch.tensor([0.1 - 0.5, 0.1, 0.1 - 0.5]), 2)
    tensor([0, 2])
    """
    left, labels = of_bias.detach().cpu().clone(), []
    for _ in range(batch):
        labels.append(int(left.argmin()))
        left[labels[-1]] += 1 / batch
    return torch.tensor(labels)


# --- the attacks ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Run:
    """What an attack knows besides the network and its gradient, and how it computes."""

    batch: int
    steps: int
    seed: int
    tf32: bool = False


Attack = Callable[[nn.Module, Mapping[str, Tensor], Run], Tensor]


@dataclass(frozen=True, kw_only=True)
class Search:
    """The settings of our attacks.

    Activations of an untrained network are near 0.03. Smoothed ReLUs would hide them, so ReLUs stay. L falls by a
    factor of fifty, and the strength of the priors falls with it. One image of the tuning seed chose them, at width 64.
    """

    steps: int = 600
    variation: float = 0.3  # weight of the total variation
    last_strength: float = 0.002  # of the priors
    rate: float = 0.05


SEARCH = Search()


class Given(Classes):
    """Labels that are known before the search, in turn."""

    def __init__(self, labels: Tensor) -> None:
        self.labels = labels

    def balanced(self, k: int, outputs: int) -> Tensor:
        return self.labels[torch.arange(k) % len(self.labels)]


class LossGradient(pal.Gradient):
    """g = Σ_i λ_i ∇_θ ℓ(Φ(x_i), y_i): one multiplier for each image, because its label is known."""

    linear = False

    def scalar(self, outputs: Tensor, labels: Tensor | None) -> Tensor:
        assert labels is not None
        return F.cross_entropy(outputs, labels, reduction="none")


def by_multipliers(model: nn.Module, g: Mapping[str, Tensor], run: Run) -> Tensor:
    """λ_ic = (p_ic − y_ic) / n is free for each image and output."""
    return searched(pal.Gradient(model, g, weights="likelihood"), run)


def by_labels(model: nn.Module, g: Mapping[str, Tensor], run: Run, *, weights: Weights = "likelihood") -> Tensor:
    return searched(with_labels(model, g, run.batch, weights), run)


def with_labels(model: nn.Module, g: Mapping[str, Tensor], batch: int, weights: Weights) -> LossGradient:
    objective = LossGradient(model, g, weights=weights)
    objective.label_kind = Given(labels_from_bias(list(g.values())[-1], batch))
    return objective


def searched(objective: pal.Gradient, run: Run) -> Tensor:
    return pal.reconstruct(
        objective, image_shape=(3, 32, 32), candidates=run.batch, steps=run.steps, sharpness=None,
        priors=(pal.priors.Box.around(MEAN.expand(3, 32, 32)), pal.priors.TotalVariation(weight=SEARCH.variation)),
        prior_strength=(1.0, SEARCH.last_strength), optimiser=pal.optimisers.Adam(learning_rate=SEARCH.rate),
        seed=run.seed, progress=False, execution=Execution(tf32=run.tf32),
    ).images  # fmt: skip


def as_published(model: nn.Module, g: Mapping[str, Tensor], run: Run, *, smoothness: float = 0.2) -> Tensor:
    """Inverting Gradients (Geiping et al. 2020): cosine distance, signs of the gradient, total variation, a box.

    Its default smoothness is for other networks. Here cosine distances are below 0.01. A prototype with a cosine
    schedule chose 1e-4 among 1e-3, 1e-4 and 1e-5 on the tuning seed. Breaching's notebook
    Beyond Inferring has this weight too.
    """
    wanted = torch.cat([t.flatten() for t in g.values()])
    mean, std, y = MEAN.to(wanted), STD.to(wanted), labels_from_bias(list(g.values())[-1], run.batch).to(wanted.device)
    z = torch.randn(run.batch, 3, 32, 32, generator=torch.Generator().manual_seed(run.seed)).to(wanted)

    def step(at: dict[str, Tensor], row: Tensor) -> None:
        """In place, and without reading back from the device, so that CUDA can replay it as one graph."""
        loss, slope = published_loss(model, at["z"], std, y, wanted, smoothness)
        sign, (length, root) = slope.sign(), row.unbind()  # Adam, as torch.optim has it
        first = at["first"].lerp_(sign, 1 - BETAS[0])
        second = at["second"].mul_(BETAS[1]).addcmul_(sign, sign, value=1 - BETAS[1])
        at["z"].sub_(length * first / (second.sqrt() / root + 1e-8))
        at["z"].copy_(torch.maximum(torch.minimum(at["z"], (1 - mean) / std), -mean / std))
        at["best"].copy_(torch.where(loss < at["least"], at["z"], at["best"]))
        at["least"].copy_(torch.minimum(loss, at["least"]))

    zero, least = torch.zeros_like(z), torch.full((), math.inf).to(wanted)
    given = {"z": z, "first": zero, "second": zero, "best": z, "least": least}
    mode: Mode = "graph" if z.device.type == "cuda" else "eager"
    steps = Executor({"step": step}, mode, may_fall_back=True)
    found, _ = steps.run(given, ["step"] * run.steps, published_schedule(run.steps).to(z.device))
    return found["best"] * std


def published_loss(
    model: nn.Module, z: Tensor, std: Tensor, y: Tensor, wanted: Tensor, smoothness: float
) -> tuple[Tensor, Tensor]:
    """The loss of Inverting Gradients, and its gradient in z."""
    z = z.detach().requires_grad_()
    with torch.enable_grad():
        error = F.cross_entropy(model(z * std), y)
        parts = torch.autograd.grad(error, list(model.parameters()), create_graph=True)
        found = torch.cat([t.flatten() for t in parts])
        variation = z.diff(dim=-1).abs().mean() + z.diff(dim=-2).abs().mean()
        loss = 1 - F.cosine_similarity(found, wanted, dim=0) + smoothness * variation
    (slope,) = torch.autograd.grad(loss, z)
    return loss.detach(), slope


def published_schedule(steps: int) -> Tensor:
    """For each step, Adam's length of a step and the root of the factor that corrects its mean of squares."""
    turns = [int(steps / 2.667), int(steps / 1.6), int(steps / 1.142)]
    rates = [PUBLISHED_RATE * 0.1 ** bisect_right(turns, step) for step in range(steps)]
    rows = [(rate / (1 - BETAS[0] ** t), math.sqrt(1 - BETAS[1] ** t)) for t, rate in enumerate(rates, start=1)]
    return torch.tensor(rows, dtype=torch.float64)


ATTACKS: dict[str, tuple[str, Attack]] = {
    "multipliers": ("pal.Gradient, a multiplier per image and output", by_multipliers),
    "labels": ("pal.Gradient, labels from the last bias", by_labels),
    "auto": ("pal.Gradient, labels, fixed automatic weights", partial(by_labels, weights="auto")),
    "equal": ("pal.Gradient, labels, equal weights", partial(by_labels, weights=None)),
    "published": ("Inverting Gradients, its default total variation", as_published),
    "tuned": ("Inverting Gradients, weak total variation", partial(as_published, smoothness=1e-4)),
}
OURS = ("multipliers", "labels", "auto", "equal")


def steps_of(attack: str) -> int:
    """The usual number of steps."""
    return SEARCH.steps if attack in OURS else PUBLISHED_STEPS


# --- parts and their scores -----------------------------------------------------------------------


def psnr(found: Tensor, images: Tensor) -> list[float]:
    """10·log10(1/MSE) of each image in [0, 1], as breaching measures it; each image has its own candidate."""
    mse = torch.stack([(found.clamp(0, 1) - image).square().flatten(1).mean(1) for image in images])
    values = 10 * torch.log10(1 / mse.clamp_min(1e-12))
    rows, columns = linear_sum_assignment(-values.numpy())
    return [round(v, 2) for v in values[rows, columns].tolist()]


@dataclass(frozen=True, kw_only=True)
class Part:
    attack: str
    batch: int
    width: int
    seed: int
    steps: int
    small: bool
    device: torch.device
    results: Path
    tf32: bool = False

    @property
    def file(self) -> Path:
        name = f"{self.attack}-batch{self.batch}-width{self.width}-steps{self.steps}-seed{self.seed}.json"
        return self.results / name

    def problem(self, images: Tensor, classes: Tensor) -> tuple[nn.Module, dict[str, Tensor]]:
        """The network and the gradient, which has full precision in any case."""
        torch.manual_seed(self.seed)
        model = network(self.width).eval().to(self.device)
        with matrix_products(tf32=False, device=self.device):
            return model, gradient_of(model, (images - MEAN).to(self.device), classes.to(self.device))

    def run_before(self, end: float) -> str | None:
        """Run, unless it is too late to begin."""
        return self.run() if time.time() < end else None

    def run(self) -> str:
        images, classes, held_out = images_of(self.seed, self.batch, small=self.small)
        model, g = self.problem(images, classes)
        attack = ATTACKS[self.attack][1]
        began = time.perf_counter()
        with matrix_products(tf32=self.tf32, device=self.device):
            run = Run(batch=self.batch, steps=self.steps, seed=self.seed, tf32=self.tf32)
            found = attack(model, g, run).detach().cpu()
        seconds = round(time.perf_counter() - began, 1)
        score = pal.score(found, images, held_out=held_out, mean=MEAN, matching="one-to-one")
        right = labels_from_bias(g[list(g)[-1]], self.batch).sort().values.equal(classes.sort().values)
        command = f"python experiments/gradient_inversion.py --attacks {self.attack} --batches {self.batch}"
        command += f" --width {self.width} --seeds {self.seed} --steps {self.steps} --device {self.device.type}"
        command += " --tf32" * self.tf32 + " --small" * self.small
        result: dict[str, Any] = {"attack": self.attack, "batch": self.batch, "width": self.width, "seed": self.seed}
        result |= made_by(command) | {"steps": self.steps, "seconds": seconds, "labels right": right}
        result |= {"device": torch.cuda.get_device_name() if self.device.type == "cuda" else "CPU"}
        search = asdict(replace(SEARCH, steps=self.steps))
        result |= {"tf32": self.tf32} | ({"search": search} if self.attack in OURS else {})
        result |= {"psnr": psnr(found + MEAN, images), "held-out psnr": psnr(found + MEAN, held_out)}
        result |= {"ssim": [round(v, 4) for v in score.ssim.tolist()]}
        self.results.mkdir(parents=True, exist_ok=True)
        write_atomically(self.file, (json.dumps(result, separators=(",", ":")) + "\n").encode())
        return f"{self.file.stem}: PSNR {fmean(result['psnr']):.2f}, held-out {fmean(result['held-out psnr']):.2f}"


# --- the landscape --------------------------------------------------------------------------------


def outputs(model: nn.Sequential, x: Tensor, chosen: Sequence[Tensor] | None = None) -> tuple[Tensor, list[Tensor]]:
    """The outputs, and the choices that ReLUs and pools made; or the outputs with choices made at another image."""
    made: list[Tensor] = []
    for layer in model:
        if isinstance(layer, nn.ReLU):
            made.append(x > 0 if chosen is None else chosen[len(made)])
            x = x * made[-1]
        elif isinstance(layer, nn.MaxPool2d):
            made.append(F.max_pool2d(x, 3, return_indices=True)[1] if chosen is None else chosen[len(made)])
            x = x.flatten(2).gather(2, made[-1].flatten(2)).view(made[-1].shape)
        else:
            x = layer(x)
    return x, made


def landscape(width: int, *, small: bool) -> dict[str, Any]:
    """‖g_p(x + noise) − g_p(x)‖² / ‖g_p(x)‖² of each layer p, with the choices at x + noise and with those at x."""
    images, y, _ = images_of(TUNING, 1, small=small)
    torch.manual_seed(TUNING)
    model, x = network(width).eval().double(), (images - MEAN).double()
    weights = {name: θ for name, θ in model.named_parameters() if θ.ndim > 1}
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(TUNING), dtype=torch.float64)

    def gradients(at: Tensor, chosen: Sequence[Tensor] | None) -> tuple[Tensor, ...]:
        return torch.autograd.grad(F.cross_entropy(outputs(model, at, chosen)[0], y), list(weights.values()))

    def errors(at: Tensor, chosen: Sequence[Tensor] | None) -> list[float]:
        pairs = zip(gradients(at, chosen), here, strict=True)
        return [float((there - g).square().sum() / g.square().sum()) for there, g in pairs]

    here, choices = gradients(x, None), outputs(model, x)[1]
    rows = [{"noise": σ, "choices": "of the noisy image", "errors": errors(x + σ * noise, None)} for σ in NOISE]
    rows += [{"noise": σ, "choices": "of the image", "errors": errors(x + σ * noise, choices)} for σ in NOISE]
    command = f"python experiments/gradient_inversion.py --landscape --width {width}" + " --small" * small
    return made_by(command) | {"width": width, "seed": TUNING, "layers": list(weights), "rows": rows}


def landscape_table(results: Path) -> str:
    """The first, the middle and the last layers."""
    found = json.loads((results / "landscape.json").read_bytes())
    shown = (0, 2, 4, 6, 7, 8)
    columns = ["noise per pixel", "choices", *(f"layer {number + 1}" for number in shown)]
    cells = [[f"{row['errors'][number]:.1e}" for number in shown] for row in found["rows"]]
    heads = [[row["noise"], row["choices"]] for row in found["rows"]]
    return tables.markdown(columns, [head + row for head, row in zip(heads, cells, strict=True)])


# --- tables and commands --------------------------------------------------------------------------


def table(results: Path) -> str:
    """Means over seeds, and what breaching prints."""
    parts = defaultdict(list)
    for file in sorted(results.glob("*-seed*.json")):
        part = json.loads(file.read_bytes())
        parts[part["width"], part["batch"], part["attack"], part["steps"]].append(part)
    lines: list[list[object]] = [
        [f"{says} (printed by breaching)", WIDTH, 1, 1, steps, f"{value:.2f}", "", "", ""]
        for says, (value, steps) in PRINTED.items()
    ]
    order = {name: number for number, name in enumerate(ATTACKS)}
    for (width, batch, attack, steps), seeds in sorted(
        parts.items(), key=lambda item: (item[0][:2], order[item[0][2]], item[0][3])
    ):
        mean = {key: fmean(v for part in seeds for v in part[key]) for key in ("psnr", "ssim", "held-out psnr")}
        cells = [f"{mean['psnr']:.2f}", f"{mean['ssim']:.3f}", f"{mean['held-out psnr']:.2f}"]
        seconds = fmean(part["seconds"] for part in seeds)
        lines.append([ATTACKS[attack][0], width, batch, len(seeds), steps, *cells, f"{seconds:.0f}"])
    columns = ["attack", "width", "images", "seeds", "steps", "PSNR", "mean SSIM", "PSNR to held-out images", "seconds"]
    return tables.markdown(columns, lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attacks", nargs="+", choices=list(ATTACKS), default=list(ATTACKS))
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--width", type=int, default=WIDTH, help="of the network; breaching has 64")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--steps", type=int, help="of every attack; each has its own number")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--tf32", action="store_true", help="let attacks on CUDA round factors to 10 bits")
    processes.add_arguments(parser)
    parser.add_argument("--seconds", type=float, default=math.inf, help="after which no part begins")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the results")
    parser.add_argument("--small", action="store_true", help="a version of seconds, which does not need files")
    parser.add_argument("--landscape", action="store_true", help="measure the gradient near an image, and end")
    parser.add_argument("--table", action="store_true", help="print the results as a table, and end")
    parser.add_argument("--page", action="store_true", help="write the tables into their page of the docs, and end")
    options = parser.parse_args(arguments)
    if options.landscape:
        options.results.mkdir(parents=True, exist_ok=True)
        found = json.dumps(landscape(options.width, small=options.small), separators=(",", ":")) + "\n"
        write_atomically(options.results / "landscape.json", found.encode())
        return 0
    if options.table:
        print(table(options.results), end="")
        return 0
    if options.page:
        tables.write(PAGE, table(options.results))
        tables.write(PAGE, landscape_table(options.results), "landscape")
        return 0
    end = time.time() + options.seconds
    parts = [part for part in chosen(options) if not part.file.exists()]
    status = processes.run_all({part.file.stem: partial(part.run_before, end) for part in parts}, options)
    if left := sum(not part.file.exists() for part in parts):
        print(f"parts left: {left}")
    return status


def chosen(options: argparse.Namespace) -> list[Part]:
    def steps(attack: str, batch: int) -> int:
        return options.steps or (3 if options.small else steps_of(attack))

    return [
        Part(attack=attack, batch=batch, width=options.width, seed=seed, steps=steps(attack, batch),
             small=options.small, device=options.device, results=options.results, tf32=options.tf32)
        for attack in options.attacks for batch in options.batches for seed in options.seeds
    ]  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
