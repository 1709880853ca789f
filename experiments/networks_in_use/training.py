"""Images, pretrained networks, and training by plain torch."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import palimpsest as pal
from networks_in_use import networks
from networks_in_use.rows import Row, Training
from palimpsest.datasets.base import ENVIRONMENT, SOURCES
from palimpsest.execution.precision import matrix_products
from palimpsest.methods.trail import distance, spread

REPORTED, POOL = (0, 1, 2), 1000  # seed s has images 1000·s … 1000·s + 999, so that seeds share none
TUNING = 11  # images 4000 to 4999
PRETRAINING = slice(3000, 4000)  # and the test file
VEHICLES = (0, 1, 8, 9)  # the classes with label +1


@dataclass(frozen=True)
class Images:
    """Of one row and seed, in [0, 1]; as many are held out as are trained on, of the same classes."""

    train: Tensor
    labels: Tensor
    held_out: Tensor
    mean: Tensor


def source(name: str, side: int) -> tuple[Tensor, Tensor]:
    """CIFAR-10 and its classes; smooth noise in its place for a small version."""
    if side != 32:
        generator = torch.Generator().manual_seed(len(name))
        coarse = torch.rand(5000, 3, side // 4, side // 4, generator=generator)
        return F.interpolate(coarse, size=(side, side), mode="bilinear"), torch.arange(5000) % 10
    root = os.environ.get(ENVIRONMENT)
    found = SOURCES[name](Path(root).expanduser() if root else None)
    return torch.from_numpy(found.images.astype(np.float32) / 255), torch.from_numpy(found.labels).long()


def load(row: Row, seed: int) -> Images:
    if seed not in (*REPORTED, TUNING):
        raise SystemExit(f"there are no images for seed {seed}; choose one of {REPORTED}, or {TUNING} to tune")
    images, classes = source("cifar10", row.side)
    first = POOL * (4 if seed == TUNING else seed)
    images, classes = images[first : first + POOL], classes[first : first + POOL]
    groups = classes if row.classes == 10 else sides(classes)
    order = torch.from_numpy(np.random.default_rng(seed).permutation(POOL))
    train, held_out = [], []
    for number, group in enumerate(groups.unique().tolist()):
        count = row.n // row.classes + (number < row.n % row.classes)
        rows = order[groups[order] == group]
        train.append(rows[:count])
        held_out.append(rows[count : 2 * count])
    chosen, others = torch.cat(train), torch.cat(held_out)
    mean = networks.channel(networks.CHANNEL_MEAN).expand_as(images[0]) if scaled(row) else images.mean(0)
    return Images(images[chosen], groups[chosen], images[others], mean.contiguous())


def targets(row: Row, images: Images) -> Tensor:
    """What the outputs should be: classes, or a number for each image."""
    return images.labels if row.classes == 10 else images.labels.float()


def sides(classes: Tensor) -> Tensor:
    return 2 * torch.isin(classes, torch.tensor(VEHICLES)).long() - 1


def scaled(row: Row) -> bool:
    """Whether the network divides by the channels' deviations, as is usual for its kind."""
    return row.kind in ("resnet", "vit")


# --- networks before training ---------------------------------------------------------------------


def before(row: Row, seed: int, folder: Path) -> nn.Module:
    """The network with which the training of this row starts."""
    torch.manual_seed(seed)
    model = fresh(row)
    if (name := pretrained_name(row)) is not None:
        model.load_state_dict(torch.load(folder / name, weights_only=True))
    if row.kind == "cnn head":
        assert isinstance(model, nn.Sequential)
        return networks.with_new_head(model)
    if row.kind == "mlp adapter":
        assert isinstance(model, pal.networks.MLP)
        return networks.with_adapters(model)
    return model


