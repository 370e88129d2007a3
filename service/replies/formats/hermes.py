"""Hermes and Qwen: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, perhaps after reasoning.

An object without its last brace still counts as a call.
"""

from __future__ import annotations

from service.replies.call_form import CallForm
from service.replies.calls import call_object
from service.replies.format import Context, marked
from service.replies.pieces import PieceWriter
from service.replies.reader import MAX_BLANKS, Reader, Steps

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


def _call(reader: Reader, out: PieceWriter, context: Context) -> Steps:
    yield from reader.blanks()
    yield from call_object(reader, out)
    yield from reader.blanks(MAX_BLANKS)
    yield from reader.literal(CLOSE)


def _form(template: str) -> CallForm:
    return CallForm(
        before=OPEN + '\n{"name": "',
        after='", "arguments": ',
        end="}\n" + CLOSE,
        marks=(OPEN,),
    )


FORMAT = marked(
    "hermes",
    {OPEN: _call},
    marks=(CLOSE,),
    templates=((OPEN, "arguments"),),
    call_form=_form,
)
