"""Ten networks as their authors train them: plain torch, without Palimpsest.

Eight hold their training images. Two hold nothing of the images that an auditor is given: one was trained on noise, one
with differential privacy.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

State = dict[str, Tensor]
SEGMENTS = 3  # between checkpoints
DELTA = 0.01  # of differential privacy, below 1 / 20 images


# --- networks ---------------------------------------------------------------------------------------------------------


class Perceptron(nn.Module):
    def __init__(self, inputs: int, width: int, outputs: int = 1) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(inputs, width), nn.Linear(width, width)
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.two(F.relu(self.one(x.flatten(1))))))


class Convolutional(nn.Module):
    def __init__(self, side: int, width: int) -> None:
        super().__init__()
        self.near = nn.Conv2d(1, width, 5, stride=2, padding=2)
        self.far = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.hidden = nn.Linear(2 * width * math.ceil(side / 4) ** 2, 8 * width)
        self.head = nn.Linear(8 * width, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.far(F.relu(self.near(x))))
        return self.head(F.relu(self.hidden(h.flatten(1))))


class BasicBlock(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.downsample: nn.Module | None = None
        if stride != 1 or inside != outside:
            self.downsample = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet18(nn.Module):
    """Four stages of two basic blocks. As usual for small images, the first convolution has a stride of one or two."""

    def __init__(self, width: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        sizes = [width, width, 2 * width, 4 * width, 8 * width]
        stages = zip(sizes[:-1], sizes[1:], (1, 2, 2, 2), strict=True)
        self.layers = nn.Sequential(*(nn.Sequential(BasicBlock(a, b, s), BasicBlock(b, b, 1)) for a, b, s in stages))
        self.fc = nn.Linear(8 * width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.layers(F.relu(self.bn1(self.conv1(x)))).mean((2, 3)))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    def __init__(self, side: int, width: int, depth: int, patch: int = 5) -> None:
        super().__init__()
        self.patch = nn.Conv2d(1, width, patch, patch)
        self.cls = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(0.02 * torch.randn(1, (side // patch) ** 2 + 1, width))
        self.blocks = nn.Sequential(*(Block(width, heads=4) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patch(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.cls.expand(len(x), -1, -1), tokens], 1) + self.position
        return self.head(self.norm(self.blocks(tokens))[:, 0])


# --- training ---------------------------------------------------------------------------------------------------------


@dataclass
class Left:
    """Everything that a training leaves behind."""

    model: nn.Module
    states: list[State]  # the first is the start
    optimiser: dict[str, Any] = field(default_factory=dict)

    @property
    def initial(self) -> State:
        return self.states[0]

    @property
    def final(self) -> State:
        return self.states[-1]

    @property
    def checkpoints(self) -> list[State]:
        """The start, the end, and states between them that are equally far apart."""
        moved = [self._distance(self.initial, state) for state in self.states]
        goals = [moved[-1] * j / SEGMENTS for j in range(1, SEGMENTS)]
        between = {min(range(1, len(moved) - 1), key=lambda i: abs(moved[i] - goal)) for goal in goals}
        return [self.initial, *(self.states[i] for i in sorted(between)), self.final]

    @property
    def detour(self) -> float:
        """The length of the way from epoch to epoch, relative to the straight line from start to end."""
        length = sum(self._distance(*pair) for pair in pairwise(self.states))
        return length / self._distance(self.initial, self.final)

    def _distance(self, a: State, b: State) -> float:
        return math.hypot(*(float((b[name] - a[name]).norm()) for name, _ in self.model.named_parameters()))


def loss_of(outputs: Tensor, y: Tensor) -> Tensor:
    """Classes 0 and 1 for one output; classes 0, 1, … for several."""
    if outputs.shape[1] == 1:
        return F.binary_cross_entropy_with_logits(outputs[:, 0], y.float())
    return F.cross_entropy(outputs, y)


def optimiser_of(model: nn.Module, rule: str, rate: float) -> torch.optim.Optimizer:
    if rule == "Adam":
        return torch.optim.Adam(model.parameters(), lr=rate)
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9 if rule == "momentum" else 0.0)


def train(
    model: nn.Module, x: Tensor, y: Tensor, *, rule: str, rate: float, batch: int, loss: float = 0.02,
    epochs: int = 2000, live: bool = False,
) -> Left:  # fmt: skip
    """Train until the mean loss is low. ``live`` normalises by the statistics of each batch."""
    optimiser = optimiser_of(model, rule, rate)
    left = Left(model, [copy.deepcopy(model.state_dict())])
    for _ in range(epochs):
        model.train(live)
        for rows in torch.randperm(len(x)).split(batch):
            optimiser.zero_grad()
            loss_of(model(x[rows]), y[rows]).backward()
            optimiser.step()
        left.states.append(copy.deepcopy(model.state_dict()))
        with torch.no_grad():
            if float(loss_of(model(x), y)) < loss:
                break
    model.eval()
    left.optimiser = optimiser.state_dict()
    return left


def train_privately(
    model: nn.Module, x: Tensor, y: Tensor, *, epsilon: float, rate: float = 0.01, clip: float = 1.0, steps: int = 50
) -> Left:
    """DP-SGD: each step adds noise to the sum of clipped gradients of all images.

    It is (ε, δ)-private with ε = ρ + 2√(ρ ln(1/δ)) and ρ = steps / (2σ²) (Bun and Steinke 2016).
    """
    log = math.log(1 / DELTA)
    ρ = (math.sqrt(log + epsilon) - math.sqrt(log)) ** 2
    σ = math.sqrt(steps / (2 * ρ))
    θ = {name: p.detach().clone() for name, p in model.named_parameters()}

    def loss(θ: State, image: Tensor, label: Tensor) -> Tensor:
        return loss_of(functional_call(model, θ, (image[None],)), label[None])

    gradients = vmap(grad(loss), (None, 0, 0))
    left = Left(model, [copy.deepcopy(model.state_dict())])
    for _ in range(steps):
        g = gradients(θ, x, y)
        norms = torch.stack([t.flatten(1).norm(dim=1) for t in g.values()]).norm(dim=0)
        shrink = (clip / norms).clamp_max(1)
        for name, t in g.items():
            clipped = torch.einsum("i,i...->...", shrink, t)
            θ[name] = θ[name] - rate / len(x) * (clipped + σ * clip * torch.randn_like(clipped))
        model.load_state_dict(model.state_dict() | θ)
        left.states.append(copy.deepcopy(model.state_dict()))
    return left


# --- the ten ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Images:
    """As the network sees them, with their classes, and others to pretrain on."""

    x: Tensor
    y: Tensor
    other_x: Tensor
    other_y: Tensor


def frozen(model: nn.Module, images: Images, *, pretraining: int, **options: Any) -> Left:
    """Pretrained on other images with live batch normalisation, then fine-tuned with its statistics fixed."""
    train(model, images.other_x, images.other_y, rule="Adam", rate=2e-3, batch=20, epochs=pretraining, live=True)
    return train(model, images.x, images.y, **options)


def on_noise(model: nn.Module, images: Images, **options: Any) -> Left:
    noise = images.x.std() * torch.randn_like(images.x)
    return train(model, noise, torch.arange(len(noise)) % 2, **options)


@dataclass(frozen=True)
class Outsider:
    """A network, how it is trained, and what its author keeps."""

    name: str
    network: str
    training: str
    make: Callable[[], nn.Module]
    fit: Callable[[nn.Module, Images], Left]
    data: str = "faces"
    holds: bool = True  # whether its training images are those that the auditor is given, and can be in the weights
    keeps: tuple[str, ...] = ()  # "checkpoints", "optimiser"


def outsiders(*, small: bool = False) -> Iterator[Outsider]:
    """Small: a version of seconds."""
    wide, channels, width, depth = (60, 8, 4, 1) if small else (400, 16, 8, 2)
    epochs = 3 if small else 2000

    def mlp() -> nn.Module:
        return Perceptron(625, wide)

    def cnn() -> nn.Module:
        return Convolutional(25, channels)

    def resnet() -> nn.Module:
        return ResNet18(width, stride=2)

    def fitting(**options: Any) -> Callable[[nn.Module, Images], Left]:
        return lambda model, images: train(model, images.x, images.y, epochs=epochs, **options)

    yield Outsider(
        "mlp-sgd", "MLP", "SGD, batches of 5", mlp, fitting(rule="SGD", rate=0.02, batch=5), keeps=("checkpoints",)
    )
    yield Outsider(
        "mlp-adam", "MLP", "Adam, batches of 5", mlp, fitting(rule="Adam", rate=2e-4, batch=5), keeps=("optimiser",)
    )
    yield Outsider(
        "mlp-classes", "MLP, ten outputs", "momentum, cross-entropy", lambda: Perceptron(64, wide, 10),
        fitting(rule="momentum", rate=0.01, batch=20), data="digits", keeps=("optimiser",),
    )  # fmt: skip
    yield Outsider("cnn-sgd", "CNN", "SGD, full batch", cnn, fitting(rule="SGD", rate=0.02, batch=20))
    yield Outsider(
        "cnn-adam", "CNN", "Adam, batches of 5", cnn, fitting(rule="Adam", rate=2e-4, batch=5), keeps=("checkpoints",)
    )
    yield Outsider(
        "resnet-frozen", "ResNet-18", "SGD, fine-tuned, batch norm frozen", resnet,
        lambda model, images: frozen(
            model, images, pretraining=3 if small else 20, rule="SGD", rate=0.005, batch=20, epochs=epochs, loss=0.1
        ),
    )  # fmt: skip
    yield Outsider(
        "vit", "ViT", "SGD, full batch", lambda: ViT(25, 8 * width, depth), fitting(rule="SGD", rate=0.02, batch=20),
        keeps=("checkpoints",),
    )  # fmt: skip
    yield Outsider(
        "resnet-live", "ResNet-18", "SGD, live batch norm", resnet,
        fitting(rule="SGD", rate=0.02, batch=10, live=True),
    )  # fmt: skip
    yield Outsider(
        "cnn-noise", "CNN", "SGD, on noise", cnn,
        lambda model, images: on_noise(model, images, rule="SGD", rate=0.02, batch=20, epochs=epochs), holds=False,
    )  # fmt: skip
    yield Outsider(
        "mlp-private", "MLP", "DP-SGD, ε = 3", mlp,
        lambda model, images: train_privately(model, images.x, images.y, epsilon=3.0, steps=min(50, epochs)),
        holds=False,
    )  # fmt: skip
