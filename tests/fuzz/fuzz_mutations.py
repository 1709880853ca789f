"""Ways to spoil a file: blind ones, and ones that know the format well enough to get past its first checks."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import math
import re
import struct
import zipfile
import zlib
from collections.abc import Callable
from random import Random

import safetensors.torch

from palimpsest.files import storage

Mutation = Callable[[bytes, Random], bytes]
NUMBERS = (0, 1, 2, 7, *(2**n + i for n in (7, 8, 16, 31, 32, 63) for i in (-1, 0)), 2**40, 2**62, 2**64 - 1)
VALUES = (
    *(None, True, -1, 0, 1, 3, 1e308, 1e-320, -1e300, 2**70, float("nan"), float("inf"), "", "F32", "x" * 5000),
    *([], {}, [[]], {"": 0}, "\ud800", "<script>alert(1)</script>", "\u202e", [0, 2**40], "../../etc/passwd"),
)
DTYPES = "BOOL U8 I8 F8_E5M2 F8_E4M3 I16 U16 F16 BF16 I32 U32 F32 F64 I64 U64 C64 F4 ?".split()
ARRAY_TYPES = (*"<f8 |O |u1 >f4 <i8 |S0 <U5 |V8 <M8[s] <c16 <f2 <g f8,f8".split(), [("a", "<i4")])
PICKLED_NUMBERS = (b"K\x00", b"K\xff", b"J\xff\xff\xff\x7f", b"J\xff\xff\xff\xff", b"\x8a\x08" + b"\xff" * 8, b"N")
PICKLED_NAMES = (
    *("os system", "builtins eval", "builtins bytearray", "torch FloatTensor", "torch load", "collections defaultdict"),
    *(
        "torch LongStorage",
        "torch QInt8Storage",
        "torch Size",
        "collections OrderedDict",
        "torch._utils _rebuild_qtensor",
    ),
    *("torch._utils _rebuild_parameter", "torch._utils _rebuild_sparse_tensor"),
)
CHUNKS = (b"tEXt", b"zTXt", b"iCCP", b"PLTE", b"tRNS", b"IDAT", b"IEND", b"acTL", b"fdAT")


# --- blind -------------------------------------------------------------------------------------------


def flip(data: bytes, rng: Random) -> bytes:
    spoilt = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8, 64))):
        if spoilt:
            spoilt[rng.randrange(len(spoilt))] ^= 1 << rng.randrange(8)
    return bytes(spoilt)


def truncate(data: bytes, rng: Random) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def insert(data: bytes, rng: Random) -> bytes:
    i, n = rng.randrange(len(data) + 1), rng.choice((1, 2, 4, 16, 300))
    return data[:i] + (rng.randbytes(n) if rng.random() < 0.5 else bytes([rng.randrange(256)]) * n) + data[i:]


def splice(data: bytes, rng: Random) -> bytes:
    i, j, k = (rng.randrange(len(data) + 1) for _ in range(3))
    return data[:i] + data[min(j, k) : max(j, k)] + data[rng.randrange(len(data) + 1) :]


def overwrite(data: bytes, rng: Random) -> bytes:
    """A length, a count or an offset, perhaps, becomes a number at which programs break."""
    kind = rng.choice(("<B", "<H", ">H", "<I", ">I", "<Q", ">Q"))
    size = struct.calcsize(kind)
    if len(data) < size:
        return data
    i = rng.randrange(min(len(data) - size, rng.choice((8, 64, 1 << 30))) + 1)
    return data[:i] + struct.pack(kind, rng.choice(NUMBERS) % 256**size) + data[i + size :]


BLIND: tuple[Mutation, ...] = (flip, truncate, insert, splice, overwrite)


def blindly(data: bytes, rng: Random) -> bytes:
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        data = rng.choice(BLIND)(data, rng)
    return data


# --- JSON ----------------------------------------------------------------------------------------------


def json_text(data: bytes, rng: Random) -> bytes:
    """A value becomes another, a key is lost or doubled, or everything is wrapped a thousand times."""
    text = json.dumps(_edited(json.loads(data), rng))
    if rng.random() < 0.05:
        depth = rng.choice((30, 500, 100_000))
        text = '{"a":' * depth + text + "}" * depth
    if rng.random() < 0.1:
        text = text.replace("{", f'{{"format": {rng.choice((1, 2, 3))}, ', 1)
    return text.encode("utf-8", "surrogatepass")


def _edited(value: object, rng: Random) -> object:
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        if rng.random() < 0.15:
            return {k: v for k, v in value.items() if k != key}
        return value | {(key if rng.random() < 0.95 else f"{key}x"): _edited(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.8:
        i = rng.randrange(len(value))
        return [*value[:i], _edited(value[i], rng), *value[i + 1 :]] if rng.random() < 0.8 else value[:i]
    return rng.choice(VALUES)


# --- safetensors -----------------------------------------------------------------------------------------


def safetensors_header(data: bytes, rng: Random) -> bytes:
    """One entry of the header says something else, the rest of the file as before."""
    length = int.from_bytes(data[:8], "little")
    header, rest = json.loads(data[8 : 8 + length]), data[8 + length :]
    names = [name for name in header if name != "__metadata__"]
    choice = rng.randrange(7)
    if choice == 0 and "palimpsest" in header.get("__metadata__", {}):
        inner = json_text(header["__metadata__"]["palimpsest"].encode(), rng).decode("utf-8", "replace")
        header["__metadata__"]["palimpsest"] = inner
    elif choice == 1 or not names:
        header = _edited(header, rng)
    else:
        entry = header[name := rng.choice(names)]
        if choice == 2:
            entry["dtype"] = rng.choice(DTYPES)
        elif choice == 3:
            entry["shape"] = _reshaped(entry["shape"], rng)
        elif choice == 4:
            entry["data_offsets"] = [rng.choice((0, 8, *NUMBERS)) for _ in range(2)]
        elif choice == 5:
            header[rng.choice((*names, "extra", "x" * 5000, "moments/x", "a/b/c/d"))] = header.pop(name)
        else:
            del header[name]
    text = json.dumps(header).encode("utf-8", "surrogatepass")
    text += b" " * (-len(text) % 8)
    claimed = len(text) if rng.random() < 0.95 else rng.choice(NUMBERS)
    return claimed.to_bytes(8, "little") + text + rest


def _reshaped(shape: list[int], rng: Random) -> list[int]:
    """Other dimensions, now and then with as many numbers as before, so that only their meaning changes."""
    kept = [shape[::-1], [1, *shape], [*shape, 1], [math.prod(shape)], [1] * 40 + shape]
    return rng.choice(kept) if rng.random() < 0.6 else [rng.choice(NUMBERS) for _ in range(rng.randrange(4))]


# --- zip: npz and torch's archives -----------------------------------------------------------------------


def zip_member(inner: Mutation) -> Mutation:
    """The content of one member is spoilt, and the archive around it is sound."""

    def mutate(data: bytes, rng: Random) -> bytes:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
        target = rng.choice(list(members))
        members[target] = inner(members[target], rng)
        file, kind = io.BytesIO(), rng.choice((zipfile.ZIP_STORED,) * 3 + (zipfile.ZIP_DEFLATED,))
        with zipfile.ZipFile(file, "w", kind) as archive:
            for name, content in members.items():
                archive.writestr(name, content)
        return file.getvalue()

    return mutate


def zip_directory(data: bytes, rng: Random) -> bytes:
    """A number in the archive's directory, or in its end, is another."""
    places = [match.start() for match in re.finditer(b"PK\x01\x02|PK\x05\x06|PK\x06\x06", data)]
    if not places:
        return flip(data, rng)
    i, size = rng.choice(places) + rng.randrange(4, 46), rng.choice((2, 4))
    return data[:i] + (rng.choice(NUMBERS) % 256**size).to_bytes(size, "little") + data[i + size :]


