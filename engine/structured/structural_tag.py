"""Reads a structural tag: JSON that defines the order of fixed text, free text, tags and values
that match schemas. The format is that of xgrammar and vLLM:

    {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<call>"], …}}

    text ─▶ values ─▶ nodes (bounded, each error with location) ─▶ tag_grammar ─▶ llguidance

Strings may contain names of the tokenizer's special tokens. Such a name stands for that token only;
the text around it may be written by any tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NoReturn

from llguidance import LLMatcher

from engine.contract.json_types import JSON_TYPES
from engine.structured.arguments import BareObjects, python_arguments
from engine.structured.parameters import ParameterMarks, tagged_parameters
from engine.structured.schema import SchemaChecks, SchemaError, read_json, schema_text
from engine.structured.special_names import SpecialNames
from engine.structured.tag_grammar import TagError, TagGrammar, excluding
from engine.structured.tag_nodes import (
    EMPTY,
    Alternatives,
    JsonNode,
    Lark,
    Literal,
    Node,
    Open,
    Repeated,
    Sequence,
    Tag,
    Triggered,
    is_open,
    without_prefix,
)

MAX_FORMATS = 512
"""The most formats of a structural tag, tags included, and the most strings in its lists."""
MAX_FORMAT_DEPTH = 32
"""The deepest nesting of formats."""
MAX_REGEX_BYTES = 16 * 1024
"""The most bytes of all regular expressions of a structural tag."""
MAX_LARK_BYTES = 64 * 1024
"""The most bytes of all Lark grammars of a structural tag."""

_MAX_MARK = 256
MAX_SHOWN = 80
"""How many characters of a tag's beginning are shown in messages about the tag."""

_Object = dict[str, Any]
_Begun = tuple[str, Literal, Node]
"""A tag: its location, how it begins, and what follows the beginning."""


def read_structural_tag(
    text: str,
    names: SpecialNames,
    options: dict[str, object],
    one_line: dict[str, object],
) -> tuple[str, TagGrammar]:
    """Return the grammar of a structural tag as text, and the object with its other properties.

    Args:
        text: the JSON text, at most MAX_GRAMMAR_BYTES.
        names: finds the model's special tokens in strings.
        options: llguidance's options for JSON.
        one_line: the options for JSON that must be on one line.

    Raises:
        TagError: it is not valid, is too large, or cannot be enforced.
    """
    try:
        value = read_json(text)
    except SchemaError as error:
        raise TagError(str(error)) from error
    reader = _Reader(names, options, one_line)
    grammar = TagGrammar()
    source = grammar.source(reader.read(value))
    grammar.notes = reader.notes
    return source, grammar


