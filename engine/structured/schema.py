r"""Prepares a JSON Schema for llguidance: reads it without changing a number, checks it, and
completes it.

    text ─▶ values (numbers as they are written) ─▶ checks, each with a location ─▶ text

llguidance stores every number of a schema as a float64 and generates that: `{"const":
1234567890123456789}` would silently give another number. So a number that a float64 cannot
represent exactly is refused here, with its location, or narrowed if it is a bound (`numbers`).
Keywords that llguidance does not support are rewritten (`keywords`). It deviates from JSON Schema
in four more cases, which are refused or corrected here:

- Dates: `format` checks months, but neither leap years nor when a minute may have a 60th second. A
  pattern that checks these is added.
- An open interval that starts at an integer and ends before the next one: the integer itself would
  be allowed. Refused.
- Repeated names: an object could reach `minProperties` by repeating one name. Refused if it would
  have to count names that are not required.
- Escapes such as \u0061, which could make a declared name look like another one, are never
  generated (`JSON_ESCAPES`); a constant that needs one is refused.

The text has at most MAX_GRAMMAR_BYTES. Nesting is bounded before anything is traversed, and no
traversal of unchecked input is recursive.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, NamedTuple, NoReturn, TypeGuard

from engine.contract.errors import InvalidRequestError
from engine.contract.sampling_params import MAX_GRAMMAR_BYTES
from engine.structured.keywords import KeywordError, Rewriter, add_pattern, check_wrapper
from engine.structured.numbers import (
    BOUNDS,
    MAX_EXACT_INTEGER,
    Unheld,
    narrowed,
    no_constant,
    read_fraction,
    read_integer,
    written,
)

MAX_PATTERN_BYTES = 16 * 1024
"""The most bytes of all patterns in a schema together."""
MAX_SCHEMA_DEPTH = 96
"""The deepest nesting of arrays and objects in a schema's text."""
MAX_MULTIPLE_OF = 100_000
"""The largest product of a schema's different multipleOf values, each without its decimal point."""
MAX_DECIMAL_PLACES = 9
"""The most decimal places of a multipleOf value."""
MAX_OPTIONAL_PROPERTIES = 256
"""The most optional properties of one object: each is one more way to continue at the same
position. A few more would work with small vocabularies, but fail in the middle of an output with
large ones.
"""
MAX_COUNT = 2**31 - 1
"""The cap on maximum lengths and numbers of items and properties; no output is as long as this."""
MAX_WORKED_OUT_BYTES = 8 * MAX_GRAMMAR_BYTES
"""The largest size of a schema whose choices are multiplied out. For 16 times as much, llguidance
took 400 MB and six seconds.
"""
JSON_ESCAPES = 'nrbtf\\"'
"""The characters that may follow a backslash in generated JSON, so that each character has one
spelling.
"""

_MAX_LCM = 2**32 - 1  # llguidance multiplies multipleOf values as 32-bit integers
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_COMBINING = ("allOf", "anyOf", "oneOf", "$ref")
_CONSTANTS = frozenset(["const", "enum"])
_DATA = _CONSTANTS | {"default", "examples"}
"""Keywords with plain values instead of schemas."""
_NAMES = frozenset(["properties", "patternProperties", "$defs", "definitions", "dependentSchemas"])
"""Keywords with an object that maps names to schemas."""

_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = (
    f"^(?:{_LEAP_YEAR}-02-29|[0-9]{{4}}-02-(?:[01][0-9]|2[0-8])|[0-9]{{4}}-(?:0[13-9]|1[0-2])-..)"
)
_CALENDAR = {
    "date": _DATE,
    "date-time": f"{_DATE}.[0-9]{{2}}:[0-9]{{2}}:[0-5]",
    "time": "^[0-9]{2}:[0-9]{2}:[0-5]",
}
"""For each format, a pattern that its strings must match in addition to llguidance's own."""


class _Place(NamedTuple):
    """A value within a schema.

    Attributes:
        value: the value.
        depth: its depth; 1 for the root.
        above: the value that contains it; None for the root.
        key: its name or index there.
        is_data, is_names: whether it is (part of) a plain value such as a constant, or an object
            that maps names to schemas. If neither, it is a schema, or may be referred to as one.
    """

    value: object
    depth: int
    above: _Place | None = None
    key: str | int = "$"
    is_data: bool = False
    is_names: bool = False

    @property
    def is_constant(self) -> bool:
        """Whether it is data that may be generated, rather than a default or an example."""
        place: _Place | None = self
        while place is not None and (place.above is None or place.above.is_data):
            place = place.above
        return place is not None and place.key in _CONSTANTS

    def parts(self) -> Iterator[_Place]:
        """Yield the values directly within it."""
        value, depth = self.value, self.depth + 1
        if isinstance(value, list):
            for index, part in enumerate(value):
                yield _Place(part, depth, self, index, self.is_data)
        elif isinstance(value, dict):
            is_schema = not (self.is_data or self.is_names)
            for key, part in value.items():
                yield _Place(
                    part,
                    depth,
                    self,
                    key,
                    self.is_data or (is_schema and key in _DATA),
                    is_schema and key in _NAMES,
                )

    def __str__(self) -> str:
        """The path, such as $.properties.age.maximum; the middle of a long path is left out."""
        keys: list[str] = []
        place: _Place | None = self
        while place is not None:
            keys.append(f"[{place.key}]" if isinstance(place.key, int) else f".{place.key}")
            place = place.above
        path = "".join(reversed(keys)).removeprefix(".")
        return path if len(path) <= 80 else f"{path[:30]}…{path[-49:]}"


