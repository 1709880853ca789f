"""Gradients out of an optimiser's state: the targets of `pal.Gradient`.

SGD keeps b ← μ b + g, and Adam m ← β₁ m + (1 − β₁) g and v ← β₂ v + (1 − β₂) g². Both b and m are sums of the gradients
of the last steps, as long as the optimiser does not add weight decay to them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from palimpsest.errors import InvalidInputError
from palimpsest.methods.optimiser_states import match
from palimpsest.objectives.binding import matching

KINDS = ("exp_avg", "momentum_buffer")  # of Adam and its relatives, and of SGD
StateDict = Mapping[str, Any]


def moments(
    model: nn.Module, optimiser: StateDict, *, previous: StateDict | None = None, steps: int | None = None
) -> dict[str, Tensor]:
    """The first moment that an optimiser keeps of each parameter: Adam's ``exp_avg``, SGD's ``momentum_buffer``.

    Two states that are s steps apart give the sum of the gradients between them alone: m_t − βˢ m_{t−s}.

    Args:
        model: the network whose parameters were trained.
        optimiser: ``optimizer.state_dict()``. Its parameters may be in any number of groups, and some may be missing.
            If they do not have names, order and shapes must leave no choice.
        previous: an earlier state of the same optimiser.
        steps: s. Adam's state counts its steps, so only SGD needs it.

    Examples:
        >>> import torch, palimpsest as pal
        >>> model = pal.networks.MLP(4, hidden=(8,))
        >>> rule = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> model(torch.randn(2, 4)).sum().backward()
        >>> rule.step()
        >>> objective = pal.Gradient(model, moments(model, rule.state_dict()))
    """
    now = match(model, optimiser)
    found = now.moment(*KINDS)
    if not found:
        raise InvalidInputError("the optimiser does not keep a first moment; use Adam, or SGD with momentum")
    if previous is None:
        return found
    before = match(model, previous)
    earlier = matching(before.moment(*KINDS), found, "the moments of the earlier state")
    ends = {name: (before.states[name].get("step"), now.states[name].get("step")) for name in found}
    return {name: m - _kept(now.settings[name], *ends[name], steps) * earlier[name] for name, m in found.items()}


def undo_adam(model: nn.Module, initial: Mapping[str, Tensor], optimiser: StateDict) -> dict[str, Tensor]:
    """Δθ ∘ (√v̂ + ε): the change of the weights, without the factors by which Adam scaled each gradient.

    v̂ is Adam's second moment at the end, without its bias. Adam's own factors changed during the training, so this is
    close to a sum of gradients if the second moment hardly changed. Give it to `pal.Gradient` with a tangent point on
    the way.

    Args:
        model: the trained network.
        initial: its weights before training, a state dict.
        optimiser: ``optimizer.state_dict()`` at the end, as for `pal.moments`.

    Examples:
        >>> import copy, torch, palimpsest as pal
        >>> model = pal.networks.MLP(4, hidden=(8,))
        >>> initial, rule = copy.deepcopy(model.state_dict()), torch.optim.Adam(model.parameters())
        >>> model(torch.randn(2, 4)).sum().backward()
        >>> rule.step()
        >>> objective = pal.Gradient(model, undo_adam(model, initial, rule.state_dict()), tangent=initial)
    """
    matched = match(model, optimiser)
    second = matched.moment("exp_avg_sq")
    if not second:
        raise InvalidInputError("the optimiser does not keep a second moment; use the state of Adam")
    θ = {name: model.get_parameter(name).detach() for name in second}
    θ_0 = matching(initial, θ)

    def divisor(name: str) -> Tensor:
        settings, step = matched.settings[name], matched.states[name]["step"]
        return (second[name] / (1 - settings["betas"][1] ** step)).sqrt() + settings["eps"]

    return {name: (θ[name] - θ_0[name]) * divisor(name).to(θ[name]) for name in θ}


def _kept(settings: Mapping[str, Any], before: float | None, now: float | None, steps: int | None) -> float:
    """βˢ: the share of the earlier moment in the present one."""
    if steps is None and (before is None or now is None):
        raise InvalidInputError("the optimiser does not count its steps; give steps, the number between the two states")
    s = steps if before is None or now is None or steps is not None else int(now - before)
    assert s is not None
    if s <= 0:
        raise InvalidInputError(f"the earlier state is {-s} steps later; give the states in order")
    return float(settings["betas"][0] if "betas" in settings else settings["momentum"]) ** s
