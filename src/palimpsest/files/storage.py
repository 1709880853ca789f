"""Files that are either whole or not there: atomic writes, and strict reading.

Every file carries a checksum of its content and the name of its owner: the run whose other files it belongs to. A file
that is damaged, or that was copied from another run, is refused when it is read.
"""

import errno
import hashlib
import io
import json
import os
import stat
import tempfile
from collections import Counter
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from palimpsest.errors import CheckpointError, PalimpsestError, RunFolderError, StorageError

FORMAT = 4  # of files that are read again; another number is another version, and is refused
DEEPEST = 20  # levels of nesting in a JSON file; ours have about five
LARGEST_JSON = 1 << 26  # bytes; scores of a hundred thousand images
MAKE_AGAIN = "delete it and run the same command again"
os.umask(_UMASK := os.umask(0o022))  # it cannot be read without being set


def write_atomically(path: Path | str, data: bytes) -> None:
    """Write a file so that a reader, or a crash at any moment, sees the old one or the new one, never a part."""
    write_together({Path(path): data})


def write_together(files: Mapping[Path, bytes]) -> None:
    """Write files that belong together: none is replaced before all are on the disk."""
    temporary: dict[Path, Path] = {}
    intact = "what was saved before is intact"
    try:
        for path, data in files.items():
            temporary[path] = _beside(path, data)
        for path, new in temporary.items():
            os.replace(new, path)
            intact = "some files are new and some are old until then"
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror or error}; make room or choose another folder, and"
                           f" run the same command again: {intact}") from error  # fmt: skip
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


# --- opening -----------------------------------------------------------------------------------------


def open_regular(path: Path | str, *, follow: bool = False) -> io.BufferedReader:
    """Open a regular file for reading. Anything else is an OSError at once: a FIFO or a device might never end.

    Inside a run folder links are not followed; a file that a user names may be a link (``follow``).
    """
    return os.fdopen(regular(path, os.O_RDONLY, follow=follow), "rb")


def regular(path: Path | str, flags: int, *, follow: bool = False) -> int:
    """A handle of a regular file, opened without waiting and without following a link unless told to."""
    try:
        handle = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW), 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP and not follow:
            raise OSError(errno.ELOOP, "it is a symbolic link", str(path)) from error
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return handle


def _unreadable(path: Path | str, error: Exception, kind: type[PalimpsestError], remedy: str) -> PalimpsestError:
    """Why a file of ours cannot be read: it is not there, the system refuses it, or it is damaged."""
    if isinstance(error, FileNotFoundError):
        return kind(f"there is no file {path}; {remedy}")
    if isinstance(error, OSError):
        return StorageError(f"cannot read {path}: {error.strerror or error}; correct that and run the command again")
    return kind(f"{path} is damaged, or Palimpsest did not write it; {remedy}")


def _problem(number: object, sound: bool, found: object, owner: str | None) -> str:
    """Why a file that can be read must not be used, or the empty string."""
    if number != FORMAT:
        return "was written by another version of Palimpsest"
    if not sound:
        return "is damaged: its checksum is wrong"
    return "" if owner in (None, found) else "belongs to another run"


# --- checksums ---------------------------------------------------------------------------------------


def digest(*content: Any) -> str:
    """SHA-256 of JSON values, whatever the order of their keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def file_digest(path: Path | str, *, follow: bool = False) -> str:
    """SHA-256 of a file, as `sha256sum` gives it."""
    with open_regular(path, follow=follow) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def folder_digest(folder: Path | str, *, skip: str | None = None) -> str:
    """SHA-256 of a folder's files: of the lines that `sha256sum` gives for them, in the order of their names."""
    files = (p for p in Path(folder).rglob("*") if p.is_file() and p.suffix != skip)
    names = sorted(p.relative_to(folder).as_posix() for p in files)
    lines = [f"{file_digest(Path(folder, name), follow=True)}  {name}\n" for name in names]
    return hashlib.sha256("".join(lines).encode(errors="surrogateescape")).hexdigest()


