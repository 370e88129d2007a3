"""The properties of an object's schema whose values are written one by one; see `parameters` and
`arguments`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from engine.json_types import allowed_types, own_types, referred
from engine.structured.tag_grammar import TagError

MAX_PARAMETERS = 256
"""The most properties: the service reads no more of one call."""

NOTES = frozenset({"title", "description", "default", "examples", "deprecated", "readOnly"}) | {
    "writeOnly", "$comment", "$schema", "$id", "$defs", "definitions",
}  # fmt: skip
"""Keywords that say nothing about a value."""
OF_OBJECTS = NOTES | {"type", "properties", "required", "additionalProperties"}
MAX_REFERENCES = 8
BRANCHES = ("anyOf", "oneOf")

Schema = Mapping[str, Any]


def listed(
    schema: dict[str, Any], place: str, root: dict[str, Any] | None = None
) -> tuple[Mapping[str, Any], list[Any], str]:
    """The properties of an object's schema, those that are required, and its place."""
    root = schema if root is None else root
    target, where = resolved(schema, root, place)
    check_keywords(target, OF_OBJECTS, where, "an object's schema")
    if own_types(target) - {"object"}:
        refuse(f"{where}.type", "must be object, because it describes parameters")
    properties = target.get("properties", {})
    required = target.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        refuse(where, "must have an object of `properties`, and a list of what is `required`")
    others = target.get("additionalProperties", True)
    found: dict[str, Any] = dict(properties)
    for name in required:
        if isinstance(name, str) and name not in found:
            if others is False:
                refuse(f"{where}.required", f"has {name!r}, which is none of its properties")
            if allowed_types(others, root) - {"string"}:  # the service looks at properties alone
                refuse(f"{where}.required", f"has {name!r}; describe it in `properties`")
            found[name] = others
    if len(found) > MAX_PARAMETERS:
        refuse(where, f"has {len(found)} properties; at most {MAX_PARAMETERS} are allowed")
    return found, required, where


def lengths(schema: Schema, place: str) -> str:
    """The terminal of text with a string's bounds."""
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    for keyword, bound in (("minLength", least), ("maxLength", most or 0)):
        if type(bound) is not int or bound < 0:
            refuse(f"{place}.{keyword}", "must be an integer, 0 or more")
    if most is not None and most < least:
        refuse(f"{place}.maxLength", "is below its minLength")
    if least or most is not None:
        return f"/(?s:.{{{least},{'' if most is None else most}}})/"
    return "ANY"


def with_definitions(schema: object, root: dict[str, Any]) -> dict[str, Any]:
    """A schema with those of its root that it may refer to."""
    if not isinstance(schema, dict):
        return {"not": {}}
    names = ("$defs", "definitions")
    return schema | {name: root[name] for name in names if name in root}


def resolved(schema: Schema, root: dict[str, Any], place: str) -> tuple[Schema, str]:
    """What a schema's `$ref` leads to, and its place."""
    num_followed = 0
    while "$ref" in schema:
        check_keywords(schema, NOTES | {"$ref"}, place, "a $ref")
        target = referred(schema, root)
        if not isinstance(target, dict):
            refuse(f"{place}.$ref", "names no schema within the tag's own schema")
        num_followed += 1
        if num_followed > MAX_REFERENCES:
            refuse(f"{place}.$ref", f"leads to more than {MAX_REFERENCES} others")
        schema = target
    return schema, place


def check_keywords(schema: Schema, known: frozenset[str], place: str, what: str) -> None:
    if unknown := sorted(schema.keys() - known):
        refuse(
            f"{place}.{unknown[0]}",
            f"cannot be held here for {what}; leave it out, or use json_schema",
        )


def refuse(place: str, message: str) -> NoReturn:
    raise TagError(f"{place} {message}")