def npy_header(data: bytes, rng: Random) -> bytes:
    """Shape, order or type of an array, in a header of the right length."""
    if not data.startswith(b"\x93NUMPY"):
        return blindly(data, rng)
    length = int.from_bytes(data[8:10], "little")
    shape = tuple(rng.choice((-1, *NUMBERS)) for _ in range(rng.randrange(5)))
    entries = {"descr": rng.choice(ARRAY_TYPES), "fortran_order": rng.choice((False, True, 3)), "shape": shape}
    old = eval(data[10 : 10 + length].decode("latin-1"))  # what numpy itself wrote for our seed
    text = repr(old | dict([rng.choice(list(entries.items()))]))
    if rng.random() < 0.1:
        text = rng.choice(("(" * 3000, "{'a': " * 200, "__import__('os').system('true')", text * 50, "\x00"))
    text = text[:65000] + "\n"
    start = data[:6] + bytes((rng.choice((1, 1, 1, 2, 3, 9)), 0)) + struct.pack("<H", len(text))
    return start + text.encode() + data[10 + length :]


def pickle_number(data: bytes, rng: Random) -> bytes:
    """A small number in a pickle (a size, a stride, an offset, a place in the memo) is another."""
    places = [match.start() for match in re.finditer(b"[KMJhq]", data)]
    if not places:
        return flip(data, rng)
    i = rng.choice(places)
    return data[:i] + rng.choice(PICKLED_NUMBERS) + data[i + 2 :]


