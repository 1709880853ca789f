"""Reading other people's weights: nothing in a file is run, and nothing larger than it claims is allocated."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path

import safetensors
import torch
from torch import Tensor, nn

from palimpsest import archives, resources
from palimpsest.errors import NonFiniteError, WeightsError

NESTED = ("state_dict", "model_state_dict", "model")  # where training scripts keep the weights among other things
PREFIXES = ("module.", "_orig_mod.")  # what DataParallel and torch.compile put before every name
MOST_DIMENSIONS = 16
SHOWN = 4  # entries of each kind that an error names


def load(path: Path | str) -> dict[str, Tensor]:
    """The tensors of a ``.safetensors`` file, or of a state dict saved by ``torch.save`` (``.pt``, ``.pth``, ``.bin``).

    A state dict may lie inside a checkpoint, as "state_dict", "model_state_dict" or "model". Names lose the prefixes
    of wrappers ("module.", "_orig_mod.") where all have them. Half precision becomes single precision; buffers of
    whole numbers stay as they are.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "net.pt"
    >>> torch.save({"epoch": 3, "state_dict": {"module.weight": torch.ones(2, 3).half()}}, path)
    >>> {name: (t.dtype, tuple(t.shape)) for name, t in load(path).items()}
    {'weight': (torch.float32, (2, 3))}
    """
    path = Path(path)
    readers = {".safetensors": _safetensors} | dict.fromkeys((".pt", ".pth", ".bin"), _torch_archive)
    if path.suffix not in readers:
        raise WeightsError(f"{path} is no file of weights; give a .safetensors, .pt, .pth or .bin file")
    if not path.is_file():
        raise WeightsError(f"there is no file {path}; check the path")
    tensors = readers[path.suffix](path)
    if not tensors:
        raise WeightsError(f"{path} holds no tensor; save model.state_dict()")
    return {name: _plain(t) for name, t in _unwrapped(tensors).items()}


def fit_into(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Put weights into a network that must have exactly these names, shapes and kinds of number, all of them finite."""
    own = model.state_dict()
    missing = [name for name in own if name not in weights]
    extra = [name for name in weights if name not in own]
    odd = [
        f"{name} {_shape(weights[name])} instead of {_shape(own[name])}"
        for name in own
        if name in weights and _shape(weights[name]) != _shape(own[name])
    ]
    kinds = {"missing": missing, "not in the network": extra, "of another shape": odd}
    if found := [f"{kind}: {_some(names)}" for kind, names in kinds.items() if names]:
        raise WeightsError(f"the weights do not fit the network ({'; '.join(found)}); give those of this very network")
    if broken := [name for name, t in weights.items() if t.is_floating_point() and not t.isfinite().all()]:
        raise NonFiniteError(f"the weights hold NaN or infinity in {_some(broken)}; give those of a sound training")
    model.load_state_dict(dict(weights))


def _shape(t: Tensor) -> str:
    """Shape, and whether it counts or measures: whole numbers are no substitute for real ones."""
    return ("" if t.is_floating_point() else "whole ") + str(tuple(t.shape))


def _some(names: Iterable[str]) -> str:
    """A handful of names, cut short where a hostile file made them long.

    >>> _some("abcdefg")
    'a, b, c, d and 3 more'
    """
    names = [name if len(name) <= 100 else f"{name[:100]}…" for name in names]
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


# --- the two formats ---------------------------------------------------------------------------------


def _safetensors(path: Path) -> dict[str, Tensor]:
    try:
        with safetensors.safe_open(str(path), framework="pt") as file:  # checks the header against the file's length
            names = list(file.keys())
            shapes = {name: file.get_slice(name).get_shape() for name in names}
            for name in names:
                _check_shape(path, name, shapes[name])
            _check_room(path, sum(math.prod(shape) for shape in shapes.values()))
            return {name: _check_kind(path, name, file.get_tensor(name)) for name in names}
    except (safetensors.SafetensorError, OSError, ValueError, RuntimeError, TypeError, KeyError) as error:
        if isinstance(error, WeightsError):
            raise
        raise WeightsError(f"{path} is no safetensors file, or it is damaged; save the weights again") from error


def _torch_archive(path: Path) -> dict[str, Tensor]:
    archives.check(path)
    _check_room(path, path.stat().st_size // 4)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what is deprecated in files that others wrote
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # hostile or damaged, files make their readers raise anything at all
        raise WeightsError(f"{path} holds more than tensors, or is damaged; save model.state_dict() alone") from error
    tensors = _state_dict(path, content)
    for name, t in tensors.items():
        _check_kind(path, name, t)
    _check_room(path, sum(t.numel() for t in tensors.values()))
    return tensors


def _state_dict(path: Path, content: object) -> dict[str, Tensor]:
    """The state dict that was saved, or that lies in what was saved."""
    if not isinstance(content, Mapping):
        raise WeightsError(f"{path} holds a {type(content).__name__}; save model.state_dict()")
    inner = [content[name] for name in NESTED if isinstance(content.get(name), Mapping)]
    found = inner[0] if inner else content
    for name, value in found.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise WeightsError(f"{path} has something other than a tensor under {str(name)[:100]!r};"
                               " save model.state_dict() alone")  # fmt: skip
    return dict(found)


def _check_shape(path: Path, name: str, shape: Iterable[int]) -> None:
    if len(list(shape)) > MOST_DIMENSIONS:
        raise WeightsError(
            f"{path} holds {_some([name])} of more than {MOST_DIMENSIONS} dimensions; no layer has those"
        )


def _check_kind(path: Path, name: str, t: Tensor) -> Tensor:
    """Dense, real, on the processor, with a place of its own for every number."""
    _check_shape(path, name, t.shape)
    plain = t.layout is torch.strided and t.device.type == "cpu" and not t.is_quantized and not t.is_complex()
    if not plain or t.numel() * t.element_size() > t.untyped_storage().nbytes():
        raise WeightsError(f"{path} holds {_some([name])}, which is sparse, quantised, complex or no real tensor;"
                           " save plain dense weights")  # fmt: skip
    return t


def _check_room(path: Path, numbers: int) -> None:
    """Room for the tensors as they are read, and once more as the network holds them."""
    resources.require_memory(2 * 4 * numbers, of=f"reading {path}", remedy="use a machine with more")


def _plain(t: Tensor) -> Tensor:
    t = t.detach()
    return (t.float() if t.is_floating_point() and t.element_size() < 4 else t).contiguous()


def _unwrapped(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Names without the prefixes that all of them have, in whichever order the wrappers were put on."""
    while prefix := next((p for p in PREFIXES if all(name.startswith(p) for name in tensors)), None):
        tensors = {name.removeprefix(prefix): t for name, t in tensors.items()}
    return tensors
