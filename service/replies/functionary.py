"""Functionary 3.2: each section of a reply names its recipient.

    all                     text; the prompt ends with the first section's >>>
    I look.>>>name          a call
    {"key": 1}>>>other
    {}

A section for an unknown recipient is text, and so is a reply that names no recipient.
"""

from __future__ import annotations

from service.replies.call_form import CallGrammar
from service.replies.format import Context, Format, ReasoningMarks
from service.replies.json_calls import arguments, begin
from service.replies.pieces import PieceWriter
from service.replies.reader import MalformedError, ReplyMarks, ReplyReader, Steps

_PART = ">>>"
_PARTS = ReplyMarks({_PART})
_ALL = "all"


def _read(reader: ReplyReader, out: PieceWriter, context: Context) -> Steps:
    yield from reader.literal(_PART)
    while True:
        try:
            yield from _part(reader, out, context)
        except MalformedError:
            out.text(reader.take())
        if not (yield from reader.until(_PARTS, out.text, blanks="", most=0)):
            return


def _part(reader: ReplyReader, out: PieceWriter, context: Context) -> Steps:
    name = yield from reader.name("\n{")
    yield from reader.expect("\n")
    if name == _ALL:
        out.mark(reader.take())
        return
    is_tool = context.calls and (not context.tools or name in context.tools)
    if not is_tool or (yield from reader.behind_blanks()) != "{":
        raise MalformedError
    yield from reader.blanks()
    begin(reader, out, name)
    yield from arguments(reader, out)


FORMAT = Format(
    "functionary_v3_2",
    frozenset({_PART}),
    ReasoningMarks("", "", in_prompt=False),
    _read,
    forms=(
        CallGrammar(
            before="",
            after="\n",
            end="",
            marks=(_PART,),
            separator=_PART,
            name_in_json=False,
            text=f"{_ALL}\n",
        ),
    ),
)
