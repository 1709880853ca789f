"""Reads other people's weights. Nothing in a file is executed, and memory is taken only for its actual content."""

from __future__ import annotations

import argparse
import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

import safetensors
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from palimpsest.errors import InvalidInputError, NonFiniteError, WeightsError
from palimpsest.execution import resources
from palimpsest.files import archives

NESTED = ("state_dict", "model_state_dict", "model")  # where training scripts keep the weights among other things
PREFIXES = ("module.", "_orig_mod.")  # what DataParallel and torch.compile put before every name
MOST_DIMENSIONS = 16
SHOWN = 4  # entries of each kind that an error names


@dataclass(frozen=True)
class Found:
    """Weights, and what a user should know about how they were read."""

    tensors: dict[str, Tensor]
    source: str
    """The file and, inside a checkpoint, the entry."""
    others: str
    """Other entries of the checkpoint that hold weights, or the empty string."""
    half: bool
    """Whether some numbers were stored with less than single precision."""


def load(path: Path | str, key: str | None = None) -> dict[str, Tensor]:
    """Read the tensors of a ``.safetensors`` file, or of a state dict that ``torch.save`` wrote.

    Nothing in the file is executed. A checkpoint may hold the state dict under "state_dict", "model_state_dict" or
    "model", or as its only state dict. The prefixes of wrappers ("module.", "_orig_mod.") are removed if all names have
    them. Half precision becomes single precision. Buffers of whole numbers do not change.

    Args:
        path: the file.
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
    """The result of :func:`load`, with its source. A mapping also works, such as a loaded checkpoint."""
    name = "the mapping" if isinstance(source, Mapping) else str(source)
    content = source if isinstance(source, Mapping) else _content(Path(source))
    entry, tensors = _state_dict(name, content, key)
    others = [] if not isinstance(content, Mapping) or not entry else [n for n in _state_dicts(content) if n != entry]
    if not tensors:
        raise WeightsError(f"{name} does not hold a tensor; save model.state_dict()")
    if not isinstance(source, Mapping):
        for each, t in tensors.items():
            _check_kind(name, each, t)
        _check_room(name, sum(t.numel() for t in tensors.values()))
    return Found(
        {each: _plain(t) for each, t in _unwrapped(tensors).items()},
        f"{name}, entry {entry!r}" if entry else name,
        _some(others),
        any(_is_short(t) for t in tensors.values()),
    )


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
    own = model.state_dict()
    if lazy := [name for name, t in own.items() if is_lazy(t)]:
        raise InvalidInputError(f"the network does not know the shape of {_some(lazy)} yet; run it on an image first")
    weights = _with_every_name(model, _without_prefix(weights, own))
    missing = [name for name in own if name not in weights]
    extra = [name for name in weights if name not in own]
    odd = [
        f"{name} {_shape(weights[name])} instead of {_shape(own[name])}"
        for name in own
        if name in weights and _shape(weights[name]) != _shape(own[name])
    ]
    kinds = {"missing": missing, "not in the network": extra, "of another shape": odd}
    if found := [f"{kind}: {_some(names)}" for kind, names in kinds.items() if names]:
        raise WeightsError(f"{what} do not fit the network ({'; '.join(found)}); give the weights of this network")
    if broken := [name for name, t in weights.items() if t.is_floating_point() and not t.isfinite().all()]:
        raise NonFiniteError(f"{what} hold NaN or infinity in {_some(broken)}; give finite weights")
    for names in _shared(model):
        if any(not torch.equal(weights[names[0]], weights[name]) for name in names[1:]):
            raise WeightsError(f"{what} differ in {_some(names)}, one parameter; give the weights of this network")
    model.load_state_dict(dict(weights))


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
    return ("" if t.is_floating_point() else "whole ") + str(tuple(t.shape))


def _some(names: Iterable[str]) -> str:
    """A few names, shortened if a hostile file made them long.

    >>> _some("abcdefg")
    'a, b, c, d and 3 more'
    """
    names = [name if len(name) <= 100 else f"{name[:100]}…" for name in names]
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


# --- the two formats ---------------------------------------------------------------------------------


def _content(path: Path) -> object:
    readers = {".safetensors": _safetensors} | dict.fromkeys((".pt", ".pth", ".bin"), _torch_archive)
    if path.suffix not in readers:
        raise WeightsError(f"{path} is not a file of weights; give a .safetensors, .pt, .pth or .bin file")
    if not path.is_file():
        raise WeightsError(f"there is no file {path}; check the path")
    return readers[path.suffix](path)


def _safetensors(path: Path) -> dict[str, Tensor]:
    try:
        with safetensors.safe_open(str(path), framework="pt") as file:  # checks the header against the file's length
            names = list(file.keys())
            shapes = {name: file.get_slice(name).get_shape() for name in names}
            for name in names:
                _check_shape(path, name, shapes[name])
            _check_room(path, sum(math.prod(shape) for shape in shapes.values()))
            return {name: file.get_tensor(name) for name in names}
    except (safetensors.SafetensorError, OSError, ValueError, RuntimeError, TypeError, KeyError) as error:
        if isinstance(error, WeightsError):
            raise
        raise WeightsError(f"{path} is not a safetensors file, or it is damaged; save the weights again") from error


def _torch_archive(path: Path) -> object:
    archives.check(path)
    _check_room(path, path.stat().st_size // 4)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about deprecated content
            with torch.serialization.safe_globals([argparse.Namespace]):  # in which training scripts keep options
                return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # hostile or damaged files make their readers raise anything at all
        raise WeightsError(f"{path} holds more than tensors, or is damaged; save model.state_dict() alone") from error


# --- where in a file the weights are -------------------------------------------------------------------


def _state_dict(path: str, content: object, key: str | None) -> tuple[str, dict[str, Tensor]]:
    """The state dict that was saved, or that lies in what was saved, and the name of its entry."""
    if not isinstance(content, Mapping):
        raise WeightsError(f"{path} holds a {type(content).__name__}; save model.state_dict()")
    inside = _state_dicts(content)
    choice = f"; the entries with weights are {_some(inside)}" if inside else ""
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
            if not isinstance(name, str) or not isinstance(value, Mapping):
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


def _check_shape(path: Path | str, name: str, shape: Iterable[int]) -> None:
    if len(list(shape)) > MOST_DIMENSIONS:
        raise WeightsError(f"{path} holds {_some([name])} with more than {MOST_DIMENSIONS} dimensions; remove it")


def _check_kind(path: Path | str, name: str, t: Tensor) -> None:
    """Dense, real, on the CPU, with memory for every number."""
    _check_shape(path, name, t.shape)
    plain = t.layout is torch.strided and t.device.type == "cpu" and not t.is_quantized and not t.is_complex()
    if not plain or t.numel() * t.element_size() > t.untyped_storage().nbytes():
        raise WeightsError(f"{path} holds {_some([name])}, which is not dense and real; save dense real tensors")


def _check_room(path: Path | str, numbers: int) -> None:
    """Memory for the tensors in the file, and again for those in the network."""
    resources.require_memory(2 * 4 * numbers, of=f"reading {path}", remedy="use a machine with more")


def _plain(t: Tensor) -> Tensor:
    t = t.detach()
    return (t.float() if _is_short(t) else t).contiguous()


def _is_short(t: Tensor) -> bool:
    return t.is_floating_point() and t.element_size() < 4


def _unwrapped(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Names without the prefixes that all of them have, in any order."""
    while prefix := next((p for p in PREFIXES if all(name.startswith(p) for name in tensors)), None):
        tensors = {name.removeprefix(prefix): t for name, t in tensors.items()}
    return tensors
