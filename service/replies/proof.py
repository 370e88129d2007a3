"""Proves which format a chat template writes. A format is accepted only if its parser reads back
the tool calls that the template itself writes.

    template, messages with calls ──▶ text ──▶ each format's parser ──▶ the same calls?

The messages (`_PROBES`) have no call, one, two, one with nested and non-ASCII arguments, one after
reasoning, and one after text. A message that a template refuses or does not print proves nothing;
everything that it prints must be read back. Marks that merely occur in a template's source prove
nothing either: templates mention the marks of other families and assemble marks from fragments.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product, takewhile
from typing import Any

from engine.text import ChatTemplates, JsonObject
from service.replies.call_form import CallGrammar
from service.replies.format import Context, Format
from service.replies.pieces import Reply, fold
from service.replies.tool_types import tool_types

MAX_WRITTEN = 65_536
"""The longest text of a probe. A longer text proves nothing and is not parsed."""
_TEXT = "It is said by headrace."
_THOUGHT = "This was thought by headrace."
_USER: Mapping[str, Any] = {"role": "user", "content": "What does headrace ask?"}
_PARAMETERS = {
    "place": {"type": "string"},
    "größe": {"type": "string"},
    "at": {"type": "array", "items": {"type": "number"}},
    "depth": {"type": "object", "additionalProperties": {"type": "object"}},
    "open": {"type": "boolean"},
    "n": {"type": "integer"},
}
_LOOK = ("headrace_look", {"place": "Ulm"})
_NESTED = (
    "headrace_look",
    {"größe": '3 m\n"q" é水', "at": [0.5, 2], "depth": {"of": {"it": "x y"}}, "open": True, "n": 3},
)
_NOW: tuple[str, dict[str, object]] = ("headrace_now", {})
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Asks headrace.",
            "parameters": {"type": "object", "properties": properties, "required": []},
        },
    }
    for name, properties in ((_LOOK[0], _PARAMETERS), (_NOW[0], {}))
]
_TYPES = tool_types(_TOOLS)
_IDS = ("abcDE123{index}", "functions.{name}:{index}")
"""Formats of a call's id. Some templates write only the id where the name belongs."""


@dataclass(frozen=True, slots=True, eq=False)
class _Probe:
    """A message of the assistant: its description and its contents."""

    title: str
    calls: tuple[tuple[str, Mapping[str, object]], ...] = ()
    text: str = ""
    thought: str = ""

    def message(self, ids: str) -> dict[str, object]:
        """The message as templates see it."""
        message: dict[str, object] = {"role": "assistant", "content": self.text or None}
        if self.thought:
            message["reasoning_content"] = self.thought
        if self.calls:
            message["tool_calls"] = [
                {
                    "id": ids.format(name=name, index=index),
                    "type": "function",
                    "function": {
                        "name": name,
                        "arguments": JsonObject(given, json.dumps(given, ensure_ascii=False)),
                    },
                }
                for index, (name, given) in enumerate(self.calls)
            ]
        return message


_ONE = _Probe("one call", (_LOOK,))
_SAID = _Probe("no call", text=_TEXT)
_WITH_TEXT = _Probe("text before a call", (_LOOK,), text=_TEXT)
_PROBES = (
    _SAID,
    _ONE,
    _Probe("two calls", (_LOOK, _NOW)),
    _Probe("nested arguments", (_NESTED,)),
    _Probe("reasoning before a call", (_LOOK,), thought=_THOUGHT),
    _WITH_TEXT,
)


@dataclass(frozen=True, slots=True)
class Proof:
    """What a format's parser read back from a template's output.

    Attributes:
        read: which messages were read, in words.
        reasoning: whether printed reasoning was separated from the text; None if none was printed.
        left: how many characters of the end of a turn came as text; the fewer, the better the fit.
        is_foreign: whether its marks of reasoning are specific to a family and were not written.
        form: how the template writes calls; None if calls cannot be constrained.
    """

    read: tuple[str, ...]
    reasoning: bool | None
    left: int
    is_foreign: bool
    form: CallGrammar | None

    @property
    def rank(self) -> tuple[bool, int, bool]:
        """The sort key of a proof; the smallest is the best."""
        return self.reasoning is False, self.left, self.is_foreign


