"""The input of `headrace batch`: from the bytes of a file to requests and their ids.

1. `open_source` returns the source of bytes; `split_lines` yields the lines as they arrive.
2. `InputReader.requests` makes a request from each line, or an error if the line is invalid. An
   invalid line does not affect others.
3. Every line has an id, which is given or is its line number. No two lines have the same id.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from io import RawIOBase
from pathlib import Path
from typing import Any, NoReturn, cast

from headrace._batch import BatchInput
from headrace.cli import common
from headrace.errors import HeadraceError, invalid_argument
from headrace.options import OPTION_NAMES, GenerationOptions, Request

Id = str | int
"""The id of a request in the input and of its outcome in the output; 2 and "2" are different."""

_INPUTS = ("prompt", "messages", "token_ids")
_CHUNK_BYTES = 64 * 1024


def open_source(source: Path, stack: ExitStack) -> RawIOBase:
    """Opens the source of requests. The stack closes it. If it cannot be read, the command ends.

    It is unbuffered: a buffer stays locked while it waits for a pipe, and Python cannot exit then.
    """
    if str(source) == "-":
        return unbuffered(sys.stdin)
    try:
        return stack.enter_context(source.open("rb", buffering=0))
    except OSError as error:
        common.fail(f"cannot read the requests: {error}", common.EXIT_USAGE)


def unbuffered(stream: Any) -> RawIOBase:
    """Returns the raw stream below one of Python's standard streams, or else its buffer."""
    return cast(RawIOBase, getattr(stream.buffer, "raw", stream.buffer))


def split_lines(source: RawIOBase) -> Iterator[bytes]:
    """Yields each line as soon as it is complete, without its line end, then any incomplete rest.

    Raises:
        HeadraceError: reading the source failed.
    """
    rest = b""
    try:
        while chunk := source.read(_CHUNK_BYTES):
            *lines, rest = (rest + chunk).split(b"\n")
            yield from lines
    except OSError as error:
        raise HeadraceError(f"cannot read the requests: {error}") from None
    if rest:
        yield rest


class InputReader:
    """Turns lines into requests and remembers the ids of those in progress."""

    def __init__(self, done: set[Id]) -> None:
        """Initializes the reader. `done` has the ids that already have a result."""
        self.ids: dict[int, Id] = {}
        self.skipped = 0
        self._done = done
        self._seen: set[Id] = set()
        self._count = 0

    def requests(self, lines: Iterator[bytes]) -> Iterator[BatchInput]:
        """Yields a request for each line without a result yet, or an error for an invalid line."""
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            id_: Id = number
            request: BatchInput
            try:
                fields = parse_fields(line)
                id_ = take_id(fields, number)
                request = make_request(fields)
            except HeadraceError as error:
                request = error
            if id_ not in self._seen:
                self._seen.add(id_)
                if id_ in self._done:
                    self.skipped += 1
                    continue
            elif not isinstance(request, HeadraceError):
                request = invalid_argument("id", f"{id_!r} is that of an earlier line")
            self.ids[self._count] = id_
            self._count += 1
            yield request


def parse_fields(line: bytes) -> dict[str, Any]:
    """Parses the JSON object of a line.

    Raises:
        InvalidArgumentError: the line is not a JSON object, or contains text that cannot be sent.
    """
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError:
        raise invalid_argument("line", "is not UTF-8") from None
    try:
        fields = json.loads(text, parse_constant=_refuse_constant)
        if "\\u" in text:  # the one way to write half a surrogate pair
            json.dumps(fields, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise invalid_argument("line", "holds half a surrogate pair") from None
    except (ValueError, RecursionError) as error:
        raise invalid_argument("line", f"is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise invalid_argument("line", "is not a JSON object")
    return fields


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def take_id(fields: dict[str, Any], number: int) -> Id:
    """Removes the id from a line's fields and returns it, or the line's number if there is no id.

    Raises:
        InvalidArgumentError: the id is neither a string nor an integer.
    """
    given = fields.pop("id", None)
    if given is None:
        return number
    if isinstance(given, bool) or not isinstance(given, (str, int)):
        raise invalid_argument("id", "is neither a string nor a whole number")
    return given


def make_request(fields: dict[str, Any]) -> Request:
    """Makes a request from a line's other fields.

    Raises:
        InvalidArgumentError: the fields do not describe a request.
    """
    given = [name for name in _INPUTS if fields.get(name) is not None]
    if len(given) != 1:
        raise invalid_argument("line", f"has not exactly one of {', '.join(_INPUTS)}")
    kind, prompt = given[0], fields[given[0]]
    options = {name: value for name, value in fields.items() if name not in _INPUTS}
    if kind == "prompt":
        if not isinstance(prompt, str):
            raise invalid_argument(kind, "is not a string")
    elif not isinstance(prompt, list):
        raise invalid_argument(kind, "is not an array")
    elif kind == "messages" and not all(isinstance(item, dict) for item in prompt):
        raise invalid_argument(kind, "holds what is no message, which is an object")
    elif kind == "token_ids" and not all(type(item) is int for item in prompt):
        raise invalid_argument(kind, "holds what is no token id, which is a whole number")
    if unknown := sorted(options.keys() - OPTION_NAMES):
        raise invalid_argument(unknown[0], "is no option of a request")
    return Request(prompt, **cast(GenerationOptions, options))
