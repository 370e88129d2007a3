"""Mistral: `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, and the newer
`[TOOL_CALLS]name[ARGS]{…}`, perhaps with `[CALL_ID]id` before the arguments. Reasoning is in
`[THINK]…[/THINK]`.
"""

from __future__ import annotations

from service.replies.call_form import CallForm
from service.replies.calls import arguments, begin, call_list
from service.replies.format import Context, marked
from service.replies.pieces import PieceWriter
from service.replies.reader import MalformedError, Reader, Steps

_CALLS = "[TOOL_CALLS]"
_ID = "[CALL_ID]"
_ARGUMENTS = "[ARGS]"


def _calls(reader: Reader, out: PieceWriter, context: Context) -> Steps:
    yield from reader.blanks()
    if (yield from reader.peek()) == "[":
        yield from call_list(reader, out)
    else:
        yield from _named(reader, out)


def _named(reader: Reader, out: PieceWriter) -> Steps:
    name = yield from reader.name("[{")
    id = None
    if (yield from reader.literal(_ID)):
        id = yield from reader.name("[{")
    if not (yield from reader.literal(_ARGUMENTS)) and (yield from reader.peek()) != "{":
        raise MalformedError
    yield from reader.blanks()
    if (yield from reader.peek()) != "{":
        raise MalformedError
    begin(reader, out, name, id if id is not None and id.isalnum() and id.isascii() else None)
    yield from arguments(reader, out)


def _form(template: str) -> CallForm:
    if _ARGUMENTS in template:
        return CallForm(
            before=_CALLS,
            after=_ARGUMENTS,
            end="",
            marks=(_CALLS,),
            separator="",
            name_in_json=False,
        )
    return CallForm(
        before='{"name": "',
        after='", "arguments": ',
        end="}",
        marks=(_CALLS,),
        opening=_CALLS + "[",
        closing="]",
        separator=", ",
    )


FORMAT = marked(
    "mistral",
    {_CALLS: _calls},
    reasoning=("[THINK]", "[/THINK]"),
    marks=(_ID, _ARGUMENTS),
    templates=((_CALLS,),),
    call_form=_form,
)
