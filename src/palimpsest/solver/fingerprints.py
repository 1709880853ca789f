"""Hashes of values, the same in every process."""

import functools
import hashlib
import inspect
from collections.abc import Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from palimpsest.errors import InvalidInputError


def digest(value: Any) -> bytes:
    """A hash of every bit of a value; equal values have equal hashes in every process.

    A collection hashes the hashes of its members. These have one length, so no two members run together.

    >>> digest([12, 1000]) == digest([1, 21000])
    False
    """
    kind, content = _described(value)
    return hashlib.sha256(f"{kind}:".encode() + content).digest()


def _described(value: Any) -> tuple[str, bytes]:
    """The kind of a value, and its content."""
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            raise InvalidInputError("an array of objects does not have a stable hash; give an array of numbers")
        return f"array {value.dtype.str} {value.shape}", value.tobytes()
    if isinstance(value, Tensor):  # repr would leave out the middle
        plain = value.detach().cpu().contiguous().flatten()
        return f"tensor {value.dtype} {tuple(value.shape)}", plain.view(torch.uint8).numpy().tobytes()
    if value is None or isinstance(value, str | bytes | bool | int | float | complex):
        return _name(type(value)), repr(value).encode()
    if isinstance(value, type):
        return "type", _name(value).encode()
    if isinstance(value, Mapping):
        return "mapping", b"".join(digest(part) for item in value.items() for part in item)
    if isinstance(value, Set):
        return "set", b"".join(sorted(map(digest, value)))
    if isinstance(value, Sequence):
        return "sequence", b"".join(map(digest, value))
    return _name(type(value)), _content(value)


def _content(value: Any) -> bytes:
    """An object by its attributes, or by its repr if it does not have any."""
    if is_dataclass(value):  # a subclass may hold more than the fields
        return digest({field.name: getattr(value, field.name) for field in fields(value)} | _attributes(value))
    if isinstance(value, functools.partial):
        return digest([value.func, value.args, value.keywords])
    if hasattr(value, "__dict__") and not inspect.isroutine(value):  # attributes do not tell functions apart
        return digest(_attributes(value))
    if type(value).__repr__ is object.__repr__ or " at 0x" in repr(value):
        raise InvalidInputError(f"a run with {value!r} cannot be resumed; hold its settings as attributes of an object,"
                                " or leave out the checkpoint")  # fmt: skip
    return repr(value).encode()


def _attributes(value: Any) -> dict[str, Any]:
    """The attributes of an object, without cached results."""
    held = getattr(value, "__dict__", {})
    return {k: v for k, v in held.items() if not isinstance(getattr(type(value), k, None), functools.cached_property)}


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