class _Reader:
    def __init__(
        self, names: SpecialNames, options: dict[str, object], one_line: dict[str, object]
    ) -> None:
        self._names = names
        self._options = options
        self._one_line = one_line
        self._checks = SchemaChecks()
        self._num_formats = 0
        self._regex_bytes = 0
        self._lark_bytes = 0
        self._kinds: dict[str, Callable[[_Object, str, int], Node]] = {
            "structural_tag": self._structural_tag,
            "const_string": self._const_string,
            "json_schema": self._json_schema,
            "qwen_xml_parameter": self._qwen_xml_parameter,
            "tagged_parameters": self._tagged_parameters,
            "python_arguments": self._python_arguments,
            "bare_object": self._bare_object,
            "regex": self._regex,
            "grammar": self._grammar,
            "any_text": self._any_text,
            "sequence": self._sequence,
            "or": self._or,
            "tag": self._tag,
            "triggered_tags": self._triggered_tags,
            "tags_with_separator": self._tags_with_separator,
        }

    @property
    def notes(self) -> tuple[str, ...]:
        """Descriptions of what is enforced differently from what the schemas say."""
        return self._checks.notes

    def read(self, value: object) -> Node:
        """Return the node of a whole structural tag."""
        if not isinstance(value, dict):
            raise TagError("is not a JSON object")
        if value.get("type") != "structural_tag":
            _refuse("type", f"is {_shown(value.get('type'))}; it must be structural_tag")
        if "structures" in value or "triggers" in value:
            node = self._older(value, "")
        else:
            _check_members(value, "", {"format"})
            node = self._format(value.get("format"), "format", 1)
        try:
            self._checks.finish()
        except SchemaError as error:
            raise TagError(f"{error} (all schemas together)") from error
        return node

    def _older(self, value: _Object, where: str) -> Node:
        """Read the older syntax, which means triggered_tags. `where`: the prefix of its
        locations.
        """
        _check_members(value, where, {"structures", "triggers"})
        tags: list[_Begun] = []
        for index, item in enumerate(_listed(value, "structures", where)):
            place = _at(where, f"structures[{index}]")
            self._count()
            if not isinstance(item, dict):
                _refuse(place, "is not an object")
            _check_members(item, place, {"begin", "schema", "end"})
            content = self._json_schema({"json_schema": item.get("schema", True)}, place, 1)
            begin = self._literal(_string(item, "begin", place))
            end = self._literal(_string(item, "end", place))
            tags.append((place, begin, Sequence((content, end))))
        triggers = self._triggers(value, where)
        return Triggered(
            Open("ANY", "the text", True), _by_trigger(tags, triggers, where), False, False
        )

    # ---- one format ------------------------------------------------------------------------------

    def _format(self, value: object, place: str, depth: int) -> Node:
        if not isinstance(value, dict):
            _refuse(place, f"is {_shown(value)}; it must be an object with a type")
        if depth > MAX_FORMAT_DEPTH:
            _refuse(place, f"is nested deeper than {MAX_FORMAT_DEPTH} formats")
        self._count()
        kind = value.get("type")
        read = self._kinds.get(kind) if type(kind) is str else None
        if read is None:
            _refuse(
                f"{place}.type", f"is {_shown(kind)}; it must be one of {', '.join(self._kinds)}"
            )
        return read(value, place, depth)

    def _structural_tag(self, value: _Object, place: str, depth: int) -> Node:
        """Read a whole structural tag that is nested in another."""
        if "structures" in value or "triggers" in value:
            return self._older(value, place)
        _check_members(value, place, {"format"})
        return self._format(value.get("format"), f"{place}.format", depth + 1)

    def _const_string(self, value: _Object, place: str, depth: int) -> Node:
        _check_members(value, place, {"value"})
        return self._literal(_string(value, "value", place))

    def _json_schema(self, value: _Object, place: str, depth: int) -> Node:
        _check_members(value, place, {"json_schema"})
        return JsonNode(
            schema_text(self._schema(value, place), self._options), f"{place}.json_schema"
        )

    def _qwen_xml_parameter(self, value: _Object, place: str, depth: int) -> Node:
        _check_members(value, place, {"json_schema"})
        marks = ParameterMarks("<parameter=", ">\n", "\n</parameter>\n", self._literal)
        schema = self._schema(value, place)
        return tagged_parameters(schema, f"{place}.json_schema", self._one_line, marks)

    def _tagged_parameters(self, value: _Object, place: str, depth: int) -> Node:
        _check_members(value, place, {"json_schema", "before_name", "after_name", "after_value"})
        before, end = (_mark(value, name, place) for name in ("before_name", "after_value"))
        after = value.get("after_name")
        if isinstance(after, dict):
            _check_typed(after, f"{place}.after_name")
        else:
            after = _mark(value, "after_name", place)
        bare = end.strip()
        if any(bare[:n] == bare[-n:] for n in range(1, len(bare))):
            message = "ends as it begins, so it is not clear where a text ends; use another mark"
            _refuse(f"{place}.after_value", message)
        schema = self._schema(value, place)
        marks = ParameterMarks(before, after, end, self._literal)
        return tagged_parameters(schema, f"{place}.json_schema", self._one_line, marks)

    def _python_arguments(self, value: _Object, place: str, depth: int) -> Node:
        _check_members(value, place, {"json_schema"})
        schema = self._schema(value, place)
        return python_arguments(schema, f"{place}.json_schema", self._one_line)

    def _bare_object(self, value: _Object, place: str, depth: int) -> Node:
        _check_members(value, place, {"json_schema", "quote"})
        quote, schema = _mark(value, "quote", place), self._schema(value, place)
        made = BareObjects(schema, self._one_line, quote, self._literal)
        return made.members(schema, f"{place}.json_schema")

    def _regex(self, value: _Object, place: str, depth: int) -> Node:
        _check_members(value, place, {"pattern"})
        pattern = _string(value, "pattern", place)
        self._regex_bytes += len(pattern.encode())
        if self._regex_bytes > MAX_REGEX_BYTES:
            _refuse(f"{place}.pattern", f"is too long; all have at most {MAX_REGEX_BYTES} bytes")
        written = json.loads(LLMatcher.grammar_from_regex(pattern))["grammars"][0]["lark_grammar"]
        return Open(written.removeprefix("start: "), place, False)

    def _grammar(self, value: _Object, place: str, depth: int) -> Node:
        _check_members(value, place, {"grammar"})
        grammar = _string(value, "grammar", place)
        self._lark_bytes += len(grammar.encode())
        if self._lark_bytes > MAX_LARK_BYTES:
            _refuse(f"{place}.grammar", f"is too long; all have at most {MAX_LARK_BYTES} bytes")
        if "%json" in grammar:
            _refuse(f"{place}.grammar", "has %json, which is not taken; use a json_schema instead")
        return Lark(grammar, f"{place}.grammar")

    def _any_text(self, value: _Object, place: str, depth: int) -> Node:
        _check_members(value, place, {"excludes"})
        return Open(self._text(value, place), place, True)

    def _sequence(self, value: _Object, place: str, depth: int) -> Node:
        return Sequence(self._elements(value, place, depth))

    def _or(self, value: _Object, place: str, depth: int) -> Node:
        return Alternatives(self._elements(value, place, depth))

    def _tag(self, value: _Object, place: str, depth: int) -> Node:
        begin, behind = self._parts_of_tag(value, place, depth)
        return Sequence((begin, behind))

    def _triggered_tags(self, value: _Object, place: str, depth: int) -> Node:
        known = {"triggers", "tags", "at_least_one", "stop_after_first", "excludes"}
        _check_members(value, place, known)
        stops = _flag(value, "stop_after_first", place)
        tags = self._tags(value, place, depth, must_end=not stops)
        text = Open(self._text(value, place), place, True)
        found = _by_trigger(tags, self._triggers(value, place), place)
        return Triggered(text, found, _flag(value, "at_least_one", place), stops)

    def _tags_with_separator(self, value: _Object, place: str, depth: int) -> Node:
        _check_members(value, place, {"tags", "separator", "at_least_one", "stop_after_first"})
        stops = _flag(value, "stop_after_first", place)
        tags = self._tags(value, place, depth, must_end=not stops)
        one = Alternatives(tuple(Sequence((begin, behind)) for _, begin, behind in tags))
        separator = self._literal(_string(value, "separator", place))
        more = () if stops else (Repeated(Sequence((separator, one))),)
        node = Sequence((one, *more))
        return node if _flag(value, "at_least_one", place) else Alternatives((node, EMPTY))

    # ---- parts -----------------------------------------------------------------------------------

    def _elements(self, value: _Object, place: str, depth: int) -> tuple[Node, ...]:
        _check_members(value, place, {"elements"})
        listed = _listed(value, "elements", place)
        return tuple(
            self._format(element, f"{place}.elements[{index}]", depth + 1)
            for index, element in enumerate(listed)
        )

    def _tags(self, value: _Object, place: str, depth: int, *, must_end: bool) -> list[_Begun]:
        tags: list[_Begun] = []
        for index, tag in enumerate(_listed(value, "tags", place)):
            where = f"{place}.tags[{index}]"
            self._count()
            if not isinstance(tag, dict):
                _refuse(where, "is not an object")
            begin, behind = self._parts_of_tag(tag, where, depth)
            if must_end and is_open((behind,)):
                _refuse(f"{where}.end", "is empty, so that nothing tells where its free text ends")
            tags.append((where, begin, behind))
        return tags

    def _parts_of_tag(self, value: _Object, place: str, depth: int) -> tuple[Literal, Node]:
        _check_members(value, place, {"begin", "content", "end"})
        if value.get("type", "tag") != "tag":
            _refuse(f"{place}.type", f"is {_shown(value['type'])}; it must be tag")
        begin = self._literal(_string(value, "begin", place))
        try:
            content = self._format(value.get("content"), f"{place}.content", depth + 1)
        except TagError as error:
            raise error.within(_string(value, "begin", place)[:MAX_SHOWN]) from error
        ends = value.get("end")
        if not isinstance(ends, list):
            return begin, Sequence((content, self._literal(_string(value, "end", place))))
        found = [self._literal(end) for end in self._strings(value, "end", place, empty=True)]
        return begin, Sequence((content, Alternatives(tuple(found))))

    def _triggers(self, value: _Object, place: str) -> list[Literal]:
        triggers = self._strings(value, "triggers", place, empty=False)
        return [self._literal(trigger) for trigger in triggers]

    def _text(self, value: _Object, place: str) -> str:
        """Return the terminal of free text."""
        excluded = (
            self._strings(value, "excludes", place, empty=False) if value.get("excludes") else []
        )
        return excluding("ANY", dict.fromkeys(excluded))

    def _strings(self, value: _Object, name: str, place: str, *, empty: bool) -> list[str]:
        strings = _listed(value, name, place)
        for index, string in enumerate(strings):
            self._count()
            if type(string) is not str or not (string or empty):
                _refuse(
                    _at(place, f"{name}[{index}]"),
                    f"is {_shown(string)}; it must be a string" + ("" if empty else ", not empty"),
                )
        return strings

    def _schema(self, value: _Object, place: str) -> _Object:
        try:
            return self._checks.add(value.get("json_schema"))
        except SchemaError as error:
            raise TagError(f"{place}.json_schema {error}") from error

    def _literal(self, text: str) -> Literal:
        """Convert a string, with its special tokens."""
        return Literal(self._names.parts(text))

    def _count(self) -> None:
        self._num_formats += 1
        if self._num_formats > MAX_FORMATS:
            raise TagError(f"has more than {MAX_FORMATS} formats, tags and strings of lists")


