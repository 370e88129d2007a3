"""OLMo 3: calls as in Python, one a line, their values as in JSON.

    <function_calls>name(key="text", other=[1, 2])
    name()</function_calls>

`True`, `False`, `None` and text between single quotes are taken as Python's values. Arguments are
made here: the names become members, and JSON values are handed on as they come.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator

from service.replies.calls import begin, json_value
from service.replies.format import Context, marked
from service.replies.pieces import PieceWriter
from service.replies.reader import MalformedError, Reader, Steps
from service.replies.typed_values import MAX_PARAMETERS

_CALLS = "<function_calls>"
_CALLS_END = "</function_calls>"
_NO_NAME = "(),=<>[]{}'\"\n"
_WORDS = {"True": "true", "False": "false", "None": "null"}
_ESCAPE = re.compile(r"\\([\\'\"nrt])")
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t"}


def _calls(reader: Reader, out: PieceWriter, context: Context) -> Steps:
    while True:
        yield from reader.blanks()
        yield from _call(reader, out)
        ahead = yield from reader.behind_blanks()
        if not ahead or (ahead == "<" and (yield from reader.past(_CALLS_END))):
            return


def _call(reader: Reader, out: PieceWriter) -> Steps:
    name = yield from reader.name(_NO_NAME)
    yield from reader.expect("(")
    yield from reader.blanks()
    key = None
    if (yield from reader.peek()) != ")":
        key = yield from _key(reader)
    begin(reader, out, name)
    out.arguments("{", "")
    try:
        if key is not None:
            yield from _arguments(reader, out, key)
        yield from reader.expect(")")
    except MalformedError:
        out.end(complete=False)
        raise
    out.arguments("}", reader.take())
    out.end(complete=True)


def _arguments(reader: Reader, out: PieceWriter, key: str) -> Steps:
    """Read values and names, after the first name and up to the closing bracket."""
    keys: set[str] = set()
    while True:
        if key in keys or len(keys) >= MAX_PARAMETERS:
            raise MalformedError
        before = ("," if keys else "") + json.dumps(key, ensure_ascii=False) + ":"
        keys.add(key)
        yield from reader.blanks()
        out.arguments(before, reader.take())
        yield from _value(reader, out)
        yield from reader.blanks()
        if (yield from reader.peek()) == ")":
            return
        yield from reader.expect(",")
        yield from reader.blanks()
        if (yield from reader.peek()) == ")":
            return
        key = yield from _key(reader)


def _key(reader: Reader) -> Generator[None, None, str]:
    key = yield from reader.name(_NO_NAME)
    yield from reader.expect("=")
    return key


def _value(reader: Reader, out: PieceWriter) -> Steps:
    for word, value in _WORDS.items():
        if (yield from reader.literal(word)):
            out.arguments(value, reader.take())
            return
    if (yield from reader.peek()) == "'":
        text = yield from _quoted(reader)
        out.arguments(json.dumps(text, ensure_ascii=False), reader.take())
    elif not (yield from json_value(reader, out, around=1)):
        raise MalformedError


def _quoted(reader: Reader) -> Generator[None, None, str]:
    """Read text between single quotes, which is held."""
    yield from reader.expect("'")
    found: list[str] = []
    escapes = False
    while True:
        character = yield from reader.peek()
        if not character or character == "\n":
            raise MalformedError
        reader.pos += 1
        if character == "'" and not escapes:
            return _ESCAPE.sub(lambda m: _ESCAPED.get(m[1], m[1]), "".join(found))
        escapes = character == "\\" and not escapes
        found.append(character)


FORMAT = marked(
    "olmo3",
    {_CALLS: _calls},
    marks=(_CALLS_END,),
    templates=((_CALLS,),),
)
