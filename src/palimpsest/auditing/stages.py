"""Stages that are done once: what a stage found is kept in the run folder, and a repeated audit reads it there.

A stage returns what its file says, also the first time, so that an audit that was interrupted at any moment goes on
with the same numbers as one that never was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from palimpsest.errors import PalimpsestError, RunFolderError
from palimpsest.files.storage import MAKE_AGAIN, load_json, load_tensors, packed_json, save_tensors, write_atomically

Facts = dict[str, Any]
Tensors = dict[str, Tensor]
Found = TypeVar("Found")


def facts(path: Path, owner: str, find: Callable[[], Mapping[str, Any]], read: Callable[[Facts], Found]) -> Found:
    """What the owner's JSON file at a path says; it is found and written now unless it was before."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, packed_json(find(), owner=owner))
    return _understood(path, lambda: read(load_json(path, owner=owner)))


def tensors(
    path: Path,
    owner: str,
    find: Callable[[], tuple[Mapping[str, Tensor], Mapping[str, Any]]],
    read: Callable[[Tensors, Facts], Found],
) -> Found:
    """What the owner's tensors at a path and their description say; they are computed now unless they were before."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        save_tensors(path, *find(), owner=owner)
    return _understood(path, lambda: read(*load_tensors(path, owner=owner)))


def _understood(path: Path, read: Callable[[], Found]) -> Found:
    """What is read; content that no audit writes is an error of the folder, all else is told as it is."""
    try:
        return read()
    except PalimpsestError:
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise RunFolderError(f"{path} does not hold what an audit writes; {MAKE_AGAIN}") from error
