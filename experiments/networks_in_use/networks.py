"""The networks, before any training. All see images from which the mean was subtracted."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import palimpsest as pal

CHANNEL_MEAN, CHANNEL_STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)  # of CIFAR-10, as SimuDy has them
RANK = 16  # of an adapter


def channel(values: tuple[float, ...]) -> Tensor:
    return torch.tensor(values).view(3, 1, 1)


class Scaled(nn.Module):
    """Divides centred pixels by the channels' standard deviations."""

    factor: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", 1 / channel(CHANNEL_STD))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def convolutional(side: int, width: int, *, he: bool, normalised: bool = False) -> nn.Module:
    """Two convolutions, with batch normalisation or without, and two dense layers. With He's start or torch's own."""
    a, b, dense = width, 2 * width, 8 * width

    def after(channels: int) -> list[nn.Module]:
        return [nn.BatchNorm2d(channels), nn.ReLU()] if normalised else [nn.ReLU()]

    model = nn.Sequential(
        nn.Conv2d(3, a, 5, 2, 2, bias=not normalised), *after(a),
        nn.Conv2d(a, b, 3, 2, 1, bias=not normalised), *after(b),
        nn.Flatten(), nn.Linear(b * (side // 4) ** 2, dense), nn.ReLU(), nn.Linear(dense, 1),
    )  # fmt: skip
    if he:
        start_as_he(model)
    return model


def start_as_he(model: nn.Module) -> None:
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(layer.weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


def perceptron(side: int, width: int) -> nn.Module:
    return pal.networks.MLP((3, side, side), hidden=(8 * width, 8 * width), outputs=1)


def as_haim(side: int, width: int) -> nn.Module:
    """The start of Haim et al.: a tiny first layer, which alone has biases, and torch's own for the others."""
    model = pal.networks.MLP((3, side, side), hidden=(1000 * width // 128,) * 2, outputs=1, bias="first")
    first, *others = model.layers
    with torch.no_grad():
        for values in first.parameters():
            values.normal_().mul_(1e-4)
        for layer in others:
            assert isinstance(layer, nn.Linear)
            layer.reset_parameters()
    return model


class Block(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.shortcut = nn.Sequential()
        if stride != 1 or inside != outside:
            self.shortcut = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class ResNet18(nn.Module):
    """ResNet-18 for small images: the first convolution keeps their size."""

    def __init__(self, width: int) -> None:
        super().__init__()
        sizes = [width, width, 2 * width, 4 * width, 8 * width]
        stages = zip(sizes[:-1], sizes[1:], (1, 2, 2, 2), strict=True)
        self.conv1 = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.layers = nn.Sequential(*(nn.Sequential(Block(a, b, stride), Block(b, b, 1)) for a, b, stride in stages))
        self.fc = nn.Linear(8 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.bn1(self.conv1(x)))
        return self.fc(self.layers(x).mean((2, 3)))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, max(1, width // 64))
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """A vision transformer of four layers on patches of 4×4 pixels."""

    def __init__(self, side: int, width: int, depth: int = 4, patch: int = 4) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(0.02 * torch.randn(1, (side // patch) ** 2 + 1, width))
        self.layers = nn.Sequential(*(Layer(width) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.position
        return self.head(self.norm(self.layers(x)[:, 0]))


class Adapted(nn.Module):
    """Wx + b + B(Ax): a frozen dense layer with a trained adapter of low rank (LoRA). B starts at zero."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.A = nn.Parameter(torch.randn(RANK, layer.in_features) / math.sqrt(layer.in_features))
        self.B = nn.Parameter(torch.zeros(layer.out_features, RANK))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + x @ self.A.T @ self.B.T


def with_adapters(model: pal.networks.MLP) -> nn.Module:
    for number, layer in enumerate(model.layers):
        assert isinstance(layer, nn.Linear)
        model.layers[number] = Adapted(layer)
    return model


def with_new_head(model: nn.Sequential) -> nn.Module:
    """The convolutions are frozen, and the dense layers start again."""
    for layer in model:
        if isinstance(layer, nn.Conv2d):
            layer.requires_grad_(False)
        elif isinstance(layer, nn.Linear):
            start_as_he(layer)
    return model
