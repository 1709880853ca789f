"""Sound files to spoil, and hand-made ones that mean harm."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import struct
import tarfile
import warnings
import zipfile
import zlib

import numpy as np
import safetensors.torch
import torch
from numpy.lib import format as npy
from PIL import Image

from palimpsest.datasets import cifar10

warnings.filterwarnings("ignore", message="torch.quantize_per_tensor")  # deprecated, and so rightly refused
RNG = np.random.default_rng(0)
CANARY = "PALIMPSEST_FUZZ_CANARY"  # what hostile pickles try to set in the environment


# --- images ----------------------------------------------------------------------------------------------


def idx(array: np.ndarray, *shape: int) -> bytes:
    shape = shape or array.shape
    return bytes((0, 0, 8, len(shape))) + struct.pack(f">{len(shape)}I", *shape) + array.tobytes()


PIXELS = RNG.integers(0, 256, (40, 4, 3), dtype=np.uint8)
DIGITS = np.arange(40, dtype=np.uint8) % 10
IDX_IMAGES, IDX_LABELS = idx(PIXELS), idx(DIGITS)
IDX_NASTY = [
    idx(PIXELS, 2**31, 28, 28),
    idx(PIXELS, 2**32 - 1, 2**32 - 1, 2**32 - 1),
    idx(PIXELS, 0, 4, 3),
    idx(PIXELS[:0], 40, 0, 3),
    b"",
]
GIGABYTES = gzip.compress(bytes(1 << 24)) * 256  # four of zeros, in as many parts as gzip likes
GZIP_NASTY = [gzip.compress(start) + GIGABYTES for start in (IDX_IMAGES, idx(PIXELS[:0], 2**26, 1, 1))]


def cifar_batch(n: int) -> bytes:
    records = RNG.integers(0, 256, (n, cifar10.RECORD), dtype=np.uint8)
    records[:, 0] = np.arange(n) % 10
    return records.tobytes()


def tar_gz(members: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz", compresslevel=1) as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return file.getvalue()


BATCH = cifar_batch(20)
ARCHIVE = tar_gz({name: cifar_batch(4) for name in cifar10.BATCHES})
PADDING = tarfile.TarInfo("padding")
PADDING.size = 1 << 32
ARCHIVE_NASTY = [gzip.compress(PADDING.tobuf()) + GIGABYTES, tar_gz({cifar10.BATCHES[0]: bytes(31 << 20)})]


def picture(kind: str, mode: str = "RGB", size: tuple[int, int] = (5, 4)) -> bytes:
    file = io.BytesIO()
    shape = (size[1], size[0], len(mode)) if len(mode) > 1 else size[::-1]
    Image.fromarray(RNG.integers(0, 256, shape, dtype=np.uint8)).save(file, kind)
    return file.getvalue()


def png(width: int, height: int, content: bytes, *, colour: int = 2, before: bytes = b"") -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + before + chunk(b"IDAT", content) + chunk(b"IEND", b"")


ZEROS = zlib.compress(bytes(1 << 25))
PNG_NASTY = [
    png(60000, 60000, ZEROS),
    png(13000, 13000, ZEROS),
    png(9000, 9000, ZEROS, colour=6),
    png(2**31 - 1, 2**31 - 1, b""),
    png(0, 0, b""),
    png(5, 4, ZEROS),
    png(5, 4, zlib.compress(bytes(64)), before=struct.pack(">I", 2**31 - 1) + b"zTXt"),
]


# --- arrays ----------------------------------------------------------------------------------------------


def npz(**arrays: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def lying_npz(shape: tuple[int, ...], descr: str = "<f8", content: bytes = b"") -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        with archive.open("images.npy", "w") as stream:
            npy.write_array_header_1_0(stream, {"descr": descr, "fortran_order": False, "shape": shape})
            stream.write(content)
        with archive.open("labels.npy", "w") as stream:
            np.save(stream, np.arange(4))
    return file.getvalue()


class Payload:
    """An object whose unpickling runs a function."""

    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


HARM = f"__import__('os').environ.update({CANARY}='1')"
PAYLOADS = [
    Payload(os.system, "true"),
    Payload(eval, HARM),
    Payload(exec, HARM),
    Payload(os.putenv, CANARY, "1"),
    Payload(bytearray, 1 << 33),
    Payload(getattr, "text", "upper"),
    Payload(__import__, "antigravity"),
    Payload(torch.load, "nothing"),
    Payload(torch.FloatTensor, 1 << 32),
    Payload(open, "/dev/null"),
]
NPZ = npz(images=RNG.integers(0, 256, (12, 4, 5), dtype=np.uint8), labels=np.arange(12) % 2)
NPZ_NASTY = [
    npz(images=np.zeros((4, 3, 3)), labels=np.array([Payload(eval, HARM)] * 4)),
    lying_npz((2**40, 28, 28)),
    lying_npz((-4, 3, 3)),
    lying_npz((5, 1 << 12, 1 << 12), "|u1", bytes(5 << 24)),
    lying_npz((4,) + (1,) * 60, "|u1", bytes(4)),
    lying_npz((0, 2**40, 3), "|u1"),
]


# --- weights and states --------------------------------------------------------------------------------------


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "0.weight": torch.randn(3, 4, generator=generator),
        "0.bias": torch.zeros(3).half(),
        "1.num_batches_tracked": torch.tensor(5),
    }


WEIGHTS = safetensors.torch.save(tensors())


def header(text: bytes, length: int | None = None) -> bytes:
    return (len(text) if length is None else length).to_bytes(8, "little") + text


SAFETENSORS_NASTY = [
    b"",
    header(b"", 2**60),
    header(b"", 2**64 - 1),
    header(b"{}", 100_000_000),
    header(b"[" * 100_000),
    header(b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
    header(b'{"a":{"dtype":"F32","shape":[0,4611686018427387904],"data_offsets":[0,0]}}'),
    header(b'{"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0]}}'),
    header(b"{" + b",".join([b'"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'] * 2) + b"}") + bytes(4),
    header(b'{"a":{"dtype":"F32","shape":[' + b",".join([b"1"] * 5000) + b'],"data_offsets":[0,4]}}') + bytes(4),
    header(b'{"__metadata__":{"palimpsest":"' + b"[" * 50_000 + b'"}}'),
    header(json.dumps({"__metadata__": {"palimpsest": '{"format": 3}'}}).encode()),
    header(b"{" + b",".join(b'"%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}' % i for i in range(20_000)) + b"}"),
]


def torch_archive(content: object) -> bytes:
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def with_pickle(program: bytes, **options) -> bytes:
    """Torch's archive of some tensors, its pickle replaced."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(TORCH)) as old, zipfile.ZipFile(file, "w", **options) as new:
        for name in old.namelist():
            new.writestr(name, program if name.endswith("data.pkl") else old.read(name))
    return file.getvalue()


