"""How much does a client of federated learning give away by its updates, and does noise protect it?

Five clients with 20 pictures each train a face detector by federated averaging. In every round each client starts from
the global weights, takes a few steps of plain gradient descent, and sends its change. The server sees the changes of
the first client in 1, 3 or 10 rounds. In two more trainings every client clips its change and adds Gaussian noise.

    python experiments/federated.py     writes docs/results/federated.json and the table of docs/federated.md

It takes three minutes on two cores.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Mapping

import tables
import torch
from provenance import made_by
from torch import Tensor, nn

import palimpsest as pal
from palimpsest.datasets import DataSet
from palimpsest.runs.problems import problem

CLIENTS, PER_CLASS, ROUNDS, LOCAL_STEPS, RATE = 5, 10, 10, 5, 0.05
READ = (1, 3, 10)  # rounds that the server looks at
NOISE = (0.0, 4.0, 16.0)  # ‖noise‖ / ‖clipped change‖; 0 neither clips nor adds noise
CLIP = 0.5  # of the first change of the audited client
CANDIDATES, STEPS, SEED = 40, 800, 0

Weights = dict[str, Tensor]


def client_images(data: DataSet, client: int) -> Tensor:
    """The numbers of a client's images, as many of each class."""
    sides = torch.arange(len(data.train)).view(2, -1)
    return sides[:, client * PER_CLASS : (client + 1) * PER_CLASS].flatten()


def change(model: nn.Module, start: Mapping[str, Tensor], images: Tensor, labels: Tensor) -> Weights:
    """The change of the weights by the client's own steps."""
    model.load_state_dict(start)
    optimiser = torch.optim.SGD(model.parameters(), lr=RATE)
    for _ in range(LOCAL_STEPS):
        optimiser.zero_grad()
        (model(images)[:, 0] - labels).square().mean().backward()
        optimiser.step()
    return {name: θ.detach() - start[name] for name, θ in model.named_parameters()}


def norm(T: Mapping[str, Tensor]) -> float:
    return sum(float(t.double().square().sum()) for t in T.values()) ** 0.5


def protected(T: Weights, clip: float, noise: float, generator: torch.Generator) -> Weights:
    """T · min(1, C/‖T‖) + z C N(0, 1), with z such that the noise is ``noise`` times as long as C."""
    size, count = norm(T), sum(t.numel() for t in T.values())
    z = noise / count**0.5
    scaled = {name: t * min(1.0, clip / size) for name, t in T.items()}
    return {name: t + z * clip * torch.randn(t.shape, generator=generator) for name, t in scaled.items()}


def trained(data: DataSet, noise: float) -> tuple[nn.Module, list[tuple[Weights, Weights]], float]:
    """The global model, the first client's weights before and after each round, and the noise multiplier z."""
    torch.manual_seed(SEED)
    model = pal.networks.MLP(data.image_shape, hidden=(300, 300))
    generator = torch.Generator().manual_seed(SEED)
    images, labels = data.centred(data.train.images), data.train.labels.float()
    θ: Weights = copy.deepcopy(model.state_dict())
    clip, seen = 0.0, []
    for _ in range(ROUNDS):
        changes = [change(model, θ, images[i], labels[i]) for i in (client_images(data, c) for c in range(CLIENTS))]
        clip = clip or CLIP * norm(changes[0])
        if noise:
            changes = [protected(T, clip, noise, generator) for T in changes]
        seen.append((θ, {name: t + changes[0][name] for name, t in θ.items()}))
        θ = {name: t + sum(T[name] for T in changes) / CLIENTS for name, t in θ.items()}
    model.load_state_dict(θ)
    return model, seen, noise / sum(t.numel() for t in θ.values()) ** 0.5


def accuracy(model: nn.Module, data: DataSet) -> float:
    """Of the global model, on images that no client has."""
    with torch.no_grad():
        right = model(data.centred(data.held_out.images))[:, 0] * data.held_out.labels > 0
    return float(right.double().mean())


def read(model: nn.Module, rounds: list[tuple[Weights, Weights]], data: DataSet) -> dict[str, object]:
    """How well the first client's images are read out of these rounds."""
    began = time.monotonic()
    objective, space = problem("path", model, checkpoints=rounds, within=None)
    rec = pal.reconstruct(
        objective, image_shape=data.image_shape, within=space, candidates=CANDIDATES, steps=STEPS, seed=SEED,
        progress=False,
    )  # fmt: skip
    own = data.train.images[client_images(data, 0)]
    score = pal.score(rec, own, held_out=data.held_out.images, mean=data.mean)
    assert score.held_out is not None
    return {
        "rounds": len(rounds),
        "images": len(own),
        "span": space is not None,
        "recovered": score.verdict.recovered,
        "verdict": score.verdict.outcome.value,
        "mean ssim": round(float(score.ssim.mean()), 3),
        "best held-out ssim": round(float(score.held_out.ssim.max()), 3),
        "seconds": round(time.monotonic() - began, 1),
    }


def main() -> None:
    data = pal.datasets.load("faces", per_class=CLIENTS * PER_CLASS, seed=SEED)
    rows = []
    for noise in NOISE:
        model, seen, z = trained(data, noise)
        for count in READ:
            row = {"noise": noise, "noise multiplier": z, "accuracy": round(accuracy(model, data), 3)}
            rows.append(row | read(model, seen[:count], data))
            print(rows[-1], flush=True)
    written = made_by("python experiments/federated.py") | {"rows": rows}
    (tables.DOCS / "results" / "federated.json").write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    tables.write("federated.md", table(rows))


def table(rows: list[dict]) -> str:
    columns = [
        "protection of each change",
        "rounds seen",
        "images recovered",
        "mean SSIM",
        "accuracy of the global model",
    ]
    names = {0.0: "none"} | {noise: f"clipped, noise {noise:g} times as long" for noise in NOISE if noise}
    return tables.markdown(columns, [
        [names[row["noise"]], row["rounds"], f"{row['recovered']} of {row['images']}", f"{row['mean ssim']:.2f}",
         f"{row['accuracy']:.0%}"] for row in rows
    ])  # fmt: skip


if __name__ == "__main__":
    main()
