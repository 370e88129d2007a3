"""What the parameters of a request's tools may be: what is kept of their schemas for formats that
have no types.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

ToolTypes = Mapping[str, Mapping[str, frozenset[str]]]
"""Tool → parameter → the types that its schema allows, by JSON's names. What may be a string alone,
or says nothing, is left out.
"""

MAX_TYPED = 4_096
"""The most parameters, of all tools of a request, whose types are kept; others are strings."""
_MAX_NESTED = 8
_KINDS = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})
_STRING = frozenset({"string"})


def tool_types(tools: Iterable[Mapping[str, object]]) -> ToolTypes:
    """The types of these tools' parameters; tools as templates see them ({"type": "function",
    "function": {"name", "parameters"}}, or the function alone).
    """
    left = MAX_TYPED
    seen: dict[frozenset[str], frozenset[str]] = {}  # one of a kind is enough
    found: dict[str, dict[str, frozenset[str]]] = {}
    for tool in tools:
        function = tool.get("function", tool)
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str):
            continue
        own = found.setdefault(name, {})
        for key, schema in _properties(function.get("parameters")):
            types = frozenset(_allowed(schema))
            if left > 0 and not types <= _STRING:
                left -= 1
                own[key] = seen.setdefault(types, types)
    return found


def _properties(schema: object) -> Iterator[tuple[str, object]]:
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    for key, value in properties.items() if isinstance(properties, Mapping) else ():
        yield str(key), value


def _allowed(schema: object, depth: int = 0) -> Iterator[str]:
    if not isinstance(schema, Mapping) or depth > _MAX_NESTED:
        return
    kinds = schema.get("type")
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if isinstance(kind, str) and kind in _KINDS:
            yield kind
    for word in ("anyOf", "oneOf"):
        choices = schema.get(word)
        for choice in choices if isinstance(choices, list) else ():
            yield from _allowed(choice, depth + 1)