def _by_trigger(tags: list[_Begun], triggers: list[Literal], place: str) -> tuple[Tag, ...]:
    """Match each tag with its trigger, the longest one that the tag begins with."""
    longest_first = sorted(triggers, key=_length, reverse=True)
    found = []
    for where, begin, behind in tags:
        for trigger in longest_first:
            rest = without_prefix(begin, trigger)
            if rest is not None:
                found.append(Tag(trigger, Sequence((rest, behind))))
                break
        else:
            _refuse(f"{where}.begin", "begins with none of the triggers")
    used = {id(tag.trigger) for tag in found}
    for index, trigger in enumerate(triggers):
        if id(trigger) not in used:
            _refuse(_at(place, f"triggers[{index}]"), "is the beginning of no tag")
    return tuple(found)


def _length(literal: Literal) -> int:
    return sum(len(part) if isinstance(part, str) else 1 for part in literal.parts)


def _listed(value: _Object, name: str, place: str) -> list[Any]:
    found = value.get(name)
    if not isinstance(found, list) or not found:
        _refuse(_at(place, name), f"is {_shown(found)}; it must be a list, not empty")
    return found


def _string(value: _Object, name: str, place: str) -> str:
    found = value.get(name)
    if type(found) is not str:
        _refuse(_at(place, name), f"is {_shown(found)}; it must be a string")
    return found


