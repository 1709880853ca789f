"""Do weights that follow the residual read more from small convolutional networks?

`weights="likelihood"` decides the inversion of a gradient of an untrained network (`gradient_inversion.py`). Here each
weighting reads the change of the weights, or the optimiser's momentum, of trained networks: with the same candidates,
steps and seeds, and at each smoothness. The images are faces, and the CIFAR-10 images on which settings are chosen.

    python experiments/residual_weights.py         writes docs/results/residual-weights.json
    python experiments/residual_weights.py --page  writes the table of its page, and ends
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import outsiders
import tables
import torch
from networks_in_use import networks, training
from networks_in_use.rows import Row, Training
from provenance import made_by
from torch import Tensor, nn

import palimpsest as pal
from palimpsest.files.storage import write_atomically
from palimpsest.objectives import Objective
from palimpsest.objectives.weighting import Weights

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "docs/results/residual-weights.json", "which-method.md"
SEEDS = (11, 12)
WEIGHTS: dict[str, Weights] = {"equal": None, "auto": "auto", "likelihood": "likelihood"}
SMOOTHNESS = (0.3, 1.0)  # of total variation; it falls tenfold
SOFTPLUS = (10.0, 200.0)


@dataclass(frozen=True)
class Case:
    """A trained network as an objective without its weights w_p, and the images that it was trained on."""

    objective: Callable[..., Objective]
    train: Tensor
    held_out: Tensor
    mean: Tensor
    per_image: int = 2
    steps: int = 1500
    rate: float = 0.02


def faces(seed: int) -> Case:
    data = pal.datasets.load("faces", per_class=3, seed=790 + seed, task="binary")
    torch.manual_seed(seed)
    x, y = data.train.images - 0.5, data.train.labels.clamp_min(0)
    left = outsiders.train(outsiders.Convolutional(25, 16), x, y, rule="SGD", rate=0.02, batch=len(x))
    read = partial(pal.NTK, left.model, left.initial, at=(0.25, 0.75))
    return Case(read, data.train.images, data.held_out.images, torch.full(data.image_shape, 0.5))


def pictures(n: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images of different classes from the pool of the tuning seed, their classes, as many others, and its mean."""
    images, classes = (t[4 * training.POOL : 5 * training.POOL] for t in training.source("cifar10", 32))
    order = torch.randperm(training.POOL, generator=torch.Generator().manual_seed(seed))
    first, second = zip(*(order[classes[order] == c][:2].tolist() for c in range(n)), strict=True)
    return images[list(first)], classes[list(first)], images[list(second)], images.mean(0)


def cnn(seed: int) -> Case:
    """He's start and a small rate."""
    images, classes, held_out, mean = pictures(5, seed)
    torch.manual_seed(seed)
    model, y = networks.convolutional(32, 16, he=True).eval(), training.sides(classes).float()
    model, (initial, _), _ = training.train(model, images - mean, y, Training(rate=2e-4), seed)
    return Case(partial(pal.NTK, model, initial, at=(0.25, 0.75)), images, held_out, mean)


def moment(rule: str, rate: float, seed: int) -> Case:
    """The first moment after 25 steps on all images, with torch's default start."""
    images, classes, held_out, mean = pictures(5, seed)
    torch.manual_seed(seed)
    model, y = networks.convolutional(32, 16, he=False).eval(), training.sides(classes).float()
    optimiser = training.optimiser_of(model, rule, rate)
    for _ in range(25):
        optimiser.zero_grad()
        training.loss_of(model(images - mean), y).backward()
        optimiser.step()
    return Case(partial(pal.Gradient, model, pal.moments(model, optimiser.state_dict())), images, held_out, mean)


