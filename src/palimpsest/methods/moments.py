"""Gradients out of an optimiser's state: the targets of `pal.Gradient`.

SGD keeps b ← μ b + (1 − d) g with dampening d, and Adam m ← β₁ m + (1 − β₁) g and v ← β₂ v + (1 − β₂) g². Both b and m
are sums of the gradients of the last steps. Weight decay δ adds δθ to every g, unless it is decoupled as in AdamW. θ
hardly moves during these steps. A moment thus holds δθ times the sum of the factors of g, and this is subtracted here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from palimpsest.errors import InvalidInputError
from palimpsest.methods.optimiser_states import OptimiserState, match
from palimpsest.objectives.binding import matching


def moments(
    model: nn.Module,
    optimiser: Mapping[str, Any],
    *,
    previous: Mapping[str, Any] | None = None,
    steps: int | None = None,
    names: Sequence[str] | None = None,
) -> dict[str, Tensor]:
    """The first moment that an optimiser keeps of each parameter: Adam's ``exp_avg``, SGD's ``momentum_buffer``.

    The share of weight decay is taken out. Two states that are s steps apart give the sum of the gradients between them
    alone: m_t − βˢ m_{t−s}.

    Args:
        model: the network whose parameters were trained.
        optimiser: ``optimizer.state_dict()``.
        previous: an earlier state of the same optimiser.
        steps: s. Adam's state counts its steps, so only SGD needs it.
        names: the names of the parameters in the order of the optimiser. None finds them by their order and shapes.

    Examples:
        >>> import torch, palimpsest as pal
        >>> model = pal.networks.MLP(4, hidden=(8,))
        >>> rule = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> model(torch.randn(2, 4)).sum().backward()
        >>> rule.step()
        >>> objective = pal.Gradient(model, moments(model, rule.state_dict()))
    """
    now = match(model, optimiser, names=names)
    found = _first_moments(now)
    if not found:
        raise InvalidInputError("the optimiser does not keep a first moment; use Adam, or SGD with momentum")
    if previous is None:
        return {name: m - _decay(name, now, None) * _weights(model, name, m) for name, m in found.items()}
    before = match(model, previous, names=names)
    earlier = matching(_first_moments(before), found, "the moments of the earlier state")
    kept = {name: _kept(name, now, before, steps) for name in found}
    return {
        name: m - kept[name] * earlier[name] - _decay(name, now, kept[name]) * _weights(model, name, m)
        for name, m in found.items()
    }


def undo_adam(
    model: nn.Module,
    initial: Mapping[str, Tensor],
    optimiser: Mapping[str, Any],
    *,
    names: Sequence[str] | None = None,
) -> dict[str, Tensor]:
    """Δθ ∘ (√v̂ + ε): the change of the weights, without the factors by which Adam scaled each gradient.

    v̂ is Adam's second moment at the end, without its bias. Adam's own factors changed during the training, so this is
    close to a sum of gradients if the second moment hardly changed. Give it to `pal.Gradient` with a tangent point on
    the way.

    Args:
        model: the trained network.
        initial: its weights before training, a state dict.
        optimiser: ``optimizer.state_dict()`` at the end.
        names: as for `pal.moments`.

    Examples:
        >>> import copy, torch, palimpsest as pal
        >>> model = pal.networks.MLP(4, hidden=(8,))
        >>> initial, rule = copy.deepcopy(model.state_dict()), torch.optim.Adam(model.parameters())
        >>> model(torch.randn(2, 4)).sum().backward()
        >>> rule.step()
        >>> objective = pal.Gradient(model, undo_adam(model, initial, rule.state_dict()), tangent=initial)
    """
    found = match(model, optimiser, names=names)
    v = found.moment("exp_avg_sq") | found.moment("max_exp_avg_sq")  # AMSGrad divides by the latter
    if not v:
        raise InvalidInputError("the optimiser does not keep a second moment; use the state of Adam")
    θ = {name: model.get_parameter(name).detach() for name in v}
    θ_0 = matching(initial, θ)

    def divisor(name: str) -> Tensor:
        settings, t = found.settings[name], found.states[name].get("step", 0.0)
        β2, ε = settings.get("betas", (0.0, 0.0))[1], settings.get("eps", 0.0)
        if t <= 0:
            raise InvalidInputError(f"the optimiser's state of {name!r} does not count its steps; use Adam's")
        return (v[name] / (1 - β2**t)).sqrt() + ε

    return {name: (θ[name] - θ_0[name]) * divisor(name).to(θ[name]) for name in θ}


def _first_moments(state: OptimiserState) -> dict[str, Tensor]:
    """exp_avg of Adam and its relatives, momentum_buffer of SGD. That of RMSprop sums gradients that were scaled."""
    scaled = state.moment("square_avg")
    of_sgd = {name: b for name, b in state.moment("momentum_buffer").items() if name not in scaled}
    return of_sgd | state.moment("exp_avg")


def _weights(model: nn.Module, name: str, like: Tensor) -> Tensor:
    return model.get_parameter(name).detach().to(like)


def _decay(name: str, state: OptimiserState, kept: float | None) -> float:
    """What a moment holds of θ by weight decay: δ times the sum of the factors of the gradients in it.

    Over t steps the factors add up to (1 − d)(1 − βᵗ)/(1 − β) for SGD and to 1 − β₁ᵗ for Adam. ``kept`` is βᵗ between
    two states. SGD does not count its steps; after many of them βᵗ is 0.
    """
    settings, t = state.settings[name], state.states[name].get("step")
    if not settings.get("weight_decay") or settings.get("decoupled_weight_decay"):
        return 0.0
    β = float(settings["betas"][0] if "betas" in settings else settings.get("momentum", 0.0))
    share = 1 - (kept if kept is not None else 0.0 if t is None else β ** float(t))
    if "betas" not in settings:
        share *= (1 - float(settings.get("dampening", 0.0))) / (1 - β)
    return float(settings["weight_decay"]) * share


def _kept(name: str, now: OptimiserState, before: OptimiserState, steps: int | None) -> float:
    """βˢ: the share of the earlier moment in the present one."""
    counted = all("step" in state.states[name] for state in (before, now))
    if steps is None and not counted:
        raise InvalidInputError("the optimiser does not count its steps; give steps, the number between the two states")
    s = now.states[name]["step"] - before.states[name]["step"] if steps is None else steps
    if s <= 0:
        raise InvalidInputError(f"the earlier state is {-s:g} steps later; give the states in order")
    settings = now.settings[name]
    β = settings["betas"][0] if "betas" in settings else settings.get("momentum", 0.0)
    return float(β) ** s
