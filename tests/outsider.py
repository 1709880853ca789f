"""A training script that knows nothing of Palimpsest: plain torch, classes of its own, functional ReLUs.

    python tests/outsider.py convolutional digits.npz folder     writes start.pt and final.pt into the folder

`palimpsest audit --network tests/outsider.py:convolutional` reads its networks as they are.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIZE = 8  # of the digits it is trained on


class Convolutional(nn.Module):
    def __init__(self, width: int = 32, hidden: int = 128) -> None:
        super().__init__()
        self.near = nn.Conv2d(1, width, 5, stride=2, padding=2)
        self.far = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.hidden = nn.Linear(2 * width * (SIZE // 4) ** 2, hidden)
        self.dropout = nn.Dropout(0.0)
        self.head = nn.Linear(hidden, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.far(F.relu(self.near(x), inplace=True)))
        return self.head(self.dropout(torch.relu(self.hidden(h.flatten(1)))))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.first_norm(self.first(x)))
        return F.relu(x + self.second_norm(self.second(h)))


class Residual(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 4, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.head = nn.Linear(width * (SIZE // 2) ** 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(F.relu(self.norm(self.stem(x)))).flatten(1))


def convolutional() -> nn.Module:
    return initialised(Convolutional())


def residual() -> nn.Module:
    return initialised(Residual())


def initialised(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight)
    return model


def train(model: nn.Module, images: Tensor, labels: Tensor, *, rate: float = 1e-4, steps: int = 2000) -> nn.Module:
    """Fine-tuning with squared loss, the statistics of batch normalisation fixed, as is usual for small sets."""
    model.eval()
    optimiser = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    for _ in range(steps):
        loss = (model(images).squeeze(1) - labels).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if loss.item() < 1e-4:
            break
    return model


def main(kind: str, data: str, folder: str) -> None:
    torch.manual_seed(0)
    arrays = np.load(data)
    images = torch.from_numpy(arrays["images"]).float()
    model = {"convolutional": convolutional, "residual": residual}[kind]()
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), out / "start.pt")
    train(model, images - 0.5, torch.from_numpy(arrays["labels"]).float() * 2 - 1)
    torch.save(model.state_dict(), out / "final.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