def resnet(seed: int) -> Case:
    """ResNet-18 of width 8, pretrained, then trained with fixed batch norm as SimuDy does."""
    images, classes, held_out, _ = pictures(2, seed)
    row = Row(name="", kind="resnet", says="", n=2, width=8, pretraining=6, training=Training(rate=0.01))
    with tempfile.TemporaryDirectory() as folder:
        training.pretrain(row, Path(folder), torch.device("cpu"))
        model: nn.Module = training.before(row, seed, Path(folder)).eval()
    mean = networks.channel(networks.CHANNEL_MEAN).expand(3, 32, 32).contiguous()
    recipe = Training(optimiser="sgd", rate=0.01, epochs=20)
    model, (initial, _), _ = training.train(model, images - mean, classes, recipe, seed)
    read = partial(pal.NTK, model, initial, at=(0.25, 0.75))
    return Case(read, images, held_out, mean, per_image=1, steps=800, rate=0.03)


CASES: dict[str, Callable[[int], Case]] = {
    "CNN, 6 faces": faces,
    "CNN, He's start, 5 images": cnn,
    "CNN, momentum, 5 images": partial(moment, "momentum", 0.01),
    "CNN, Adam's moment, 5 images": partial(moment, "adam", 3e-4),
    "ResNet-18, width 8, 2 images": resnet,
}


def read(case: Case, weights: Weights, smoothness: float, sharpness: tuple[float, float] | None) -> dict[str, float]:
    rec = pal.reconstruct(
        case.objective(weights=weights), image_shape=case.mean.shape, candidates=case.per_image * len(case.train),
        steps=case.steps, sharpness=sharpness, prior_strength=(1.0, 0.1), progress=False,
        priors=(pal.priors.Box.around(case.mean), pal.priors.TotalVariation(weight=smoothness)),
        optimiser=pal.optimisers.Adam(learning_rate=case.rate),
    )  # fmt: skip
    score = pal.score(rec, case.train, held_out=case.held_out, mean=case.mean)
    assert score.held_out is not None
    return {"ssim": round(float(score.ssim.mean()), 4), "held-out": round(float(score.held_out.ssim.mean()), 4)}


def run(name: str, seed: int) -> list[dict[str, Any]]:
    """Every weighting at every smoothness, and with exact ReLUs at the first smoothness of the first seed."""
    case = CASES[name](seed)
    ways = [(w, s, "softplus") for s in SMOOTHNESS for w in WEIGHTS]
    ways += [(w, SMOOTHNESS[0], "exact") for w in WEIGHTS] if seed == SEEDS[0] else []
    rows = []
    for weights, smoothness, relu in ways:
        found = read(case, WEIGHTS[weights], smoothness, SOFTPLUS if relu == "softplus" else None)
        rows.append({"case": name, "seed": seed, "weights": weights, "smoothness": smoothness, "ReLU": relu} | found)
        print(rows[-1], flush=True)
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Mean SSIM over seeds, at the smoothness that is best for each weighting."""
    found: dict[tuple[str, str, str], dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        found[row["case"], row["weights"], row["ReLU"]][row["smoothness"]].append(row["ssim"])

    def best(case: str, weights: str, relu: str) -> str:
        values = {s: fmean(v) for s, v in found[case, weights, relu].items()}
        s = max(values, key=lambda s: values[s])
        return f"{values[s]:.3f}" + (f" ({s:g})" if relu == "softplus" else "")

    columns = ["network", *WEIGHTS, *(f"{w}, exact ReLU" for w in WEIGHTS)]
    cells = [[best(case, w, relu) for relu in ("softplus", "exact") for w in WEIGHTS] for case in CASES]
    return tables.markdown(columns, [[case, *line] for case, line in zip(CASES, cells, strict=True)])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", action="store_true", help="write the table into its page of the docs, and end")
    if parser.parse_args(arguments).page:
        tables.write(PAGE, table(json.loads(RESULTS.read_bytes())["rows"]), "weights")
        return 0
    torch.set_num_threads(1)
    written: dict[str, Any] = made_by("python experiments/residual_weights.py") | {"rows": []}
    for seed in SEEDS:
        for name in CASES:
            written["rows"] += run(name, seed)
            write_atomically(RESULTS, (json.dumps(written, indent=1) + "\n").encode())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
