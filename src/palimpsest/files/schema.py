"""Values from JSON, TOML and the command line become dataclasses. An error names the field that is wrong.

The type hint of a field says what it may hold: a whole number is a count (0 ≤ n < 2⁵³), a number is finite, and
``Annotated[int, Range(least=1)]`` narrows either.
"""

import reprlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import lru_cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints, is_typeddict

from palimpsest.errors import InvalidInputError
from palimpsest.solver.checks import LARGEST, Range

Kind = TypeVar("Kind")
Positive = Annotated[int, Range(least=1)]
Share = Annotated[float, Range(least=0, most=1)]
LONGEST_NAME = 60  # characters of a name in a message
WORDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", Path: "a path"}


class FieldError(ValueError):
    """A field that is unknown, missing, or does not fit its type hint."""


def built(kind: type[Kind], values: Mapping[str, Any]) -> Kind:
    """The dataclass that plain values describe.

    >>> from dataclasses import make_dataclass
    >>> plan = make_dataclass("Plan", [("steps", Positive), ("at", tuple[float, ...])])
    >>> built(plan, {"steps": 3, "at": [0.5, 1]})
    Plan(steps=3, at=(0.5, 1))
    >>> built(plan, {"steps": "x", "at": [0.5, 1]})
    Traceback (most recent call last):
    palimpsest.files.schema.FieldError: steps is 'x'; give a whole number of at least 1
    """
    return _record(kind, values, "")


def without_unknown(kind: Any, values: Any) -> Any:
    """Plain values without the fields that a dataclass, or one inside it, does not have.

    >>> from dataclasses import make_dataclass
    >>> inner = make_dataclass("Inner", [("a", int)])
    >>> without_unknown(make_dataclass("Outer", [("each", list[inner])]), {"each": [{"a": 1, "b": 2}], "c": 3})
    {'each': [{'a': 1}]}
    """
    origin, inner = get_origin(kind), get_args(kind)
    if is_dataclass(kind) and isinstance(values, Mapping):
        hints: dict[str, Any] = _hints(kind)  # type: ignore[arg-type]
        return {name: without_unknown(hints[name], value) for name, value in values.items() if name in hints}
    if origin in (Union, UnionType):
        return without_unknown(next((each for each in inner if is_dataclass(each)), None), values)
    if origin in (list, tuple) and isinstance(values, list | tuple):
        return [without_unknown(inner[0], value) for value in values]
    return values


def check_options(options: Kind) -> Kind:
    """A command's options in the types of their hints. An error names an option as the command line does."""
    kind: Any = type(options)
    try:
        return kind(**{n: _value(h, getattr(options, n), f"--{n.replace('_', '-')}") for n, h in _hints(kind).items()})
    except FieldError as error:
        raise InvalidInputError(str(error)) from error


@lru_cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


@lru_cache
def _required(kind: Any) -> frozenset[str]:
    if is_typeddict(kind):
        return kind.__required_keys__
    return frozenset(f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING)


def _record(kind: Any, values: Any, path: str) -> Any:
    """A dataclass, or a dictionary of a known form."""
    if not isinstance(values, Mapping):
        raise FieldError(f"{path or 'the content'} is {reprlib.repr(values)}; give {_words(kind)}")
    hints, inside = _hints(kind), f"{path}." if path else ""
    for name in values:
        if name not in hints:
            raise FieldError(f"{inside}{name[:LONGEST_NAME]} is unknown; choose from {', '.join(hints)}")
    converted = {name: _value(hints[name], value, f"{inside}{name}") for name, value in values.items()}
    for name in hints:
        if name in _required(kind) and name not in values:
            raise FieldError(f"{inside}{name} is missing; add it")
    try:
        return kind(**converted)
    except (TypeError, ValueError) as error:  # what no single field shows
        raise FieldError(f"{path}: {error}" if path else str(error)) from error


def _value(hint: Any, value: Any, path: str) -> Any:
    origin, inner = get_origin(hint), get_args(hint)
    if is_dataclass(hint) or is_typeddict(hint):
        return _record(hint, value, path)
    if origin in (Union, UnionType):
        kinds = [kind for kind in inner if kind is not NoneType]
        if value is None and NoneType in inner:
            return None
        if len(kinds) == 1:
            return _value(kinds[0], value, path)
        for kind in kinds:
            with suppress(FieldError):
                return _value(kind, value, path)
    elif origin in (list, tuple) and isinstance(value, list | tuple) and len(value) == _length(hint, len(value)):
        places = [path if path.startswith("--") else f"{path}[{i}]" for i in range(len(value))]
        return origin(_value(inner[0], each, place) for each, place in zip(value, places, strict=True))
    elif origin is dict and isinstance(value, Mapping):
        keys = [_value(inner[0], key, f"a name in {path}") for key in value]
        return {key: _value(inner[1], value[key], f"{path}.{key[:LONGEST_NAME]}") for key in keys}
    elif _fits(hint, value):
        return hint(value) if hint is Path else hint[value] if _is_choice(hint) else value
    raise FieldError(f"{path} is {reprlib.repr(value)}; give {_words(hint)}")


def _length(hint: Any, usual: int) -> int:
    """That of a tuple with a fixed length; others have any."""
    inner = get_args(hint)
    return usual if get_origin(hint) is list or inner[-1] is ... else len(inner)


def _fits(hint: Any, value: Any) -> bool:
    """Whether a single value fits. A truth value is not a number."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _fits(inner[0], value) and all(value in limit for limit in inner[1:] if isinstance(limit, Range))
    if origin is Literal:
        return any(type(value) is type(choice) and value == choice for choice in inner)
    if hint in (int, float) and isinstance(value, int):
        return not isinstance(value, bool) and (0 if hint is int else -(1 << 53)) <= value < 1 << 53
    if hint is float:
        return isinstance(value, float) and abs(value) < LARGEST
    if _is_choice(hint):
        return isinstance(value, str) and value in hint.__members__
    return hint is Any or (origin is None and isinstance(value, str | Path if hint is Path else hint))


def _is_choice(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Enum)


def _words(hint: Any) -> str:
    """A type hint in words."""
    origin, inner = get_origin(hint), get_args(hint)
    if is_dataclass(hint) or is_typeddict(hint):
        return f"a table of {', '.join(_hints(hint))}"
    if origin is Annotated:
        return f"{WORDS[inner[0]]} {' '.join(str(limit) for limit in inner[1:] if isinstance(limit, Range))}"
    if origin is Literal or _is_choice(hint):
        *others, last = map(str, inner or hint.__members__)
        return f"{', '.join(others)} or {last}" if others else last
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(_words(kind) for kind in inner if kind is not NoneType))
    if origin in (list, tuple):
        return f"a list{f' of {length}' if (length := _length(hint, 0)) else ''}, each {_words(inner[0])}"
    return f"{WORDS[int]} of at least 0" if hint is int else WORDS.get(hint, "a table")
