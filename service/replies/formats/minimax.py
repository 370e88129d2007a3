"""MiniMax M2's XML:

    <minimax:tool_call>
    <invoke name="name">
    <parameter name="key">value</parameter>
    </invoke>
    </minimax:tool_call>

The values have no types: see `typed_values`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from service.replies.calls import begin
from service.replies.format import Context, marked
from service.replies.pieces import PieceWriter
from service.replies.reader import MalformedError, Marks, Reader, Steps
from service.replies.typed_values import MAX_PARAMETERS, TypedValue

_CALLS = "<minimax:tool_call>"
_CALLS_END = "</minimax:tool_call>"
_CALL = '<invoke name="'
_CALL_END = "</invoke>"
_PARAMETER = '<parameter name="'
_PARAMETER_END = "</parameter>"
_NAME_END = '">'
_VALUE_ENDS = Marks({_PARAMETER_END})


def _calls(reader: Reader, out: PieceWriter, context: Context) -> Steps:
    yield from reader.blanks()
    if not (yield from reader.literal(_CALL)):
        raise MalformedError
    while True:
        yield from _call(reader, out, context)
        if not (yield from reader.past(_CALL)):
            yield from reader.past(_CALLS_END)
            return


def _call(reader: Reader, out: PieceWriter, context: Context) -> Steps:
    name = yield from reader.name('"\n')
    if not (yield from reader.literal(_NAME_END)):
        raise MalformedError
    if (yield from reader.behind_blanks()) not in ("<", ""):
        raise MalformedError
    begin(reader, out, name)
    out.arguments("{", "")
    try:
        yield from _parameters(reader, out, context.tools.get(name, {}))
    except MalformedError:
        out.end(complete=False)
        raise
    out.arguments("}", reader.take())
    out.end(complete=True)


def _parameters(reader: Reader, out: PieceWriter, types: Mapping[str, frozenset[str]]) -> Steps:
    keys: set[str] = set()
    while True:
        yield from reader.blanks()
        if (yield from reader.literal(_CALL_END)):
            return
        if not (yield from reader.literal(_PARAMETER)):
            raise MalformedError
        key = yield from reader.name('"\n')
        if not (yield from reader.literal(_NAME_END)):
            raise MalformedError
        if key in keys or len(keys) >= MAX_PARAMETERS:
            raise MalformedError
        out.arguments(("," if keys else "") + json.dumps(key, ensure_ascii=False) + ":", "")
        keys.add(key)
        yield from TypedValue(out, types.get(key, frozenset())).read(reader, _VALUE_ENDS)


FORMAT = marked(
    "minimax",
    {_CALLS: _calls},
    marks=(_CALLS_END, _CALL, _CALL_END, _PARAMETER, _PARAMETER_END),
    templates=((_CALLS,),),
)
