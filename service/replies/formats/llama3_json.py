"""Llama 3's JSON: `{"name": …, "parameters": {…}}` is the whole reply, several divided by `;`, with
or without `<|python_tag|>` before it.

Without the mark it is a call only where the request has tools, at the beginning, and with
parameters: JSON that was asked for stays text.
"""

from __future__ import annotations

from service.replies.call_form import CallForm
from service.replies.calls import call_object
from service.replies.format import Context, marked
from service.replies.pieces import PieceWriter
from service.replies.reader import Reader, Steps

_TAG = "<|python_tag|>"


def _call(reader: Reader, out: PieceWriter, context: Context) -> Steps:
    yield from reader.blanks()
    while (yield from call_object(reader, out, needs_arguments=True)):
        if (yield from reader.behind_blanks()) != ";":
            return
        yield from reader.blanks()
        yield from reader.expect(";")
        if (yield from reader.behind_blanks()) != "{":
            return
        yield from reader.blanks()
        out.mark(reader.take())


def _form(template: str) -> CallForm:
    return CallForm(
        before='{"name": "',
        after='", "parameters": ',
        end="}",
        marks=(_TAG,),
        separator="; ",
        bare=True,
    )


FORMAT = marked(
    "llama3_json",
    {_TAG: _call},
    bare=_call,
    templates=((_TAG,), ("<|start_header_id|>", '"parameters"')),
    call_form=_form,
)
