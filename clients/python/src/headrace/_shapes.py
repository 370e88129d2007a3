"""Converts type hints to JSON Schemas, and JSON values to the Python values of the hints.

Hints are read once, when a tool is created; anything that JSON cannot express is refused then, by
name. A value from the model is checked and converted in one pass. An error names the value's
location (`route.stops[2]`), in words that a model can act on. This module uses only the standard
library, to keep the client light: a validation library would be more than it needs.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Literal, NotRequired, Required, Union, get_args, get_origin

_LISTS = (list, Sequence, Collection, Iterable)
_DICTS = (dict, Mapping, MutableMapping)
_SCALARS = (str, int, float, bool)
_NAMES = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}


class InexpressibleError(TypeError):
    """A type hint has no equivalent in JSON."""


class UnfitError(ValueError):
    """A value does not have the type given by its hint."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The schema and the reader for a type hint."""

    schema: dict[str, Any]
    """The hint's JSON Schema."""
    read: Callable[[Any, str], Any]
    """Converts a JSON value, given with its location, to the Python value. Raises UnfitError."""


@dataclass(frozen=True, slots=True)
class Member:
    """A member of an object."""

    hint: Any
    required: bool
    default: Any = None
    """Shown to the model if it is a plain value."""
    description: str = ""
    """Used unless the hint is Annotated with another description."""


def shape_of(hint: Any) -> Shape:
    """Returns the shape of a type hint.

    Raises:
        InexpressibleError: the hint has no equivalent in JSON; the message names it.
    """
    return _shape(hint, ())


def object_shape(
    members: Mapping[str, Member], make: Callable[..., Any], within: tuple[Any, ...] = ()
) -> Shape:
    """Returns the shape of an object with these members and no others.

    `make` is called with the members that are present, as keyword arguments.

    Raises:
        InexpressibleError: a member's hint has no equivalent in JSON; the message names both.
    """
    inner: dict[str, Shape] = {}
    properties: dict[str, Any] = {}
    for name, member in members.items():
        try:
            inner[name] = _shape(member.hint, within)
        except InexpressibleError as error:
            raise InexpressibleError(f"{name!r}: {error}") from None
        schema = inner[name].schema
        if member.description and "description" not in schema:
            schema = {**schema, "description": member.description}
        default = member.default.value if isinstance(member.default, Enum) else member.default
        if isinstance(default, _SCALARS) and _is_finite(default):
            schema = {**schema, "default": default}
        properties[name] = schema
    required = [name for name, member in members.items() if member.required]
    schema = {"type": "object", "properties": properties}
    if required:
        schema["required"] = required
    schema["additionalProperties"] = False

    def read(value: Any, place: str) -> Any:
        found = _expect(value, dict, "an object", place)
        if unknown := [name for name in found if name not in inner]:
            raise UnfitError(f"{_at(place)}there is no {', '.join(map(repr, unknown))}")
        if missing := [name for name in required if name not in found]:
            raise UnfitError(f"{_at(place)}{', '.join(map(repr, missing))} is missing")
        values = {
            name: inner[name].read(item, f"{place}.{name}" if place else name)
            for name, item in found.items()
        }
        try:
            return make(**values)
        except (TypeError, ValueError) as error:  # of a dataclass that checks itself
            raise UnfitError(f"{_at(place)}{error}") from None

    return Shape(schema, read)


def hints_of(thing: Any) -> dict[str, Any]:
    """Returns the resolved type hints of a function or a class, including their annotations.

    Raises:
        InexpressibleError: a hint cannot be resolved.
    """
    try:
        return typing.get_type_hints(thing, include_extras=True)
    except (NameError, AttributeError, TypeError, SyntaxError) as error:
        raise InexpressibleError(f"a type hint cannot be resolved: {error}") from None


def _is_finite(value: Any) -> bool:
    """Whether a value is not a NaN or an infinity, which JSON cannot represent."""
    return not isinstance(value, float) or math.isfinite(value)


