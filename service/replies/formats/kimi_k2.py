"""Kimi K2: each call has an id, of which its name is a part.

<|tool_calls_section_begin|><|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{…}
<|tool_call_end|><|tool_calls_section_end|>

The id is handed on as it is, because the template writes it as the call.
"""

from __future__ import annotations

import re

from service.replies.call_form import CallForm
from service.replies.calls import arguments, begin
from service.replies.format import Context, marked
from service.replies.pieces import PieceWriter
from service.replies.reader import MalformedError, Reader, Steps

_CALLS = "<|tool_calls_section_begin|>"
_CALLS_END = "<|tool_calls_section_end|>"
_CALL = "<|tool_call_begin|>"
_ARGUMENTS = "<|tool_call_argument_begin|>"
_CALL_END = "<|tool_call_end|>"
_ID = re.compile(r"(?:functions\.)?([^\s:](?:.*[^\s])?):[0-9]+\Z")


def _calls(reader: Reader, out: PieceWriter, context: Context) -> Steps:
    """Read the section of calls, after its opening mark."""
    yield from reader.blanks()
    if (yield from reader.literal(_CALL)):
        yield from _call(reader, out, context)
    elif not (yield from reader.literal(_CALLS_END)):
        raise MalformedError


def _call(reader: Reader, out: PieceWriter, context: Context) -> Steps:
    """Read a call, after its opening mark, and the calls after it."""
    while True:
        id = yield from reader.name("<{")
        found = _ID.match(id)
        if found is None or not (yield from reader.literal(_ARGUMENTS)):
            raise MalformedError
        yield from reader.blanks()
        if (yield from reader.peek()) != "{":
            raise MalformedError
        begin(reader, out, found.group(1), id)
        yield from arguments(reader, out)
        yield from reader.past(_CALL_END)
        if not (yield from reader.past(_CALL)):
            yield from reader.past(_CALLS_END)
            return


def _form(template: str) -> CallForm:
    # The number in an id grows with each call, so a form has one call.
    return CallForm(
        before=_CALL + "functions.",
        after=":0" + _ARGUMENTS,
        end=_CALL_END,
        marks=(_CALLS, _CALL),
        opening=_CALLS,
        closing=_CALLS_END,
        separator=None,
        name_in_json=False,
    )


FORMAT = marked(
    "kimi_k2",
    {_CALLS: _calls, _CALL: _call},
    marks=(_CALLS_END, _ARGUMENTS, _CALL_END),
    templates=((_CALLS,), ("<|im_middle|>", "tool_declare")),
    call_form=_form,
)
