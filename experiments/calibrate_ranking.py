"""From agreement to probability: fits the map by which an audit ranks candidates, on networks with known images.

Each network is trained, read from several seeds as an audit reads it, and every distinct candidate is labelled real if
it shows a training image, by SSIM of at least 0.4, and clearly better than it shows any of as many held-out images. How
often the label is wrong is told by exchanging the roles of training and held-out images. Features are kept that lower
the loss on networks left out of the fit. What is finished is kept in --out.

    python experiments/calibrate_ranking.py --out runs/calibration --set medium --seeds 0 1 2 3 4 5 13 15 --fit
    python experiments/calibrate_ranking.py --out runs/unseen --set medium --seeds 17 19 21 --judge

The first writes src/palimpsest/auditing/calibration.json; the second tries that map on networks it was not fitted on,
and writes docs/results/ranking.json.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor, nn

import palimpsest as pal
from palimpsest.auditing import agreement, controls, plan, ranking, reading
from palimpsest.auditing.subject import Subject
from palimpsest.datasets import DataSet
from palimpsest.files.storage import write_atomically
from palimpsest.scoring import metrics

ROOT = Path(__file__).parents[1]
FEATURES = ("constant", "agreement", "pixels", "colour", "agreement by pixels", "copies", "crowding", "explained")
LEAST_SSIM = 0.4
CLEARLY = 0.1  # by how much a training image must be shown better than any held-out image
BINS = 5
RIDGE = 1e-4
TOP = 25


@dataclass(frozen=True)
class Model:
    """One network to train and read. ``shuffled``: what it learnt is put in disorder before it is read."""

    data: str
    per_class: int
    seed: int
    hidden: tuple[int, ...] = (500, 500)
    loss: str = "squared"
    training_steps: int = 10_000
    weight_decay: float = 0.0
    shuffled: bool = False
    convolutional: bool = False

    @property
    def name(self) -> str:
        words = [
            self.data,
            self.per_class,
            "conv" if self.convolutional else "x".join(map(str, self.hidden)),
            self.loss,
        ]
        words += [f"decay{self.weight_decay:g}"] if self.weight_decay else []
        words += [f"steps{self.training_steps}"] if self.training_steps < 10_000 else []
        words += ["shuffled"] if self.shuffled else []
        return "-".join(map(str, [*words, self.seed]))


def models(which: str, seeds: Sequence[int]) -> list[Model]:
    """Networks that leak much, little and nothing: what an audit may meet."""
    if which == "medium":
        kinds = [{"data": "faces", "per_class": n} for n in (5, 20, 40)]
        kinds += [{"data": "faces", "per_class": 20, "shuffled": True}]
        kinds += [{"data": "cifar10", "per_class": n, "hidden": (1000, 1000)} for n in (20, 50)]
        tiny: dict = {"data": "digits", "hidden": (200, 200)}  # restarts agree on tiny images for no reason at all
        kinds += [tiny | {"per_class": n} for n in (5, 20)]
        untrained = tiny | {"per_class": 5, "loss": "logistic", "training_steps": 1}
        kinds += [untrained, untrained | {"convolutional": True}]
        return [Model(seed=seed, **kind) for seed in seeds for kind in kinds]
    if which == "small":
        kinds = [{"per_class": 20}, {"per_class": 40}, {"per_class": 20, "weight_decay": 1e-3}]
        kinds += [{"per_class": 5}, {"per_class": 20, "shuffled": True}]
        return [Model(data="faces", hidden=(300, 300), seed=seed, **kind) for seed in seeds[:2] for kind in kinds]
    kinds = [{"data": "faces", "per_class": n} for n in (5, 10, 20, 40, 60)]
    kinds += [{"data": "digits", "per_class": n, "hidden": (300, 300)} for n in (10, 40)]
    kinds += [
        {"data": name, "per_class": n, "hidden": (1000, 1000)} for name in ("mnist", "cifar10") for n in (50, 250)
    ]
    kinds += [{"data": "faces", "per_class": 20, **more} for more in (
        {"weight_decay": 1e-3}, {"weight_decay": 1e-4}, {"training_steps": 20}, {"shuffled": True},
        {"loss": "logistic"}, {"hidden": (100, 100)}, {"convolutional": True},
    )]  # fmt: skip
    kinds += [
        {"data": "faces", "per_class": 5, "convolutional": True},
        {"data": "cifar10", "per_class": 50, "shuffled": True},
    ]
    kinds += [{"data": "mnist", "per_class": 100, "loss": "logistic", "hidden": (1000, 1000)}]
    return [Model(seed=seed, **kind) for seed in seeds for kind in kinds]


class Convolutional(nn.Module):
    """A small convolutional network for images of any size."""

    def __init__(self, image_shape: tuple[int, ...], width: int = 16) -> None:
        super().__init__()
        quarter = [math.ceil(side / 4) for side in image_shape[1:]]
        self.layers = nn.Sequential(
            nn.Conv2d(image_shape[0], width, 5, stride=2, padding=2), nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(),
            nn.Linear(2 * width * math.prod(quarter), 200), nn.ReLU(), nn.Linear(200, 1),
        )  # fmt: skip
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def network(model: Model, data: DataSet) -> nn.Module:
    torch.manual_seed(model.seed)
    if model.convolutional:
        return Convolutional(data.image_shape)
    return pal.networks.MLP(data.image_shape, hidden=model.hidden, outputs=1)


def images(model: Model, options: argparse.Namespace) -> DataSet:
    return pal.datasets.load(
        model.data, per_class=model.per_class, held_out_per_class=min(model.per_class, 100 - model.per_class)
        if model.data == "faces" else None, seed=model.seed, task="binary", data_root=options.data_root,
    )  # fmt: skip


def examined(model: Model, options: argparse.Namespace) -> dict:
    """Train, read, merge, label: the features of every distinct candidate, and whether it is real."""
    data = images(model, options)
    start = network(model, data).to(options.device)
    fit = pal.train(
        start, data.centred(data.train.images), data.train.labels, loss=model.loss, steps=model.training_steps,
        weight_decay=model.weight_decay,
    )  # fmt: skip
    method = "ntk" if model.loss == "squared" else "kkt"
    subject = Subject(fit.model, fit.initial, data.image_shape, 1, lambda: start)
    subject = controls.shuffled(subject, method, seed=model.seed) if model.shuffled else subject
    choices = plan.Plan(
        method=method, within="everywhere", at=plan.NODES[options.tangents] if method == "ntk" else (),
        candidates=4 * model.per_class,
        steps=options.steps, restarts=options.restarts, total_variation=0.1, control_images=1, control_steps=1, seed=0,
    )  # fmt: skip
    runs = []
    for number in range(options.restarts):
        rec = pal.reconstruct(
            problem := reading.posed(subject, choices)[0], image_shape=data.image_shape,
            candidates=choices.candidates, steps=choices.steps, seed=1000 * model.seed + number, progress=False,
        )  # fmt: skip
        tensors, facts = reading.candidates(problem, rec.images, rec.multipliers, rec.labels)
        runs.append(agreement.Run(tensors["images"], tensors["contributions"], facts["loss"]))
    return described(model, data, runs)


def described(model: Model, data: DataSet, runs: list[agreement.Run]) -> dict:
    agreed = agreement.agree(runs)
    φ = ranking.features(agreed)
    trained_on, held_out = (data.centred(part.images) for part in (data.train, data.held_out))
    return {
        "model": asdict(model), "real": shows(agreed.images, trained_on, held_out).tolist(),
        "exchanged": int(shows(agreed.images, held_out, trained_on).sum()),
        "features": {name: φ[name].tolist() for name in FEATURES}, "losses": [run.loss for run in runs],
    }  # fmt: skip


def shows(candidates: Tensor, members: Tensor, others: Tensor) -> Tensor:
    """Which candidates show one of the members, and none of as many others nearly as well.

    Both are compared as the network sees them, stretched to the same range: weights do not determine the contrast of
    an image, for a candidate of twice the contrast with half the multiplier explains as much.
    """
    if len(candidates) == 0:
        return torch.zeros(0, dtype=torch.bool)
    x, *parts = (metrics.minmax(images.double()) for images in (candidates, members, others))
    pairs = (torch.stack([metrics.ssim(x, image.expand_as(x)) for image in part], 1) for part in parts)
    member, other = (ssim.amax(1) for ssim in pairs)
    return (member >= LEAST_SSIM) & (member > other + CLEARLY)


# --- the map -------------------------------------------------------------------------------------


def matrix(results: list[dict], names: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
    φ = np.concatenate([np.array([r["features"][name] for name in names]).T.reshape(-1, len(names)) for r in results])
    return φ, np.concatenate([np.array(r["real"], dtype=float) for r in results])


def fit_map(results: list[dict], names: tuple[str, ...]) -> dict[str, float]:
    """Coefficients b of the most likely logistic map; a slight ridge keeps them finite."""
    φ, y = matrix(results, names)

    def loss(b: np.ndarray) -> tuple[float, np.ndarray]:
        z = φ @ b
        value = np.mean(np.logaddexp(0, z) - y * z) + RIDGE * b[1:] @ b[1:]
        return float(value), φ.T @ (1 / (1 + np.exp(-z)) - y) / len(y) + 2 * RIDGE * np.r_[0, b[1:]]

    return dict(zip(names, minimize(loss, np.zeros(len(names)), jac=True).x.round(4).tolist(), strict=True))


def probabilities(results: list[dict], b: dict[str, float]) -> list[np.ndarray]:
    return [1 / (1 + np.exp(-matrix([r], tuple(b))[0] @ np.array(list(b.values())))) for r in results]


def check(results: list[dict], b: dict[str, float]) -> dict:
    """Mean log loss, the bins, and the share of real ones among the likeliest of each network."""
    p = [
        np.minimum(values, np.clip(1.001 - 10 ** -np.array(r["features"]["explained"]), 0, ranking.MOST_CERTAIN))
        for values, r in zip(probabilities(results, b), results, strict=True)
    ]
    y = [np.array(r["real"], dtype=float) for r in results]
    flat, real_ = np.concatenate(p), np.concatenate(y)
    log_loss = -np.mean(real_ * np.log(flat.clip(1e-9)) + (1 - real_) * np.log((1 - flat).clip(1e-9)))
    rows = []
    for low in np.arange(BINS) / BINS:
        inside = (flat >= low) & (flat < low + 1 / BINS)
        if inside.any():
            rows.append({"n": int(inside.sum()), "estimated": float(flat[inside].mean()),
                         "observed": float(real_[inside].mean())})  # fmt: skip
    return {"log loss": float(log_loss), "bins": rows, "top": tops(results, p, y)}


def by_data(results: list[dict], b: dict[str, float]) -> dict[str, list[dict]]:
    """The bins of each kind of images: errors of opposite sign cancel where kinds are mixed."""
    kinds = sorted({r["model"]["data"] for r in results})
    return {data: check([r for r in results if r["model"]["data"] == data], b)["bins"] for data in kinds}


def left_out(results: list[dict], names: tuple[str, ...]) -> float:
    """Mean log loss over candidates, each network judged by a map fitted on the others: what chooses the features."""
    others = [[r for r in results if r is not one] for one in results]
    usable = [(one, rest) for one, rest in zip(results, others, strict=True) if one["real"]]
    losses = [check([one], fit_map(rest, names))["log loss"] for one, rest in usable]
    return float(np.average(losses, weights=[len(one["real"]) for one, _ in usable]))


def tops(results: list[dict], p: list[np.ndarray], y: list[np.ndarray]) -> list[dict]:
    rows = []
    for result, estimated, observed in zip(results, p, y, strict=True):
        best = np.argsort(-estimated, kind="stable")[:TOP]
        rows.append({
            "model": Model(**result["model"] | {"hidden": tuple(result["model"]["hidden"])}).name,
            "shown": len(best), "expected": float(estimated[best].sum()), "real": int(observed[best].sum()),
            "likely": int((estimated >= 0.5).sum()), "likely and real": int(observed[estimated >= 0.5].sum()),
        })  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where finished networks are kept")
    parser.add_argument("--set", choices=("small", "medium", "large"), default="small", dest="which")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data-root", type=Path, help="where MNIST and CIFAR-10 files are")
    parser.add_argument("--seeds", type=int, nargs="*", help="0 to 5 unless given")
    then = parser.add_mutually_exclusive_group()
    then.add_argument("--fit", action="store_true", help="fit the map on what --out holds, and ship it")
    then.add_argument("--judge", action="store_true", help="judge what --out holds by the shipped map")
    parser.add_argument("--restarts", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--tangents", type=int, choices=(1, 2), default=1)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for model in models(options.which, options.seeds or range(6)):
        path = options.out / f"{model.name}.json"
        if not path.exists():
            began = time.monotonic()
            found = examined(model, options)
            write_atomically(path, json.dumps(found).encode())
            print(f"{model.name}: {sum(found['real'])} of {len(found['real'])} candidates are real,"
                  f" {time.monotonic() - began:.0f} s", flush=True)  # fmt: skip
    if options.fit:
        fit(options)
    if options.judge:
        judge(options)


def finished(options: argparse.Namespace) -> list[dict]:
    """What --out holds of the networks that are asked for."""
    paths = [options.out / f"{model.name}.json" for model in models(options.which, options.seeds or range(6))]
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def command(options: argparse.Namespace, last: str) -> str:
    seeds = " ".join(map(str, options.seeds or range(6)))
    reading = f"--steps {options.steps} --restarts {options.restarts} --tangents {options.tangents} --seeds {seeds}"
    return f"python experiments/calibrate_ranking.py --out {options.out} --set {options.which} {reading} {last}"


def fit(options: argparse.Namespace) -> None:
    """Choose the features, fit the map on all networks, and ship it."""
    results = finished(options)
    # What explains nothing of the weights is no training image, however far restarts agree: that feature stays.
    sets = [tuple(name for name in FEATURES if name != left) for left in (*FEATURES[1:-1], None)]
    losses = {names: left_out(results, names) for names in sets}
    for names, loss in losses.items():
        print(f"{loss:.4f} log loss on networks left out, with {', '.join(names[1:])}")
    near = [names for names in sets if losses[names] <= min(losses.values()) + 0.001]
    chosen = min(near, key=lambda names: (len(names), losses[names]))  # the fewest of those that do as well
    labels = {
        name: sum(sum(r["real"]) if name == "real" else r[name] for r in results) for name in ("real", "exchanged")
    }
    print(f"{labels['real']} candidates are real; {labels['exchanged']} show a held-out image as clearly")
    counts = {"networks": len(results), "candidates": sum(len(r["real"]) for r in results)} | labels
    counts["log loss on networks left out"] = losses[chosen]
    write = {"coefficients": fit_map(results, chosen), "command": command(options, "--fit")} | counts
    (ROOT / "src/palimpsest/auditing/calibration.json").write_text(json.dumps(write, indent=1) + "\n", encoding="utf-8")


def judge(options: argparse.Namespace) -> None:
    """How the shipped map does on networks it was not fitted on."""
    results = finished(options)
    shipped = json.loads((ROOT / "src/palimpsest/auditing/calibration.json").read_text(encoding="utf-8"))
    table = check(results, shipped["coefficients"])
    table["by data"] = by_data(results, shipped["coefficients"])
    for row in table["bins"]:
        print(f"estimated {row['estimated']:.2f} observed {row['observed']:.2f} ({row['n']})")
    for row in table["top"]:
        print(f"{row['model']:45s} top {row['shown']}: {row['real']} real, {row['expected']:.1f} expected;"
              f" {row['likely']} likely, {row['likely and real']} of them real")  # fmt: skip
    written = {"command": command(options, "--judge"), "map": shipped["command"], "held back": table}
    (ROOT / "docs/results/ranking.json").write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
