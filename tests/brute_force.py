"""The definitions, written out without a thought for speed: the oracle for every operator."""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

import palimpsest as pal
from palimpsest.objectives import Objective
from palimpsest.objectives.smoothing import Smoothed
from palimpsest.objectives.weighting import Likelihood


def scalars(objective: Objective, x: Tensor, label: Tensor | None) -> list[tuple[dict[str, Tensor], Tensor]]:
    """(θ, φ(θ, x, y)) at every tangent point. φ has one row for each image, and one column for each multiplier."""
    found = []
    network = copy.deepcopy(objective._network.module).train(objective.live)  # which changes the running statistics
    for tangent in objective.tangents:
        θ = {name: tangent[name].clone().requires_grad_() for name in objective.target}
        with Smoothed(objective.sharpness), sdpa_kernel(SDPBackend.MATH):  # others cannot be differentiated twice
            outputs = functional_call(network, tangent | θ, (x,)).flatten(1)
        φ = objective.scalar(outputs, None if label is None else label.expand(len(x)))
        found.append((θ, φ.reshape(len(x), -1)))
    return found


def gradient(φ: Tensor, θ: dict[str, Tensor]) -> dict[str, Tensor]:
    grads = torch.autograd.grad(φ, list(θ.values()), create_graph=True, materialize_grads=True)
    return dict(zip(θ, grads, strict=True))


def per_sample_gradients(objective: Objective, x: Tensor, labels: Tensor | None, i: int) -> list[dict[str, Tensor]]:
    """f_s(x_i) = ∇_θ φ_s(θ_s, x_i, y_i) for every slot s, one dense gradient at a time.

    With live batch normalisation, that of the i-th output of the whole batch.
    """
    batch, row = (x, i) if objective.live else (x[i : i + 1], 0)
    points = scalars(objective, batch, None if labels is None else labels[i])
    return [gradient(φ_s, θ) for θ, φ in points for φ_s in φ[row]]


def targets(objective: Objective) -> list[dict[str, Tensor]]:
    """T, or T_j of each segment."""
    if not isinstance(objective, pal.Path):
        return [dict(objective.target)]
    m = len(next(iter(objective.target.values())))
    return [{name: t[j] for name, t in objective.target.items()} for j in range(m)]


def shares(objective: Objective) -> list[float]:
    """How much each ‖r_j‖² counts: 1 / (m ‖T_j‖²), or 1 for one target without segments."""
    Ts = targets(objective)
    squares = [sum(float(t.square().sum()) for t in T.values()) for T in Ts]
    return [1 / (len(Ts) * square) for square in squares] if isinstance(objective, pal.Path) else [1.0]


