"""Nemotron: `<TOOLCALL>[{"name": …, "arguments": {…}}, …]</TOOLCALL>`."""

from __future__ import annotations

from service.replies.call_form import CallForm
from service.replies.calls import call_list
from service.replies.format import Context, marked
from service.replies.pieces import PieceWriter
from service.replies.reader import Reader, Steps

_CALLS = "<TOOLCALL>"
_CALLS_END = "</TOOLCALL>"


def _calls(reader: Reader, out: PieceWriter, context: Context) -> Steps:
    yield from reader.blanks()
    yield from call_list(reader, out)
    yield from reader.past(_CALLS_END)


def _form(template: str) -> CallForm:
    return CallForm(
        before='{"name": "',
        after='", "arguments": ',
        end="}",
        marks=(_CALLS,),
        opening=_CALLS + "[",
        closing="]" + _CALLS_END,
        separator=", ",
    )


FORMAT = marked(
    "nemotron",
    {_CALLS: _calls},
    marks=(_CALLS_END,),
    templates=((_CALLS,),),
    call_form=_form,
)
