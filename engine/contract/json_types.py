"""Determines which types a JSON Schema allows.

Some formats, such as Qwen3-coder's XML, do not write types. The engine enforces these formats and
the service parses them, so both must give a value the same type.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

JSON_TYPES = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})
MAX_LOOKED_AT = 256
"""The maximum number of schemas examined to find the types of one."""
_MAX_NESTED = 8
_MEANT = {
    "properties": "object",
    "additionalProperties": "object",
    "items": "array",
    "prefixItems": "array",
}
"""Keywords of schemas without a type, and the types they imply."""


def allowed_types(schema: object, root: object) -> frozenset[str]:
    """Return the JSON type names of the values that a schema allows, or an empty set if it does not
    say.

    They are taken from `type`, or failing that from `const`, `enum`, the branches of `anyOf` and
    `oneOf`, and a `$ref` into `root`, or failing that from keywords that apply to objects or
    arrays. Where there are too many branches, or they are nested too deeply, the rest counts as a
    string.

    Args:
        schema: the schema. Anything that is not a schema allows no known types.
        root: the schema that `$ref` refers to.
    """
    found: set[str] = set()
    seen: set[int] = set()
    waiting = [(schema, 0)]
    while waiting:
        place, depth = waiting.pop()
        if not isinstance(place, Mapping) or id(place) in seen:
            continue
        if depth > _MAX_NESTED or len(seen) >= MAX_LOOKED_AT:
            return frozenset(found | {"string"})
        seen.add(id(place))
        if own := own_types(place):
            found |= own
        elif branches := list(_branches(place, root)):
            waiting += [(branch, depth + 1) for branch in branches]
        else:
            found |= {kind for keyword, kind in _MEANT.items() if keyword in place}
    return frozenset(found)


def own_types(schema: Mapping[str, Any]) -> frozenset[str]:
    """Return the types that a schema itself declares with `type`, `const` or `enum`."""
    kinds = schema.get("type")
    named = kinds if isinstance(kinds, list) else [kinds]
    if found := {kind for kind in named if isinstance(kind, str) and kind in JSON_TYPES}:
        return frozenset(found)
    if "const" in schema:
        return frozenset({type_of(schema["const"])})
    values = schema.get("enum")
    return frozenset(map(type_of, values if isinstance(values, list) else ()))


def referred(schema: Mapping[str, Any], root: object) -> object:
    """Return what the schema's `$ref` refers to within `root`, or None if there is no such
    reference or target.
    """
    reference = schema.get("$ref")
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    place = root
    for part in reference[1:].split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(place, Mapping) or key not in place:
            return None
        place = place[key]
    return place


def type_of(value: object) -> str:
    """Return the JSON type name of a value."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case str():
            return "string"
        case int():
            return "integer"
        case float():
            return "number"
        case Mapping():
            return "object"
        case _:
            return "array"


def _branches(schema: Mapping[str, Any], root: object) -> Iterator[object]:
    for word in ("anyOf", "oneOf"):
        choices = schema.get(word)
        if isinstance(choices, list):
            yield from choices
    if (target := referred(schema, root)) is not None:
        yield target
