"""Call arguments in a notation other than JSON, constrained by the schema of their object. For
arguments between marks, see `parameters`.

python_arguments: key="text", n=3, as in a Python call. The values are JSON, except that a
top-level null or boolean is written True, False or None.

bare_object: key:<|"|>text<|"|>,n:3, as Gemma 4 writes objects, at every depth.

A schema that cannot be enforced in this way is refused with the location of the problem.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Listed
from typing import Any

from engine.contract.json_types import allowed_types, own_types, type_of
from engine.structured.properties import (
    BRANCHES,
    MAX_NAME,
    NOTES,
    PYTHON,
    Schema,
    check_keywords,
    divided,
    lengths,
    listed,
    refuse,
    resolved,
    with_definitions,
)
from engine.structured.schema import schema_text
from engine.structured.tag_grammar import excluding
from engine.structured.tag_nodes import (
    EMPTY,
    Alternatives,
    JsonNode,
    Literal,
    Node,
    Open,
    Repeated,
    Sequence,
)

_OF_STRINGS = NOTES | {"type", "minLength", "maxLength"}
_OF_LISTS = NOTES | {"type", "items", "prefixItems", "minItems", "maxItems"}
_MAX_ITEMS = 64
_MAX_VALUES = 4096
"""The most values of an object. The target of a `$ref` counts each time it is referenced."""
_MAX_DEPTH = 16
_ToLiteral = Callable[[str], Literal]


def python_arguments(schema: dict[str, Any], place: str, options: dict[str, object]) -> Node:
    """Return the arguments of an object's schema as in a Python call; see `tagged_parameters`."""
    properties, required, where = listed(schema, place)
    written: dict[str, Node] = {}
    for name, inner in properties.items():
        inside = f"{where}.properties.{name}"
        _check_name(name, where, "(),=<>[]{}'\"\n")
        words, kinds = divided(inner, schema, inside)
        values: list[Node] = [Literal((PYTHON[word],)) for word in words]
        if kinds:
            typed = with_definitions({**inner, "type": kinds}, schema)
            values.append(JsonNode(schema_text(typed, options), inside))
        written[name] = Sequence((Literal((f"{name}=",)), Alternatives(tuple(values))))
    return _in_order(written, required, ", ")


def _check_name(name: str, where: str, barred: str) -> None:
    fits = name and len(name) <= MAX_NAME and name.isprintable() and name == name.strip()
    if not fits or set(name) & set(barred):
        refuse(
            f"{where}.properties",
            f"has the name {name[:40]!r}, which cannot stand without quotation marks; use letters, "
            "digits and underscores",
        )


def _in_order(written: Mapping[str, Node], required: Listed[Any], separator: str) -> Node:
    """Return the items in order, with separators. Items that are not required may be left out."""
    ways: list[Node] = [EMPTY]  # from an item on, by which one is written first
    more: list[Node] = []  # the same behind others
    for name, item in reversed(list(written.items())):
        behind = Sequence((Literal((separator,)), item))
        way = Sequence((item, *more))
        if name in required:
            ways, more = [way], [behind, *more]
        else:
            ways, more = [way, *ways], [Alternatives((behind, EMPTY)), *more]
    return Alternatives(tuple(ways))


