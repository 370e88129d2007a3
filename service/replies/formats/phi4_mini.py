"""Phi-4-mini: `<|tool_call|>[{"name": …, "arguments": {…}}, …]<|/tool_call|>`, or one object in
place of the list, or `functools[…]`.
"""

from __future__ import annotations

from service.replies.call_form import CallForm
from service.replies.calls import call_items, call_list, call_object
from service.replies.format import Context, marked
from service.replies.pieces import PieceWriter
from service.replies.reader import Reader, Steps

_CALLS = "<|tool_call|>"
_CALLS_END = "<|/tool_call|>"
_FUNCTOOLS = "functools["


def _calls(reader: Reader, out: PieceWriter, context: Context) -> Steps:
    yield from reader.blanks()
    if (yield from reader.peek()) == "{":
        yield from call_object(reader, out)
    else:
        yield from call_list(reader, out)
    yield from reader.past(_CALLS_END)


def _functools(reader: Reader, out: PieceWriter, context: Context) -> Steps:
    yield from call_items(reader, out)


def _form(template: str) -> CallForm:
    return CallForm(
        before='{"name": "',
        after='", "arguments": ',
        end="}",
        marks=(_CALLS, _FUNCTOOLS),
        opening=_CALLS + "[",
        closing="]" + _CALLS_END,
        separator=", ",
    )


FORMAT = marked(
    "phi4_mini",
    {_CALLS: _calls, _FUNCTOOLS: _functools},
    marks=(_CALLS_END,),
    templates=(("<|tool|>",), (_CALLS, _CALLS_END), (_FUNCTOOLS,)),
    call_form=_form,
)
