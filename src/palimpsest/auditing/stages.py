"""Stages that are done once: what a stage found is kept in the run folder, and a repeated audit reads it there.

A stage returns what its file says, also the first time, so that an audit that was interrupted at any moment goes on
with the same numbers as one that never was.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from palimpsest.errors import RunFolderError
from palimpsest.storage import load_tensors, save_tensors, write_atomically

Facts = dict[str, Any]
Tensors = dict[str, Tensor]


def facts(path: Path, find: Callable[[], Mapping[str, Any]]) -> Facts:
    """The JSON facts at a path, found now unless they were before."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, (json.dumps(find(), indent=1) + "\n").encode())
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise RunFolderError(f"{path} is not readable; delete it, and the audit makes it again") from error
    if not isinstance(content, dict):
        raise RunFolderError(f"{path} is not what an audit writes; delete it, and the audit makes it again")
    return content


def tensors(path: Path, find: Callable[[], tuple[Mapping[str, Tensor], Mapping[str, Any]]]) -> tuple[Tensors, Facts]:
    """The tensors at a path with their description, computed now unless they were before."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        save_tensors(path, *find())
    return load_tensors(path)
