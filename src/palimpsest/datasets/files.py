"""Read files that may be missing, damaged or hostile, with memory in proportion to their real content."""

import contextlib
import gzip
import lzma
import math
import tarfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from palimpsest.errors import DataError
from palimpsest.files.storage import open_regular

IDX_LIMIT = 1 << 26  # 64 MiB; the largest MNIST file has 45 MiB
ARCHIVE_LIMIT = 1 << 29  # 512 MiB, unpacked; the official CIFAR-10 archive has 176 MiB
CHUNK = 1 << 20


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn every failure of reading into a `DataError`."""
    try:
        yield
    except (zlib.error, lzma.LZMAError, gzip.BadGzipFile, tarfile.TarError, EOFError) as error:
        raise DataError(f"{path} is damaged ({error}); download it again") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error}); check the file") from error


def find(folders: Iterable[Path], *file_names: str) -> Path | None:
    """The first of the named files that one of the folders contains."""
    for path in (folder / name for folder in folders for name in file_names):
        with reading(path):
            if path.is_file():
                return path
    return None


class Readable(Protocol):
    """A file, a gzipped file, or a file inside an archive."""

    def read(self, size: int, /) -> bytes: ...


def read_up_to(stream: Readable, limit: int) -> bytes:
    """At most `limit` bytes, piece by piece, so that memory follows the content and not the announced size."""
    pieces = []
    while limit > 0 and (piece := stream.read(min(CHUNK, limit))):
        pieces.append(piece)
        limit -= len(piece)
    return b"".join(pieces)


def read_announced(stream: Readable, size: int, *, limit: int, what: str) -> bytes:
    """The bytes that a header announces, refused unless the content has exactly this size."""
    if not 0 <= size <= limit:
        raise DataError(f"{what} announces {size} bytes; use a file with at most {limit}")
    content = read_up_to(stream, size + 1)
    if len(content) != size:
        has = "more" if len(content) > size else f"only {len(content)}"
        raise DataError(f"{what} announces {size} bytes but has {has}; write or download the file again")
    return content


def read_bytes(path: Path, *, limit: int) -> bytes:
    """A whole file, refused if it is longer than `limit`."""
    with reading(path), open_regular(path, follow=True) as stream:
        content = read_up_to(stream, limit + 1)
    if len(content) > limit:
        raise DataError(f"{path} is longer than the {limit} bytes of its format; use the official file")
    return content


def read_idx(path: Path, *, dimensions: int) -> np.ndarray:
    """An array of bytes in the idx format, gzipped or not.

    The header is four bytes (0, 0, 8 for unsigned bytes, number of dimensions), then each dimension as a big-endian
    32-bit integer.
    """
    zipped = path.suffix == ".gz"
    with reading(path), open_regular(path, follow=True) as file, gzip.open(file) if zipped else file as stream:
        header = stream.read(4 + 4 * dimensions)
        if len(header) < 4 + 4 * dimensions or header[:4] != bytes((0, 0, 8, dimensions)):
            raise DataError(f"{path} is not an idx file of bytes in {dimensions} dimensions; use the official file")
        shape = tuple(int(n) for n in np.frombuffer(header, ">u4", offset=4))
        content = read_announced(stream, math.prod(shape), limit=IDX_LIMIT, what=str(path))
    return np.frombuffer(content, np.uint8).reshape(shape)


def read_members(path: Path, members: Sequence[str], *, limit: int) -> dict[str, bytes]:
    """Some files inside a gzipped tar archive, in order, none longer than `limit`."""
    contents: dict[str, bytes] = {}
    with reading(path), open_regular(path, follow=True) as file, tarfile.open(fileobj=file, mode="r:gz") as archive:
        for member in archive:
            if member.offset_data + member.size > ARCHIVE_LIMIT:
                raise DataError(f"{path} is larger than the official archive when unpacked; use the official archive")
            if member.name not in members:
                continue
            stream = archive.extractfile(member) if member.isreg() else None
            if member.size > limit or stream is None:
                raise DataError(f"{path} has an unexpected {member.name}; use the official archive")
            contents[member.name] = read_up_to(stream, limit)
            if len(contents) == len(members):
                break
    if missing := [name for name in members if name not in contents]:
        raise DataError(f"{path} does not contain {missing[0]}; use the official archive")
    return {name: contents[name] for name in members}


def download(md5: Mapping[str, str], *, mirrors: Sequence[str]) -> list[Path]:
    """Files from the first mirror that has them intact, kept in the cache. A failure does not leave files there."""
    return [_download(name, checksum, mirrors) for name, checksum in md5.items()]


def _download(name: str, md5: str, mirrors: Sequence[str]) -> Path:
    import pooch

    reason: Exception | None = None
    for mirror in mirrors:
        try:
            cache = pooch.os_cache("palimpsest")
            return Path(pooch.retrieve(mirror + name, known_hash=f"md5:{md5}", fname=name, path=cache))
        except (OSError, ValueError) as error:  # an OSError without connection, a ValueError for another checksum
            reason = error
    why = "its checksum is wrong" if isinstance(reason, ValueError) else f"no mirror sent it: {type(reason).__name__}"
    raise DataError(f"cannot download {name} ({why}); try again, or put the file into a data folder") from reason
