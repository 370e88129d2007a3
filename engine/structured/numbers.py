"""Which numbers of a schema llguidance represents exactly, and how to write them so that it does.

llguidance stores every number as a float64, and writes its shortest digits, as repr does. It reads
a literal with a fraction in two steps that both round: it converts the digits to a float64, then
multiplies or divides by a power of ten. So some literals of 16 or 17 digits are read as the
adjacent float. For those, `written` finds other digits that are read as exactly the intended float.

A bound that cannot be represented exactly is replaced by the nearest one inside that can. So fewer
values may be generated than are allowed, but never more. Any other such number is refused.
"""

from __future__ import annotations

import json
import math
import re
from decimal import Decimal
from typing import NoReturn

MAX_EXACT_INTEGER = 2**53
"""A float64 represents every integer up to this one."""
LOWER_BOUNDS = ("minimum", "exclusiveMinimum")
BOUNDS = (*LOWER_BOUNDS, "maximum", "exclusiveMaximum")

_MAX_DIGITS = 2**64 - 1  # llguidance reads the digits of a literal as an unsigned integer
_LONG = re.compile(r"[0-9][0-9.]{15}|[0-9]e[-+][0-9]{2}")
"""Matches every number that may be read wrongly: one with more than 15 digits, or with an exponent
larger than 22. It also matches a few others.
"""
_LEAST = 1e-280
"""The least magnitude for which other digits are searched for."""


class Unheld(str):
    """A number, as written, that cannot be represented exactly."""

    __slots__ = ()


def read_integer(literal: str) -> int | Unheld:
    """For json.loads: parse an integer, if it can be represented exactly."""
    # More digits than that are not parsed: int() takes quadratic time.
    if len(literal) > 20 or abs(value := int(literal)) > MAX_EXACT_INTEGER:
        return Unheld(literal)
    return value


def read_fraction(literal: str) -> float | Unheld:
    """For json.loads: parse a number with a point or an exponent, if it can be represented
    exactly.
    """
    value = float(literal)
    if value == 0:
        is_held = not any(digit in "123456789" for digit in literal.lower().partition("e")[0])
    elif math.isinf(value):
        is_held = False
    elif value.is_integer():
        is_held = abs(value) <= MAX_EXACT_INTEGER and Decimal(literal) == Decimal(value)
    else:
        is_held = Decimal(literal) == Decimal(repr(value)) and _digits(value) is not None
    return value if is_held else Unheld(literal)


def no_constant(name: str) -> NoReturn:
    """For json.loads: refuse NaN and the infinities."""
    raise ValueError(f"{name} is no JSON number")


def narrowed(keyword: str, literal: Unheld) -> int | float | None:
    """Return the nearest bound inside this one that is represented exactly, or None if there is
    none.

    Args:
        keyword: one of BOUNDS.
        literal: the bound.
    """
    value, is_lower = float(literal), keyword in LOWER_BOUNDS
    if abs(value) > MAX_EXACT_INTEGER:
        if (value < 0) is not is_lower:
            return None  # it excludes all that is held
        return -MAX_EXACT_INTEGER if is_lower else MAX_EXACT_INTEGER
    if value == 0:
        return None
    exact = Decimal(literal)
    for _ in range(8):
        is_inside = Decimal(repr(value)) >= exact if is_lower else Decimal(repr(value)) <= exact
        if is_inside and abs(value) <= MAX_EXACT_INTEGER and _digits(value) is not None:
            return value
        value = math.nextafter(value, math.inf if is_lower else -math.inf)
    return None


def written(value: object) -> str:
    """Return JSON text in which llguidance reads every number as intended. All floats must come
    from `read_fraction` or `narrowed`.
    """
    text = json.dumps(value)
    return _written(value) if _LONG.search(text) else text


def _written(value: object) -> str:
    if isinstance(value, float):
        return _digits(value) or repr(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)}: {_written(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_written, value)) + "]"
    return json.dumps(value)


def _digits(value: float) -> str | None:
    """Return a literal that llguidance reads as this float. None if none was found, as for about
    one in a thousand floats of 17 digits.
    """
    shortest = repr(value)
    _, digits, exponent = Decimal(shortest).as_tuple()
    if not isinstance(exponent, int) or value == 0:
        return shortest
    size = abs(value)
    number = int("".join(map(str, digits)))
    if _as_read(number, exponent) == size:
        return shortest
    if size < _LEAST:
        return None
    sign = "-" if value < 0 else ""
    largest = math.floor(math.log10(_MAX_DIGITS)) - math.floor(math.log10(size))
    for places in range(largest - 4, largest + 2):
        near = size * 10.0**places if places >= 0 else size / 10.0**-places
        for step in (0, 1, -1, 2, -2):
            number = int(near + step * math.ulp(near))
            if 0 < number <= _MAX_DIGITS and _as_read(number, -places) == size:
                return f"{sign}{number}e{-places}"
    return None


def _as_read(number: int, exponent: int) -> float:
    """Return how llguidance reads these digits with this power of ten."""
    if abs(exponent) > 308:
        return math.nan
    power = float(10 ** abs(exponent))
    return float(number) * power if exponent >= 0 else float(number) / power