def pickle_name(data: bytes, rng: Random) -> bytes:
    """A name that a pickle asks for is a dangerous or an expensive one."""
    places = [match.span() for match in re.finditer(rb"c[a-z._]+\n[A-Za-z0-9_]+\n", data)]
    if not places:
        return flip(data, rng)
    i, j = rng.choice(places)
    return data[:i] + f"c{rng.choice(PICKLED_NAMES)}\n".replace(" ", "\n").encode() + data[j:]


# --- gzip, idx, PNG ------------------------------------------------------------------------------------------


def inside_gzip(inner: Mutation) -> Mutation:
    return lambda data, rng: gzip.compress(inner(gzip.decompress(data), rng), 1)


def idx_dimensions(data: bytes, rng: Random) -> bytes:
    i = 4 * rng.randrange(1, 4)
    return data[:i] + struct.pack(">I", rng.choice(NUMBERS) % 2**32) + data[i + 4 :]


def png_chunk(data: bytes, rng: Random) -> bytes:
    """One chunk is changed, doubled, renamed, lost or another size, with its checksum made right again."""
    chunks, i = [], 8
    with contextlib.suppress(struct.error):
        while i < len(data):
            (length,) = struct.unpack(">I", data[i : i + 4])
            chunks.append((data[i + 4 : i + 8], data[i + 8 : i + 8 + length]))
            i += length + 12
    k = rng.randrange(len(chunks))
    kind, content = chunks[k]
    if kind == b"IHDR" and rng.random() < 0.7:
        where = rng.choice((0, 4))
        size = rng.choice((*NUMBERS, 5000, 60000)) % 2**32
        content = content[:where] + struct.pack(">I", size) + content[where + 4 :]
    elif kind == b"IDAT" and rng.random() < 0.5:
        content = zlib.compress(blindly(zlib.decompress(content), rng))
    else:
        content = blindly(content, rng)
    new = (rng.choice((*CHUNKS, kind, kind, kind)), content)
    chunks[k : k + 1] = rng.choice(([new], [new], [new, chunks[k]], [chunks[k], new], []))
    return data[:8] + b"".join(
        struct.pack(">I", len(c)) + t + c + struct.pack(">I", zlib.crc32(t + c)) for t, c in chunks
    )


# --- our own files -----------------------------------------------------------------------------------------


def sealed(inner: Mutation) -> Mutation:
    """The content is spoilt under a right checksum, wherever it can still be read: what lies behind is tried too."""

    def mutate(data: bytes, rng: Random) -> bytes:
        spoilt = inner(data, rng)
        try:
            return _sealed_json(spoilt) if spoilt.startswith(b"{") else _sealed_tensors(spoilt)
        except Exception:  # no longer readable
            return spoilt

    return mutate


def _sealed_json(data: bytes) -> bytes:
    content = {name: value for name, value in json.loads(data).items() if name != "sha256"}
    return json.dumps(content | {"sha256": storage.digest(content)}).encode()


def _sealed_tensors(data: bytes) -> bytes:
    length = int.from_bytes(data[:8], "little")
    metadata = json.loads(data[8 : 8 + length])["__metadata__"]
    tensors = safetensors.torch.load(data)
    right = storage._tensor_digest(tensors, metadata["palimpsest"], metadata["owner"])
    return data.replace(metadata["sha256"].encode(), right.encode(), 1)
