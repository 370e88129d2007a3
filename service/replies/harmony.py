"""The harmony format of gpt-oss: a reply consists of messages, each with a header, separated by
special tokens.

    <|channel|>analysis<|message|>…<|end|>                                        reasoning
    <|start|>assistant<|channel|>commentary to=functions.name <|constrain|>json
        <|message|>{…}<|call|>                                                    a call
    <|start|>assistant<|channel|>final<|message|>…<|return|>                      text

The prompt ends with `<|start|>assistant`, so the first header lacks its beginning. A commentary
message without a recipient is text, because it is meant for the user. Only functions count as
calls: a message to one of the model's built-in tools is treated like any other message of its
channel. An invalid header, or one with an unknown channel, is passed on as text. Nothing is
trimmed: the tokens say where a message begins and ends.
"""

from __future__ import annotations

import re
from collections.abc import Generator

from service.replies.call_form import CallGrammar
from service.replies.format import Context, Format, ReasoningMarks
from service.replies.json_calls import arguments, begin
from service.replies.pieces import PieceWriter
from service.replies.reader import (
    MAX_BLANKS,
    MalformedError,
    ReplyMarks,
    ReplyReader,
    Steps,
    checked_name,
)

_START = "<|start|>"
_CHANNEL = "<|channel|>"
_CONSTRAIN = "<|constrain|>"
_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_MARKS = (_START, _CHANNEL, _CONSTRAIN, _MESSAGE, *_ENDS)
_BETWEEN = ReplyMarks({_START, _CHANNEL})
_WITHIN = ReplyMarks({_START, _CHANNEL, *_ENDS})
_MAX_HEADER = 1_024
_CHANNELS = ("analysis", "commentary", "final")
_RECIPIENT = re.compile(r"(?:\A|\s)to=functions\.([^\s<]+)")
_IN_HEADER = re.compile(re.escape(_CHANNEL) + r"([a-z]+)")
_TO = " to="


def _read(reader: ReplyReader, out: PieceWriter, context: Context) -> Steps:
    mark = _START if (yield from reader.literal(_TO)) else ""
    before = _TO if mark else ""
    while True:
        if not mark:
            mark = yield from reader.until(_BETWEEN, out.text, blanks="", most=0)
            if not mark:
                return
        try:
            channel, recipient = yield from _header(
                reader, before + (_CHANNEL if mark == _CHANNEL else "")
            )
            mark = before = ""
            if not context.calls:
                recipient = None
            mark = yield from _message(reader, out, channel, recipient)
        except MalformedError:
            out.text(reader.take())
            mark = before = ""


def _header(reader: ReplyReader, before: str) -> Generator[None, None, tuple[str, str | None]]:
    """Read the rest of a header: its channel and the tool that it calls."""
    found = [before]
    size = 0
    while True:
        character = yield from reader.peek()
        if not character or size > _MAX_HEADER:
            raise MalformedError
        if character == "<":
            if (yield from reader.literal(_MESSAGE)):
                break
            character = ""
            for mark in (_CHANNEL, _CONSTRAIN):
                if not character and (yield from reader.literal(mark)):
                    character = mark
            if not character:
                raise MalformedError
        else:
            reader.pos += 1
        found.append(character)
        size += len(character)
    text = "".join(found)
    channel = _IN_HEADER.search(text)
    if channel is None or channel.group(1) not in _CHANNELS:
        raise MalformedError
    # Marks are no part of a word.
    words = text.replace(_CHANNEL, " ").replace(_CONSTRAIN, " ")
    recipient = _RECIPIENT.search(words)
    return channel.group(1), None if recipient is None else checked_name(recipient.group(1))


def _message(
    reader: ReplyReader, out: PieceWriter, channel: str, recipient: str | None
) -> Generator[None, None, str]:
    """Read a message after its header, up to the mark that ends it. Return the mark, still held, if
    it begins the next header.
    """
    if recipient is not None:
        begin(reader, out, recipient)
        yield from _arguments(reader, out)
    else:
        out.mark(reader.take())
    out.in_reasoning = channel == "analysis" and recipient is None
    hand_on = out.reasoning if channel == "analysis" else out.text
    mark = yield from reader.until(_WITHIN, hand_on, blanks="", most=0)
    out.in_reasoning = False
    if mark in (_START, _CHANNEL):
        return mark
    out.mark(reader.take())
    return ""


def _arguments(reader: ReplyReader, out: PieceWriter) -> Steps:
    """Read a call's arguments and the blanks around them. If the message is closed without
    arguments, they are an empty object.
    """
    ahead = yield from reader.behind_blanks()
    yield from reader.blanks(MAX_BLANKS)
    out.mark(reader.take())
    if ahead == "{":
        try:
            yield from arguments(reader, out)
        except MalformedError:
            return
        yield from reader.blanks(MAX_BLANKS)
        out.mark(reader.take())
        return
    for mark in _ENDS:
        if (yield from reader.literal(mark)):
            out.arguments("{}", reader.take())
            out.end(complete=True)
            return
    out.end(complete=False)


FORMAT = Format(
    "harmony",
    frozenset(_MARKS),
    ReasoningMarks(
        f"{_CHANNEL}analysis{_MESSAGE}", "<|end|>", then=f"{_START}assistant", in_prompt=False
    ),
    _read,
    forms=(
        CallGrammar(
            before=f"{_CHANNEL}commentary to=functions.",
            after=f" {_CONSTRAIN}json{_MESSAGE}",
            end="",
            marks=tuple(_MARKS),
            separator=None,
            name_in_json=False,
            text=f"{_CHANNEL}final{_MESSAGE}",
            preamble=(f"{_CHANNEL}commentary{_MESSAGE}", f"<|end|>{_START}assistant"),
        ),
    ),
)
