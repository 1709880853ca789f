"""How much of splitting's advantage remains after equal further descent?

On synthetic problems whose target is built from n = 6 known images, two candidates descend until they stall. Each
policy then splits both, once, and descends further for the same number of steps. Reported per seed: the loss L/‖T‖²
when stalled, the immediate change at equal η, and the loss after 50, 500 and 1500 further steps.

    python experiments/splitting_advantage.py        writes docs/results/splitting-advantage.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from palimpsest.solver import splitting  # noqa: E402
from palimpsest.solver.splitting import Splitting  # noqa: E402
from synthetic import descend, stalled_problem  # noqa: E402

SEEDS, ETA, FURTHER = range(10), 0.05, (50, 500, 1500)


def one_seed(seed: int) -> dict[str, dict[str, float]]:
    objective, x, λ = stalled_problem(seed)
    T2 = float(objective.target_norm_squared)
    values, vectors = splitting.min_eigenpairs(objective, x, λ, iterations=x[0].numel())
    chosen = Splitting(share=1.0).chosen(values, objective.loss(x, λ))
    stalled = float(objective.loss(x, λ)) / T2
    rows = {"none": _continued(objective, x, λ, T2) | {"immediate": 0.0}}
    for direction in ("curvature", "random", "duplicate"):
        policy = Splitting(direction=direction)
        v = policy.directions(vectors, torch.Generator().manual_seed(seed))[chosen]
        after = splitting.apply(x, λ, None, chosen, ETA * v)[:2]
        immediate = float(objective.loss(*after)) / T2 - stalled
        rows[direction] = _continued(objective, *after, T2) | {"immediate": immediate}
    return rows | {"stalled": {"loss": stalled, "split": len(chosen)}}


def _continued(objective, x, λ, T2: float) -> dict[str, float]:
    return {
        f"after {steps}": float(objective.loss(*descend(objective, x, λ, steps=steps, learning_rate=0.05))) / T2
        for steps in FURTHER
    }


def main() -> None:
    torch.set_num_threads(1)
    seeds = {seed: one_seed(seed) for seed in SEEDS}
    policies = ("none", "duplicate", "random", "curvature")
    columns = ["immediate", *(f"after {steps}" for steps in FURTHER)]
    medians = {policy: {c: median(seeds[s][policy][c] for s in SEEDS) for c in columns} for policy in policies}
    wins = {c: sum(seeds[s]["curvature"][c] < seeds[s]["random"][c] for s in SEEDS) for c in columns}
    result = {
        "command": "python experiments/splitting_advantage.py",
        "eta": ETA,
        "median": medians,
        "seeds on which curvature is below random": wins,
        "seeds": seeds,
    }
    path = ROOT / "docs" / "results" / "splitting-advantage.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for policy in policies:
        print(f"{policy:10s}", "  ".join(f"{c} {medians[policy][c]:+.5f}" for c in columns))
    print("curvature below random, of 10 seeds:", wins)


if __name__ == "__main__":
    main()
