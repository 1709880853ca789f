"""Reads other people's weights, and puts them into a network. `formats` reads the files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from palimpsest.errors import InvalidInputError, NonFiniteError, WeightsError
from palimpsest.files import formats
from palimpsest.files.formats import some

NESTED = ("state_dict", "model_state_dict", "model")  # where training scripts keep the weights among other things
COUNTERS = ("global_step", "step", "iteration", "iter", "epoch")  # where they keep the time, the finest first
PREFIXES = ("module.", "_orig_mod.", "_module.")  # DataParallel, torch.compile and Opacus put them before every name


@dataclass(frozen=True)
class Found:
    """Weights, and everything else that a training checkpoint says."""

    tensors: dict[str, Tensor]
    source: str
    """The file and, inside a checkpoint, the entry."""
    remarks: tuple[str, ...] = ()
    """Conversions, and other entries that hold weights."""
    optimiser: Mapping | None = None
    """The optimiser's state dict, for `pal.moments`. None if there is none, or if there are several."""
    counters: dict[str, float] = field(default_factory=dict)
    """The numbers of steps and epochs, by the name of their entry."""

    @property
    def step(self) -> float | None:
        """The number of steps or, if it is unknown, of epochs."""
        return next(iter(self.counters.values()), None)

    def __str__(self) -> str:
        return "; ".join((self.source, *self.remarks))


def load(path: Path | str, key: str | None = None) -> dict[str, Tensor]:
    """Read the tensors of a ``.safetensors`` file, of its shards, or of a state dict that ``torch.save`` wrote.

    Nothing in the file is executed. A checkpoint may hold the state dict under "state_dict", "model_state_dict" or
    "model", or as its only state dict. The prefixes of wrappers ("module.", "_orig_mod.", "_module.") are removed if
    all names have them. Half precision becomes single precision. Buffers of whole numbers do not change.

    Args:
        path: the file; of shards, their index or their folder.
        key: the entry that holds the weights, for example ``"ema.state_dict"``. A single entry is found without it.

    Examples:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "net.pt"
        >>> torch.save({"epoch": 3, "state_dict": {"module.weight": torch.ones(2, 3).half()}}, path)
        >>> {name: (t.dtype, tuple(t.shape)) for name, t in load(path).items()}
        {'weight': (torch.float32, (2, 3))}
    """
    return find(path, key).tensors


def find(source: Path | str | Mapping, key: str | None = None) -> Found:
    """Read weights with all that a training checkpoint says beside them.

    Args:
        source: a file, as for `load`, or a mapping, such as a loaded checkpoint.
        key: the entry that holds the weights.

    Examples:
        >>> model = nn.Linear(2, 1)
        >>> optimiser = torch.optim.SGD(model.parameters(), momentum=0.9)
        >>> found = find({"epoch": 3, "model": model.state_dict(), "optimizer": optimiser.state_dict()})
        >>> found.source, found.step, list(found.optimiser)
        ("the mapping, entry 'model'", 3.0, ['state', 'param_groups'])
    """
    name = "the mapping" if isinstance(source, Mapping) else str(source)
    content = source if isinstance(source, Mapping) else formats.content(Path(source))
    entry, tensors = _state_dict(name, content, key)
    if not tensors:
        raise WeightsError(f"{name} does not hold a tensor; save model.state_dict()")
    rest = content if entry and isinstance(content, Mapping) else {}
    optimisers = _optimisers(rest)
    if not isinstance(source, Mapping):
        _check(name, tensors, optimisers)
    prefix = _prefix(tensors)
    return Found(
        {each.removeprefix(prefix): _plain(t) for each, t in tensors.items()},
        f"{name}, entry {entry!r}" if entry else name,
        _remarks(tensors, prefix, len(optimisers), [other for other in _state_dicts(rest) if other != entry]),
        optimisers[0] if len(optimisers) == 1 else None,
        _counters(rest),
    )


def _remarks(tensors: Mapping[str, Tensor], prefix: str, optimisers: int, others: list[str]) -> tuple[str, ...]:
    short = sorted({str(t.dtype).removeprefix("torch.") for t in tensors.values() if _is_short(t)})
    remarks = {
        f"converted from {' and '.join(short)} to float32": short,
        f"without the prefix {prefix}": prefix,
        f"other entries with weights: {some(others)}": others,
        f"the states of {optimisers} optimisers are not read": optimisers > 1,
    }
    return tuple(remark for remark, holds in remarks.items() if holds)


