"""Which parameter each state of an optimiser belongs to.

A state dict of `torch.optim` numbers its parameters in the order of its groups. ``state[n]`` holds the moments of
number n, and ``param_groups[g]["params"]`` lists the numbers of group g. Names come from the first of these sources:

1. names that the caller gives;
2. ``param_groups[g]["param_names"]``, which torch writes if the optimiser was made from ``named_parameters()``;
3. order and shapes: within a group, parameters keep the order of ``model.named_parameters()``. Groups may be in any
   order, and frozen parameters may be missing. There must be exactly one way to do this;
4. shapes alone, if each fits one parameter only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from palimpsest.errors import NonFiniteError, WeightsError

MOST_PLACES = 2_000  # how far each group has got, in all combinations; more are as good as ambiguous
LONGEST = 100  # letters of a name that an error shows; a hostile file may hold longer ones
GIVE_NAMES = "freeze what was not trained (requires_grad), or give the names in the optimiser's order (names=)"

Shape = tuple[int, ...]


@dataclass(frozen=True)
class OptimiserState:
    """The state of an optimiser, by the names of the network's parameters."""

    states: dict[str, dict[str, Any]]
    """For each parameter, torch's entries: exp_avg, exp_avg_sq, momentum_buffer and the step, as a number."""
    settings: dict[str, dict[str, Any]]
    """For each parameter, the settings of its group: lr, betas, eps, momentum, weight_decay and so on."""

    def moment(self, entry: str) -> dict[str, Tensor]:
        """One entry of all parameters that have it, such as ``"exp_avg"``."""
        return {name: state[entry] for name, state in self.states.items() if isinstance(state.get(entry), Tensor)}


def match(model: nn.Module, optimiser: Mapping, *, names: Sequence[str] | None = None) -> OptimiserState:
    """Give the states of an optimiser the names of the network's parameters.

    Args:
        model: the network that the optimiser trained.
        optimiser: its ``state_dict()``.
        names: the parameters' names in the order of the optimiser, if it is known.

    Examples:
        >>> import torch
        >>> model = nn.Linear(3, 2)
        >>> optimiser = torch.optim.Adam([{"params": [model.bias], "lr": 0.1}, {"params": [model.weight]}])
        >>> model(torch.ones(1, 3)).sum().backward()
        >>> optimiser.step()
        >>> found = match(model, optimiser.state_dict())
        >>> found.states["weight"]["exp_avg"].shape, found.states["weight"]["step"], found.settings["bias"]["lr"]
        (torch.Size([2, 3]), 1.0, 0.1)
    """
    groups = _groups(optimiser)
    own = dict(model.named_parameters())
    states = {n: _entries(optimiser["state"].get(n, {})) for group in groups for n in group["params"]}
    named = _stored_names(groups, own) if names is None else _given_names(groups, names)
    if named is None:
        named = _by_shape(model, [group["params"] for group in groups], {n: _shape(states[n]) for n in states})
    for n, name in named.items():
        if name not in own:
            raise WeightsError(f"the network does not have the optimiser's parameter {name[:LONGEST]!r}; {GIVE_NAMES}")
        if not _fits(_shape(states[n]), own[name]):
            here, there = tuple(own[name].shape), _shape(states[n])
            raise WeightsError(f"the optimiser's state of {name} has the shape {there} instead of {here}; {GIVE_NAMES}")
        if broken := [e for e, t in states[n].items() if isinstance(t, Tensor) and not t.isfinite().all()]:
            raise NonFiniteError(f"{broken[0][:LONGEST]} of {name} holds NaN or infinity; give another checkpoint")
    settings = {n: _settings(group) for group in groups for n in group["params"]}
    numbers = {name: n for n, name in named.items()}
    trained = [name for name in own if name in numbers]
    return OptimiserState(
        {name: states[numbers[name]] for name in trained}, {name: settings[numbers[name]] for name in trained}
    )


# --- the optimiser's own form ----------------------------------------------------------------------------


def _groups(optimiser: Mapping) -> list[Mapping]:
    """The groups, each parameter in one of them."""
    groups = optimiser.get("param_groups")
    groups = groups if isinstance(groups, list) and isinstance(optimiser.get("state"), Mapping) else []
    sound = all(isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in groups)
    numbers = [n for group in groups for n in group["params"]] if sound else []
    if not numbers or not all(isinstance(n, int | str) for n in numbers) or len(set(numbers)) != len(numbers):
        inner = [name for name, value in optimiser.items() if isinstance(value, Mapping) and "param_groups" in value]
        remedy = f"give its entry {inner[0]!r}" if inner else "save optimizer.state_dict()"
        raise WeightsError(f"the optimiser's state is not that of torch.optim; {remedy}")
    return groups


