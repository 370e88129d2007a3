"""Calls in Python syntax: `name(key="value", other=[1, 2])`. The arguments are converted to JSON.

Double-quoted text, numbers and words are passed on as they arrive if they are JSON. What Python
writes differently is converted: `True`, `False`, `None`, single-quoted text, and lists, tuples and
dictionaries of these. Such a value is held until it ends, so one of more than MAX_HELD characters
is invalid. Anything else, such as an expression, is also invalid: the call ends as incomplete, and
the rest is text.

Models write quotes within single quotes without escaping them. A single quote ends a text only if
what follows can come after a value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Generator

from service.replies.json_calls import MAX_PARAMETERS, begin, json_value
from service.replies.json_scanner import MAX_DEPTH, is_json
from service.replies.pieces import PieceWriter
from service.replies.reader import MalformedError, ReplyReader, Steps

_NO_NAME = "(),=<>[]{}'\"\n"
_WORDS = {"True": "true", "False": "false", "None": "null"}
_ESCAPE = re.compile(r"\\([\\'\"nrt])")
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t"}
_CLOSING = {"[": "]", "(": ")", "{": "}"}
_BEHIND_VALUES = ",)]}:"


def python_call(
    reader: ReplyReader, out: PieceWriter, names: Container[str] | None = None
) -> Steps:
    """Read a call that comes next. `names` are the allowed tool names; None allows any.

    Raises:
        MalformedError: it is not a call, or not a complete one. Text that was read but not passed
            on is held.
    """
    name = yield from reader.name(_NO_NAME)
    if names is not None and name not in names:
        raise MalformedError
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


def _arguments(reader: ReplyReader, out: PieceWriter, key: str) -> Steps:
    """Read values and names after the first name, up to the closing bracket."""
    keys: set[str] = set()
    while True:
        if key in keys or len(keys) >= MAX_PARAMETERS:
            raise MalformedError
        before = ("," if keys else "") + _string(key) + ":"
        keys.add(key)
        yield from reader.blanks()
        out.arguments(before, reader.take())
        yield from _argument(reader, out)
        if not (yield from _next(reader, ")")):
            return
        key = yield from _key(reader)


def _next(reader: ReplyReader, closing: str) -> Generator[None, None, bool]:
    """Read the comma after a value. Return False if the closing bracket comes next, with or without
    a comma before it; the bracket is not read.
    """
    yield from reader.blanks()
    if (yield from reader.peek()) == closing:
        return False
    yield from reader.expect(",")
    yield from reader.blanks()
    return (yield from reader.peek()) != closing


def _key(reader: ReplyReader) -> Generator[None, None, str]:
    key = yield from reader.name(_NO_NAME)
    yield from reader.expect("=")
    return key


def _argument(reader: ReplyReader, out: PieceWriter) -> Steps:
    """Read a value and pass it on."""
    if (yield from reader.peek()) in "TFN'[({":
        value = yield from _value(reader, 1)
        raw = reader.take()
        out.arguments(raw if is_json(raw, around=1) else value, raw)
    elif not (yield from json_value(reader, out, around=1)):
        raise MalformedError


def python_value(text: str) -> str | None:
    """Convert a list, tuple or dictionary in Python syntax to JSON text; None if it is not one."""
    reader = ReplyReader()
    reader.add(text)
    reader.close()
    steps = _value(reader, 1)
    try:
        next(steps)
    except StopIteration as end:
        return str(end.value) if reader.pos == len(text) else None
    except MalformedError:
        pass
    return None


def _value(reader: ReplyReader, depth: int) -> Generator[None, None, str]:
    """Read and hold a value that is nested `depth` containers deep, and return its JSON text."""
    for word, value in _WORDS.items():
        if (yield from reader.literal(word)):
            return value
    first = yield from reader.peek()
    if first == "'":
        return _string((yield from _quoted(reader)))
    if not first or first not in _CLOSING:
        return (yield from reader.value())
    if depth >= MAX_DEPTH:
        raise MalformedError
    reader.pos += 1
    closing, items = _CLOSING[first], list[str]()
    yield from reader.blanks()
    ahead = yield from reader.peek()
    more = ahead != closing
    while more:
        key = ""
        if first == "{":
            key = yield from _member(reader)
        items.append(key + (yield from _value(reader, depth + 1)))
        more = yield from _next(reader, closing)
    yield from reader.expect(closing)
    listed = ", ".join(items)
    return f"{{{listed}}}" if first == "{" else f"[{listed}]"


def _member(reader: ReplyReader) -> Generator[None, None, str]:
    """Read a dictionary's key, up to its value."""
    if (yield from reader.peek()) == "'":
        key = _string((yield from _quoted(reader)))
    else:
        key = _string((yield from reader.string()))
    yield from reader.blanks()
    yield from reader.expect(":")
    yield from reader.blanks()
    return key + ": "


def _quoted(reader: ReplyReader) -> Generator[None, None, str]:
    yield from reader.expect("'")
    found: list[str] = []
    escapes = False
    while True:
        character = yield from reader.peek()
        if not character:
            raise MalformedError
        reader.pos += 1
        if (
            character == "'"
            and not escapes
            and (yield from reader.behind_blanks()) in _BEHIND_VALUES
        ):
            return _ESCAPE.sub(lambda m: _ESCAPED.get(m[1], m[1]), "".join(found))
        escapes = character == "\\" and not escapes
        found.append(character)


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
