"""The types of the parameters of a request's tools, kept from their schemas for formats that have
no types.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from engine.contract.json_types import allowed_types, referred

ToolTypes = Mapping[str, Mapping[str, frozenset[str]]]
"""Tool → parameter → the types that its schema allows, by their JSON names; empty if it does not
say.
"""

MAX_TYPED = 4_096
"""The most parameters, over all tools of a request, whose types are kept; others are strings."""


def tool_types(tools: Iterable[Mapping[str, object]]) -> ToolTypes:
    """Return the types of the parameters of these tools. Tools are given as templates see them
    ({"type": "function", "function": {"name", "parameters"}}, or only the function).
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
        root = function.get("parameters")
        for key, schema in _properties(root):
            types = allowed_types(schema, root)
            if left > 0:
                left -= 1
                own[key] = seen.setdefault(types, types)
    return found


def _properties(root: object) -> Iterator[tuple[str, object]]:
    schema = root
    if isinstance(root, Mapping) and "properties" not in root:
        schema = referred(root, root) or root
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    for key, value in properties.items() if isinstance(properties, Mapping) else ():
        yield str(key), value
