"""Bodies of requests: read within bounds, then read as JSON within bounds.

Before JSON becomes objects its values are counted: a body of 8 MiB may hold four million of them,
which would take hundreds of megabytes. What is left may still take most of a second, in which every
other stream would stand still: so a thread does it, for one body at a time. A body's bytes count
until its server has accepted what it asks for, since so long it is there in one form or another.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

from starlette.requests import Request

from headrace.openai.errors import ApiError

MAX_BYTES = 8 << 20
"""Of one body."""
MAX_VALUES = 300_000
"""Commas, colons and opening brackets of one body: at most so many values; the longest prompt of
token ids that a server takes has 262,144.
"""
MAX_HELD_BYTES = 64 << 20
"""Of all bodies that are being read or sent on; each peer may have a quarter."""
SMALL_BYTES = 32 << 10
"""A body up to here takes no more than some milliseconds."""
BODY_SECONDS = 60.0
"""How long a body may take to come."""
T = TypeVar("T")


class Bodies:
    """The bodies that are being read, in bytes.

    Args:
        turn: of large ones.
    """

    def __init__(self, turn: asyncio.Lock) -> None:
        self._held: Counter[str] = Counter()
        self._turn = turn

    @asynccontextmanager
    async def read(
        self, request: Request, peer: str, understand: Callable[[dict[str, Any]], T]
    ) -> AsyncIterator[T]:
        """What `understand` makes of the body's object; the block is left when that is sent on.

        Raises:
            ApiError: it is too large, too slow, of another type, or no object of JSON.
            ClientDisconnect: its sender has left.
        """
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            said = f"'{kind[:100]}'" if kind else "none"
            raise ApiError(
                415, f"the body's content-type is {said}; send application/json", code="media_type"
            )
        with self._room(peer) as take:
            try:
                async with asyncio.timeout(BODY_SECONDS):
                    body = bytearray()
                    async for piece in request.stream():
                        take(len(piece))
                        body += piece
                        if len(body) > MAX_BYTES:
                            raise _too_large(f"more than {MAX_BYTES} bytes")
            except TimeoutError:
                raise ApiError(
                    408, f"the body did not come within {BODY_SECONDS:.0f} s", code="timeout"
                ) from None
            if len(body) <= SMALL_BYTES:
                found = understand(parse(body))
            else:
                async with self._turn:
                    found = await asyncio.to_thread(lambda: understand(parse(body)))
            body = bytearray()
            yield found

    @contextmanager
    def _room(self, peer: str) -> Iterator[Any]:
        taken = 0

        def take(size: int) -> None:
            nonlocal taken
            total, own = self._held.total() + size, self._held[peer] + size
            if total > MAX_HELD_BYTES or own > MAX_HELD_BYTES // 4:
                raise ApiError(
                    503,
                    "too many large bodies are being read; send yours again",
                    type="server_error",
                    code="too_many_bodies",
                    headers={"retry-after": "1"},
                )
            taken += size
            self._held[peer] += size

        try:
            yield take
        finally:
            self._held[peer] -= taken
            if self._held[peer] <= 0:
                del self._held[peer]


def parse(body: bytes | bytearray) -> dict[str, Any]:
    """The object of a text of JSON.

    Raises:
        ApiError: it is none, has a member twice, NaN or an infinity, a lone surrogate, or too many
            values.
    """
    if sum(map(body.count, (b",", b":", b"[", b"{"))) > MAX_VALUES:
        raise _too_large(f"more than {MAX_VALUES} commas, colons and opening brackets")
    try:
        found = json.loads(
            body.decode("utf-8"), object_pairs_hook=_members, parse_constant=_constant
        )
        # A lone surrogate is written as an escape, and is no text.
        if b"\\u" in body:
            json.dumps(found, ensure_ascii=False).encode()
    except RecursionError:
        raise _no_json("it nests too deeply") from None
    except UnicodeError:
        raise _no_json("it is not UTF-8, or has a lone surrogate") from None
    except ValueError as error:
        raise _no_json(str(error)) from None
    if not isinstance(found, dict):
        raise ApiError(400, f"the body is no JSON object: it is {type_name(found)}", code="json")
    return found


def type_name(value: Any) -> str:
    """What a value of JSON is, in words."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    kinds = {str: "a string", list: "an array", dict: "an object", int: "an integer"}
    return kinds.get(type(value), "a number")


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        counted = Counter(name for name, _ in pairs)
        raise ValueError(f"the member {counted.most_common(1)[0][0][:100]!r} comes twice")
    return found


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def _no_json(why: str) -> ApiError:
    return ApiError(400, f"the body cannot be read as JSON: {why}", code="json")


def _too_large(what: str) -> ApiError:
    return ApiError(413, f"the body has {what}", code="body_too_large")
