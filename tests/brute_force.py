"""The definitions, written out without a thought for speed: the oracle for every operator."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import functional_call

from palimpsest.objectives import Objective
from palimpsest.objectives.smoothing import Smoothed


def per_sample_gradients(objective: Objective, x_i: Tensor, label: Tensor | None) -> list[dict[str, Tensor]]:
    """f_s(x_i) = ∇_θ φ_s(θ_s, x_i, y_i) for every slot s, one dense gradient at a time."""
    features = []
    for tangent in objective.tangents:
        θ = {name: t.clone().requires_grad_() for name, t in tangent.items()}
        with Smoothed(objective.sharpness):
            outputs = functional_call(objective._network.module, θ, (x_i[None],)).flatten(1)
        φ = objective.scalar(outputs, None if label is None else label[None]).flatten()
        for φ_s in φ:
            grads = torch.autograd.grad(φ_s, list(θ.values()), create_graph=True, materialize_grads=True)
            features.append(dict(zip(θ, grads, strict=True)))
    return features


def residual(objective: Objective, x: Tensor, multipliers: Tensor, labels: Tensor | None) -> dict[str, Tensor]:
    r = dict(objective.target)
    for i, x_i in enumerate(x):
        features = per_sample_gradients(objective, x_i, None if labels is None else labels[i])
        for λ, f in zip(multipliers[i].flatten(), features, strict=True):
            r = {name: r[name] - λ * f[name] for name in r}
    return r


def loss(objective: Objective, x: Tensor, multipliers: Tensor, labels: Tensor | None) -> Tensor:
    r = residual(objective, x, multipliers, labels)
    return sum(objective.weights[name] * (r[name] ** 2).sum() for name in r)


def gradients(objective: Objective, x: Tensor, multipliers: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor]:
    x, λ = x.clone().requires_grad_(), multipliers.clone().requires_grad_()
    return torch.autograd.grad(loss(objective, x, λ, labels), (x, λ), materialize_grads=True)


def pull_gradient(objective, x_i: Tensor, multipliers_i: Tensor, label: Tensor | None, r: dict[str, Tensor]) -> Tensor:
    """∇_x Σ_s λ_s ⟨w∘r, f_s(x_i)⟩ for one candidate and a fixed residual."""
    x_i = x_i.clone().requires_grad_()
    pull = sum(
        λ * sum((objective.weights[name] * r[name] * f[name]).sum() for name in r)
        for λ, f in zip(multipliers_i.flatten(), per_sample_gradients(objective, x_i, label), strict=True)
    )
    return torch.autograd.grad(pull, x_i, materialize_grads=True)[0]


def splitting_matrix(objective, x: Tensor, multipliers: Tensor, labels: Tensor | None, h: float = 1e-5) -> Tensor:
    """S(x_i) = −2 ∇²_x Σ_s λ_is g_is by central differences of its gradient, column by column."""
    r = {name: value.detach() for name, value in residual(objective, x, multipliers, labels).items()}
    matrices = []
    for i, x_i in enumerate(x):
        label = None if labels is None else labels[i]
        columns = []
        for e in torch.eye(x_i.numel(), dtype=x.dtype).reshape(-1, *x_i.shape):
            forward = pull_gradient(objective, x_i + h * e, multipliers[i], label, r)
            backward = pull_gradient(objective, x_i - h * e, multipliers[i], label, r)
            columns.append(-2 * (forward - backward).flatten() / (2 * h))
        matrices.append(torch.stack(columns, dim=1))
    return torch.stack(matrices)
