"""Checkpoints of one training, in order.

``--checkpoints`` names files, folders or patterns (``"runs/epoch-*.pt"``). A folder stands for all checkpoints in it.
A counter orders them if all files store it and it differs between them. The first of global_step, step, iteration, iter
and epoch decides. Without such a counter, the numbers in the names decide: ``epoch-9.pt`` comes before ``epoch-10.pt``.
The names must then be equal apart from their numbers.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import TypeGuard

import torch
from torch import Tensor, nn

from palimpsest.errors import WeightsError
from palimpsest.files import formats, weights
from palimpsest.files.formats import some
from palimpsest.files.weights import COUNTERS, Found

Sources = Path | str | Iterable[Path | str]
InMemory = Sequence[Mapping[str, Tensor]]


def series(
    model: nn.Module,
    sources: Sources | InMemory,
    *,
    key: str | None = None,
    initial: Found | None = None,
    trained: Found | None = None,
) -> list[Found]:
    """Read the checkpoints of a training, in order, with the network's names and in its precision.

    Args:
        model: the network. It does not change.
        sources: files, folders or patterns; or state dicts, in order.
        key: the entry of each file that holds the weights.
        initial: the weights before training, which come first.
        trained: the trained weights, which come last. Both may be in the series too.

    Examples:
        >>> import tempfile
        >>> folder, model = Path(tempfile.mkdtemp()), nn.Linear(2, 1)
        >>> for epoch in (10, 9, 8):
        ...     torch.save({"weight": torch.full((1, 2), float(epoch)), "bias": torch.ones(1)}, folder / f"{epoch}.pt")
        >>> [Path(found.source).name for found in series(model, folder)]
        ['8.pt', '9.pt', '10.pt']
    """
    if _in_memory(sources):
        called = [f"checkpoint {j}" for j, _ in enumerate(sources, start=1)]
        read = [replace(weights.find(state, key), source=name) for state, name in zip(sources, called, strict=True)]
        middle = [_fitted(model, found) for found in read]
    else:
        paths = gathered(sources)  # type: ignore[arg-type]
        middle = _in_order(paths, [_fitted(model, weights.find(path, key)) for path in paths])
    names = [name for name, _ in model.named_parameters()]
    ends = [None if end is None else _fitted(model, end) for end in (initial, trained)]
    for end, place in zip(ends, (0, -1), strict=True):
        if end is not None and middle and _equal(end, middle[place], names):
            same = middle.pop(place)
            ends[place] = same if end.optimiser is None else end
    found = [each for each in (ends[0], *middle, ends[1]) if each is not None]
    if len(found) < 2:
        raise WeightsError(f"{found[0].source} is one checkpoint; give at least two, or the initial weights")
    for one, other in combinations(found, 2):
        if _equal(one, other, names):
            raise WeightsError(f"{one.source} and {other.source} hold equal weights; leave one of them out")
    return found


def _in_memory(sources: Sources | InMemory) -> TypeGuard[InMemory]:
    return isinstance(sources, list | tuple) and all(isinstance(each, Mapping) for each in sources)


def gathered(sources: Sources) -> list[Path]:
    """The checkpoints that files, folders and patterns stand for."""
    paths = [path for source in ([sources] if isinstance(sources, Path | str) else sources) for path in _named(source)]
    if double := {str(path) for path in paths if paths.count(path) > 1}:
        raise WeightsError(f"{some(sorted(double))} is given twice; give each checkpoint once")
    return paths


def _named(source: Path | str) -> list[Path]:
    path = Path(source)
    if path.is_file() or (path.is_dir() and formats.first(path, formats.MODELS)):
        return [path]
    if path.is_dir():
        found = [each for each in sorted(path.iterdir()) if not each.name.startswith(".")]
        found = [p for p in found if p.name.endswith(formats.SUFFIXES) or formats.first(p, formats.MODELS)]
    else:
        found = [Path(each) for each in sorted(glob.glob(str(source)))]
    if not found:
        raise WeightsError(f"there is no checkpoint {source}; give files, a folder of them, or a pattern in quotes")
    return found


def _fitted(model: nn.Module, found: Found) -> Found:
    own = weights.fitted(model, found.tensors, what=f"the weights of {found.source}")
    to, given = (_precision(tensors) for tensors in (own, found.tensors))
    converted = () if to == given else (f"converted from {given} to {to}",)
    return replace(found, tensors=own, remarks=(*found.remarks, *converted))


def _precision(tensors: Mapping[str, Tensor]) -> str:
    kinds = {str(t.dtype).removeprefix("torch.") for t in tensors.values() if t.is_floating_point()}
    return " and ".join(sorted(kinds))


def _equal(one: Found, other: Found, names: list[str]) -> bool:
    return all(torch.equal(one.tensors[name], other.tensors[name]) for name in names)


# --- the order -------------------------------------------------------------------------------------------


def _in_order(paths: list[Path], found: list[Found]) -> list[Found]:
    """Checkpoints by a counter that the files store, or else by the numbers in their names."""
    for counter in COUNTERS:
        numbers = [each.counters.get(counter) for each in found]
        if None not in numbers and len(set(numbers)) == len(numbers):
            said = [replace(f, remarks=(*f.remarks, f"{counter} {f.counters[counter]:g}")) for f in found]
            return sorted(said, key=lambda each: each.counters[counter])
    texts, keys = zip(*map(_split, paths), strict=True)
    if len(set(texts)) > 1 or len(set(keys)) < len(keys):
        names = some(path.name for path in paths)
        raise WeightsError(f"nothing orders the checkpoints {names}; number their names, such as step-100.pt")
    return [each for _, each in sorted(zip(keys, found, strict=True), key=lambda pair: pair[0])]


def _split(path: Path) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The text of a name and its numbers.

    >>> _split(Path("/runs/epoch-09.pt"))
    (('/runs/epoch-', ''), (9,))
    """
    name = os.path.abspath(path)
    suffix = next((suffix for suffix in formats.SUFFIXES if name.endswith(suffix)), "")
    pieces = re.split("([0-9]+)", name.removesuffix(suffix))
    return tuple(pieces[::2]), tuple(map(int, pieces[1::2]))
