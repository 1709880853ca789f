"""What JSON files may say: the fields of a dataclass, each of the type that it is declared with."""

from __future__ import annotations

from collections.abc import Mapping
from types import UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from palimpsest.solver.checks import is_count, is_number, require

Kind = TypeVar("Kind")


def built(kind: type[Kind], fields: Mapping[str, Any]) -> Kind:
    """The dataclass that JSON fields describe, each of the type that it is declared with.

    >>> from dataclasses import make_dataclass
    >>> built(make_dataclass("Plan", [("steps", int), ("at", tuple[float, ...])]), {"steps": 3, "at": [0.5, 1]})
    Plan(steps=3, at=(0.5, 1))
    """
    hints = get_type_hints(kind)
    require(fields.keys() == hints.keys(), f"other fields than {', '.join(hints)}")
    for name, hint in hints.items():
        require(_is_a(hint, fields[name]), f"{name} is of another type")
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()})


def _is_a(hint: Any, value: Any) -> bool:
    """Whether a JSON value has a type; a whole number is a float too, a truth value is no number."""
    inner = get_args(hint)
    if get_origin(hint) is UnionType:
        return any(_is_a(one, value) for one in inner)
    if get_origin(hint) is Literal:
        return isinstance(value, str) and value in inner
    if get_origin(hint) is tuple:
        return isinstance(value, list | tuple) and all(_is_a(inner[0], each) for each in value)
    simple = {int: is_count, float: is_number}
    return simple[hint](value) if hint in simple else isinstance(value, hint)
