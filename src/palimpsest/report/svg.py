"""A plotting area in scalable vector graphics. The style sheet sets colours and fonts, so figures follow the theme."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup, escape

from palimpsest.report.words import number, power_of_ten

LEFT, RIGHT, TOP, BOTTOM = 46.0, 10.0, 28.0, 40.0  # margins, in units of the view box


def element(name: str, *children: str, **attributes: Any) -> Markup:
    """One element. Every text and attribute is escaped unless it is already markup.

    >>> print(element("text", "a < b", class_="note", text_anchor="end"))
    <text class="note" text-anchor="end">a &lt; b</text>
    """
    parts = [f' {key.rstrip("_").replace("_", "-")}="{escape(_short(value))}"' for key, value in attributes.items()]
    return Markup(f"<{name}{''.join(parts)}>{''.join(escape(child) for child in children)}</{name}>")


def _short(value: Any) -> Any:
    """Numbers rounded to tenths of a unit."""
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else value


@dataclass(frozen=True)
class Scale:
    """Maps values to places, linearly or by logarithm."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        low, high, value = (math.log(v) if self.logarithmic else v for v in (self.low, self.high, value))
        return self.start + (self.end - self.start) * (value - low) / (high - low)

    def ticks(self, about: int = 5) -> list[float]:
        """Round numbers inside the scale."""
        return self._decades(about) if self.logarithmic else self._round_numbers(about)

    def _round_numbers(self, about: int) -> list[float]:
        rough = (self.high - self.low) / about
        unit = 10.0 ** math.floor(math.log10(rough))
        step = next(m * unit for m in (1, 2, 5, 10) if m * unit >= rough)
        tolerance = 1e-9 * (self.high - self.low)
        first, last = math.ceil((self.low - tolerance) / step), math.floor((self.high + tolerance) / step)
        return [round(i * step, 12) for i in range(first, last + 1)]

    def _decades(self, about: int) -> list[float]:
        first, last = math.floor(math.log10(self.low)), math.floor(math.log10(self.high))
        every = max(1, math.ceil((last - first) / about))
        digits = (1, 2, 5) if last - first < 3 else (1,)
        ticks = [d * 10.0**e for e in range(first, last + 1, every) for d in digits]
        return [t for t in ticks if self.low <= t * (1 + 1e-9) and t <= self.high * (1 + 1e-9)]

    def name(self, tick: float) -> str:
        """A tick's label."""
        exponent = math.log10(tick) if self.logarithmic else 0.0
        decade = self.logarithmic and abs(exponent - round(exponent)) < 1e-9 and not -3 <= exponent <= 3
        return power_of_ten(round(exponent)) if decade else number(tick).replace(" × ", "·")  # there is little room


def limits(values: Iterable[float], *, margin: float = 0.05, least: float = 1e-9) -> tuple[float, float]:
    """A range slightly wider than the finite values, or than 0 to 1 if there are none.

    >>> limits([0.0, 1.0])
    (-0.05, 1.05)
    """
    finite = [v for v in values if math.isfinite(v)] or [0.0, 1.0]
    room = max(margin * (max(finite) - min(finite)), least)
    return min(finite) - room, max(finite) + room


def logarithmic_limits(values: Iterable[float]) -> tuple[float, float]:
    """The same for a logarithmic scale, from the positive values."""
    low, high = limits([math.log10(v) for v in values if 0 < v < math.inf], least=0.05)
    return 10 ** max(low, -300), 10 ** min(high, 300)


class Panel:
    """Axes to draw in. Places are values, and shapes are classes of the style sheet."""

    def __init__(
        self,
        width: float,
        height: float,
        *,
        x: tuple[float, float],
        y: tuple[float, float],
        logarithmic: bool = False,
        logarithmic_x: bool = False,
        left: float = LEFT,
        bottom: float = BOTTOM,
    ) -> None:
        self.width, self.height, self.left, self.bottom = width, height, left, bottom
        self.x = Scale(*x, left, width - RIGHT, logarithmic_x)
        self.y = Scale(*y, height - bottom, TOP, logarithmic)
        self.elements: list[Markup] = []

    def add(self, name: str, *children: str, **attributes: Any) -> None:
        self.elements.append(element(name, *children, **attributes))

    def x_axis(self, label: str, *, about: int = 5) -> None:
        floor = self.height - self.bottom
        self.add("line", class_="axis", x1=self.left, x2=self.width - RIGHT, y1=floor, y2=floor)
        for tick in self.x.ticks(about):
            self.add("line", class_="axis", x1=self.x(tick), x2=self.x(tick), y1=floor, y2=floor + 4)
            self.add("text", self.x.name(tick), class_="tick", x=self.x(tick), y=floor + 16, text_anchor="middle")
        middle = (self.left + self.width - RIGHT) / 2
        self.add("text", label, class_="label", x=middle, y=self.height - 4, text_anchor="middle")

    def y_axis(self, label: str, *, about: int = 5) -> None:
        """Grid lines and their values. The label is horizontal, above the axis."""
        for tick in self.y.ticks(about):
            y = self.y(tick)
            self.add("line", class_="grid", x1=self.left, x2=self.width - RIGHT, y1=y, y2=y)
            self.add("text", self.y.name(tick), class_="tick", x=self.left - 7, y=y + 4, text_anchor="end")
        self.add("text", label, class_="label", x=0.0, y=12.0)

    def line(self, points: Sequence[tuple[float, float]], class_: str) -> None:
        places = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)
        self.add("polyline", class_=class_, points=places)

    def vertical(self, x: float, class_: str) -> None:
        self.add("line", class_=class_, x1=self.x(x), x2=self.x(x), y1=TOP, y2=self.height - self.bottom)

    def horizontal(self, y: float, class_: str) -> None:
        self.add("line", class_=class_, x1=self.left, x2=self.width - RIGHT, y1=self.y(y), y2=self.y(y))

    def rectangle(
        self, x: tuple[float, float], y: tuple[float, float], class_: str, *, air: tuple[float, float]
    ) -> None:
        """A bar or a brick, with some air inside its sides."""
        (left, right), (upper, lower) = map(self.x, x), sorted(map(self.y, y))
        gap = min(air[1], 0.2 * (lower - upper))
        size = {"width": right - left - 2 * air[0], "height": lower - upper - 2 * gap}
        self.add("rect", class_=class_, x=left + air[0], y=upper + gap, **size)

    def dot(self, x: float, y: float, class_: str, *, radius: float = 3.5, shift: float = 0.0) -> None:
        self.add("circle", class_=class_, cx=self.x(x) + shift, cy=self.y(y), r=radius)

    def svg(self, description: str) -> Markup:
        """The figure, with its alternative text."""
        box = f"0 0 {self.width:g} {self.height:g}"
        return element("svg", *self.elements, viewBox=box, role="img", aria_label=description)
