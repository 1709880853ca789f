"""How much of a trained network its own training images explain: the best that any reader of the KKT equation can do.

For each layer with weights T, and the gradients f_i of the margins of the *true* images at the final weights,

    min_{λ ≥ 0} ‖T − Σ_i λ_i f_i‖ / ‖T‖.

In a stack of dense layers f_i = δ_i h_iᵀ, so that ⟨f_i, f_j⟩ = (δ_i·δ_j)(h_i·h_j), and only n×n matrices are needed.
At a KKT point the value is 0. At 1 the images explain nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from provenance import made_by
from scipy.optimize import nnls
from torch import Tensor, nn

from palimpsest.files.storage import load_tensors
from published.recipes import SETTINGS, Setting
from published.training import built, load, network, write_json


def unexplained(model: nn.Module, initial: nn.Module, images: Tensor, labels: Tensor) -> dict[str, list[float]]:
    """The share of each layer's weights, and of their change, that margins of one output leave unexplained."""
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    starts = [layer for layer in initial.modules() if isinstance(layer, nn.Linear)]
    h, slopes = [images.flatten(1)], list[Tensor]()
    for layer in layers[:-1]:
        z = layer(h[-1])
        slopes.append((z > 0).to(z))
        h.append(z.relu())
    δ = labels.to(images)[:, None] * torch.ones_like(layers[-1](h[-1]))
    shares: dict[str, list[float]] = {"weights": [], "change": []}
    for number in reversed(range(len(layers))):
        layer, start = layers[number], starts[number]
        bias = layer.bias is not None
        K = (δ @ δ.T) * (h[number] @ h[number].T + bias)
        W, ΔW = layer.weight, layer.weight - start.weight
        b, Δb = (layer.bias, layer.bias - start.bias) if bias else (W.new_zeros(len(W)),) * 2
        for name, T, t in (("weights", W, b), ("change", ΔW, Δb)):
            c = ((δ @ T) * h[number]).sum(1) + bias * (δ @ t)
            shares[name].insert(0, _least(K, c, float(T.square().sum() + bias * t.square().sum())))
        if number:
            δ = (δ @ W) * slopes[number - 1]
    return shares


def _least(K: Tensor, c: Tensor, T2: float) -> float:
    """min_{λ ≥ 0} (λᵀKλ − 2cᵀλ + ‖T‖²)^½ / ‖T‖, as a problem of n equations with the square root of K."""
    e, V = torch.linalg.eigh(K)
    e, kept = e.clamp_min(0), e > 1e-12 * e.max()
    root = (V * e.sqrt()) @ V.T
    right = V @ torch.where(kept, (V.T @ c) / e.sqrt().clamp_min(1e-300), 0.0)
    λ = torch.from_numpy(nnls(root.cpu().numpy(), right.cpu().numpy(), maxiter=100 * len(c))[0]).to(K)
    return round(float(((λ @ K @ λ - 2 * c @ λ) / T2 + 1).clamp_min(0).sqrt()), 4)


@torch.no_grad()
def write(results: Path, scratch: Path) -> None:
    """The shares for every trained network in the folder, of settings with one output."""
    for setting in SETTINGS:
        if setting.task == "binary" and setting.loss == "logistic":
            for file in sorted((scratch / setting.name).glob("network-seed*-*.safetensors")):
                if ".step" not in file.name:
                    _write(setting, file, results / f"published-{setting.name}")


def _write(setting: Setting, file: Path, folder: Path) -> None:
    kept, description = load_tensors(file)
    seed = int(file.stem.split("-")[1].removeprefix("seed"))
    data = load(setting, seed)
    model = built(setting, seed, data, kept, description["shrinkage"])
    images = data.centred(data.train.images.double()).to(next(model.parameters()).device)
    start = network(setting, data.image_shape, seed).to(images.device)
    shares: dict[str, Any] = unexplained(model, start, images, data.train.labels.to(images.device))
    print(f"{setting.name} {file.stem}: left unexplained by the training images {shares}", flush=True)
    write_json(
        folder / f"explained-{file.stem.removeprefix('network-')}.json",
        made_by("python experiments/published --explained") | {"training": description["facts"]} | shares,
    )
