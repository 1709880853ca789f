"""Gradients out of an optimiser's state: the targets of `pal.Gradient`.

SGD keeps b ← μ b + g, and Adam m ← β₁ m + (1 − β₁) g and v ← β₂ v + (1 − β₂) g². Both b and m are sums of the gradients
of the last steps, as long as the optimiser does not add weight decay to them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from palimpsest.errors import InvalidInputError
from palimpsest.objectives.binding import matching

KINDS = ("exp_avg", "momentum_buffer")  # of Adam and its relatives, and of SGD
OptimiserState = Mapping[str, Any]


def moments(
    model: nn.Module, optimiser: OptimiserState, *, previous: OptimiserState | None = None, steps: int | None = None
) -> dict[str, Tensor]:
    """The first moment that an optimiser keeps of each parameter: Adam's ``exp_avg``, SGD's ``momentum_buffer``.

    Two states that are s steps apart give the sum of the gradients between them alone: m_t − βˢ m_{t−s}.

    Args:
        model: the network whose parameters were trained.
        optimiser: ``optimizer.state_dict()``. Its parameters must be in the order of ``model.named_parameters()``: all
            of them or those that are trained, in any number of groups.
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
    now = _by_name(model, optimiser)
    found = {name: values[kind] for name, values in now.items() for kind in KINDS if kind in values}
    if not found:
        raise InvalidInputError("the optimiser does not keep a first moment; use Adam, or SGD with momentum")
    if previous is None:
        return found
    before = _by_name(model, previous)
    earlier = {name: before[name][kind] for name in found for kind in KINDS if kind in before.get(name, {})}
    earlier = matching(earlier, found, "the moments of the earlier state")
    return {name: m - _kept(now[name], before[name], steps) * earlier[name] for name, m in found.items()}


def undo_adam(model: nn.Module, initial: Mapping[str, Tensor], optimiser: OptimiserState) -> dict[str, Tensor]:
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
    states = {name: values for name, values in _by_name(model, optimiser).items() if "exp_avg_sq" in values}
    if not states:
        raise InvalidInputError("the optimiser does not keep a second moment; use the state of Adam")
    θ = {name: model.get_parameter(name).detach() for name in states}
    θ_0 = matching(initial, θ)

    def divisor(values: Mapping[str, Any]) -> Tensor:
        unbiased = values["exp_avg_sq"] / (1 - values["betas"][1] ** float(values["step"]))
        return unbiased.sqrt() + values["eps"]

    return {name: (θ[name] - θ_0[name]) * divisor(states[name]).to(θ[name]) for name in θ}


def _by_name(model: nn.Module, optimiser: OptimiserState) -> dict[str, dict[str, Any]]:
    """The state of each parameter with the settings of its group, by the parameter's name."""
    if not isinstance(optimiser, Mapping) or not {"state", "param_groups"} <= optimiser.keys():
        raise InvalidInputError("this is not the state of an optimiser; give optimizer.state_dict()")
    settings = {index: group for group in optimiser["param_groups"] for index in group["params"]}
    parameters = dict(model.named_parameters())
    trained = {name: p for name, p in parameters.items() if p.requires_grad}
    known = parameters if len(settings) == len(parameters) else trained
    if len(settings) != len(known):
        raise InvalidInputError(f"the optimiser has {len(settings)} parameters, but the network trains {len(known)}; "
                                "set requires_grad on the trained ones")  # fmt: skip
    named: dict[str, dict[str, Any]] = {}
    for (name, p), (index, group) in zip(known.items(), settings.items(), strict=True):
        values = optimiser["state"].get(index)
        if values is None:  # it never received a gradient
            continue
        kept = {key: t for key, t in values.items() if isinstance(t, Tensor) and t.ndim}
        if any(t.shape != p.shape for t in kept.values()):
            raise InvalidInputError(f"the optimiser's state does not fit {name!r}; give it the order of the network's "
                                    "parameters")  # fmt: skip
        named[name] = dict(group) | dict(values)
    return named


def _kept(now: Mapping[str, Any], before: Mapping[str, Any], steps: int | None) -> float:
    """βˢ: the share of the earlier moment in the present one."""
    if steps is None and not ("step" in now and "step" in before):
        raise InvalidInputError("the optimiser does not count its steps; give steps, the number between the two states")
    s = steps if steps is not None else int(now["step"]) - int(before["step"])
    if s <= 0:
        raise InvalidInputError(f"the earlier state is {-s} steps later; give the states in order")
    return float(now["betas"][0] if "betas" in now else now["momentum"]) ** s