def _mark(value: _Object, name: str, place: str) -> str:
    found = _string(value, name, place)
    if not found.strip() or len(found) > _MAX_MARK:
        _refuse(_at(place, name), f"must have 1 to {_MAX_MARK} characters, not only blanks")
    return found


def _check_typed(marks: _Object, place: str) -> None:
    """Check marks that depend on the value's type. The string's mark must be distinct from all
    others.
    """
    if unknown := marks.keys() - JSON_TYPES - {"other"}:
        known = ", ".join(sorted(JSON_TYPES))
        _refuse(_at(place, min(unknown)[:40]), f"is no type; known here: {known}, other")
    for kind in ("string", "other", *marks):
        _mark(marks, kind, place)
    text = marks["string"]
    for kind, mark in marks.items():
        if kind != "string" and (mark.startswith(text) or text.startswith(mark)):
            _refuse(_at(place, kind), "and `string` begin alike to the end of one; use other text")


def _flag(value: _Object, name: str, place: str) -> bool:
    found = value.get(name, False)
    if type(found) is not bool:
        _refuse(_at(place, name), f"is {_shown(found)}; it must be true or false")
    return found


def _check_members(value: _Object, place: str, known: set[str]) -> None:
    for name in value:
        if name != "type" and name not in known:
            _refuse(_at(place, name[:40]), f"is not known; known here: {', '.join(sorted(known))}")


def _at(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name


def _shown(value: object) -> str:
    if value is None:
        return "missing"
    text = value if type(value) is str else json.dumps(value)
    return text if len(text) <= 40 else f"{text[:39]}…"


def _refuse(place: str, message: str) -> NoReturn:
    raise TagError(f"{place} {message}")
