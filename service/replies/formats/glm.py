"""GLM 4.5 and later: a call is a name, keys and values.

    <tool_call>name
    <arg_key>key</arg_key>
    <arg_value>value</arg_value>
    </tool_call>

Later models leave out the line breaks. The values have no types: see `typed_values`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from service.replies.calls import begin
from service.replies.format import Context, marked
from service.replies.formats.hermes import CLOSE, OPEN
from service.replies.pieces import PieceWriter
from service.replies.reader import MalformedError, Marks, Reader, Steps
from service.replies.typed_values import MAX_PARAMETERS, TypedValue

_KEY = "<arg_key>"
_KEY_END = "</arg_key>"
_VALUE = "<arg_value>"
_VALUE_END = "</arg_value>"
_VALUE_ENDS = Marks({_VALUE_END})


def _call(reader: Reader, out: PieceWriter, context: Context) -> Steps:
    name = yield from reader.name("<{")
    if (yield from reader.literal(CLOSE)):
        begin(reader, out, name)
        out.arguments("{}", "")
        out.end(complete=True)
        return
    if not (yield from reader.literal(_KEY)):
        raise MalformedError
    begin(reader, out, name)
    out.arguments("{", "")
    try:
        yield from _arguments(reader, out, context.tools.get(name, {}))
    except MalformedError:
        out.end(complete=False)
        raise
    out.arguments("}", reader.take())
    out.end(complete=True)


def _arguments(reader: Reader, out: PieceWriter, types: Mapping[str, frozenset[str]]) -> Steps:
    """Read keys and values after the first <arg_key>, and the call's end."""
    keys: set[str] = set()
    while True:
        key = yield from reader.name("<")
        if not (yield from reader.literal(_KEY_END)):
            raise MalformedError
        yield from reader.blanks()
        if not (yield from reader.literal(_VALUE)):
            raise MalformedError
        if key in keys or len(keys) >= MAX_PARAMETERS:
            raise MalformedError
        out.arguments(("," if keys else "") + json.dumps(key, ensure_ascii=False) + ":", "")
        keys.add(key)
        yield from TypedValue(out, types.get(key, frozenset())).read(reader, _VALUE_ENDS)
        yield from reader.blanks()
        if (yield from reader.literal(CLOSE)):
            return
        if not (yield from reader.literal(_KEY)):
            raise MalformedError


FORMAT = marked(
    "glm",
    {OPEN: _call},
    marks=(CLOSE, _KEY, _KEY_END, _VALUE, _VALUE_END),
    templates=((OPEN, _KEY, _VALUE),),
)