def tensor_digest(tensors: Mapping[str, Tensor], *texts: str) -> str:
    """SHA-256 of tensors with their names, and of texts."""
    found = hashlib.sha256(json.dumps(texts).encode())
    for name, t in sorted(tensors.items()):
        found.update(json.dumps([name, str(t.dtype), list(t.shape)]).encode())
        found.update(t.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


# --- tensors -----------------------------------------------------------------------------------------


def packed(tensors: Mapping[str, Tensor], description: Mapping[str, Any], *, owner: str = "") -> bytes:
    """Tensors and a JSON description as one safetensors file, under the number of our format."""
    contiguous = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    owners = Counter(t.untyped_storage().data_ptr() for t in contiguous.values())
    apart = {  # safetensors refuses tensors that share memory, as layers with tied weights do
        name: t.clone() if owners[t.untyped_storage().data_ptr()] > 1 else t for name, t in contiguous.items()
    }
    text = json.dumps({"format": FORMAT, **description}, default=_plain)
    checked = {"palimpsest": text, "owner": owner, "sha256": tensor_digest(apart, text, owner)}
    return safetensors.torch.save(apart, metadata=checked)


def _plain(value: object) -> str:
    """The name of a choice, because its value may be prose."""
    if isinstance(value, Enum):
        return value.name
    raise TypeError(f"a file cannot hold a {type(value).__name__}")


def save_tensors(
    path: Path | str, tensors: Mapping[str, Tensor], description: Mapping[str, Any], *, owner: str = ""
) -> None:
    """Write tensors by name and a JSON description into one safetensors file, with a checksum.

    The file is written atomically: readers see the old file or the new one. It belongs to the run ``owner``.

    Examples:
        >>> path = Path(tempfile.mkdtemp()) / "tensors.safetensors"
        >>> save_tensors(path, {"x": torch.ones(2)}, {"what": "an example"})
    """
    write_atomically(path, packed(tensors, description, owner=owner))


def load_tensors(
    path: Path | str, *, owner: str | None = None, remedy: str = MAKE_AGAIN
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a file that `save_tensors` wrote: the tensors and the description. Any other or damaged file is refused.

    Nothing in the file is executed. The file must belong to the run ``owner``, if one is given. Error messages end in
    the advice ``remedy``.

    Examples:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "tensors.safetensors"
        >>> save_tensors(path, {"x": torch.ones(2)}, {"what": "an example"})
        >>> tensors, description = load_tensors(path)
        >>> tensors["x"].tolist(), description["what"]
        ([1.0, 1.0], 'an example')
    """
    try:
        with open_regular(path) as file:
            content = file.read()
        loaded = safetensors.torch.load(content)
        metadata = parse_json(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
        description = parse_json(metadata["palimpsest"])
        found = metadata.get("owner", "")  # the first versions did not write owners and checksums
        sound = metadata.get("sha256") == tensor_digest(loaded, metadata["palimpsest"], found)
        # Copied to memory of torch: on some CPUs tensors that are aligned differently round differently.
        tensors = {name: t.clone() for name, t in loaded.items()}
    except (OSError, safetensors.SafetensorError, KeyError, ValueError, TypeError, RuntimeError) as error:
        raise _unreadable(path, error, CheckpointError, remedy) from error
    if problem := _problem(description.pop("format", None), sound, found, owner):
        raise CheckpointError(f"{path} {problem}; {remedy}")
    return tensors, description


# --- JSON --------------------------------------------------------------------------------------------


def packed_json(content: Mapping[str, Any], *, owner: str = "") -> bytes:
    """A JSON object with the number of our format, its owner and its checksum."""
    plain = json.loads(json.dumps({"format": FORMAT, "owner": owner, **content}, default=str))
    return (json.dumps(plain | {"sha256": digest(plain)}, indent=1) + "\n").encode()


def load_json(path: Path | str, *, owner: str | None = None, remedy: str = MAKE_AGAIN) -> dict[str, Any]:
    """The content that `packed_json` was given for this owner (any owner, if None); anything else is refused."""
    try:
        with open_regular(path) as file:
            content = parse_json(file.read(LARGEST_JSON))
    except (OSError, ValueError) as error:
        raise _unreadable(path, error, RunFolderError, remedy) from error
    sound = content.pop("sha256", None) == digest(content)
    if problem := _problem(content.pop("format", None), sound, content.pop("owner", None), owner):
        raise RunFolderError(f"{path} {problem}; {remedy}")
    return content


def parse_json(text: str | bytes) -> dict[str, Any]:
    """A JSON object. Anything else, or deep nesting, is a ValueError."""
    try:
        content = json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(content, dict) or not _is_shallow(content, DEEPEST):
        raise ValueError("not a JSON object, or nested too deeply")
    return content


def _is_shallow(value: Any, levels: int) -> bool:
    """Whether a value is nested at most this deep."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels > 0 and all(_is_shallow(each, levels - 1) for each in inner)