def _shape(hint: Any, within: tuple[Any, ...]) -> Shape:
    """Returns the shape of a hint. `within` lists the classes whose members are being read."""
    hint, description = _bare(hint)
    made = _made(hint, within)
    if description:
        return Shape({**made.schema, "description": description}, made.read)
    return made


def _bare(hint: Any) -> tuple[Any, str]:
    """Returns a hint without its wrappers, and the first text it is annotated with."""
    description = ""
    while True:
        origin = get_origin(hint)
        if origin is Annotated:
            hint, *notes = get_args(hint)
            texts = [note for note in notes if isinstance(note, str)]
            description = description or (texts[0] if texts else "")
        elif origin in (Required, NotRequired):
            [hint] = get_args(hint)
        elif isinstance(hint, typing.NewType):
            hint = hint.__supertype__
        elif type(hint).__name__ == "TypeAliasType":  # `type X = …`, of Python 3.12
            hint = hint.__value__
        else:
            return hint, description


def _made(hint: Any, within: tuple[Any, ...]) -> Shape:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any or hint is object:
        return Shape({}, lambda value, _place: value)
    if hint is None:
        hint = type(None)
    if isinstance(hint, type) and hint in _SCALAR_READERS:
        return Shape({"type": _NAMES[hint]}, _SCALAR_READERS[hint])
    if origin is Literal:
        return _one_of(hint, [(a.value if isinstance(a, Enum) else a, a) for a in arguments])
    if origin in (Union, types.UnionType):
        return _union([_shape(one, within) for one in arguments])
    if hint in _LISTS or origin in _LISTS:
        return _list(_shape(arguments[0], within) if arguments else shape_of(Any))
    if hint is tuple or origin is tuple:
        return _tuple(hint, arguments, within)
    if hint in _DICTS or origin in _DICTS:
        return _dict(hint, arguments, within)
    if isinstance(hint, type):
        if issubclass(hint, Enum):
            return _one_of(hint, [(member.value, member) for member in hint])
        if typing.is_typeddict(hint) or dataclasses.is_dataclass(hint):
            return _class(hint, within)
    raise _inexpressible(hint)


def _inexpressible(hint: Any, why: str = "") -> InexpressibleError:
    name = hint.__qualname__ if isinstance(hint, type) else str(hint)
    if not why:
        return InexpressibleError(
            f"JSON has nothing for {name}; take str, int, float, bool, None, Any, Literal, Enum, "
            "list, tuple, dict, a union, a dataclass or a TypedDict"
        )
    return InexpressibleError(f"{name} {why}")


# ---- reading -------------------------------------------------------------------------------------


def _at(place: str) -> str:
    return f"{place}: " if place else ""


def _expect(value: Any, kind: type, words: str, place: str) -> Any:
    if type(value) is not kind:
        raise UnfitError(f"{_at(place)}{_short(value)} is not {words}")
    return value


def _short(value: Any) -> str:
    said = repr(value)
    return said if len(said) <= 80 else f"{said[:77]}..."


def _read_int(value: Any, place: str) -> int:
    if type(value) is float and value.is_integer():  # 3.0 is an integer to JSON Schema
        return int(value)
    number: int = _expect(value, int, "an integer", place)
    return number


def _read_float(value: Any, place: str) -> float:
    try:
        number = float(value) if type(value) in (int, float) else math.nan
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise UnfitError(f"{_at(place)}{_short(value)} is not a number")
    return number


_SCALAR_READERS: dict[Any, Callable[[Any, str], Any]] = {
    str: lambda value, place: _expect(value, str, "a string", place),
    int: _read_int,
    float: _read_float,
    bool: lambda value, place: _expect(value, bool, "true or false", place),
    type(None): lambda value, place: _expect(value, type(None), "null", place),
}


