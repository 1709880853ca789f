"""Numbers and facts formatted for readers."""

import math
import re
from collections.abc import Mapping
from typing import Any

from markupsafe import Markup, escape

SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
ORDINARY = {code: chr(digit).replace("-", "−") for digit, code in SUPERSCRIPTS.items()}
SMALLEST_P = 1e-12  # smaller values are shown as "< 10⁻¹²"


def power_of_ten(exponent: int) -> str:
    """10ⁿ.

    >>> power_of_ten(-12), power_of_ten(0)
    ('10⁻¹²', '1')
    """
    return "1" if exponent == 0 else "10" + str(exponent).translate(SUPERSCRIPTS)


def number(value: float, digits: int = 3) -> str:
    """A number to a few significant digits, with powers of ten in place of exponents.

    >>> number(0.12345), number(1234567.0), number(3.2e-9), number(float("inf")), number(-2.0), number(1e-5)
    ('0.123', '1,234,567', '3.2 × 10⁻⁹', '∞', '−2', '10⁻⁵')
    >>> number(999.7), number(0.99999), number(120.0)
    ('1,000', '1', '120')
    """
    if not math.isfinite(value):
        return "undefined" if math.isnan(value) else "∞" if value > 0 else "−∞"
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1e7:
        decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
        text = f"{value:,.{decimals}f}"
        text = text.rstrip("0").rstrip(".") if "." in text else text
    else:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        mantissa = mantissa.rstrip("0").rstrip(".")
        power = power_of_ten(int(exponent))
        text = {"1": power, "-1": f"-{power}"}.get(mantissa, f"{mantissa} × {power}")
    return text.replace("-", "−")


def raised(text: str) -> Markup:
    """Text with superscript characters replaced by ordinary ones in <sup>, because few typefaces have them.

    >>> print(raised("3 × 10⁻⁹ < x"))
    3 × 10<sup>−9</sup> &lt; x
    """

    def ordinary(match: re.Match[str]) -> str:
        return f"<sup>{match[0].translate(ORDINARY)}</sup>"

    return Markup(re.sub(f"[{''.join(map(chr, ORDINARY))}]+", ordinary, str(escape(text))))


def p_value(p: float) -> str:
    """The p-value with its relation.

    >>> p_value(0.034), p_value(4e-30)
    ('p = 0.034', 'p < 10⁻¹²')
    """
    return f"p < {power_of_ten(round(math.log10(SMALLEST_P)))}" if p < SMALLEST_P else f"p = {number(p, 2)}"


def duration(seconds: float) -> str:
    """A time span at a sensible precision.

    >>> duration(0.04), duration(12.34), duration(125.0), duration(7380)
    ('0.04 s', '12.3 s', '2 min 5 s', '2 h 3 min')
    """
    if seconds < 60:
        return f"{number(seconds)} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def fact(value: Any) -> str:
    """Any value of a configuration, as text.

    >>> fact({"at": (0.15, 0.85), "decay": None}), fact([]), fact(True)
    ('at: 0.15, 0.85; decay: none', 'none', 'yes')
    """
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    if isinstance(value, float):
        return number(value, 4)
    if isinstance(value, Mapping):
        return "; ".join(f"{label(key)}: {fact(inner)}" for key, inner in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(map(fact, value)) or "none"
    return str(value)


def label(key: Any) -> str:
    """A key as a label: ``held_out_per_class`` reads better with spaces."""
    return str(key).replace("_", " ")