def _entries(state: object) -> dict[str, Any]:
    """Tensors in single precision at least, and the step as a number."""
    found: dict[str, Any] = {}
    for entry, value in state.items() if isinstance(state, Mapping) else ():
        if entry == "step" and isinstance(value, Tensor) and value.numel() == 1:
            value = value.item()
        if entry == "step" and isinstance(value, int | float) and abs(value) < 2**63:
            found["step"] = float(value)
        elif isinstance(value, Tensor):
            found[str(entry)] = value.float() if value.is_floating_point() and value.element_size() < 4 else value
    return found


def _shape(state: Mapping[str, Any]) -> Shape | None:
    """The shape that all tensors of a state share, apart from scalars. Factored states do not share one."""
    shapes = {tuple(t.shape) for t in state.values() if isinstance(t, Tensor)}
    shapes = shapes - {()} or shapes
    return shapes.pop() if len(shapes) == 1 else None


def _settings(group: Mapping) -> dict[str, Any]:
    plain = {name: v.item() if isinstance(v, Tensor) and v.numel() == 1 else v for name, v in group.items()}
    return {name: v for name, v in plain.items() if name not in ("params", "param_names")}


# --- the names -------------------------------------------------------------------------------------------


def _stored_names(groups: list[Mapping], own: Mapping[str, Tensor]) -> dict[Any, str] | None:
    """The names that the optimiser stored, or uses as numbers, if all have one; without a wrapper's prefix."""
    named: dict[Any, str] = {}
    for group in groups:
        names = group["param_names"] if isinstance(group.get("param_names"), list) else group["params"]
        if len(names) != len(group["params"]) or not all(isinstance(name, str) for name in names):
            return None
        named |= dict(zip(group["params"], names, strict=True))
    parts = next(iter(named.values()), "").split(".")
    for prefix in (".".join(parts[:n]) + "." for n in range(1, len(parts))):
        if all(name.startswith(prefix) and name.removeprefix(prefix) in own for name in named.values()):
            named = {n: name.removeprefix(prefix) for n, name in named.items()}
            break
    return named if len(set(named.values())) == len(named) else None


def _given_names(groups: list[Mapping], names: Sequence[str]) -> dict[Any, str]:
    numbers = [n for group in groups for n in group["params"]]
    if len(names) != len(numbers) or len(set(names)) != len(names):
        raise WeightsError(f"the optimiser has {len(numbers)} parameters, but {len(names)} names; give each one once")
    return dict(zip(numbers, names, strict=True))


def _by_shape(model: nn.Module, groups: list[list], shapes: Mapping[Any, Shape | None]) -> dict[Any, str]:
    """By order and shapes: of the trainable parameters or, if that is impossible, of all. Or by shapes alone."""
    every = list(model.named_parameters())
    for parameters in ([(name, p) for name, p in every if p.requires_grad], every):
        ways, named = _assignment(parameters, groups, shapes)
        if ways == 1:
            return named
        if ways > 1:
            raise WeightsError(f"the optimiser's states fit the network's parameters in several ways; {GIVE_NAMES}")
    fitting = {n: [name for name, p in every if _fits(shape, p)] for n, shape in shapes.items()}
    named = {n: names[0] for n, names in fitting.items() if len(names) == 1}
    if len(named) < len(shapes) or len(set(named.values())) < len(named):
        raise WeightsError(f"the optimiser's states do not fit the network's parameters in their order; {GIVE_NAMES}")
    return named


def _assignment(
    parameters: list[tuple[str, nn.Parameter]], groups: list[list], shapes: Mapping[Any, Shape | None]
) -> tuple[int, dict[Any, str]]:
    """How many ways there are to name all numbers (2 stands for more), and one of them.

    A place says how many numbers of each group have a name. Every parameter is frozen, or the next one of a group.
    """
    places: dict[Shape, tuple[int, tuple]] = {(0,) * len(groups): (1, ())}
    unnamed, left = sum(map(len, groups)), len(parameters)
    for name, p in parameters:
        left -= 1
        after: dict[Shape, tuple[int, tuple]] = {}
        for place, (ways, chain) in places.items():
            options = [(place, chain)]
            for g, k in enumerate(place):
                if k < len(groups[g]) and _fits(shapes[groups[g][k]], p):
                    options.append(((*place[:g], k + 1, *place[g + 1 :]), (chain, groups[g][k], name)))
            for there, names in options:
                if unnamed - sum(there) <= left:
                    after[there] = (min(2, ways + after.get(there, (0,))[0]), names)
        if len(after) > MOST_PLACES:
            return 2, {}
        places = after
    ways, chain = places.get(tuple(map(len, groups)), (0, ()))
    named = {}
    while chain:
        chain, n, name = chain
        named[n] = name
    return ways, named


def _fits(shape: Shape | None, p: Tensor) -> bool:
    """Whether a state may be that of a parameter; a number without a state may be any."""
    return shape is None or shape == tuple(p.shape)
