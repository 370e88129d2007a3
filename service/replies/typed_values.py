"""Converts the untyped values of some formats to JSON, according to the tool's schema.

A value becomes

- a string, if the schema says so, says nothing, or the tool is unknown. It is passed on as it
  arrives.
- for another type, the JSON exactly as the model wrote it, if it is a value of that type. A boolean
  may be in any case, an integer may end with `.0`, and `None`, lists and dictionaries in Python
  syntax are converted to JSON. Otherwise it is a string. A value of more than MAX_HELD characters
  is a string.

If a schema allows both strings and another type, a value that fits the other type has that type.
`engine.contract.json_types` determines what a schema allows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator

from service.replies.json_scanner import BLANKS, JsonScanner, is_json
from service.replies.pieces import PieceWriter
from service.replies.python_calls import python_value
from service.replies.reader import MAX_HELD, MalformedError, ReplyMarks, ReplyReader

_INTEGER = re.compile(r"(-?(?:0|[1-9][0-9]*))(\.0+)?\Z")
_BOOLEANS = ("true", "false")
_PYTHON = {"True": "true", "False": "false", "None": "null"}
_KINDS = {
    "{": "object",
    "[": "array",
    '"': "string",
    "t": "boolean",
    "f": "boolean",
    "n": "null",
}


class TypedValue:
    """One parameter's value. It is held back if its type matters; otherwise it is passed on as a
    string.
    """

    def __init__(self, out: PieceWriter, types: frozenset[str]) -> None:
        self._out = out
        self._types = types
        self._parts: list[str] = []
        self._size = 0
        self._began = False
        self._is_string = types <= {"string"}
        self._json = JsonScanner(around=1)

    def read(
        self, reader: ReplyReader, ends: ReplyMarks, *, trimmed: str = ""
    ) -> Generator[None, None, tuple[str, str]]:
        """Read the value up to one of these marks, or continue after a mark that did not end it.

        Args:
            reader: what to read from. The held text comes before the value.
            ends: the marks that may end the value.
            trimmed: one of these characters is left out at the value's end.

        Returns:
            The mark, and the mark including what is left out before it, for `close` or `add`.

        Raises:
            MalformedError: the output ended.
        """
        if not self._began:
            self._began = True
            self._out.arguments('"' if self._is_string else "", reader.take())
        most = 1 if trimmed else 0
        while mark := (yield from reader.until(ends, self.add, blanks=trimmed, most=most)):
            raw = reader.take()
            if not self._is_within(raw):
                return mark, raw
            self.add(raw)
        self._abandon()
        raise MalformedError

    def _is_within(self, raw: str) -> bool:
        """Whether a mark is inside a string of an object or a list. These strings have no line
        breaks, so a line break before the mark means that the mark ends the value.
        """
        within = self._json.container
        return within is not None and within in self._types and not raw[:1].isspace()

    def add(self, text: str) -> None:
        """Add text to the value."""
        if self._is_string:
            self._out.arguments(_escaped(text), text)
            return
        self._json.feed(text, 0, len(text))
        self._parts.append(text)
        self._size += len(text)
        if self._size > MAX_HELD:
            self._is_string = True
            whole = "".join(self._parts)
            self._out.arguments('"' + _escaped(whole), whole)

    def close(self, raw: str) -> None:
        """End the value. `raw` is the mark."""
        if self._is_string:
            self._out.arguments('"', raw)
            return
        whole = "".join(self._parts)
        self._out.arguments(_converted(whole, self._types), whole + raw)

    def _abandon(self) -> None:
        """Pass on a value as it was written, because the output ended within it. Nothing is lost
        this way.
        """
        if not self._is_string:
            whole = "".join(self._parts)
            self._out.arguments(whole, whole)


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _converted(value: str, types: frozenset[str]) -> str:
    """Return the JSON text of a value."""
    text = value.strip(BLANKS)
    text = _PYTHON.get(text, text)
    if "string" not in types and text.lower() in _BOOLEANS and "boolean" in types:
        text = text.lower()
    if text[:1] in ("{", "[", "(") and not is_json(text, around=1):
        text = python_value(text) or text
    if text and is_json(text, around=1):
        kind = _KINDS.get(text[0], "number")
        if kind in types - {"string"}:
            return text
        found = _INTEGER.match(text)
        if found is not None and "integer" in types and not (found[2] and "string" in types):
            return found[1]
    return json.dumps(value, ensure_ascii=False)


def as_json(value: str) -> str:
    """Return the JSON text of a value of unknown type: the value itself if it is JSON other than a
    string, otherwise a string.
    """
    text = value.strip(BLANKS)
    if text[:1] not in ("", '"') and is_json(text, around=1):
        return text
    return json.dumps(value, ensure_ascii=False)