def fit_into(model: nn.Module, weights: Mapping[str, Tensor], *, what: str = "the weights") -> None:
    """Put weights into a network. Names, shapes and kinds of number must fit, and all numbers must be finite.

    A prefix that all given names share is removed if the names then fit. If layers share a parameter, one of its names
    is enough.

    Args:
        model: the network. It is changed.
        weights: the weights, for example from `load`.
        what: the subject of error messages.

    Examples:
        >>> layer = nn.Linear(2, 1)
        >>> fit_into(layer, {"model.weight": torch.ones(1, 2), "model.bias": torch.zeros(1)})
        >>> layer.weight.tolist()
        [[1.0, 1.0]]
    """
    model.load_state_dict(fitted(model, weights, what=what))


def fitted(model: nn.Module, weights: Mapping[str, Tensor], *, what: str = "the weights") -> dict[str, Tensor]:
    """The weights under the network's names and in its precision, or the reason why they do not fit it."""
    own = model.state_dict()
    if lazy := [name for name, t in own.items() if is_lazy(t)]:
        raise InvalidInputError(f"the network does not know the shape of {some(lazy)} yet; run it on an image first")
    weights = _with_every_name(model, _without_prefix(weights, own))
    missing = [name for name in own if name not in weights]
    extra = [name for name in weights if name not in own]
    odd = [
        f"{name} {_shape(weights[name])} instead of {_shape(own[name])}"
        for name in own
        if name in weights and _shape(weights[name]) != _shape(own[name])
    ]
    kinds = {"missing": missing, "not in the network": extra, "of another shape": odd}
    if found := [f"{kind}: {some(names)}" for kind, names in kinds.items() if names]:
        raise WeightsError(f"{what} do not fit the network ({'; '.join(found)}); give the weights of this network")
    weights = {name: weights[name].detach().to(t.device, t.dtype) for name, t in own.items()}
    if broken := [name for name, t in weights.items() if t.is_floating_point() and not t.isfinite().all()]:
        raise NonFiniteError(f"{what} hold NaN or infinity in {some(broken)}; give finite weights")
    for names in _shared(model):
        if any(not torch.equal(weights[names[0]], weights[name]) for name in names[1:]):
            raise WeightsError(f"{what} differ in {some(names)}, one parameter; give the weights of this network")
    return weights


