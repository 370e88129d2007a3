"""Reads request bodies and parses them as JSON, both within limits.

The values in JSON text are counted before it is parsed: a body of 8 MiB may contain four million of
them, which would take hundreds of megabytes. Even within the limit, parsing may take most of a
second, during which every other stream would stall. Large bodies are therefore parsed in a thread,
one at a time. A body's bytes count until its server has accepted the request, because until then
its content is in memory in some form.
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
"""The maximum size of one body."""
MAX_VALUES = 300_000
"""The maximum number of commas, colons and opening brackets in one body, which bounds the number of
values. The longest prompt of token ids that a server accepts has 262,144.
"""
MAX_HELD_BYTES = 64 << 20
"""The maximum total size of all bodies being read or forwarded. Each peer may use a quarter."""
SMALL_BYTES = 32 << 10
"""The size up to which parsing a body takes no more than a few milliseconds."""
BODY_SECONDS = 60.0
"""The time limit for receiving a body, in seconds."""
T = TypeVar("T")


class Bodies:
    """Reads bodies, and limits the bytes held by all of them.

    Args:
        turn: a lock held while a large body is parsed.
    """

    def __init__(self, turn: asyncio.Lock) -> None:
        self._held: Counter[str] = Counter()
        self._turn = turn

    @asynccontextmanager
    async def read(
        self, request: Request, peer: str, understand: Callable[[dict[str, Any]], T]
    ) -> AsyncIterator[T]:
        """Yields what `understand` makes of the body's object. Leave the block once it is
        forwarded.

        Raises:
            ApiError: the body is too large, too slow, of another type, or not a JSON object.
            ClientDisconnect: the client has disconnected.
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
    """Parses a JSON object.

    Raises:
        ApiError: the text is not a JSON object, or has a duplicate member, NaN or an infinity, a
            lone surrogate, or too many values.
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
    """Describes the type of a JSON value in words."""
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