TORCH = torch_archive({"epoch": 3, "state_dict": tensors()})
MOMENTS = {n: {"step": torch.tensor(3.0), "exp_avg": t.float()} for n, t in enumerate(list(tensors().values())[:2])}
CHECKPOINT = torch_archive(
    {"epoch": 3, "model": tensors(), "optimizer": {"state": MOMENTS, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}}
)
INDEX = json.dumps({"weight_map": dict.fromkeys(tensors(), "model-00001-of-00001.safetensors")}).encode()
INDEX_NASTY = [
    b"",
    b"{}",
    b"[" * 1_000_000,
    b'{"weight_map": ["a"]}',
    b'{"weight_map": {"a": "model.safetensors.index.json"}}',
    b'{"weight_map": {"a": "/dev/zero"}}',
    b'{"weight_map": {"a": "../../a.safetensors"}}',
    b'{"weight_map": {"a": "\\u0000.safetensors"}}',
    b'{"weight_map": {"a": {"b": [1]}}}',
]
HASHED = b"\x80\x02})" + b"q\x00h\x00\x86" * 100 + b"K\x01s."  # a key that takes 2¹⁰⁰ steps to hash
TORCH_NASTY = [
    b"",
    *(pickle.dumps(payload, 2) for payload in PAYLOADS),
    *(with_pickle(pickle.dumps(payload, protocol)) for payload in PAYLOADS for protocol in (0, 2, 4)),
    *(with_pickle(pickle.dumps({"w": payload}, 2)) for payload in PAYLOADS),
    with_pickle(HASHED),
    with_pickle(b"\x80\x02" + b"]" * 1_000_000 + b"."),
    with_pickle(b"\x80\x02" + b"(" * 3_000_000 + b"."),
    with_pickle(b"\x80\x02r\xff\xff\xff\x7f."),
    with_pickle(b"\x80\x02\x8b\xff\xff\xff\x7f."),
    with_pickle(b"\x80\x02" + b"0" * 100),
    with_pickle(bytes(1 << 26), compression=zipfile.ZIP_DEFLATED),
    torch_archive({"w": torch.zeros(1).expand(1 << 40)}),
    torch_archive({"w": torch.eye(3).to_sparse()}),
    torch_archive({"w": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)}),
    torch_archive({"w": torch.ones(3, device="meta")}),
    torch_archive({"w": torch.ones(3, dtype=torch.complex64)}),
    torch_archive({"w": [1, 2]}),
    torch_archive({3: torch.ones(1)}),
    torch_archive(torch.ones(3)),
    torch_archive(torch.nn.Linear(2, 2)),
    TORCH + TORCH,
    b"prefix" + TORCH,
]
JSON_NASTY = [
    b"",
    b"null",
    b"[]",
    b"{",
    b"\xff\xfe{}",
    b'{"format": 3}',
    b'{"format": "2"}',
    b'{"format": true}',
    b'{"format": 2}',
    b'{"format": 2, "format": 2}',
    b'{"format": ' + b"9" * 10_000 + b"}",
    b"[" * 1_000_000,
    b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    b'{"format": 2, "x": ' + b"[" * 500 + b"]" * 500 + b"}",
    b'{"format": 2, "x": "' + b"y" * 10_000_000 + b'"}',
]