def _without_prefix(weights: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Names without a prefix that all of them have, if they are then the network's own."""
    parts = next(iter(weights), "").split(".")
    for prefix in (".".join(parts[:n]) + "." for n in range(1, len(parts))):
        if {f"{prefix}{name}" for name in own} == set(weights):
            return {name: weights[f"{prefix}{name}"] for name in own}
    return weights


def _shared(model: nn.Module) -> list[list[str]]:
    """The names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [each for each in names.values() if len(each) > 1]


def _with_every_name(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights under all names of a shared parameter: some writers of files store it under one of them."""
    complete = dict(weights)
    for names in _shared(model):
        if given := [name for name in names if name in weights]:
            complete |= {name: weights[given[0]] for name in names if name not in weights}
    return complete


def _shape(t: Tensor) -> str:
    """The shape, and whether it holds whole numbers, which cannot replace real ones."""
    return ("" if t.is_floating_point() else "whole numbers ") + str(tuple(t.shape))


# --- where in a file the weights are -------------------------------------------------------------------


def _state_dict(path: str, content: object, key: str | None) -> tuple[str, dict[str, Tensor]]:
    """The state dict that was saved, or that lies in what was saved, and the name of its entry."""
    if not isinstance(content, Mapping):
        raise WeightsError(f"{path} holds a {type(content).__name__}; save model.state_dict()")
    inside = _state_dicts(content)
    choice = f"; the entries with weights are {some(inside)}" if inside else ""
    if key is not None:
        chosen = _under(content, key)
        if not _is_state_dict(chosen):
            raise WeightsError(f"{path} does not have weights under {key[:100]!r}{choice}; give another key")
        return key, dict(chosen)
    if _is_state_dict(content):
        return "", dict(content)
    likely = [name for name in NESTED if name in inside] or list(inside)
    if len(likely) > 1:
        raise WeightsError(f"{path} holds several sets of weights{choice}; choose one with --key (key= in Python)")
    if likely:
        return likely[0], dict(inside[likely[0]])
    inner = next((content[name] for name in NESTED if isinstance(content.get(name), Mapping)), content)
    for name, value in inner.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise WeightsError(f"{path} holds other values, as {str(name)[:100]!r}; save model.state_dict() alone")
    return "", {}


def _is_state_dict(content: object) -> TypeGuard[Mapping[str, Tensor]]:
    return (
        isinstance(content, Mapping)
        and len(content) > 0
        and all(isinstance(name, str) and isinstance(value, Tensor) for name, value in content.items())
    )


def _state_dicts(content: Mapping) -> dict[str, Mapping[str, Tensor]]:
    """All state dicts inside, by their dotted paths. Each mapping is looked into once: it may contain itself."""
    found: dict[str, Mapping[str, Tensor]] = {}
    ahead, holds_weights = [("", content)], {id(content): False}
    while ahead:
        place, mapping = ahead.pop()
        for name, value in mapping.items():
            if not isinstance(name, str) or not isinstance(value, Mapping) or _is_optimiser(value):
                continue
            if id(value) not in holds_weights:
                holds_weights[id(value)] = _is_state_dict(value)
                ahead += [] if holds_weights[id(value)] else [(f"{place}{name}.", value)]
            if holds_weights[id(value)]:
                found[place + name] = value
    return found


def _under(content: object, key: str) -> object:
    """The content at a dotted path: an entry, an entry of an entry, or the names that begin with it."""
    if not isinstance(content, Mapping):
        return None
    if key in content:
        return content[key]
    first, _, rest = key.partition(".")
    if rest and first in content:
        return _under(content[first], rest)
    start = f"{key}."
    return {name[len(start) :]: t for name, t in content.items() if isinstance(name, str) and name.startswith(start)}


def _check(path: str, tensors: Mapping[str, Tensor], optimisers: list[Mapping]) -> None:
    """Refuse tensors that are not what they claim to be, and more of them than fit into memory."""
    states = [state for optimiser in optimisers for state in optimiser["state"].values() if isinstance(state, Mapping)]
    for name, t in (each for mapping in (tensors, *states) for each in mapping.items()):
        if isinstance(t, Tensor):
            formats.check_kind(path, str(name), t)
    formats.check_room(path, sum(t.numel() for t in tensors.values()))


def _optimisers(content: Mapping) -> list[Mapping]:
    """The state dicts of optimisers among a checkpoint's entries, which may be lists of them."""
    entries = [each for value in content.values() for each in (value if isinstance(value, list) else [value])]
    return [each for each in entries if _is_optimiser(each)]


def _is_optimiser(content: object) -> TypeGuard[Mapping]:
    return isinstance(content, Mapping) and isinstance(content.get("state"), Mapping) and "param_groups" in content


def _counters(content: Mapping) -> dict[str, float]:
    """The numbers of steps and epochs that a checkpoint states."""
    found = {name: content[name] for name in COUNTERS if name in content}
    tensors = {name: t for name, t in found.items() if isinstance(t, Tensor) and t.numel() == 1}
    found |= {name: t.item() for name, t in tensors.items() if formats.is_plain(t)}
    return {name: float(n) for name, n in found.items() if type(n) in (int, float) and abs(n) < 2**63}


def _plain(t: Tensor) -> Tensor:
    t = t.detach()
    return (t.float() if _is_short(t) else t).contiguous()


def _is_short(t: Tensor) -> bool:
    return t.is_floating_point() and t.element_size() < 4


def _prefix(names: Iterable[str]) -> str:
    """The wrappers' prefixes that all names have, in any order.

    >>> _prefix(["module._orig_mod.weight", "module._orig_mod.bias"])
    'module._orig_mod.'
    """
    names, found = list(names), ""
    while more := next((p for p in PREFIXES if all(name.startswith(found + p) for name in names)), ""):
        found += more
    return found
