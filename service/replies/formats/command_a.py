"""Command A and Command R7B:

    <|START_THINKING|>…<|END_THINKING|>
    <|START_ACTION|>[{"tool_call_id": "0", "tool_name": …, "parameters": {…}}, …]<|END_ACTION|>
    <|START_RESPONSE|>…<|END_RESPONSE|>

Later ones have `<|START_TEXT|>` around the answer. The calls' ids are numbers that the template
writes anew, so they are not handed on.
"""

from __future__ import annotations

from service.replies.call_form import CallForm
from service.replies.calls import call_list
from service.replies.format import Context, marked
from service.replies.pieces import PieceWriter
from service.replies.reader import Reader, Steps

_CALLS = "<|START_ACTION|>"
_CALLS_END = "<|END_ACTION|>"
_RESPONSE = "<|START_RESPONSE|>"
_TEXT = "<|START_TEXT|>"


def _calls(reader: Reader, out: PieceWriter, context: Context) -> Steps:
    yield from reader.blanks()
    yield from call_list(reader, out, name="tool_name")
    yield from reader.past(_CALLS_END)


def _form(template: str) -> CallForm:
    return CallForm(
        before='{"tool_name": "',
        after='", "parameters": ',
        end="}",
        marks=(_CALLS,),
        opening=_CALLS + "[\n    ",
        closing="\n]" + _CALLS_END,
        separator=",\n    ",
        text=_TEXT if _TEXT in template else _RESPONSE,
    )


FORMAT = marked(
    "command_a",
    {_CALLS: _calls},
    reasoning=("<|START_THINKING|>", "<|END_THINKING|>"),
    marks=(_CALLS_END,),
    silent=(_RESPONSE, "<|END_RESPONSE|>", _TEXT, "<|END_TEXT|>"),
    templates=((_CALLS, _CALLS_END, "tool_name"),),
    call_form=_form,
)