def fresh(row: Row) -> nn.Module:
    if row.kind == "resnet":
        return nn.Sequential(networks.Scaled(), networks.ResNet18(row.width))
    if row.kind == "vit":
        return nn.Sequential(networks.Scaled(), networks.ViT(row.side, row.width * 3 // 2))
    if row.kind == "mlp, Haim's start":
        return networks.as_haim(row.side, row.width)
    if row.kind.startswith("mlp"):
        return networks.perceptron(row.side, row.width)
    if row.kind == "cnn, batch norm":
        return networks.convolutional(row.side, row.width, he=False, normalised=True)
    return networks.convolutional(row.side, row.width, he=row.kind != "cnn, torch's start")


def pretrained_name(row: Row) -> str | None:
    """The file of the pretrained network, if the row starts with one."""
    if row.kind not in ("mlp adapter", "cnn head", "cnn fine-tuned", "resnet"):
        return None
    return f"pretrained-{row.kind.split()[0]}-{row.side}.pt"


def pretrain(row: Row, folder: Path, device: torch.device) -> None:
    """Make the file that `before` reads. The images are used for nothing else."""
    name = pretrained_name(row)
    if name is None or (folder / name).exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    (images, classes), (test, test_classes) = source("cifar10", row.side), source("cifar10-test", row.side)
    x = torch.cat([images[PRETRAINING], test[:2000]])
    y = torch.cat([classes[PRETRAINING], test_classes[:2000]]).to(device)
    x = (x - (networks.channel(networks.CHANNEL_MEAN) if scaled(row) else x.mean(0))).to(device)
    y = y if row.classes == 10 else sides(y.cpu()).to(device).float()
    torch.manual_seed(1)
    model, size = fresh(row).to(device).train(), 128
    batches = len(x) // size
    highest, optimiser = 1e-3, optimiser_of(model, "adam", 1e-3)
    if row.kind == "resnet":
        highest, optimiser = 0.1, optimiser_of(model, "momentum", 0.1, decay=5e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, highest, total_steps=row.pretraining * batches)
    with matrix_products(tf32=True, device=device):
        for _ in range(row.pretraining):
            for rows in torch.randperm(len(x)).to(device).split(size)[:batches]:
                optimiser.zero_grad()
                loss_of(model(augmented(x[rows])), y[rows]).backward()
                optimiser.step()
                schedule.step()
    torch.save({key: t.cpu() for key, t in model.state_dict().items()}, folder / f"{name}.part")
    (folder / f"{name}.part").rename(folder / name)


def augmented(x: Tensor) -> Tensor:
    """Shifted by up to an eighth, and mirrored half of the time."""
    side = x.shape[-1]
    dy, dx = torch.randint(0, side // 4 + 1, (2,)).tolist()
    x = F.pad(x, [side // 8] * 4)[:, :, dy : dy + side, dx : dx + side]
    return x.flip(3) if torch.rand(()) < 0.5 else x


# --- training -------------------------------------------------------------------------------------


def loss_of(outputs: Tensor, y: Tensor, loss: str = "squared") -> Tensor:
    if outputs.shape[1] > 1:
        return F.cross_entropy(outputs, y)
    Φ = outputs.squeeze(1)
    return (Φ - y).square().mean() if loss == "squared" else F.softplus(-y * Φ).mean()


def optimiser_of(model: nn.Module, name: str, rate: float, *, decay: float = 0.0) -> torch.optim.Optimizer:
    parameters = [p for p in model.parameters() if p.requires_grad]
    if name == "adam":
        return torch.optim.Adam(parameters, lr=rate, weight_decay=decay)
    return torch.optim.SGD(parameters, lr=rate, momentum=0.9 if name == "momentum" else 0.0, weight_decay=decay)


class Trail:
    """Weights on the way, at most MOST of them. If there are more, every other one goes, and the gaps double."""

    MOST = 64

    def __init__(self, model: nn.Module) -> None:
        self.model, self.gap = model, 0.0
        self.kept = [self._state()]

    def _state(self) -> dict[str, Tensor]:
        return {name: t.detach().clone() for name, t in self.model.state_dict().items()}

    def _parameters(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: state[name] for name, _ in self.model.named_parameters()}

    def distance(self, state: dict[str, Tensor], other: dict[str, Tensor]) -> float:
        return distance(self._parameters(state), self._parameters(other))

    def look(self) -> None:
        if self.distance(self.model.state_dict(), self.kept[-1]) > self.gap:
            self.kept.append(self._state())
        if len(self.kept) > self.MOST:
            self.kept = self.kept[::2]
            self.gap = 2 * max(self.gap, self.distance(self.kept[0], self.kept[-1]) / self.MOST)

    def checkpoints(self, segments: int) -> list[dict[str, Tensor]]:
        """The start, the end, and weights between them at equal distances from the start."""
        end = self._state()
        trail = [*(state for state in self.kept if self.distance(state, end) > 0), end]
        return [trail[j] for j in spread([self._parameters(state) for state in trail], segments)]


def train(
    model: nn.Module, x: Tensor, y: Tensor, recipe: Training, seed: int, segments: int = 1
) -> tuple[nn.Module, list[dict[str, Tensor]], dict[str, Any]]:
    """The trained network, its checkpoints, and facts. The rate is halved if the loss explodes."""
    start, rate = copy.deepcopy(model.state_dict()), recipe.rate
    while True:
        model.load_state_dict(start)
        model.train(recipe.live_statistics)
        trail = Trail(model)
        facts = _trained(model, x, y, recipe, rate, seed, trail.look if segments > 1 else lambda: None)
        if facts is not None:
            return model.eval(), trail.checkpoints(segments), facts
        rate /= 2


def _trained(
    model: nn.Module, x: Tensor, y: Tensor, recipe: Training, rate: float, seed: int, look: Callable[[], None]
) -> dict | None:
    """Facts, or None if the loss exploded."""
    optimiser = optimiser_of(model, recipe.optimiser, rate, decay=recipe.decay)
    order = torch.Generator().manual_seed(seed)
    first, steps = math.nan, 0
    for _ in range(recipe.epochs):
        worst = 0.0
        for rows in torch.randperm(len(x), generator=order).split(recipe.batch or len(x)):
            inputs, wanted = (x[rows], y[rows]) if recipe.batch else (x, y)
            outputs = model(inputs)
            loss = loss_of(outputs, wanted, recipe.loss)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            off = (outputs.detach().squeeze(1) - wanted).abs().max() if outputs.shape[1] == 1 else loss.detach()
            worst, steps = max(worst, float(off)), steps + 1
            look()
            first = float(loss.detach()) if steps == 1 else first
        last = float(loss.detach())
        if not math.isfinite(last) or last > 20 * (1 + first):
            return None
        if worst < recipe.tolerance:
            break
    return {"rate": rate, "steps": steps, "first loss": first, "last loss": last, "largest error": worst}
