"""Files that are either whole or not there: atomic writes of tensors with a description, and strict reading."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from palimpsest.errors import CheckpointError

os.umask(_UMASK := os.umask(0o022))  # it cannot be read without being set


def write_atomically(path: Path | str, data: bytes) -> None:
    """Write a file so that a reader, or a crash at any moment, sees the old one or the new one, never a part."""
    path = Path(path)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_UMASK)  # temporary files are private; results are as open as any other file
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def save_tensors(path: Path | str, tensors: Mapping[str, Tensor], description: Mapping[str, Any]) -> None:
    """Tensors and a JSON description in one safetensors file, atomically."""
    contiguous = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    write_atomically(path, safetensors.torch.save(contiguous, metadata={"palimpsest": json.dumps(description)}))


def load_tensors(path: Path | str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `save_tensors` wrote; anything else is refused. Nothing in the file is ever executed."""
    try:
        with safetensors.safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        description = json.loads(metadata["palimpsest"])
        if not isinstance(description, dict):
            raise ValueError("the description is no dictionary")
        return tensors, description
    except FileNotFoundError as error:
        raise CheckpointError(f"there is no file {path}; check the path") from error
    except (safetensors.SafetensorError, KeyError, ValueError, OSError) as error:
        raise CheckpointError(f"{path} is not a file that Palimpsest saved, or it is damaged; start afresh") from error
