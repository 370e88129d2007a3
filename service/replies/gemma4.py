"""Gemma 4: an object with bare keys, and strings between special tokens.

    <|tool_call>call:name{key:<|"|>text<|"|>,n:3,list:[1,{k:true}]}<tool_call|>

Strings have no escapes; only the token ends one. A word that is not a JSON value is a string, for
example where the tokens were left out.
"""

from __future__ import annotations

import json
from collections.abc import Generator
from types import MappingProxyType

from service.replies.call_form import CallGrammar
from service.replies.format import Context, marked
from service.replies.json_calls import MAX_PARAMETERS, begin
from service.replies.json_scanner import MAX_DEPTH, is_json
from service.replies.pieces import PieceWriter
from service.replies.reader import MAX_HELD, MalformedError, ReplyMarks, ReplyReader, Steps

_CALL = "<|tool_call>"
_CALL_END = "<tool_call|>"
_QUOTE = '<|"|>'
_QUOTES = ReplyMarks({_QUOTE})
_NO_WORD = ",{}[]:\n"


def _read(reader: ReplyReader, out: PieceWriter, context: Context) -> Steps:
    yield from reader.blanks()
    if not (yield from reader.literal("call:")):
        raise MalformedError
    name = yield from reader.name("{\n")
    yield from reader.expect("{")
    begin(reader, out, name)
    out.arguments("{", "")
    try:
        yield from _arguments(reader, out)
    except MalformedError:
        out.end(complete=False)
        raise
    out.arguments("}", reader.take())
    out.end(complete=True)
    yield from reader.past(_CALL_END)


def _arguments(reader: ReplyReader, out: PieceWriter) -> Steps:
    """Read the keys and values and the closing brace."""
    keys: set[str] = set()
    while (yield from _more(reader, "}", bool(keys))):
        key = yield from _key(reader)
        if key in keys or len(keys) >= MAX_PARAMETERS:
            raise MalformedError
        named = ("," if keys else "") + json.dumps(key, ensure_ascii=False) + ":"
        out.arguments(named, reader.take())
        keys.add(key)
        if (yield from reader.literal(_QUOTE)):
            out.arguments('"', reader.take())

            def hand_on(text: str) -> None:
                out.arguments(json.dumps(text, ensure_ascii=False)[1:-1], text)

            if not (yield from reader.until(_QUOTES, hand_on, blanks="", most=0)):
                raise MalformedError
            out.arguments('"', reader.take())
        else:
            value = yield from _value(reader, 1)
            out.arguments(value, reader.take())


def _more(reader: ReplyReader, closing: str, begun: bool) -> Generator[None, None, bool]:
    """Read the comma before the next value and return True, or read the closing bracket and return
    False.
    """
    yield from reader.blanks()
    if (yield from reader.peek()) == closing:
        reader.pos += 1
        return False
    if begun:
        yield from reader.expect(",")
        yield from reader.blanks()
    return True


def _key(reader: ReplyReader) -> Generator[None, None, str]:
    quoted = yield from reader.literal(_QUOTE)
    key = yield from reader.name("<" if quoted else _NO_WORD)
    if quoted and not (yield from reader.literal(_QUOTE)):
        raise MalformedError
    yield from reader.blanks()
    yield from reader.expect(":")
    yield from reader.blanks()
    return key


def _value(reader: ReplyReader, depth: int) -> Generator[None, None, str]:
    """Read and hold a value that is nested `depth` containers deep, and return its JSON text."""
    if (yield from reader.literal(_QUOTE)):
        text: list[str] = []
        while not (yield from reader.literal(_QUOTE)):
            if not (character := (yield from reader.peek())):
                raise MalformedError
            text.append(character)
            reader.pos += 1
        return json.dumps("".join(text), ensure_ascii=False)
    first = yield from reader.peek()
    if first not in ("{", "["):
        return (yield from _word(reader))
    if depth >= MAX_DEPTH:
        raise MalformedError
    reader.pos += 1
    items: list[str] = []
    while (yield from _more(reader, "}" if first == "{" else "]", bool(items))):
        key = ""
        if first == "{":
            key = json.dumps((yield from _key(reader)), ensure_ascii=False) + ": "
        items.append(key + (yield from _value(reader, depth + 1)))
    listed = ", ".join(items)
    return f"{{{listed}}}" if first == "{" else f"[{listed}]"


def _word(reader: ReplyReader) -> Generator[None, None, str]:
    word: list[str] = []
    while (character := (yield from reader.peek())) not in _NO_WORD or not character:
        if not character or len(word) > MAX_HELD:
            raise MalformedError
        word.append(character)
        reader.pos += 1
    text = "".join(word).strip()
    if text == "None":
        return "null"
    if not text:
        raise MalformedError
    return text if is_json(text, around=1) else json.dumps(text, ensure_ascii=False)


FORMAT = marked(
    "gemma4",
    {_CALL: _read},
    reasoning=("<|channel>thought", "<channel|>"),
    marks=(_CALL_END, _QUOTE),
    forms=(
        CallGrammar(
            before=f"{_CALL}call:",
            after="{",
            end="}" + _CALL_END,
            marks=(_CALL,),
            separator="",
            content=MappingProxyType({"type": "bare_object", "quote": _QUOTE}),
            name_in_json=False,
        ),
    ),
)
