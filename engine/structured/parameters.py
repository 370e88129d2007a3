"""Call arguments that are written one by one, constrained by the schema of their object.

tagged_parameters: keys and values between marks, as in Qwen3-coder's XML (qwen_xml_parameter):

    <parameter=key>
    value
    </parameter>

The service reads them back without types (`service.replies.typed_values`). A value whose schema
allows only strings, or does not say, is read as a string. Any other value is read as JSON if it has
a type that the schema allows, and otherwise as a string. So the following is generated:

- text, if only a string is allowed. Its length and its constants are enforced; a pattern or a
  format is refused;
- JSON on one line, if no string is allowed;
- one or the other, if both are. The text then cannot be mistaken for something else: if numbers
  are also allowed, it does not begin with a digit, and so on. If the mark of a key tells the
  value's type, any text is allowed.

A schema that cannot be enforced in this way is refused with the location of the problem.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.contract.json_types import allowed_types, own_types, type_of
from engine.structured.properties import (
    BRANCHES,
    MAX_NAME,
    MAX_REFERENCES,
    NOTES,
    Schema,
    check_keywords,
    divided,
    items,
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
    Sequence,
    Value,
)

_OF_STRINGS = NOTES | {"type", "enum", "const", "minLength", "maxLength"}
_OF_OTHERS = NOTES | {
    "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "properties",
    "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties",
    "items", "prefixItems", "additionalItems", "minItems", "maxItems",
}  # fmt: skip
"""Keywords that say nothing about a string."""
_WORDS = {"null": ("null", "None"), "boolean": ("true", "false", "True", "False")}
"""For each type: words that are read as one of its values."""
_FIRSTS = {"number": "\\-0-9", "integer": "\\-0-9", "object": "{", "array": "\\["}
"""For each type: the characters with which its values begin."""
_BLANKS = " \t\r\n"


@dataclass(slots=True)
class _Held:
    """The ways to write a value: as text (expressions of Lark's terminals), as one of JSON's words,
    or as JSON that matches one of these schemas.
    """

    texts: list[str] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    schemas: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ParameterMarks:
    """The text around keys and values.

    Attributes:
        before_name, after_value: the text before a key and after a value; `{name}` is the key.
        after_name: the text after a key, or a mapping to it from the value's type, where "other" is
            any other type.
        literal: converts a text to a literal with its special tokens.
    """

    before_name: str
    after_name: str | Mapping[str, str]
    after_value: str
    literal: Callable[[str], Literal]

    @property
    def tells_types(self) -> bool:
        """Whether the mark of a key tells its value's type."""
        return not isinstance(self.after_name, str)

    def end(self, name: str) -> str:
        """Return the text after the value of this key."""
        return self.after_value.replace("{name}", name)

    @property
    def barred(self) -> str:
        """The characters that no key may contain."""
        after = [self.after_name] if isinstance(self.after_name, str) else self.after_name.values()
        firsts = "".join(sorted({text[0] for text in after}))
        return firsts + "&" if '"' in firsts else firsts  # where & would begin an escape

    def after(self, kind: str) -> str:
        """Return the text after a key whose value has this type."""
        if isinstance(self.after_name, str):
            return self.after_name
        general = self.after_name["other"]
        if kind == "integer":
            general = self.after_name.get("number", general)
        return self.after_name.get(kind, general)


def tagged_parameters(
    schema: dict[str, Any], place: str, options: dict[str, object], marks: ParameterMarks
) -> Node:
    """Return the parameters of an object's schema between marks, in order. Parameters that are not
    required may be left out.

    Args:
        schema: the checked schema.
        place: the location of the schema, for messages.
        options: llguidance's options for JSON values.
        marks: the text around keys and values.

    Raises:
        TagError: the schema cannot be enforced.
    """
    nodes: list[Node] = []
    properties, required, where = listed(schema, place)
    for name, inner in properties.items():
        value = _Parameter(schema, options, f"{where}.properties.{name}", marks, name)
        node = value.node(inner)
        nodes.append(node if name in required else Alternatives((node, EMPTY)))
    return Sequence(tuple(nodes))


class _Parameter:
    """Makes the node of one parameter's value."""

    def __init__(
        self,
        root: dict[str, Any],
        options: dict[str, object],
        place: str,
        marks: ParameterMarks,
        name: str,
    ) -> None:
        self._marks = marks
        self._name = name
        self._root = root
        self._options = options
        self._place = place
        self._types: frozenset[str] = frozenset()
        self._close = marks.end(name)
        # The mark of a key ends a value whose own mark was forgotten.
        self._ends = [self._close.strip(), marks.before_name.strip()]

    def node(self, schema: dict[str, Any]) -> Node:
        self._types = allowed_types(schema, self._root)
        held = _Held()
        if not self._types or "string" in self._types:
            self._add(held, schema, self._place, 0)
        else:
            self._check_types(schema)
            held.schemas.append(self._typed(schema))
        return self._written(held)

    def _written(self, held: _Held) -> Node:
        if self._marks.tells_types:
            texts, choices = held.texts, self._typed_choices(held)
        else:
            texts = [*held.texts, *map(json.dumps, held.words)]
            choices = [("string", self._json(schema)) for schema in held.schemas]
        if texts:
            choices.insert(0, ("string", self._free(" | ".join(texts))))
        if self._marks.tells_types:
            return Alternatives(
                tuple(Sequence((self._opening(kind), node)) for kind, node in choices)
            )
        nodes = tuple(node for _, node in choices)
        return Sequence(
            (self._opening("string"), nodes[0] if len(nodes) == 1 else Alternatives(nodes))
        )

    def _typed_choices(self, held: _Held) -> list[tuple[str, Node]]:
        """Return the values that are not text, each with a type that determines its mark."""
        words = [json.loads(word) for word in held.words]
        choices: list[tuple[str, Node]] = []
        for schema in held.schemas:
            found, kinds = divided(schema, self._root, self._place)
            words += found
            by_mark: dict[str, list[str]] = {}
            for kind in kinds:
                by_mark.setdefault(self._marks.after(kind), []).append(kind)
            for alike in by_mark.values():
                choices.append((alike[0], self._json({**schema, "type": alike})))
        for word in words:
            node = self._marks.literal(json.dumps(word) + self._close)
            choices.append((type_of(word), node))
        return choices

    def _free(self, terminal: str) -> Node:
        """Return text, up to what ends it."""
        close = self._marks.literal(self._close)
        if len(close.parts) == 1 and isinstance(close.parts[0], str):
            return Value(f"({terminal}) {json.dumps(self._close)}")
        return Sequence((Open(terminal, self._place, False), close))  # no text has special tokens

    def _json(self, schema: dict[str, Any]) -> Node:
        text = schema_text(with_definitions(schema, self._root), self._options)
        return Sequence((JsonNode(text, self._place), self._marks.literal(self._close)))

    def _opening(self, kind: str) -> Literal:
        name, barred = self._name, self._marks.barred
        if (
            not name
            or len(name) > MAX_NAME
            or not name.isprintable()
            or any(character in name for character in barred)
            or name != name.strip()
            or self._marks.literal(name).parts != (name,)
        ):
            refuse(
                self._place.removesuffix(f".{name}"),
                f"has the name {name[:40]!r}, which cannot be written in the parameter's mark; a "
                f"name has 1 to {MAX_NAME} printable characters, none of them "
                f"{' or '.join(barred)}, no special token, and no blank at its ends",
            )
        return self._marks.literal(self._marks.before_name + name + self._marks.after(kind))

    def _check_types(self, schema: Schema) -> None:
        """Refuse branches that do not say their types: their values could be read as strings."""
        for branch, where in self._branches(schema, self._place):
            if not allowed_types(branch, self._root):
                refuse(where, "does not say its type, as the other branches do")

    def _typed(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Return a schema without strings that states its type."""
        target, _ = resolved(schema, self._root, self._place)
        if own_types(target) or any(word in target for word in BRANCHES):
            return schema
        return {**target, "type": sorted(self._types)}

    # ---- strings, and unions with them -----------------------------------------------------------

    def _add(self, held: _Held, schema: Schema, place: str, depth: int) -> None:
        """Add the ways to write a value of a schema that allows strings or states no type."""
        target, place = resolved(schema, self._root, place)
        branches = list(self._branches(target, place))
        if not branches:
            self._add_plain(held, target, place)
            return
        check_keywords(target, NOTES | {"type", *BRANCHES}, place, "a choice with strings")
        if depth >= MAX_REFERENCES:
            refuse(place, "is nested too deeply for a choice with strings")
        if "oneOf" in target and not self._exclude_each_other(b for b, _ in branches):
            refuse(place, "has a oneOf whose branches may overlap; use anyOf")
        for branch, where in branches:
            if not isinstance(branch, dict):
                refuse(where, "must be an object that says its type")
            types = allowed_types(branch, self._root)
            if self._types and not types:
                refuse(where, "does not say its type, as the other branches do")
            if not types or "string" in types or types <= _WORDS.keys():
                self._add(held, branch, where, depth + 1)
            else:
                held.schemas.append(dict(branch))

    def _exclude_each_other(self, branches: Iterable[Any]) -> bool:
        """Whether no string matches two of these branches. This holds if only one branch has
        strings, or if all that have some list them.
        """
        listed: list[str] = []
        num_open = 0
        for branch in branches:
            types = allowed_types(branch, self._root)
            if types and "string" not in types:
                continue
            values = branch.get("enum", [branch.get("const")]) if isinstance(branch, dict) else []
            strings = [v for v in values if isinstance(v, str)] if isinstance(values, list) else []
            listed += strings
            num_open += not strings
        if num_open:
            return num_open == 1 and not listed
        return len(set(listed)) == len(listed)

    def _branches(self, schema: Schema, place: str) -> Iterator[tuple[Any, str]]:
        for word in BRANCHES:
            if isinstance(listed := schema.get(word), list):
                for index, branch in enumerate(listed):
                    yield branch, f"{place}.{word}[{index}]"

    def _add_plain(self, held: _Held, schema: Schema, place: str) -> None:
        """Add the ways to write a value of a schema without branches."""
        types = own_types(schema)
        if types and "string" not in types and not types <= _WORDS.keys():
            held.schemas.append(dict(schema))
            return
        if "enum" in schema or "const" in schema:
            check_keywords(schema, _OF_STRINGS, place, "a string")
            listed = items(schema, "enum", place) if "enum" in schema else [schema["const"]]
            self._add_constants(held, listed, types, place)
            return
        rest = types - {"string"} - _WORDS.keys()
        if not types or "string" in types:
            check_keywords(schema, _OF_STRINGS | _OF_OTHERS, place, "a string")
            held.texts.append(self._text(schema, place))
        if "null" in types:
            held.words.append("null")
        if "boolean" in types:
            held.words += ["true", "false"]
        if rest:
            held.schemas.append({**schema, "type": sorted(rest)})

    def _add_constants(
        self, held: _Held, listed: list[Any], types: frozenset[str], place: str
    ) -> None:
        others = []
        for value in listed:
            kind = type_of(value)
            if types and kind not in types and not (kind == "integer" and "number" in types):
                continue
            if kind in _WORDS:
                held.words.append(json.dumps(value))
            elif kind != "string":
                others.append(value)
            elif any(mark in value for mark in self._ends) or self._reads_as_other(value):
                refuse(place, f"has the value {value[:40]!r}, which would not be read as a string")
            else:
                held.texts.append(json.dumps(value))
        if others:
            held.schemas.append({"enum": others})
        if not (held.texts or held.words or held.schemas):
            refuse(place, "has no value that its type allows")

    def _text(self, schema: Schema, place: str) -> str:
        """Return the terminal of a string that is not a constant."""
        terminal = excluding(lengths(schema, place), self._ends)
        if self._marks.tells_types:
            return f"({terminal})"
        firsts = "".join(sorted({_FIRSTS[kind] for kind in self._types if kind in _FIRSTS}))
        if firsts:
            # Not as what it must not begin with: that takes 70 MB together with a length.
            terminal += f" & /[ \\t\\r\\n]*([^ \\t\\r\\n{firsts}](?s:.*))?/"
        words = [word for kind in sorted(self._types) for word in _WORDS.get(kind, ())]
        if words:
            listed = " | ".join(map(json.dumps, words))
            terminal += f" & ~(/[ \\t\\r\\n]*/ ({listed}) /[ \\t\\r\\n]*/)"
        return f"({terminal})"

    def _reads_as_other(self, value: str) -> bool:
        """Whether the service could read a string as something else."""
        if self._marks.tells_types:
            return False
        text = value.strip(_BLANKS)
        is_word = any(text in _WORDS.get(kind, ()) for kind in self._types)
        begins = {"object": "{", "array": "[", "number": "-0123456789", "integer": "-0123456789"}
        return is_word or any(text[:1] in begins.get(kind, "") for kind in self._types if text)