class BareObjects:
    """Values as Gemma 4 writes them: {key:value,…} with bare keys, and strings between marks,
    without escapes.
    """

    def __init__(
        self, root: dict[str, Any], options: dict[str, object], quote: str, literal: _ToLiteral
    ) -> None:
        """`quote`: the mark on both sides of a string. `root`: the schema that references resolve
        in.
        """
        self._root = root
        self._options = options
        self._quote = quote
        self._literal = literal
        self._num_values = 0

    def members(self, schema: dict[str, Any], place: str, depth: int = 0) -> Node:
        """Return the members of an object's schema, without the braces; see `tagged_parameters`."""
        properties, required, where = listed(schema, place, self._root)
        items: dict[str, Node] = {}
        for name, inner in properties.items():
            _check_name(name, where, ",{}[]:\n")
            value = self._value(inner, f"{where}.properties.{name}", depth + 1)
            items[name] = Sequence((Literal((f"{name}:",)), value))
        return _in_order(items, required, ",")

    def _value(self, schema: object, place: str, depth: int) -> Node:
        if schema is True:
            schema = {"type": "string"}
        if not isinstance(schema, dict):
            refuse(place, "is a schema that allows nothing")
        self._num_values += 1
        if depth > _MAX_DEPTH or self._num_values > _MAX_VALUES:
            refuse(
                place,
                f"is deeper than {_MAX_DEPTH} values, or one of more than {_MAX_VALUES}, where "
                "each is written out; use no $ref to itself, and fewer of them",
            )
        target, place = resolved(schema, self._root, place)
        for word in BRANCHES:
            if isinstance(branches := target.get(word), list):
                check_keywords(target, NOTES | {word}, place, "a choice")
                kinds = [kind for one in branches for kind in allowed_types(one, self._root)]
                if word == "oneOf" and len(set(kinds)) < max(len(kinds), len(branches)):
                    refuse(place, "has a oneOf whose branches may overlap; use anyOf")
                return Alternatives(tuple(self._value(one, place, depth + 1) for one in branches))
        constants = target.get("enum", [target["const"]] if "const" in target else None)
        if isinstance(constants, list):
            check_keywords(target, NOTES | {"type", "enum", "const"}, place, "a constant")
            fits = own_types(target)
            fits |= {"integer"} if "number" in fits else set()
            constants = [value for value in constants if type_of(value) in fits]
            self._num_values += len(constants)
            if not constants:
                refuse(place, "has no value that its type allows")
            return Alternatives(tuple(self._constant(value, place) for value in constants))
        types = sorted(own_types(target)) or ["string"]
        nodes = tuple(self._of_type(kind, target, place, depth) for kind in types)
        return nodes[0] if len(nodes) == 1 else Alternatives(nodes)

    def _of_type(self, kind: str, schema: Schema, place: str, depth: int) -> Node:
        match kind:
            case "string":
                check_keywords(schema, _OF_STRINGS, place, "a string")
                quote = self._literal(self._quote)
                text = lengths(schema, place)
                if all(isinstance(part, str) for part in quote.parts):  # no text has a token
                    text = excluding(text, [self._quote])
                return Sequence((quote, Open(text, place, True), quote))
            case "object":
                if schema.get("additionalProperties") is not False and not schema.get("properties"):
                    refuse(place, "is an object whose properties are not described; list them")
                members = self.members(dict(schema), place, depth)
                return Sequence((Literal(("{",)), members, Literal(("}",))))
            case "array":
                return self._list(schema, place, depth)
            case _:
                return JsonNode(schema_text({**schema, "type": kind}, self._options), place)

    def _list(self, schema: Schema, place: str, depth: int) -> Node:
        check_keywords(schema, _OF_LISTS, place, "a list")
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if type(least) is not int or not (most is None or type(most) is int):
            refuse(f"{place}.minItems", "must be an integer, as must maxItems")
        if not 0 <= least <= (least if most is None else most) <= _MAX_ITEMS:
            refuse(
                place,
                f"has bounds for its items that are none, or above {_MAX_ITEMS}; leave them out",
            )
        firsts = schema.get("prefixItems")
        if isinstance(firsts, list) and firsts:
            if schema.get("items", True) is not False or least != len(firsts):
                refuse(place, "must have `items` false and all of its prefixItems (minItems)")
            values = [self._value(one, f"{place}.prefixItems", depth + 1) for one in firsts]
            behind = [node for value in values[1:] for node in (Literal((",",)), value)]
            return Sequence((Literal(("[",)), values[0], *behind, Literal(("]",))))
        item = self._value(schema.get("items", True), f"{place}.items", depth + 1)
        again = Sequence((Literal((",",)), item))
        node: Node = Repeated(again) if most is None else EMPTY
        for count in range(max(least, most or 1), 0, -1):  # from the last item on
            node = Sequence((item if count == 1 else again, node))
            node = node if count <= least else Alternatives((node, EMPTY))
        return Sequence((Literal(("[",)), EMPTY if most == 0 else node, Literal(("]",))))

    def _constant(self, value: object, place: str) -> Node:
        if not isinstance(value, str):
            if isinstance(value, dict | list):
                refuse(place, "has a constant that is an object or a list; describe it instead")
            return Literal((json.dumps(value),))
        if self._quote in value:
            refuse(place, f"has a value with {self._quote}, which ends a string")
        return self._literal(f"{self._quote}{value}{self._quote}")
