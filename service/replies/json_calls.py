"""Tool calls in JSON: an object with a name and arguments, or the arguments alone.

The arguments are passed on as they arrive, exactly as the model wrote them, and are checked at the
same time. If they stop being JSON, the call ends as incomplete, and the rest is text.
"""

from __future__ import annotations

import json
from collections.abc import Container, Generator

from service.replies.json_scanner import JsonScanner, is_json
from service.replies.pieces import PieceWriter
from service.replies.reader import MalformedError, ReplyReader, Steps, checked_name

MAX_CALLS = 128
"""The most calls in a reply; further calls are text."""
MAX_PARAMETERS = 256
"""The most arguments in a call that is assembled argument by argument. With more, the call is
incomplete, and the rest is text.
"""
_MAX_ID = 64
_ARGUMENTS = ("arguments", "parameters")


def begin(reader: ReplyReader, out: PieceWriter, name: str, id: str | None = None) -> None:
    """Begin a call. All held text belongs to it.

    Raises:
        MalformedError: the reply has too many calls.
    """
    if out.num_calls >= MAX_CALLS:
        raise MalformedError
    out.begin(reader.take(), name, id)


def arguments(reader: ReplyReader, out: PieceWriter) -> Steps:
    """Read the arguments of the current call, which come next.

    Raises:
        MalformedError: they stopped being JSON, or the output ended. The call has been ended.
    """
    complete = yield from json_value(reader, out)
    out.end(complete=complete)
    if not complete:
        raise MalformedError


def json_value(
    reader: ReplyReader, out: PieceWriter, *, around: int = 0
) -> Generator[None, None, bool]:
    """Read a JSON value that comes next, as a fragment of the current call's arguments.

    Args:
        reader, out: where to read from and where to write the value.
        around: how many containers of the arguments enclose the value.

    Returns:
        Whether the value is complete. If not, it stopped being JSON, or the output ended.
    """
    scanner = JsonScanner(around)
    while True:
        reader.pos = scanner.feed(reader.text, reader.pos, reader.end)
        fragment = reader.take()
        out.arguments(fragment, fragment)
        if scanner.done or scanner.failed:
            break
        if reader.pos >= reader.end and not (yield from reader.more()):
            break
    return scanner.done


def call_items(reader: ReplyReader, out: PieceWriter, *, name: str = "name") -> Steps:
    """Read a list of calls after its opening bracket: {"name": …, "arguments": {…}}, …]. The list
    may be empty. See `call_object` for `name`. What follows a call is left unread unless it is
    another call.

    Raises:
        MalformedError: it is not such a list. Text that was read but not passed on is held.
    """
    yield from reader.blanks()
    if (yield from reader.peek()) == "]":
        yield from reader.expect("]")
        return
    while True:
        yield from reader.blanks()
        one = call_object(reader, out, name=name) if name else keyed_object(reader, out)
        if not (yield from one):
            return
        yield from reader.blanks()
        if (yield from reader.expect(",]")) == "]":
            return


def call_object(
    reader: ReplyReader,
    out: PieceWriter,
    *,
    name: str = "name",
    needs_arguments: bool = False,
    names: Container[str] | None = None,
) -> Generator[None, None, bool]:
    """Read a call as an object: {"name": …, "arguments": {…}}, or "parameters". The members may be
    in any order. Other members are skipped, and so are repeated ones. Arguments may also be a
    string with the object's text, null, or (unless `needs_arguments`) missing. `name` is the member
    that has the tool's name, which must be one of `names` unless that is None.

    Returns:
        Whether the object was complete. If the call was complete but the rest of the object was
        not, that rest is text.

    Raises:
        MalformedError: it is not a call, or not a complete one. Text that was read but not passed
            on is held.
    """
    if (yield from _as_far_as_arguments(reader, out, name, needs_arguments, names)):
        return (yield from _rest(reader, out))
    out.mark(reader.take())
    return True


def keyed_object(reader: ReplyReader, out: PieceWriter) -> Generator[None, None, bool]:
    """Read a call as an object with one member: {"tool's name": {…arguments…}}. It returns and
    raises the same as `call_object`.
    """
    yield from reader.expect("{")
    name = checked_name((yield from _key(reader)))
    if (yield from reader.peek()) != "{":
        raise MalformedError
    begin(reader, out, name)
    yield from arguments(reader, out)
    return (yield from _rest(reader, out))


def _rest(reader: ReplyReader, out: PieceWriter) -> Generator[None, None, bool]:
    """Read what follows the arguments in a call's object. It returns the same as `call_object`."""
    try:
        while (yield from _separator(reader)) != "}":
            yield from _key(reader)
            yield from reader.value()
    except MalformedError:
        rest = reader.take()
        (out.mark if rest.isspace() else out.text)(rest)
        return False
    out.mark(reader.take())
    return True


def _as_far_as_arguments(
    reader: ReplyReader,
    out: PieceWriter,
    name_member: str,
    needs_arguments: bool,
    names: Container[str] | None,
) -> Generator[None, None, bool]:
    """Read an object up to its arguments and return True if these can be passed on as they arrive.
    Otherwise read it to its end and return False.
    """
    name: str | None = None
    id: str | None = None
    held: str | None = None  # arguments that came before the name, or as a string
    yield from reader.expect("{")
    while True:
        key = yield from _key(reader)
        kind = yield from reader.peek()
        if key == name_member and name is None:
            name = checked_name((yield from reader.string()))
            if names is not None and name not in names:
                raise MalformedError
        elif key == "id" and kind == '"':
            id = _checked_id((yield from reader.string()))
        elif key not in _ARGUMENTS or held is not None:
            yield from reader.value()
        elif name is not None and kind == "{":
            begin(reader, out, name, id)
            yield from arguments(reader, out)
            return True
        else:
            held = yield from _held_arguments(reader, kind)
        if (yield from _separator(reader)) == "}":
            break
    if name is None or (held is None and needs_arguments):
        raise MalformedError
    begin(reader, out, name, id)
    out.arguments(held or "{}", "")
    out.end(complete=True)
    return False


def _key(reader: ReplyReader) -> Generator[None, None, str]:
    yield from reader.blanks()
    key = yield from reader.string()
    yield from reader.blanks()
    yield from reader.expect(":")
    yield from reader.blanks()
    return key


def _separator(reader: ReplyReader) -> Generator[None, None, str]:
    yield from reader.blanks()
    return (yield from reader.expect(",}"))


def _held_arguments(reader: ReplyReader, kind: str) -> Generator[None, None, str]:
    """Read arguments that cannot be passed on yet."""
    text = yield from reader.value()
    if kind == "n":
        return "{}"
    if kind == '"':
        text = _decoded(text)
    if not text.startswith("{") or not is_json(text):
        raise MalformedError
    return text


def _decoded(string: str) -> str:
    text = str(json.loads(string)).strip(" \t\r\n")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise MalformedError from None
    return text


def _checked_id(id: str) -> str | None:
    fits = (
        0 < len(id) <= _MAX_ID and id.isascii() and id.replace("-", "").replace("_", "").isalnum()
    )
    return id if fits else None