class SchemaError(Exception):
    """A schema cannot be followed. The text says why, without naming the subject."""


def prepare_schema(text: str, options: dict[str, object]) -> tuple[str, tuple[str, ...]]:
    """Return the schema for llguidance, and notes on what is enforced differently.

    Args:
        text: a JSON Schema, at most MAX_GRAMMAR_BYTES.
        options: llguidance's options, which come first.

    Raises:
        InvalidRequestError: it is not JSON, is too large or too deep to be compiled safely, or has
            something that would not be followed exactly.
    """
    try:
        checks = SchemaChecks()
        schema = checks.add(read_json(text))
        checks.finish()
    except SchemaError as error:
        raise InvalidRequestError("grammar.json_schema", str(error)) from error
    return schema_text(schema, options), checks.notes


def schema_text(schema: dict[str, Any], options: dict[str, object]) -> str:
    """Return a checked schema's text for llguidance, with llguidance's options."""
    return written({"x-guidance": options, **schema})


def read_json(text: str) -> Any:
    """Parse a text that holds schemas. A number that cannot be represented exactly is kept as
    written, so that a check can refuse it and give its location.

    Raises:
        SchemaError: it is not JSON, or nested too deeply.
    """
    try:
        return json.loads(
            text, parse_float=read_fraction, parse_int=read_integer, parse_constant=no_constant
        )
    except RecursionError:
        _refuse(f"is nested deeper than {MAX_SCHEMA_DEPTH} levels")
    except ValueError as error:
        _refuse(f"is not valid JSON: {error}")


class SchemaChecks:
    """Checks the schemas of one grammar, individually and together."""

    def __init__(self) -> None:
        self._totals = _Totals()
        self._rewriter = Rewriter()

    @property
    def notes(self) -> tuple[str, ...]:
        """Descriptions of what is enforced differently from what the schemas say."""
        return self._rewriter.notes

    def add(self, schema: object) -> dict[str, Any]:
        """Check and complete a schema, and return it as an object.

        Raises:
            SchemaError: it is not a schema, is too deep to be compiled safely, or has something
                that would not be followed exactly.
        """
        if isinstance(schema, bool):
            return {} if schema else {"enum": []}
        if not isinstance(schema, dict):
            _refuse("is neither a JSON object nor true or false")
        if "x-guidance" in schema:
            _refuse("has the keyword x-guidance, which is not taken; leave it out")
        try:
            check_wrapper(schema)
        except KeywordError as error:
            raise SchemaError(str(error)) from error
        check = _Check(self._totals, self._rewriter, schema)
        for place in _walk(schema):
            if place.depth > MAX_SCHEMA_DEPTH:
                _refuse(f"is nested deeper than {MAX_SCHEMA_DEPTH} levels")
            check.add(place)
        check.finish()
        if _worked_out(schema, {})[0] > MAX_WORKED_OUT_BYTES:
            _refuse(
                "is too large once its choices are worked out: what stands beside anyOf, oneOf, "
                "dependencies and the like is copied into each alternative; make it smaller, nest "
                "fewer of them, or refer to large parts with $ref"
            )
        return schema

    def finish(self) -> None:
        """Check the limits for all schemas together.

        Raises:
            SchemaError: a limit is exceeded.
        """
        self._totals.check()


def _walk(schema: dict[str, Any]) -> Iterator[_Place]:
    stack = [_Place(schema, 1)]
    seen: dict[int, object] = {}
    while stack:
        place = stack.pop()
        if isinstance(place.value, dict | list):
            if id(place.value) in seen:
                continue  # one that rewriting has put at several places
            seen[id(place.value)] = place.value
        yield place
        stack += place.parts()


_Size = tuple[int, int]
"""The expanded size of a schema: its approximate number of bytes, and its number of alternatives.
"""


