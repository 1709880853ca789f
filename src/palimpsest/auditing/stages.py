"""Stages that are done once: what a stage found is kept in the run folder, and a repeated audit reads it there.

A stage returns what its file says, also the first time, so that an audit that was interrupted at any moment goes on
with the same numbers as one that never was.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from palimpsest.errors import RunFolderError
from palimpsest.storage import load_tensors, parse_json, save_tensors, write_atomically

Facts = dict[str, Any]
Tensors = dict[str, Tensor]
Found = TypeVar("Found")


def facts(path: Path, find: Callable[[], Mapping[str, Any]], read: Callable[[Facts], Found]) -> Found:
    """What the JSON file at a path says; it is found and written now unless it was before."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, (json.dumps(find(), indent=1) + "\n").encode())
    try:
        return read(parse_json(path.read_bytes()))
    except (ValueError, KeyError, TypeError) as error:
        raise _unreadable(path) from error


def tensors(
    path: Path,
    find: Callable[[], tuple[Mapping[str, Tensor], Mapping[str, Any]]],
    read: Callable[[Tensors, Facts], Found],
) -> Found:
    """What the tensors at a path and their description say; they are computed and written now unless they were."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        save_tensors(path, *find())
    try:
        return read(*load_tensors(path))
    except (ValueError, KeyError, TypeError) as error:
        raise _unreadable(path) from error


def _unreadable(path: Path) -> RunFolderError:
    return RunFolderError(f"{path} is not what an audit writes; delete it, and the audit makes it again")