class Writings:
    """What a template writes for the probes.

    Attributes:
        has_calls: whether it prints any tool calls.
    """

    def __init__(self, templates: ChatTemplates, special: Iterable[str] = ()) -> None:
        """Render the probes with a template. `special` has the texts of the model's special
        tokens.
        """
        self._special = tuple(special)
        for ids, tools in product(_IDS, (_TOOLS, None)):  # some fail on what tools may be
            self._let_write(templates, ids, tools)
            self.has_calls = bool(self._printed(_ONE))
            if self.has_calls:
                break

    def _let_write(
        self, templates: ChatTemplates, ids: str, tools: Sequence[Mapping[str, object]] | None
    ) -> None:
        def written(*messages: Mapping[str, object], prompt: bool = False) -> str:
            shown = [_USER, *messages]
            text = templates.attempt(shown, tools=tools, add_generation_prompt=prompt) or ""
            return text if len(text) <= MAX_WRITTEN else ""

        before = written()
        self._prompt = written(prompt=True)
        self._written: dict[_Probe, str] = {}
        self._turns: dict[_Probe, str] = {}
        for probe in _PROBES:
            text = written(probe.message(ids))
            self._written[probe] = text
            same = takewhile(lambda pair: pair[0] == pair[1], zip(before, text, strict=False))
            self._turns[probe] = text[sum(1 for _ in same) :]
        header, told, self._end = self._written[_SAID].partition(_TEXT)
        self._header = header if told else before

    def _printed(self, probe: _Probe) -> list[tuple[str, Mapping[str, object]]]:
        """Return the calls of a probe that the template prints."""
        printed = [call for call in probe.calls if call[0] in self._turns[probe]]
        return printed if printed[:1] == [*probe.calls[:1]] else []

    def prove(self, format: Format) -> Proof | None:
        """Return the proof that the template writes this format; None if it does not or prints no
        calls.
        """
        titles: list[str] = []
        reasoning: bool | None = None
        left = 0
        for probe, text in self._written.items():
            calls = self._printed(probe)
            if not self.has_calls or not text or (probe.calls and not calls):
                continue
            costs = {
                reply.reasoning.strip(): cost
                for reply in self._replies(format, text)
                if (cost := self._left(probe, calls, reply)) is not None
            }
            if not costs and probe is _WITH_TEXT:
                continue  # some put the text where no model would
            if not costs:
                return None
            titles.append(probe.title)
            left += costs.get(probe.thought, min(costs.values()))
            if probe.thought and probe.thought in self._turns[probe]:
                reasoning = probe.thought in costs
        if not titles:
            return None
        marks, every = format.reasoning, "".join(self._written.values())
        is_foreign = marks.opening != "<think>" and marks.closing not in every
        return Proof(tuple(titles), reasoning, left, is_foreign, self._form(format, every))

    def _replies(self, format: Format, text: str) -> Iterator[Reply]:
        """Yield what a parser reads from each position where the reply may begin: after the
        generation prompt, or after the header of a turn, possibly within reasoning that the prompt
        opens.
        """
        opened = format.opens_reasoning(self._prompt)
        opening = format.reasoning.opening
        unopened = self._prompt.rpartition(opening)[0] if opening else ""
        for prompt, is_open in (
            (self._prompt, opened),
            (self._header, format.opens_reasoning(self._header)),
            (self._header, opened),
            (unopened or self._prompt, False),
        ):
            if text.startswith(prompt):
                parser = format.begin(Context(_TYPES, is_open, "proof"))
                yield fold([*parser.push(text[len(prompt) :]), *parser.finish()])

    def _left(
        self, probe: _Probe, calls: Sequence[tuple[str, Mapping[str, object]]], reply: Reply
    ) -> int | None:
        """Return how many characters came as text after the message's own, which may only be the
        end of a turn; None if the reply is not the message.
        """
        read = [(call.name, json.loads(call.arguments)) for call in reply.calls if call.complete]
        text = reply.text
        if read != calls or len(read) < len(reply.calls):
            return None
        if probe.text and probe.text in self._turns[probe]:
            if probe.text not in (text + reply.reasoning):  # some have text beside calls there
                return None
            text = text.replace(probe.text, "", 1)
        if _THOUGHT in text:  # between marks that are not known
            return 0
        left = rest = text.strip()
        for special in self._special:
            rest = rest.replace(special, "")
        return len(left) if self._end.rstrip().endswith(rest.strip()) else None

    def _form(self, format: Format, written: str) -> CallGrammar | None:
        """Return which of a format's grammars the template writes. None if it writes the marks of
        none; the model must then not be constrained to one.
        """

        def fits(form: CallGrammar) -> tuple[bool, bool]:
            return form.begun(_LOOK[0]) in written, not form.text or form.text in written

        known = [form for form in format.forms if form.bare or form.marks[0] in written]
        return max(known, key=fits, default=None)
