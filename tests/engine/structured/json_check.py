"""A small validator of JSON Schema, for the keywords that the tests of forms use. It does not know
how forms are held.
"""

from __future__ import annotations

from typing import Any

_TYPES: dict[str, Any] = {
    "string": str,
    "object": dict,
    "array": list,
    "null": type(None),
    "boolean": bool,
}


def fits(schema: Any, value: Any, root: Any = None) -> bool:
    """Whether a value satisfies a schema."""
    root = schema if root is None else root
    if isinstance(schema, bool):
        return schema
    if "$ref" in schema:
        target = root
        for part in schema["$ref"].split("/")[1:]:
            target = target[part]
        return fits(target, value, root)
    checks = [
        _is_of_type(schema, value),
        "const" not in schema or _same(schema["const"], value),
        "enum" not in schema or any(_same(one, value) for one in schema["enum"]),
        all(any(fits(s, value, root) for s in schema[k]) for k in ("anyOf",) if k in schema),
        all(sum(fits(s, value, root) for s in schema[k]) == 1 for k in ("oneOf",) if k in schema),
    ]
    if isinstance(value, str):
        checks.append(schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", 1 << 30))
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        checks.append(schema.get("minimum", value) <= value <= schema.get("maximum", value))
    if isinstance(value, list):
        checks.append(schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", 1 << 30))
        checks += [fits(schema.get("items", True), item, root) for item in value]
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        others = schema.get("additionalProperties", True)
        checks.append(set(schema.get("required", [])) <= value.keys())
        checks += [fits(properties.get(key, others), item, root) for key, item in value.items()]
    return all(checks)


def _is_of_type(schema: dict[str, Any], value: Any) -> bool:
    kinds = schema.get("type")
    if kinds is None:
        return True
    return any(_is_a(kind, value) for kind in ([kinds] if isinstance(kinds, str) else kinds))


def _is_a(kind: str, value: Any) -> bool:
    if kind in ("integer", "number"):
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return is_number and (kind == "number" or value == int(value))
    return isinstance(value, _TYPES[kind])


def _same(one: Any, other: Any) -> bool:
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)
