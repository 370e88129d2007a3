"""Helpers for objects whose properties are written one by one; see `parameters` and `arguments`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from engine.contract.json_types import (
    JSON_TYPES,
    MAX_LOOKED_AT,
    allowed_types,
    own_types,
    referred,
    type_of,
)
from engine.structured.tag_grammar import TagError

MAX_PARAMETERS = 256
"""The most properties: the service reads no more in one call."""

MAX_NAME = 256
"""The most characters in a property's name."""

MAX_REFERENCES = 8
NOTES = frozenset({"title", "description", "default", "examples", "deprecated", "readOnly"}) | {
    "writeOnly", "$comment", "$schema", "$id", "$defs", "definitions",
}  # fmt: skip
"""Keywords that say nothing about a value."""
OF_OBJECTS = NOTES | {"type", "properties", "required", "additionalProperties"}
BRANCHES = ("anyOf", "oneOf")
PYTHON = {None: "None", True: "True", False: "False"}

Schema = Mapping[str, Any]


def listed(
    schema: dict[str, Any], place: str, root: dict[str, Any] | None = None
) -> tuple[Mapping[str, dict[str, Any]], list[Any], str]:
    """Return the properties of an object's schema, the required ones, and the schema's location."""
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
    for name, inner in found.items():
        found[name] = inner = {} if inner is True else inner
        if not isinstance(inner, dict):
            refuse(f"{where}.properties.{name}", "is a schema that allows nothing")
    return found, required, where


def lengths(schema: Schema, place: str) -> str:
    """Return the terminal of text with the length bounds of a string's schema."""
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    for keyword, bound in (("minLength", least), ("maxLength", most or 0)):
        if type(bound) is not int or bound < 0:
            refuse(f"{place}.{keyword}", "must be an integer, 0 or more")
    if most is not None and most < least:
        refuse(f"{place}.maxLength", "is below its minLength")
    if least or most is not None:
        return f"/(?s:.{{{least},{'' if most is None else most}}})/"
    return "ANY"


def divided(
    schema: dict[str, Any], root: dict[str, Any], place: str
) -> tuple[list[bool | None], list[str]]:
    """Return which of null, true and false a schema allows, and which other types its values may
    have.
    """
    if "type" in schema and not own_types({"type": schema["type"]}):
        refuse(f"{place}.type", f"names none of {', '.join(sorted(JSON_TYPES))}")
    told = [allowed_types(part, root) for part in (schema, *items(schema, "allOf", place))]
    listed = [*items(schema, "enum", place), *([schema["const"]] if "const" in schema else ())]
    kinds = JSON_TYPES
    for types in filter(None, (*told, frozenset(map(type_of, listed)))):
        kinds &= types | {"integer"} if "number" in types else types
    words = [w for w in PYTHON if type_of(w) in kinds and permits(schema, w, root, place)]
    kinds -= {"null", "boolean", "integer"} if "number" in kinds else {"null", "boolean"}
    if not (words or kinds):
        refuse(place, "is a schema that allows nothing")
    return words, sorted(kinds)


def permits(schema: Schema, word: bool | None, root: Schema, place: str) -> bool:
    """Whether a schema allows the given word: null, true or false."""
    seen: dict[int, bool] = {}

    def look(part: object) -> bool:
        if not isinstance(part, Mapping):
            return part is True
        if id(part) not in seen:
            if len(seen) >= MAX_LOOKED_AT:
                refuse(place, "has too many branches beside null or a boolean; use fewer")
            seen[id(part)] = False  # while what it refers to is looked at
            types = own_types(part)
            seen[id(part)] = (
                (not types or type_of(word) in types)
                and ("enum" not in part or any(v is word for v in items(part, "enum", place)))
                and part.get("const", word) is word
                and all(map(look, items(part, "allOf", place)))
                and ("anyOf" not in part or any(map(look, items(part, "anyOf", place))))
                and ("oneOf" not in part or sum(map(look, items(part, "oneOf", place))) == 1)
                and not ("not" in part and look(part["not"]))
                and ("$ref" not in part or look(referred(part, root)))
            )
        return seen[id(part)]

    return look(schema)


def items(schema: Schema, keyword: str, place: str) -> list[Any]:
    """Return the members of a keyword that takes a list, or none if it is missing."""
    found = schema.get(keyword, [])
    if not isinstance(found, list):
        refuse(f"{place}.{keyword}", "must be a list")
    return found


def with_definitions(schema: dict[str, Any], root: dict[str, Any]) -> dict[str, Any]:
    """Make a subschema self-contained: add the definitions that its `$ref` may name."""
    names = ("$defs", "definitions")
    return schema | {name: root[name] for name in names if name in root}


def resolved(schema: Schema, root: dict[str, Any], place: str) -> tuple[Schema, str]:
    """Return the target of a schema's `$ref`, and its location."""
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
    """Refuse a schema with keywords other than the known ones. `what`: what the schema
    describes.
    """
    if unknown := sorted(schema.keys() - known):
        refuse(
            f"{place}.{unknown[0]}",
            f"cannot be held here for {what}; leave it out, or use json_schema",
        )


def refuse(place: str, message: str) -> NoReturn:
    """Raise a TagError for a location in a schema."""
    raise TagError(f"{place} {message}")
