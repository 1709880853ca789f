"""Stages that are done once: a stage saves its result in the run folder, and a repeated audit reads it there.

A stage returns the content of its file, even the first time. An interrupted audit therefore continues with the same
numbers as one that was never interrupted.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from palimpsest.errors import PalimpsestError, RunFolderError
from palimpsest.files.schema import built
from palimpsest.files.storage import MAKE_AGAIN, load_json, load_tensors, packed_json, save_tensors, write_atomically

Result = TypeVar("Result")
Contents = tuple[Mapping[str, Tensor], Mapping[str, Any]]  # of a file of tensors: the tensors and their description


def cached_json(path: Path, owner: str, kind: type[Result], compute: Callable[[], Any]) -> Result:
    """The dataclass in the owner's JSON file. It is computed and saved first if there is no file."""
    if not path.exists():
        write_atomically(path, packed_json(asdict(compute()), owner=owner))
    with _checked(path):
        return built(kind, load_json(path, owner=owner))


def cached_tensors(path: Path, owner: str, compute: Callable[[], Contents], parse: Callable[..., Result]) -> Result:
    """The parsed contents of the owner's file of tensors. They are computed and saved first if there is no file."""
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        save_tensors(path, *compute(), owner=owner)
    with _checked(path):
        return parse(*load_tensors(path, owner=owner))


@contextmanager
def _checked(path: Path) -> Iterator[None]:
    """Turn the failures of reading unexpected contents into an error of the run folder."""
    try:
        yield
    except PalimpsestError:
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise RunFolderError(f"{path} is damaged ({error}); {MAKE_AGAIN}") from error