def _one_of(hint: Any, pairs: list[tuple[Any, Any]]) -> Shape:
    """Returns the shape of an enumeration, from pairs of a JSON value and its Python value."""
    if not pairs or not all(type(value) in _NAMES and _is_finite(value) for value, _ in pairs):
        raise _inexpressible(hint, "has values that are no plain ones of JSON")
    known = {(type(value), value): meant for value, meant in pairs}  # True is not 1
    schema: dict[str, Any] = {"enum": [value for value, _ in pairs]}
    if len(kinds := {type(value) for value, _ in pairs}) == 1:
        schema = {"type": _NAMES[kinds.pop()], **schema}
    words = ", ".join(repr(value) for value, _ in pairs)

    def read(value: Any, place: str) -> Any:
        try:
            return known[type(value), value]
        except (KeyError, TypeError):
            raise UnfitError(f"{_at(place)}{_short(value)} is not one of {words}") from None

    return Shape(schema, read)


def _union(shapes: list[Shape]) -> Shape:
    def read(value: Any, place: str) -> Any:
        faults = []
        for shape in shapes:  # the first that fits
            try:
                return shape.read(value, place)
            except UnfitError as error:
                faults.append(str(error))
        raise UnfitError("; or: ".join(dict.fromkeys(faults)))

    return Shape({"anyOf": [shape.schema for shape in shapes]}, read)


def _list(inner: Shape) -> Shape:
    def read(value: Any, place: str) -> list[Any]:
        items = _expect(value, list, "an array", place)
        return [inner.read(item, f"{place}[{i}]") for i, item in enumerate(items)]

    return Shape({"type": "array", "items": inner.schema}, read)


def _tuple(hint: Any, arguments: tuple[Any, ...], within: tuple[Any, ...]) -> Shape:
    if hint is tuple or (len(arguments) == 2 and arguments[1] is ...):
        many = _list(_shape(arguments[0] if arguments else Any, within))
        return Shape(many.schema, lambda value, place: tuple(many.read(value, place)))
    inner = [_shape(one, within) for one in arguments]
    count = len(inner)

    def read(value: Any, place: str) -> tuple[Any, ...]:
        items = _expect(value, list, "an array", place)
        if len(items) != count:
            raise UnfitError(f"{_at(place)}the array has {len(items)} items, not {count}")
        return tuple(
            shape.read(item, f"{place}[{i}]")
            for i, (shape, item) in enumerate(zip(inner, items, strict=True))
        )

    schema: dict[str, Any] = {"type": "array", "minItems": count, "maxItems": count}
    if inner:
        schema["prefixItems"] = [shape.schema for shape in inner]
    return Shape(schema, read)


def _dict(hint: Any, arguments: tuple[Any, ...], within: tuple[Any, ...]) -> Shape:
    if arguments and _bare(arguments[0])[0] not in (str, Any):
        raise _inexpressible(hint, "has keys that are no str; an object of JSON has no others")
    inner = _shape(arguments[1] if arguments else Any, within)

    def read(value: Any, place: str) -> dict[str, Any]:
        members = _expect(value, dict, "an object", place)
        return {
            name: inner.read(item, f"{place}.{name}" if place else name)
            for name, item in members.items()
        }

    return Shape({"type": "object", "additionalProperties": inner.schema}, read)


def _class(hint: Any, within: tuple[Any, ...]) -> Shape:
    """Returns the shape of a TypedDict or a dataclass."""
    if hint in within:
        raise _inexpressible(hint, "refers to itself")
    hints = hints_of(hint)
    if typing.is_typeddict(hint):
        # Where hints are strings, Python itself does not see that they say NotRequired.
        members = {
            name: Member(
                one,
                get_origin(one) is Required
                or (name in hint.__required_keys__ and get_origin(one) is not NotRequired),
            )
            for name, one in hints.items()
        }
    else:
        absent = dataclasses.MISSING
        members = {
            field.name: Member(
                hints[field.name],
                field.default is absent and field.default_factory is absent,
                None if field.default is absent else field.default,
            )
            for field in dataclasses.fields(hint)
            if field.init
        }
    try:
        return object_shape(members, hint, (*within, hint))
    except InexpressibleError as error:
        raise InexpressibleError(f"{hint.__qualname__}, {error}") from None
