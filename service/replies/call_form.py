"""How a format writes tool calls, so that a reply can be constrained to a choice of tools.

    tools, choice ──▶ CallGrammar ──▶ a structural tag (JSON) ──▶ the engine's grammar

A grammar here consists only of texts: those around a call's arguments and those around all calls.
`structural_tag` converts them to the description that the engine compiles (`engine.structured`).
Where a string there spells a special token, it means that token. The result allows exactly
what the format's parser reads as calls of these tools, with arguments that satisfy their schemas.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

_JSON: Mapping[str, object] = MappingProxyType({"type": "json_schema"})
_Node = dict[str, object]
"""A node of a structural tag."""


class ToolMode(enum.Enum):
    """Whether a reply calls tools."""

    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class ToolSchema:
    """A tool that may be called.

    Attributes:
        name: its name.
        schema: the JSON Schema of its arguments, which are an object.
    """

    name: str
    schema: dict[str, object]


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """How a family of models writes calls.

    Attributes:
        before, after: the texts around a tool's name; the arguments follow.
        end: the text after the arguments.
        marks: the marks that begin a call or the list of calls, starting with the one that this
            grammar writes. They do not occur where no call is intended.
        opening, closing: the texts around all calls of a reply.
        separator: the text between two calls; None if a reply has at most one call.
        content: the content of a structural tag for the arguments, without its schema.
        plain: marks within arguments that are written as text. A model that has one of them as a
            special token cannot be constrained.
        name_in_json: whether the name is in a JSON string.
        bare: the bracket at the beginning of a reply that indicates calls without a mark; empty if
            calls have a mark.
        text: the text before an answer in words.
        preamble: the texts around any words before a call; None if there cannot be any.
    """

    before: str
    after: str
    end: str
    marks: tuple[str, ...]
    opening: str = ""
    closing: str = ""
    separator: str | None = "\n"
    content: Mapping[str, object] = field(default_factory=lambda: _JSON, hash=False)
    plain: tuple[str, ...] = ()
    name_in_json: bool = True
    bare: str = ""
    text: str = ""
    preamble: tuple[str, str] | None = None

    def written(self, name: str) -> str:
        """Return a reply with one call without arguments, for a parser to read."""
        arguments = "{}" if self.content is _JSON else ""
        return self.begun(name) + arguments + self.end + self.closing

    def begun(self, name: str) -> str:
        """Return the beginning of such a reply, up to the arguments."""
        return self.opening + self._begin(name)

    def structural_tag(
        self,
        mode: ToolMode,
        tools: Sequence[ToolSchema],
        *,
        parallel: bool,
        reasoning: str = "",
    ) -> str:
        """Return the structural tag of a reply, as JSON.

        Args:
            mode: whether the reply calls tools.
            tools: the tools that it may call; at least one, unless the mode is NONE.
            parallel: whether it may have several calls.
            reasoning: the mark that opens reasoning, which may not occur in words; empty if there
                is none.
        """
        barred = [*self.marks, reasoning] if reasoning else list(self.marks)
        parallel = parallel and self.separator is not None
        match mode:
            case ToolMode.NONE:
                form = self._words(barred)
            case ToolMode.REQUIRED:
                form = self._calls(tools, parallel=parallel)
            case ToolMode.AUTO:
                form = self._words_or_calls(tools, barred, parallel=parallel)
        return json.dumps({"type": "structural_tag", "format": form}, ensure_ascii=False)

    def _begin(self, name: str) -> str:
        written = json.dumps(name, ensure_ascii=False)[1:-1] if self.name_in_json else name
        return self.before + written + self.after

    def _tag(self, tool: ToolSchema) -> _Node:
        content = {**self.content, "json_schema": tool.schema}
        return {
            "type": "tag",
            "begin": self._begin(tool.name),
            "content": content,
            "end": self.end,
        }

    def _calls(self, tools: Sequence[ToolSchema], *, parallel: bool) -> _Node:
        """Return a node for one or several calls and nothing else."""
        calls: _Node = {
            "type": "tags_with_separator",
            "tags": [self._tag(tool) for tool in tools],
            "separator": self.separator or "",
            "at_least_one": True,
            "stop_after_first": not parallel,
        }
        if not self.opening:
            return calls
        return {"type": "tag", "begin": self.opening, "content": calls, "end": self.closing}

    def _words(self, barred: list[str]) -> _Node:
        """Return a node for an answer in words that contains none of the barred texts."""
        if self.bare:
            words: _Node = {"type": "grammar", "grammar": _no_bracket(self.bare, barred)}
        else:
            words = {"type": "any_text", "excludes": barred}
        return _sequence(self.text, words)

    def _words_or_calls(
        self, tools: Sequence[ToolSchema], barred: list[str], *, parallel: bool
    ) -> _Node:
        if self.bare or self.text:
            calls = self._calls(tools, parallel=parallel)
            ways = [self._words(barred), calls]
            if self.preamble is not None:
                begin, end = self.preamble
                said: _Node = {"type": "any_text", "excludes": barred}
                before = {"type": "tag", "begin": begin, "content": said, "end": end}
                ways.append({"type": "sequence", "elements": [before, calls]})
            return {"type": "or", "elements": ways}
        first, *others = barred
        block = bool(self.opening)
        return {
            "type": "triggered_tags",
            "triggers": [first],
            "tags": (
                [self._calls(tools, parallel=parallel)]
                if block
                else [self._tag(tool) for tool in tools]
            ),
            "stop_after_first": block or not parallel,
            "excludes": others,
        }


def _no_bracket(bracket: str, barred: Sequence[str]) -> str:
    """Return a grammar for text that does not begin with a bracket and contains no barred text."""
    texts = "|".join(map(_quoted, barred))
    words = rf"/[ \n\r\t]*([^\{bracket} \n\r\t](.|\n)*)?/"
    return f"start: WORDS\nWORDS: {words} & ~/(.|\\n)*({texts})(.|\\n)*/"


def _sequence(before: str, node: _Node) -> _Node:
    if not before:
        return node
    return {"type": "sequence", "elements": [{"type": "const_string", "value": before}, node]}


def _quoted(text: str) -> str:
    return "".join(f"\\{c}" if c in r"\.+*?()|[]{}^$/&-~#" else c for c in text)
