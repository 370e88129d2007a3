"""Which types a JSON Schema allows. Formats that write no types, such as Qwen3-coder's XML, are
enforced by the engine and read by the service; both must give a value the same type.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

JSON_TYPES = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})
MAX_LOOKED_AT = 256
"""The most schemas that are looked at for the types of one."""
_MAX_NESTED = 8
_MEANT = {
    "properties": "object",
    "additionalProperties": "object",
    "items": "array",
    "prefixItems": "array",
}
"""Keywords of schemas without a type, and the type that is meant."""


def allowed_types(schema: object, root: object) -> frozenset[str]:
    """The types of the values that a schema allows, by JSON's names; empty: it does not say.

    They are taken from `type`; or else from `const`, `enum`, the branches of `anyOf` and `oneOf`,
    and a `$ref` into `root`; or else from keywords that are for objects or arrays. Where branches
    are nested too deeply, or there are too many, the rest counts as a string.

    Args:
        schema: the schema; anything else does not say.
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
    """The types that a schema itself says, by `type`, `const` or `enum`."""
    kinds = schema.get("type")
    named = kinds if isinstance(kinds, list) else [kinds]
    if found := {kind for kind in named if isinstance(kind, str) and kind in JSON_TYPES}:
        return frozenset(found)
    if "const" in schema:
        return frozenset({type_of(schema["const"])})
    values = schema.get("enum")
    return frozenset(map(type_of, values if isinstance(values, list) else ()))


def referred(schema: Mapping[str, Any], root: object) -> object:
    """What the schema's `$ref` names within `root`; None: it has none, or names nothing there."""
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
    """The type of a value, by JSON's names."""
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