def residuals(objective: Objective, x: Tensor, multipliers: Tensor, labels: Tensor | None) -> list[dict[str, Tensor]]:
    """r_j = T_j − Σ_i λ_ij f_j(x_i) for each target, or T_j − a_j Σ_s h_s for a training by Adam."""
    if isinstance(objective, pal.AdamPath):
        return adam_residuals(objective, stages(objective, x, multipliers, labels))
    rs = targets(objective)
    for i in range(len(x)):
        features = per_sample_gradients(objective, x, labels, i)
        slots = len(features) // len(rs)
        for s, (λ, f) in enumerate(zip(multipliers[i].flatten(), features, strict=True)):
            rs[s // slots] = {name: r - λ * f[name] for name, r in rs[s // slots].items()}
    return rs


def stages(objective: Objective, x: Tensor, multipliers: Tensor, labels: Tensor | None) -> list[dict[str, Tensor]]:
    """v_s = Σ_i λ_is f_s(x_i) at each tangent point."""
    vs = [{name: torch.zeros_like(t[0]) for name, t in objective.target.items()} for _ in objective.tangents]
    for i in range(len(x)):
        features = per_sample_gradients(objective, x, labels, i)
        slots = len(features) // len(vs)
        for s, (λ, f) in enumerate(zip(multipliers[i].flatten(), features, strict=True)):
            vs[s // slots] = {name: v + λ * f[name] for name, v in vs[s // slots].items()}
    return vs


def adam_residuals(objective: pal.AdamPath, vs: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """T_j − a_j h_j with Adam's means of squares written out, and a_j by weighted least squares over all parameters."""
    rs, w = targets(objective), objective.weights
    per_segment = len(vs) // len(rs)
    sizes = {name: float(torch.stack([v[name] for v in vs]).square().mean().sqrt()) for name in w}
    least = 1e-5 * max(sizes.values()) if objective.live else 0.0  # a bias before live batch norm has rounding alone
    moved = {name for name, size in sizes.items() if size > least}
    for j, T in enumerate(rs):
        h = {name: torch.zeros_like(t) for name, t in T.items()}
        for s in range(j * per_segment, (j + 1) * per_segment):
            for name in moved:
                σ2 = torch.stack([v[name] for v in vs]).square().mean()
                u = torch.stack([v[name] for v in vs[: s + 1]]).square().mean(0)
                h[name] = h[name] + vs[s][name] / (u + objective.softness**2 * σ2 + 1e-300).sqrt()
        rows = [torch.cat([w[n] ** 0.5 * t.flatten() for n, t in values.items()]) for values in (h, T)]
        a = rows[0] @ rows[1] / (rows[0] @ rows[0])
        rs[j] = {name: t - a * h[name] for name, t in T.items()}
    return rs


def residual(objective: Objective, x: Tensor, multipliers: Tensor, labels: Tensor | None) -> dict[str, Tensor]:
    rs = residuals(objective, x, multipliers, labels)
    return {name: torch.stack([r[name] for r in rs]) for name in rs[0]} if isinstance(objective, pal.Path) else rs[0]


def loss(objective: Objective, x: Tensor, multipliers: Tensor, labels: Tensor | None) -> Tensor:
    return norm_squared(objective, residuals(objective, x, multipliers, labels))


def norm_squared(objective: Objective, rs: list[dict[str, Tensor]]) -> Tensor:
    """Σ_j share_j Σ_p w_p ‖r_jp‖², or the geometric mean over the parameters."""
    rs = whitened(objective, rs)
    if isinstance(objective.weights, Likelihood):
        return geometric_mean(rs[0], objective.weights.rounding)
    pairs = zip(shares(objective), rs, strict=True)
    return sum(share * objective.weights[name] * r[name].square().sum() for share, r in pairs for name in r)


def whitened(objective: Objective, rs: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """H r = c (TTᵀ)^(−p/4) r (TᵀT)^(−p/4) for matrices, so that ‖H T‖ = ‖T‖; singular values below 1 % count as 1 %."""
    if not objective._metrics:
        return rs
    Ts, every = targets(objective), shares(objective)
    for name in [name for name, t in Ts[0].items() if t.ndim > 1 and min(t.flatten(1).shape) > 1]:
        matrices = [share**0.5 * T[name].flatten(1) for share, T in zip(every, Ts, strict=True)]
        B = inverse_power(sum(T @ T.T for T in matrices), objective.whitening)
        A = inverse_power(sum(T.T @ T for T in matrices), objective.whitening)
        c = (sum(T.square().sum() for T in matrices) / sum((B @ T @ A).square().sum() for T in matrices)).sqrt()
        rs = [r | {name: (c * B @ r[name].flatten(1) @ A).view_as(r[name])} for r in rs]
    return rs


def inverse_power(G: Tensor, p: float) -> Tensor:
    """G^(−p/4)."""
    λ, U = torch.linalg.eigh(G)
    return (U * λ.clamp_min(1e-4 * λ[-1]) ** (-p / 4)) @ U.T


def geometric_mean(r: dict[str, Tensor], ε: float) -> Tensor:
    """n Π_p (‖r_p‖² / n_p + ε)^(n_p/n)."""
    n = sum(t.numel() for t in r.values())
    return n * torch.stack([(t.square().mean() + ε) ** (t.numel() / n) for t in r.values()]).prod()


def weights(objective: Objective, rs: list[dict[str, Tensor]]) -> dict[str, Tensor] | dict[str, float]:
    """w_p, such that w_p r_p = ½ ∂L/∂r_p."""
    if not isinstance(objective.weights, Likelihood):
        return objective.weights
    rs = whitened(objective, rs)
    n, ε = sum(t.numel() for t in rs[0].values()), objective.weights.rounding
    return {name: geometric_mean(rs[0], ε) / (n * (r.square().mean() + ε)) for name, r in rs[0].items()}


def gradients(objective: Objective, x: Tensor, multipliers: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor]:
    x, λ = x.clone().requires_grad_(), multipliers.clone().requires_grad_()
    return torch.autograd.grad(loss(objective, x, λ, labels), (x, λ), materialize_grads=True)


def pulls(objective, x: Tensor, multipliers: Tensor, labels: Tensor | None) -> list[dict[str, Tensor]]:
    """−½ ∂L/∂v for each part of v: w∘r times the share of its segment; by autograd for a training by Adam."""
    if not isinstance(objective, pal.AdamPath):
        rs = residuals(objective, x, multipliers, labels)
        w, twice = weights(objective, rs), whitened(objective, whitened(objective, rs))
        pairs = zip(shares(objective), twice, strict=True)
        return [{name: share * w[name] * t for name, t in r.items()} for share, r in pairs]
    vs = stages(objective, x, multipliers, labels)
    vs = [{name: t.detach().requires_grad_() for name, t in v.items()} for v in vs]
    L = norm_squared(objective, adam_residuals(objective, vs))
    slopes = iter(torch.autograd.grad(L, [t for v in vs for t in v.values()], materialize_grads=True))
    return [{name: -next(slopes) / 2 for name in v} for v in vs]


def pull_gradients(objective, x: Tensor, multipliers_i: Tensor, label: Tensor | None, us: list) -> Tensor:
    """∇_x Σ_s λ_s ⟨u, f_s(x)⟩ for fixed pulls u, at each of these images with the multipliers of one candidate."""
    x = x.clone().requires_grad_()
    points, pull = scalars(objective, x, label), 0.0
    for s, ((θ, φ), λ) in enumerate(zip(points, multipliers_i.reshape(len(points), -1), strict=True)):
        u, f = us[s * len(us) // len(points)], gradient((φ @ λ).sum(), θ)
        pull += sum((u[name] * f[name]).sum() for name in u)
    return torch.autograd.grad(pull, x, materialize_grads=True)[0]


def splitting_matrix(objective, x: Tensor, multipliers: Tensor, labels: Tensor | None, h: float = 1e-5) -> Tensor:
    """S(x_i) = −2 ∇²_x Σ_s λ_is g_is by central differences of its gradient, a row for each direction."""
    us, matrices = pulls(objective, x, multipliers, labels), []
    for i, x_i in enumerate(x):
        steps = h * torch.eye(x_i.numel(), dtype=x.dtype).reshape(-1, *x_i.shape)
        rest = (multipliers[i], None if labels is None else labels[i], us)
        forward, backward = (pull_gradients(objective, at, *rest).flatten(1) for at in (x_i + steps, x_i - steps))
        matrices.append(-2 * (forward - backward) / (2 * h))
    return torch.stack(matrices).mT
