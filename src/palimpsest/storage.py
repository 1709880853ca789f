"""Files that are either whole or not there: atomic writes of tensors with a description, and strict reading."""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from palimpsest.errors import CheckpointError, StorageError

FORMAT = 2  # of every file that is written; another number is another version, and is refused
DEEPEST = 20  # levels of nesting in a JSON file; ours have about five
os.umask(_UMASK := os.umask(0o022))  # it cannot be read without being set


def write_atomically(path: Path | str, data: bytes) -> None:
    """Write a file so that a reader, or a crash at any moment, sees the old one or the new one, never a part."""
    write_together({Path(path): data})


def write_together(files: Mapping[Path, bytes]) -> None:
    """Write files that belong together: none is replaced before all are on the disk."""
    temporary: dict[Path, Path] = {}
    try:
        for path, data in files.items():
            temporary[path] = _beside(path, data)
        for path, new in temporary.items():
            os.replace(new, path)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror or error}; make room or choose another folder, and"
                           " give the same command again: what was saved before is intact") from error  # fmt: skip
    finally:
        for new in temporary.values():
            new.unlink(missing_ok=True)


def _beside(path: Path, data: bytes) -> Path:
    """A temporary file in the same folder, complete and on the disk."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o666 & ~_UMASK)  # temporary files are private; results are as open as any other file
    except BaseException:
        os.unlink(name)
        raise
    return Path(name)


def packed(tensors: Mapping[str, Tensor], description: Mapping[str, Any]) -> bytes:
    """Tensors and a JSON description as one safetensors file, under the number of our format."""
    contiguous = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    owners = Counter(t.untyped_storage().data_ptr() for t in contiguous.values())
    apart = {  # safetensors refuses tensors that share memory, as layers with tied weights do
        name: t.clone() if owners[t.untyped_storage().data_ptr()] > 1 else t for name, t in contiguous.items()
    }
    text = json.dumps({"format": FORMAT, **description})
    return safetensors.torch.save(apart, metadata={"palimpsest": text})


def save_tensors(path: Path | str, tensors: Mapping[str, Tensor], description: Mapping[str, Any]) -> None:
    """Tensors and a JSON description in one safetensors file, atomically."""
    write_atomically(path, packed(tensors, description))


def load_tensors(path: Path | str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `save_tensors` wrote; anything else is refused. Nothing in the file is ever executed."""
    try:
        with safetensors.safe_open(str(path), framework="pt") as file:
            description = parse_json((file.metadata() or {})["palimpsest"])
            if description.get("format") != FORMAT:
                raise CheckpointError(f"{path} was saved by another version of Palimpsest; start afresh")
            # Copied to where torch would have put them: some CPUs round otherwise where memory is not aligned alike.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        return tensors, description
    except FileNotFoundError as error:
        raise CheckpointError(f"there is no file {path}; check the path") from error
    except (safetensors.SafetensorError, KeyError, ValueError, TypeError, RuntimeError, OSError) as error:
        raise CheckpointError(f"{path} is not a file that Palimpsest saved, or it is damaged; start afresh") from error


def parse_json(text: str | bytes) -> dict[str, Any]:
    """A JSON object; anything else is a ValueError, also what is nested too deeply to be read."""
    try:
        content = json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(content, dict) or not _is_shallow(content, DEEPEST):
        raise ValueError("no JSON object, or one nested too deeply")
    return content


def _is_shallow(value: Any, levels: int) -> bool:
    """Whether whoever walks through a value will come back."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels > 0 and all(_is_shallow(each, levels - 1) for each in inner)
