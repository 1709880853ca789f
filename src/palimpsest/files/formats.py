"""The formats of weights. Nothing in a file is executed, and memory is taken only for its actual content.

=============================  ==========================================================================
.safetensors                   tensors
.pt, .pth, .ckpt, .bin, .tar   the content of an archive of ``torch.save``
NAME.index.json                tensors in several files (shards), as the index lists them
a folder                       ``model.safetensors``, ``pytorch_model.bin`` or their index; and ``optimizer.pt``
=============================  ==========================================================================
"""

from __future__ import annotations

import argparse
import math
import warnings
from collections.abc import Iterable
from pathlib import Path

import safetensors
import torch
from torch import Tensor

from palimpsest.errors import WeightsError
from palimpsest.execution import resources
from palimpsest.files import archives
from palimpsest.files.storage import open_regular, parse_json

ARCHIVES = (".pt", ".pth", ".ckpt", ".bin", ".tar")
SUFFIXES = (".safetensors", *ARCHIVES)
INDEX = ".index.json"
MODELS = tuple(name + index for name in ("model.safetensors", "pytorch_model.bin") for index in (INDEX, ""))
OPTIMISERS = ("optimizer.pt", "optimizer.bin")  # beside a model, in a folder
LARGEST_INDEX = 1 << 24  # bytes; about a hundred thousand tensors
MOST_DIMENSIONS = 16
SHOWN = 4  # names of each kind that an error shows


def content(path: Path) -> object:
    """The content of a file or a folder: tensors by name, or the value that a training script saved."""
    if path.is_dir():
        if (model := first(path, MODELS)) is None:
            raise WeightsError(f"the folder {path} does not hold {MODELS[1]}; give a file of weights")
        optimiser = first(path, OPTIMISERS)
        return {"model": content(model)} | ({} if optimiser is None else {"optimizer": content(optimiser)})
    if not path.name.endswith((*SUFFIXES, INDEX)):
        known = f"{', '.join((*SUFFIXES[:-2], INDEX))} or {SUFFIXES[-2]}"
        raise WeightsError(f"{path} is not a file of weights; give a {known} file")
    if not path.is_file():
        raise WeightsError(f"there is no file {path}; check the path")
    if path.name.endswith(INDEX):
        return _shards(path)
    return _safetensors(path) if path.suffix == SUFFIXES[0] else _torch_archive(path)


def first(folder: Path, names: Iterable[str]) -> Path | None:
    """The first of these files that the folder has."""
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _safetensors(path: Path) -> dict[str, Tensor]:
    try:
        with safetensors.safe_open(str(path), framework="pt") as file:  # checks the header against the file's length
            names = list(file.keys())
            shapes = {name: file.get_slice(name).get_shape() for name in names}
            for name in names:
                _check_shape(path, name, shapes[name])
            check_room(path, sum(math.prod(shape) for shape in shapes.values()))
            return {name: file.get_tensor(name) for name in names}
    except (safetensors.SafetensorError, OSError, ValueError, RuntimeError, TypeError, KeyError) as error:
        if isinstance(error, WeightsError):
            raise
        raise WeightsError(f"{path} is not a safetensors file, or it is damaged; save the weights again") from error


def _torch_archive(path: Path) -> object:
    archives.check(path)
    check_room(path, path.stat().st_size // 4)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about deprecated content
            with torch.serialization.safe_globals([argparse.Namespace]):  # in which training scripts keep options
                return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # hostile or damaged files make their readers raise anything at all
        raise WeightsError(f"{path} holds more than tensors, or is damaged; save model.state_dict() alone") from error


def _shards(path: Path) -> dict[str, Tensor]:
    """The tensors of all files that an index lists."""
    places, shards = listed(path)
    check_room(path, sum(shard.stat().st_size for shard in shards if shard.is_file()) // 4)
    held = {shard.name: content(shard) for shard in shards if shard.name.endswith(SUFFIXES) and not shard.is_dir()}
    tensors = {}
    for name, place in places.items():
        inside = held.get(str(place))
        t = inside.get(name) if isinstance(inside, dict) else None
        if not isinstance(t, Tensor):
            there = some([str(place)])
            raise WeightsError(f"{path} lists {some([name])} in {there}, which does not hold it; copy both again")
        tensors[name] = t
    return tensors


def listed(index: Path) -> tuple[dict[str, str], list[Path]]:
    """The file of each tensor, and all files. An index may list only files beside it."""
    try:
        with open_regular(index, follow=True) as opened:
            places = parse_json(opened.read(LARGEST_INDEX))["weight_map"]
        files = sorted({index.with_name(str(place)) for place in places.values()})  # ValueError: no plain name
        for file in files:
            file.is_file()  # OSError: the name is too long
        return places, files
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise WeightsError(f"{index} is not an index of weights, or it is damaged; save the weights again") from error


# --- checks of tensors ---------------------------------------------------------------------------------


def check_kind(path: Path | str, name: str, t: Tensor) -> None:
    """Dense, real, on the CPU, with memory for every number."""
    _check_shape(path, name, t.shape)
    if not is_plain(t) or t.numel() * t.element_size() > t.untyped_storage().nbytes():
        raise WeightsError(f"{path} holds {some([name])}, which is not dense and real; save dense real tensors")


def is_plain(t: Tensor) -> bool:
    return t.layout is torch.strided and t.device.type == "cpu" and not t.is_quantized and not t.is_complex()


def check_room(path: Path | str, numbers: int) -> None:
    """Memory for the tensors in the file, and again for those in the network."""
    resources.require_memory(2 * 4 * numbers, of=f"reading {path}", remedy="use a machine with more")


def _check_shape(path: Path | str, name: str, shape: Iterable[int]) -> None:
    if len(list(shape)) > MOST_DIMENSIONS:
        raise WeightsError(f"{path} holds {some([name])} with more than {MOST_DIMENSIONS} dimensions; remove it")


def some(names: Iterable[str]) -> str:
    """A few names, shortened if a hostile file made them long.

    >>> some("abcdefg")
    'a, b, c, d and 3 more'
    """
    names = [name if len(name) <= 100 else f"{name[:100]}…" for name in names]
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
