"""The numbers of a schema: which llguidance keeps, and how they are written so that it does.

llguidance stores every number as a float64, and writes the shortest digits that give it, as repr
does. It reads a literal of a fraction in two steps that both round: its digits as a float64, then
times or by a power of ten. So of 16 and 17 digits some come out as the float beside the right one.
`written` finds other digits for those, which are read as exactly the float that is meant.

A bound that is not held exactly is replaced by the nearest one inside that is: what is generated
may be less than what is allowed, never more. Any other number that is not held is refused.
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
"""Of more digits, or with a larger exponent than 22, a number may be read wrong."""
_LEAST = 1e-280
"""Below it no other digits are looked for."""


class Unheld(str):
    """A number, as it is written, that is not held exactly."""

    __slots__ = ()


def read_integer(literal: str) -> int | Unheld:
    """For json.loads: an integer, if it is held."""
    # More digits than that are not parsed: int() takes quadratic time.
    if len(literal) > 20 or abs(value := int(literal)) > MAX_EXACT_INTEGER:
        return Unheld(literal)
    return value


def read_fraction(literal: str) -> float | Unheld:
    """For json.loads: a number with a point or an exponent, if it is held."""
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
    """For json.loads: refuses NaN and the infinities."""
    raise ValueError(f"{name} is no JSON number")


def narrowed(keyword: str, literal: Unheld) -> int | float | None:
    """The nearest bound inside this one that is held; None: there is none.

    Args:
        keyword: one of BOUNDS.
        literal: its number.
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
    """JSON text in which llguidance reads every number as the one that is meant. All floats are
    ones that `read_fraction` or `narrowed` returned.
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
    """A literal that llguidance reads as this float; None: none was found, as for about one in a
    thousand of 17 digits.
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
    """What llguidance reads of these digits with this power of ten."""
    if abs(exponent) > 308:
        return math.nan
    power = float(10 ** abs(exponent))
    return float(number) * power if exponent >= 0 else float(number) / power
