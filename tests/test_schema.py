"""Plain values become dataclasses, and an error names the field that is wrong."""

from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

from palimpsest.errors import InvalidInputError
from palimpsest.files.schema import FieldError, Positive, Range, Share, built, check_options


class Colour(StrEnum):
    RED = "a sentence that may change"


@dataclass(frozen=True)
class Inner:
    steps: Positive
    share: Annotated[float, Range(above=0, most=1)] = 0.5


@dataclass(frozen=True)
class Outer:
    inner: Inner
    columns: dict[str, Inner] = field(default_factory=dict)
    at: float | tuple[Share, ...] = 1.0
    pair: tuple[float, float] = (0.0, 1.0)
    kind: Literal["a", "b"] | None = None
    colour: Colour = Colour.RED
    root: Path | None = None
    seed: int = 0
    on: bool = False
    rest: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        if self.seed == 13:
            raise ValueError("seed 13 is not allowed; choose another")


SOUND = {"inner": {"steps": 3}}


def test_values_are_converted():
    given = SOUND | {"columns": {"ours": {"steps": 1}}, "at": [0, 0.5], "colour": "RED", "root": "x", "kind": None}
    outer = built(Outer, given)
    assert outer == Outer(Inner(3), {"ours": Inner(1)}, at=(0, 0.5), root=Path("x"))
    assert outer.colour is Colour.RED


WRONG = {
    "mood": {"mood": 1},
    "inner.mood": {"inner": {"steps": 3, "mood": 1}},
    "inner.steps": {"inner": {}},
    "columns.ours.steps": {"columns": {"ours": {"steps": 0}}},
    "inner.share": {"inner": {"steps": 1, "share": 0.0}},
    "inner": {"inner": 3},
    "at": {"at": [2.0]},
    "pair": {"pair": [1.0]},
    "pair[1]": {"pair": [1.0, float("nan")]},
    "kind": {"kind": "c"},
    "colour": {"colour": "a sentence that may change"},
    "root": {"root": 3},
    "seed": {"seed": True},
    "seed ": {"seed": -1},
    "seed is": {"seed": 1 << 60},
    "seed 13": {"seed": 13},
    "on": {"on": 1},
    "rest": {"rest": []},
}


@pytest.mark.parametrize("path", WRONG)
def test_an_error_names_the_field(path):
    with pytest.raises(FieldError) as refused:
        built(Outer, SOUND | WRONG[path])
    assert str(refused.value).startswith(path)


def test_an_unknown_key_is_answered_with_the_known_ones():
    with pytest.raises(FieldError) as refused:
        built(Outer, SOUND | {"mood": 1})
    assert all(name in str(refused.value) for name in (known.name for known in fields(Outer)))


def test_hostile_values_give_short_messages():
    for values in ({"seed": "x" * 10**6}, {"x" * 10**6: 1}, {"rest": ["x"] * 10**6}):
        with pytest.raises(FieldError) as refused:
            built(Outer, SOUND | values)
        assert len(str(refused.value)) < 300


def test_options_are_converted_and_named_as_on_the_command_line():
    @dataclass
    class Options:
        per_class: Positive = 1
        hidden: tuple[Positive, ...] = ()
        root: Path | None = None

    assert check_options(Options(hidden=[3], root="x")) == Options(hidden=(3,), root=Path("x"))
    with pytest.raises(InvalidInputError, match="--per-class"):
        check_options(Options(per_class=0))
    with pytest.raises(InvalidInputError, match="--hidden is 0"):
        check_options(Options(hidden=[3, 0]))
