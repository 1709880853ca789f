"""Why is nothing read out of a small vision transformer, although the equation describes its training well?

    python experiments/vision_transformer.py           writes docs/results/vision-transformer.json and its table
    python experiments/vision_transformer.py --small   a version of seconds, which writes nothing there

Three networks of `outsiders.py` are trained on the same faces, and read from their whole training and from its first
step alone, whose equation is exact. Each is read as an attacker reads it, from random candidates. A diagnosis, which
knows the images, asks how strongly the weights depend on them, and whether a descent that starts at them stays there.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import outsiders
import processes
import tables
import torch
from outsiders import State
from provenance import made_by
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

import palimpsest as pal
from palimpsest.files.storage import write_atomically
from palimpsest.objectives.spaces import Everywhere
from palimpsest.solver.loop import Solver
from palimpsest.solver.settings import Settings

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "docs" / "results" / "vision-transformer.json", "experiments/networks-in-use.md"
PARTS = ROOT / "runs" / "vision-transformer"
SEEDS = (910, 911)  # 900 was used to develop
SIDE, PATCH, CENTRE = 25, 5, 0.5
COUNTS, STEPS = (1, 20), 400
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "MLP": lambda: outsiders.Perceptron(SIDE**2, 400),
    "CNN": lambda: outsiders.Convolutional(SIDE, 16),
    "ViT": lambda: outsiders.ViT(SIDE, 64, depth=2, patch=PATCH),
}
PRIORS = (pal.priors.Box(low=-CENTRE, high=CENTRE), pal.priors.TotalVariation())


@dataclass(frozen=True)
class Problem:
    """T = end − start, and the tangent points between them."""

    model: nn.Module
    start: State
    end: State
    at: tuple[float, ...]

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.model.named_parameters()]

    @property
    def target(self) -> Tensor:
        return torch.cat([(self.end[name] - self.start[name]).flatten() for name in self.names])

    def f(self, x: Tensor) -> Tensor:
        """∇_θ Φ(θ_s, x) of one image at each tangent point, (points, parameters)."""

        def output(θ: State) -> Tensor:
            return functional_call(self.model, θ, (x[None],)).sum()

        points = [{name: torch.lerp(self.start[name], self.end[name], t) for name in self.names} for t in self.at]
        return torch.stack([torch.cat([g.flatten() for g in grad(output)(θ).values()]) for θ in points])

    def objective(self) -> pal.NTK:
        self.model.load_state_dict(self.end)
        return pal.NTK(self.model, self.start, at=self.at)


# --- what an attacker reads, and where a descent from the images ends -------------------------------------------------


def descended(objective: pal.NTK, n: int, steps: int, seed: int, **start: Tensor) -> tuple[Tensor, float]:
    """Candidates and L / ‖T‖² after a descent from random candidates, or from those that are given."""
    settings = Settings(candidates=n, steps=steps, priors=PRIORS, prior_strength=(1.0, 0.1), seed=seed)
    solver = Solver(objective, Everywhere((1, SIDE, SIDE)), settings)
    state = replace(solver.init(), **start)
    while not solver.done(state):
        state = solver.step(state)
    return state.x, float(objective.loss(*state.point) / objective.target_norm_squared)


# --- how strongly the weights depend on the images --------------------------------------------------------------------


def best_multipliers(f: Tensor, T: Tensor) -> tuple[Tensor, float]:
    """λ that minimises ‖T − Σ λ f‖², and the share of ‖T‖² that stays: the floor."""
    f, T = f.double(), T.double()
    λ = torch.linalg.pinv(f @ f.T, hermitian=True) @ (f @ T)
    return λ.float(), float((T - λ @ f).square().sum() / (T @ T))


def dependence(problem: Problem, x: Tensor, f: Tensor, λ: Tensor) -> tuple[Tensor, Tensor]:
    """How much of T changes if x moves by its own length along each direction, and these directions, strongest first.

        v ↦ ‖x‖² ‖(1 − ff⁺) Jv‖² / ‖T‖²,   J = Σ_s λ_s ∂f_s/∂x,

    for the first image. What the multipliers can make good, 1 − ff⁺ takes out. The directions are eigenvectors.
    """
    basis = torch.eye(x.numel()).view(-1, *x.shape)
    J = torch.cat([
        vmap(lambda v: jvp(lambda image: λ @ problem.f(image), (x,), (v,))[1])(part) for part in basis.split(25)
    ])  # fmt: skip
    Q = torch.linalg.qr(f.T).Q
    J = J - (J @ Q) @ Q.T
    scale = float(x.square().sum() / problem.target.square().sum())
    changes, directions = torch.linalg.eigh(scale * (J @ J.T).double())
    return changes.clamp_min(0).flip(0), directions.T.flip(0)


def in_mean_patch(directions: Tensor) -> float:
    """The share of these directions that shifts all patches alike: 1 / 25 by chance."""
    side = SIDE // PATCH
    alike = directions.view(-1, side, PATCH, side, PATCH).mean((1, 3))
    return float(alike.square().sum((1, 2)).mean()) * side**2


# --- rows -------------------------------------------------------------------------------------------------------------


def measured(network: str, n: int, seed: int, *, small: bool = False) -> list[dict[str, Any]]:
    """The whole training and its first step."""
    torch.set_num_threads(1)
    data = pal.datasets.load("faces", per_class=10, held_out_per_class=20, seed=seed)
    rows = torch.arange(20).view(2, 10).T.flatten()[:n]  # both classes in turn
    x, y = data.train.images[rows] - CENTRE, data.train.labels[rows].clamp_min(0)
    torch.manual_seed(seed)
    left = outsiders.train(NETWORKS[network](), x, y, rule="SGD", rate=0.02, batch=n, epochs=3 if small else 2000)
    read_from = {
        "training": Problem(left.model, left.initial, left.final, (0.15, 0.85)),
        "first step": Problem(left.model, left.initial, left.states[1], (0.0,)),
    }
    facts = {"network": network, "images": n, "seed": seed, "epochs": len(left.states) - 1}
    steps = 3 if small else STEPS

    def ssim(found: Tensor) -> tuple[float, float]:
        scores = pal.score(found, x + CENTRE, held_out=data.held_out.images, mean=CENTRE)
        assert scores.held_out is not None
        return float(scores.ssim.mean()), float(scores.held_out.ssim.mean())

    def row(problem: Problem) -> dict[str, float]:
        with sdpa_kernel(SDPBackend.MATH):
            f = torch.stack([problem.f(image).detach() for image in x])
            λ, floor = best_multipliers(f.flatten(0, 1), problem.target)
            λ = λ.view(n, -1)
            changes, directions = dependence(problem, x[0], f.flatten(0, 1), λ[0])
        found, loss = descended(problem.objective(), n, steps, seed)
        kept, loss_from_truth = descended(problem.objective(), n, steps, seed, x=x.clone(), multipliers=λ.clone())
        numbers = {"floor": floor, "loss": loss, "loss from the images": loss_from_truth}
        numbers |= dict(zip(("ssim", "held-out ssim"), ssim(found), strict=True))
        numbers |= {"ssim at the images": ssim(x)[0], "ssim from the images": ssim(kept)[0]}
        numbers |= {"strongest change": float(changes[0]), "median change": float(changes.median())}
        numbers |= {"in mean patch": in_mean_patch(directions[: PATCH**2])}
        return {name: float(f"{value:.4g}") for name, value in numbers.items()}

    return [facts | {"read from": name} | row(problem) for name, problem in read_from.items()]


def table(rows: list[dict[str, Any]]) -> str:
    columns = ["network", "images", "read from", "floor", "loss", "SSIM", "held-out", "loss from the images",
               "SSIM from the images", "median direction", "alike in all patches"]  # fmt: skip
    groups = defaultdict(list)
    for row in rows:
        groups[row["images"], row["read from"], row["network"]].append(row)

    def mean(group: list[dict[str, Any]], name: str) -> float:
        return fmean(row[name] for row in group)

    shown = []
    for n in sorted({n for n, _, _ in groups}):
        for read_from in ("training", "first step"):
            for network in NETWORKS:
                group = groups[n, read_from, network]
                if group:
                    shown.append([
                        network, n, read_from, f"{mean(group, 'floor'):.1%}", f"{mean(group, 'loss'):.2%}",
                        *(f"{mean(group, name):.2f}" for name in ("ssim", "held-out ssim")),
                        f"{mean(group, 'loss from the images'):.2%}", f"{mean(group, 'ssim from the images'):.2f}",
                        f"{mean(group, 'median change'):.3%}", f"{mean(group, 'in mean patch'):.0%}",
                    ])  # fmt: skip
    return tables.markdown(columns, shown)


def _run(network: str, n: int, seed: int, path: Path, small: bool) -> str:
    rows = measured(network, n, seed, small=small)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (json.dumps(rows, indent=1) + "\n").encode())
    return table(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--parts", type=Path, default=PARTS)
    processes.add_arguments(parser)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    counts = (2,) if options.small else COUNTS
    wanted = [(n, network, seed) for seed in options.seeds for n in counts for network in NETWORKS]
    parts = {key: options.parts / f"{'-'.join(map(str, key))}{'-small' * options.small}.json" for key in wanted}
    jobs = {
        f"{network}, {n} images, seed {seed}": partial(_run, network, n, seed, path, options.small)
        for (n, network, seed), path in parts.items()
        if not path.exists()
    }
    processes.run_all(jobs, options)
    rows = [row for path in parts.values() for row in json.loads(path.read_text(encoding="utf-8"))]
    print(table(rows))
    if not options.small and set(SEEDS) <= set(options.seeds):
        content = made_by("python experiments/vision_transformer.py") | {"steps": STEPS, "rows": rows}
        RESULTS.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        tables.write(PAGE, table(rows), "vision transformer")


if __name__ == "__main__":
    main()
