"""Qwen3-coder's XML:

    <tool_call>
    <function=name>
    <parameter=key>
    value
    </parameter>
    </function>
    </tool_call>

The values have no types, so the arguments are made here, by the tool's schema. A value becomes

- a string, where the schema says so, says nothing, or the tool is unknown: it is handed on as it
  comes, without the line break behind the opening mark and the one before the closing mark;
- for another type, the JSON that the model wrote, as it wrote it, if it is a value of that type;
  `True`, `False` and `None` are taken as JSON's; else it is a string. A value of more than MAX_HELD
  characters is a string.

Where a schema allows strings and something else, what can be the other is. `$ref` is not followed:
what it names is a string, unless the place itself says its type.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from service.replies.calls import begin
from service.replies.format import Context, marked
from service.replies.hermes import CLOSE, OPEN
from service.replies.json_scanner import BLANKS, is_json
from service.replies.pieces import PieceWriter
from service.replies.reader import MAX_BLANKS, MAX_HELD, MalformedError, Marks, Reader, Steps

_FUNCTION = "<function="
_FUNCTION_END = "</function>"
_PARAMETER = "<parameter="
_PARAMETER_END = "</parameter>"
_VALUE_ENDS = Marks({_PARAMETER_END})
_MAX_PARAMETERS = 256
_INTEGER = re.compile(r"-?(0|[1-9][0-9]*)\Z")
_PYTHON = {"True": "true", "False": "false", "None": "null"}
_KINDS = {
    "{": "object",
    "[": "array",
    '"': "string",
    "t": "boolean",
    "f": "boolean",
    "n": "null",
}


def _call(reader: Reader, out: PieceWriter, context: Context) -> Steps:
    """Read a call after <tool_call>."""
    yield from reader.blanks()
    if not (yield from reader.literal(_FUNCTION)):
        raise MalformedError
    yield from _function(reader, out, context)


def _function(reader: Reader, out: PieceWriter, context: Context) -> Steps:
    """Read a call after <function=, because models sometimes leave out the mark around it."""
    name = yield from reader.name(">\n")
    yield from reader.expect(">")
    if (yield from reader.behind_blanks()) not in ("<", ""):
        raise MalformedError
    begin(reader, out, name)
    types = context.tools.get(name, {})
    out.arguments("{", "")
    try:
        yield from _parameters(reader, out, types)
    except MalformedError:
        out.end(complete=False)
        raise
    out.arguments("}", reader.take())
    out.end(complete=True)
    yield from reader.blanks(MAX_BLANKS)
    yield from reader.literal(CLOSE)


def _parameters(reader: Reader, out: PieceWriter, types: Mapping[str, frozenset[str]]) -> Steps:
    keys: set[str] = set()
    while True:
        yield from reader.blanks()
        if (yield from reader.literal(_FUNCTION_END)):
            return
        if not (yield from reader.literal(_PARAMETER)):
            raise MalformedError
        key = yield from reader.name(">\n")
        yield from reader.expect(">")
        if key in keys or len(keys) >= _MAX_PARAMETERS:
            raise MalformedError
        out.arguments(("," if keys else "") + json.dumps(key, ensure_ascii=False) + ":", "")
        keys.add(key)
        yield from reader.literal("\n")
        value = _Value(out, types.get(key, frozenset()))
        value.opened(reader.take())
        if not (yield from reader.until(_VALUE_ENDS, value.add, blanks="\n", most=1)):
            value.abandon()
            raise MalformedError
        value.close(reader.take())


class _Value:
    """Read one parameter's value: it is held if its type matters, or passed on as a string."""

    def __init__(self, out: PieceWriter, types: frozenset[str]) -> None:
        self._out = out
        self._types = types
        self._parts: list[str] = []
        self._size = 0
        self._is_string = types <= {"string"}

    def opened(self, raw: str) -> None:
        self._out.arguments('"' if self._is_string else "", raw)

    def add(self, text: str) -> None:
        if self._is_string:
            self._out.arguments(_escaped(text), text)
            return
        self._parts.append(text)
        self._size += len(text)
        if self._size > MAX_HELD:
            self._is_string = True
            whole = "".join(self._parts)
            self._out.arguments('"' + _escaped(whole), whole)

    def close(self, raw: str) -> None:
        if self._is_string:
            self._out.arguments('"', raw)
            return
        whole = "".join(self._parts)
        self._out.arguments(_converted(whole, self._types), whole + raw)

    def abandon(self) -> None:
        """Pass a value on as it was written, so that nothing is lost, because the output ended
        within it.
        """
        if not self._is_string:
            whole = "".join(self._parts)
            self._out.arguments(whole, whole)


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _converted(value: str, types: frozenset[str]) -> str:
    """A value's JSON text."""
    text = value.strip(BLANKS)
    text = _PYTHON.get(text, text)
    if text and is_json(text):
        kind = _KINDS.get(text[0], "number")
        whole = kind == "number" and _INTEGER.match(text) is not None
        if kind in types - {"string"} or (whole and "integer" in types):
            return text
    return json.dumps(value, ensure_ascii=False)


QWEN3_CODER = marked(
    "qwen3_coder",
    {OPEN: _call, _FUNCTION: _function},
    marks=(CLOSE, _FUNCTION_END, _PARAMETER, _PARAMETER_END),
)