def _worked_out(value: object, known: dict[int, _Size]) -> _Size:
    """Return the size of a checked schema once llguidance has expanded it: siblings of a choice are
    copied into each of its branches, and sibling choices are multiplied.

    Args:
        value: a schema, or a value within one.
        known: the sizes computed so far, by identity, because some values occur in several
            locations.
    """
    if not isinstance(value, dict | list):
        return (len(value) if isinstance(value, str) else 8), 1
    if (found := known.get(id(value))) is not None:
        return found
    own, alternatives = 0, 1
    choices: list[_Size] = []
    for name, part in value.items() if isinstance(value, dict) else enumerate(value):
        is_choice = name in ("anyOf", "oneOf", "allOf") and isinstance(part, list)
        sizes = [_worked_out(one, known) for one in part] if is_choice else []
        if name == "allOf":
            choices += sizes
        elif is_choice:
            choices.append((sum(size for size, _ in sizes), sum(number for _, number in sizes)))
        else:
            own += len(name) + 4 if isinstance(name, str) else 4
            own += _worked_out(part, known)[0]
    for _, number in choices:
        alternatives *= max(1, number)
    size = alternatives * own
    size += sum(alternatives // max(1, number) * bytes_ for bytes_, number in choices)
    known[id(value)] = size, alternatives
    return size, alternatives


_Starts = dict[str, dict[float, _Place]]
"""For "minimum" and "maximum": the excluded integers, and their locations."""
_Ends = dict[str, set[float]]
"""For "minimum" and "maximum": all their values."""


class _Totals:
    """What counts across all schemas of a grammar."""

    def __init__(self) -> None:
        self.patterns: set[str] = set()
        self.multiples: set[Decimal] = set()

    def check(self) -> None:
        pattern_bytes = sum(len(pattern.encode("utf-8", "replace")) for pattern in self.patterns)
        if pattern_bytes > MAX_PATTERN_BYTES:
            _refuse(
                f"has {pattern_bytes} bytes of patterns; at most {MAX_PATTERN_BYTES} are compiled"
            )
        _check_multiples(self.multiples)


class _Check:
    """Checks a schema, first value by value, then as a whole."""

    def __init__(self, totals: _Totals, rewriter: Rewriter, root: dict[str, Any]) -> None:
        self._totals = totals
        self._rewriter = rewriter
        self._root = root
        self._combines = False
        self._exclusive: _Starts = {"minimum": {}, "maximum": {}}
        self._ends: _Ends = {"minimum": set(), "maximum": set()}

    def add(self, place: _Place) -> None:
        value = place.value
        if isinstance(value, Unheld):
            if place.is_data and not place.is_constant:
                return  # a default or an example, which is never written
            _refuse_number(place, value)
        if place.is_data:
            if isinstance(value, str) and place.is_constant:
                _check_constant(place, value)
        elif isinstance(value, dict) and not place.is_names:
            self._add_schema(place, value)

    def finish(self) -> None:
        """Check what depends on the whole schema."""
        if self._combines:
            _check_intervals(self._exclusive, self._ends)

    def _add_schema(self, place: _Place, schema: dict[str, Any]) -> None:
        self._narrow(place, schema)
        try:
            self._rewriter.rewrite(schema, self._root, place)
        except KeywordError as error:
            raise SchemaError(f"{error.what}, in {place}; {error.remedy}") from error
        if isinstance(pattern := schema.get("pattern"), str):
            self._totals.patterns.add(pattern)
        if isinstance(patterns := schema.get("patternProperties"), dict):
            self._totals.patterns |= patterns.keys()
        if _is_number(multiple := schema.get("multipleOf")):
            self._totals.multiples.add(abs(Decimal(repr(multiple))))
        has_bounds = any(key in schema for key in BOUNDS)
        all_of = schema.get("allOf")
        self._combines |= isinstance(all_of, list) and len(all_of) > 1
        self._combines |= has_bounds and any(key in schema for key in _COMBINING)
        if has_bounds:
            self._add_bounds(place, schema)
        _check_properties(place, schema)
        calendar = schema.get("format")
        if isinstance(calendar, str) and calendar in _CALENDAR:
            add_pattern(schema, _CALENDAR[calendar])

    def _narrow(self, place: _Place, schema: dict[str, Any]) -> None:
        """Replace numbers that cannot be represented exactly by ones that can."""
        for keyword in BOUNDS:
            if isinstance(literal := schema.get(keyword), Unheld):
                if (bound := narrowed(keyword, literal)) is None:
                    _refuse_number(_Place(literal, 0, place, keyword), literal)
                schema[keyword] = bound
                self._rewriter.note(
                    f"{keyword} {literal}",
                    f"the {keyword} {_short(literal)} in {place} is held as {bound}",
                )
        for keyword in _COUNTS:
            count = schema.get(keyword)
            size = float(count) if isinstance(count, Unheld) else count
            if keyword.startswith("max") and _is_number(size) and size > MAX_COUNT:
                schema[keyword] = MAX_COUNT
            elif isinstance(count, Unheld):
                _refuse_number(_Place(count, 0, place, keyword), count)
            elif isinstance(count, float) and count.is_integer():
                schema[keyword] = int(count)

    def _add_bounds(self, place: _Place, schema: dict[str, Any]) -> None:
        exclusive: _Starts = {"minimum": {}, "maximum": {}}
        ends: _Ends = {"minimum": set(), "maximum": set()}
        for name, long in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
            bound, open_bound = schema.get(name), schema.get(long)
            if open_bound is True:  # as in draft 4
                open_bound = bound
            for end in (bound, open_bound):
                if _is_number(end):
                    ends[name].add(end)
            if _is_number(open_bound) and open_bound == int(open_bound):
                exclusive[name][open_bound] = place
        _check_intervals(exclusive, ends)
        for name in ("minimum", "maximum"):
            self._exclusive[name].update(exclusive[name])
            self._ends[name] |= ends[name]


def _check_constant(place: _Place, value: str) -> None:
    """Refuse a constant with a character that needs an escape such as \\u0001."""
    for character in value:
        if (character < " " and character not in "\n\r\b\t\f") or character == "\x7f":
            _refuse(
                f"has the control character U+{ord(character):04X} in {place}, which is never "
                "written; leave it out"
            )


def _check_properties(place: _Place, schema: dict[str, Any]) -> None:
    required = schema.get("required")
    names = {name for name in required if isinstance(name, str)} if _is_list(required) else set()
    properties = schema.get("properties")
    if isinstance(properties, dict):
        num_optional = sum(name not in names for name in properties)
        if num_optional > MAX_OPTIONAL_PROPERTIES:
            _refuse(
                f"has {num_optional} optional properties in {place}; an object can be followed "
                f"with at most {MAX_OPTIONAL_PROPERTIES}: put properties into `required`, or "
                "into objects of their own"
            )
    least = schema.get("minProperties")
    if _is_number(least) and least > len(names) + 1:
        _refuse(
            f"has a minProperties of {least} in {place}, where {len(names)} are required; names "
            "may be repeated, so that others cannot be counted: list the names in `required`, or "
            f"lower it to {len(names) + 1}"
        )


def _check_intervals(exclusive: _Starts, ends: _Ends) -> None:
    """Refuse intervals that are open at an integer and end before the next one. (From the integer
    towards zero they are allowed, because llguidance follows these exactly.)
    """
    for name, other, nearest in (
        ("minimum", "maximum", math.floor),
        ("maximum", "minimum", math.ceil),
    ):
        for end in ends[other]:
            start = nearest(end)
            is_outward = start >= 0 if name == "minimum" else start <= 0
            if start != end and is_outward and start in exclusive[name]:
                _refuse(
                    f"has numbers between {start}, which is excluded, and {end:g} in "
                    f"{exclusive[name][start]}; such an interval would take in {start} itself: "
                    f"use a {name} that is not excluded"
                )


def _check_multiples(multiples: set[Decimal]) -> None:
    """Limit multipleOf. Its cost grows with its digits, and llguidance multiplies the values of
    combined schemas as 32-bit integers, with as many decimal places as the longest one has.
    """
    product = scaled = 1
    places = max((-_exponent(multiple) for multiple in multiples), default=0)
    is_held = places <= MAX_DECIMAL_PLACES
    for multiple in multiples if is_held else ():
        product *= int(multiple.scaleb(-_exponent(multiple))) or 1
        scaled *= int(multiple.scaleb(places)) or 1
        is_held = product <= MAX_MULTIPLE_OF and scaled <= _MAX_LCM
        if not is_held:
            break
    if not is_held:
        _refuse(
            "has multipleOf values that are too large or too many; the product of their digits, "
            f"without the decimal point, must not exceed {MAX_MULTIPLE_OF}, and they have at most "
            f"{MAX_DECIMAL_PLACES} decimal places"
        )


def _exponent(multiple: Decimal) -> int:
    """Return the decimal exponent: 0 for integers, otherwise negative."""
    exponent = multiple.normalize().as_tuple().exponent
    return min(0, exponent) if isinstance(exponent, int) else 0


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_list(value: object) -> TypeGuard[list[Any]]:
    return isinstance(value, list)


def _refuse_number(place: _Place, literal: str) -> NoReturn:
    _refuse(
        f"has {_short(literal)} in {place}, which would be changed: numbers are held as 64-bit "
        f"floats, which hold integers up to {MAX_EXACT_INTEGER} and 15 digits of others exactly, "
        "and most of 17; use a number with fewer digits, or a string"
    )


def _short(literal: str) -> str:
    return literal if len(literal) <= 40 else f"{literal[:37]}…"


def _refuse(message: str) -> NoReturn:
    raise SchemaError(message)
