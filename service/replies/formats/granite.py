"""Granite 3: `<|tool_call|>[{"name": …, "arguments": {…}}, …]`; some write `<tool_call>` before the
list. Granite 4 writes as Hermes does.
"""

from __future__ import annotations

from service.replies.call_form import CallForm
from service.replies.calls import call_list
from service.replies.format import Context, marked
from service.replies.pieces import PieceWriter
from service.replies.reader import Reader, Steps

_CALLS = "<|tool_call|>"
_SPELLED = "<tool_call>"


def _calls(reader: Reader, out: PieceWriter, context: Context) -> Steps:
    yield from reader.blanks()
    yield from call_list(reader, out)


def _form(template: str) -> CallForm:
    return CallForm(
        before='{"name": "',
        after='", "arguments": ',
        end="}",
        marks=(_CALLS, _SPELLED),
        opening=_CALLS + "[",
        closing="]",
        separator=", ",
    )


FORMAT = marked(
    "granite",
    {_CALLS: _calls, _SPELLED: _calls},
    templates=(("<|start_of_role|>", _CALLS),),
    call_form=_form,
)
