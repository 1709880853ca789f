"""The shared table of small problems, networks × objectives × shapes, over which the mathematics is tested.

A new method adds one row to OBJECTIVES; a new kind of network one to NETWORKS. Everything is float64 and seeded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import palimpsest as pal
from palimpsest.objectives import Objective


class SmallCNN(nn.Module):
    """Functional ReLUs, max-pooling and average-pooling: nothing here was written for Palimpsest."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 3, 3, padding=1)
        self.norm = nn.BatchNorm2d(3)
        self.second = nn.Conv2d(3, 4, 2)
        self.head = nn.Linear(4, outputs)

    def forward(self, x: Tensor) -> Tensor:
        h = F.max_pool2d(F.relu(self.norm(self.first(x))), 2)
        h = F.avg_pool2d(torch.relu(self.second(h)), 2)
        return self.head(h.flatten(1))


class Ensemble(nn.Module):
    """Perceptrons side by side: a sum of outputs where there is one, else each member's own."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        shares = (1, 1) if outputs == 1 else (1, outputs - 1)
        self.members = nn.ModuleList(pal.networks.MLP(5, (4,), share) for share in shares)
        self.adds = outputs == 1

    def forward(self, x: Tensor) -> Tensor:
        each = [member(x) for member in self.members]
        return sum(each) if self.adds else torch.cat(each, 1)


class SmallViT(nn.Module):
    """Four patches and a class token, one block of attention with two heads, layer norms, GELU."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.patch = nn.Conv2d(1, 4, 2, 2)
        self.cls, self.position = nn.Parameter(torch.randn(1, 1, 4)), nn.Parameter(torch.randn(1, 5, 4))
        self.norm1, self.norm2, self.norm = nn.LayerNorm(4), nn.LayerNorm(4), nn.LayerNorm(4)
        self.qkv, self.proj, self.up, self.down = (nn.Linear(*sizes) for sizes in ((4, 12), (4, 4), (4, 5), (5, 4)))
        self.head = nn.Linear(4, outputs)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patch(x).flatten(2).transpose(1, 2)
        h = torch.cat([self.cls.expand(len(x), -1, -1), tokens], 1) + self.position
        q, k, v = self.qkv(self.norm1(h)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        h = h + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        h = h + self.down(F.gelu(self.up(self.norm2(h))))
        return self.head(self.norm(h)[:, 0])


@dataclass(frozen=True)
class Network:
    name: str
    make: Callable[[int], nn.Module]
    image_shape: tuple[int, ...]
    most_outputs: int = 3


NETWORKS = [
    Network("mlp-1-first", lambda o: pal.networks.MLP(6, (7,), o), (6,)),
    Network("mlp-2-all", lambda o: pal.networks.MLP((1, 2, 3), (7, 5), o, bias="all"), (1, 2, 3)),
    Network("mlp-3-none", lambda o: pal.networks.MLP(5, (6, 5, 4), o, bias="none"), (5,)),
    Network("cnn", SmallCNN, (1, 6, 6)),
    Network("ensemble", Ensemble, (5,)),
    Network("cubic", lambda o: pal.networks.PolynomialNetwork(5, 6, activation=3, bias=True), (5,), 1),
    Network("polynomial", lambda o: pal.networks.PolynomialNetwork(5, 6, activation=(0.2, 1, -0.5, 0.3)), (5,), 1),
    Network("vit", SmallViT, (1, 4, 4)),
]


def on_the_way(model: nn.Module, initial: dict[str, Tensor], segments: int) -> list[dict[str, Tensor]]:
    """Checkpoints of unequal segments, with their own statistics of batch normalisation."""
    final, generator = model.state_dict(), torch.Generator().manual_seed(0)

    def between(name: str, t: Tensor) -> Tensor:
        share = torch.rand(t.shape, generator=generator, dtype=torch.float64)
        return torch.lerp(initial[name], t, share) if t.is_floating_point() else t

    return [initial, *({n: between(n, t) for n, t in final.items()} for _ in range(segments - 1)), final]


def some_gradient(model: nn.Module) -> dict[str, Tensor]:
    return {name: torch.randn_like(θ) for name, θ in model.named_parameters()}


Make = Callable[[nn.Module, dict[str, Tensor]], Objective]
OBJECTIVES: dict[str, tuple[int, Make]] = {  # name: (outputs it needs, how to make it)
    "kkt": (1, lambda model, initial: pal.KKT(model, sharpness=4.0)),
    "kkt-signed": (1, lambda model, initial: pal.KKT(model, signed=True, sharpness=4.0, weights="auto")),
    "kkt-signed-outputs": (3, lambda model, initial: pal.KKT(model, signed=True, sharpness=4.0)),
    "multiclass": (3, lambda model, initial: pal.MulticlassKKT(model, sharpness=4.0)),
    "ntk": (1, lambda model, initial: pal.NTK(model, initial, sharpness=4.0, weights="auto")),
    "ntk-nodes": (1, lambda model, initial: pal.NTK(model, initial, at=(0.15, 0.85), sharpness=4.0)),
    "ntk-nodes-outputs": (
        3,
        lambda model, initial: pal.NTK(model, initial, at=(0.2, 0.5, 1.0), sharpness=4.0),
    ),
    "path": (1, lambda model, initial: pal.Path(model, on_the_way(model, initial, 2), sharpness=4.0, weights="auto")),
    "path-nodes-outputs": (
        3,
        lambda model, initial: pal.Path(model, on_the_way(model, initial, 2), at=(0.2, 0.7), sharpness=4.0),
    ),
    "adam": (
        1,
        lambda model, initial: pal.AdamPath(
            model, [initial, model.state_dict()], at=(0.1, 0.5, 0.8), softness=1.0, sharpness=4.0, weights="auto"
        ),
    ),
    "adam-segments-outputs": (
        3,
        lambda model, initial: pal.AdamPath(
            model, on_the_way(model, initial, 2), at=(0.2, 0.9), softness=0.3, sharpness=4.0
        ),
    ),
    "gradient-outputs": (
        3,
        lambda model, initial: pal.Gradient(model, some_gradient(model), sharpness=4.0, weights="auto"),
    ),
    "gradient-likelihood": (
        1,
        lambda model, initial: pal.Gradient(model, some_gradient(model), sharpness=4.0, weights="likelihood"),
    ),
}


@dataclass
class Case:
    objective: Objective
    x: Tensor
    multipliers: Tensor
    labels: Tensor | None

    @property
    def arguments(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.x, self.multipliers, self.labels


def make_case(network: Network, objective: str, k: int = 4, seed: int = 0, *, live: bool = False) -> Case:
    outputs, make = OBJECTIVES[objective]
    torch.manual_seed(seed)
    initial = network.make(outputs).double()
    final = network.make(outputs).double()
    for module in final.modules():
        if isinstance(module, nn.BatchNorm2d) and module.running_mean is not None:
            nn.init.uniform_(module.running_mean, -0.3, 0.3)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
    built = make(final, initial.state_dict())
    built = built.with_live_batch_norm() if live else built
    x = torch.randn(k, *network.image_shape, dtype=torch.float64)
    multipliers = torch.randn(k, *built.multiplier_shape(x), dtype=torch.float64)
    labels = built.label_kind.balanced(k, outputs)
    return Case(built, x, multipliers if built.signed else multipliers.abs(), labels)


TABLE = {
    f"{network.name}/{objective}": (network, objective)
    for network in NETWORKS
    for objective, (outputs, _) in OBJECTIVES.items()
    if outputs <= network.most_outputs
}
