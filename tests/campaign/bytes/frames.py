"""Raw bytes sent to a server's port: almost valid HTTP/2, and bytes that are not HTTP/2 at all.

A witness watches meanwhile, and a valid call must be answered at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter

import grpc
from hyperframe.frame import ContinuationFrame, HeadersFrame, PushPromiseFrame

from tests.campaign.bytes.mutating import mutate_bytes
from tests.campaign.calm import beside
from tests.campaign.hostile import encoding as wire
from tests.campaign.hostile import http2
from tests.campaign.hostile.sending import GENERATE, HEALTH
from tests.campaign.hostile.server import ATTACKER, Server
from tests.campaign.parts import Course, Tried
from tests.service.raw_http2 import HELLO, frame, literal

AT_ONCE = 8
CALM_S, CUT_CALM_S = 20.0, 2.0
READ_S = 0.05
MOST_LOG_BYTES = 1 << 20
_HEADS = (
    (b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/grpc.health.v1.Health/Check"),
    (b":authority", b"localhost"), (b"te", b"trailers"), (b"content-type", b"application/grpc"),
    (b"grpc-timeout", b"99999999999H"), (b"grpc-encoding", b"gzip"), (b"grpc-encoding", b"br"),
    (b"authorization", b"Bearer \xff\xfe"), (b"content-length", b"-1"), (b":path", b"/"),
    (b"grpc-accept-encoding", b"a" * 500), (b"connection", b"close"), (b":status", b"200"),
    (b"x-bin", b"%%%"), (b"trace-bin", b"AAAA===="), (b":path", b"/a/b/c?d"), (b"\x00", b"\r\n"),
)  # fmt: skip


def garbage(source: random.Random) -> bytes:
    if source.random() < 0.1:
        return source.randbytes(source.randint(1, 2000))
    found = [HELLO]
    for _ in range(source.randint(1, 20)):
        found.append(_frame(source))
    said = b"".join(found)
    return mutate_bytes(said, source, 1 << 20) if source.random() < 0.5 else said


def _frame(source: random.Random) -> bytes:
    stream = source.choice((0, 1, 1, 1, 3, 5, 2, 2**31 - 1))
    flags = source.choice((0, 1, 4, 5, 8, 0x20, 0xFF))
    if source.random() < 0.4:
        heads = [*_HEADS[:6], *source.sample(_HEADS, source.randint(0, 4))]
        if source.random() < 0.3:
            source.shuffle(heads)
        block = b"".join(literal(name, value) for name, value in heads)
        kind = source.choice((HeadersFrame, HeadersFrame, ContinuationFrame, PushPromiseFrame))
        return frame(kind.type, flags, stream, block)
    kind = source.choice((*range(10), 0xB, 0xFE))
    size = source.choice((0, 1, 4, 5, 6, 8, 100, 5000))
    return frame(kind, flags, stream, source.randbytes(size))


def tried(course: Course, seconds: float) -> Tried:
    with beside(course.either(CALM_S, CUT_CALM_S)) as there:
        server = there.server
        said = server.log_bytes()
        tally = there.during(
            lambda: asyncio.run(_attack(server.target, course.source("http2"), seconds))
        )
        wrong = there.faults() + there.slow()
        if server.is_alive:
            wrong += _wrong(server, said)
    told = ", ".join(f"{count:,} {what}" for what, count in tally.most_common(4))
    return Tried(
        name="http2",
        what=f"connections with HTTP/2 that is wrong, and with none ({told})",
        promises=(3, 7, 11),
        count=tally["connections"],
        worst=there.gap,
        wrong=wrong,
    )


def _wrong(server: Server, said: int) -> list[str]:
    wrong = []
    if (grown := server.log_bytes() - said) > MOST_LOG_BYTES:
        wrong.append(f"the log grew by {grown:,} bytes")
    try:
        raw = wire.request("hi", stop={"max_tokens": 2})
        server.call(GENERATE, raw, ATTACKER)
        server.call(HEALTH + "Check", b"")
    except grpc.RpcError as error:
        wrong.append(f"afterwards a call fails: {error}"[:200])
    return wrong


async def _attack(target: str, source: random.Random, seconds: float) -> Counter[str]:
    tally: Counter[str] = Counter()
    ends = time.monotonic() + seconds

    async def one(number: int) -> None:
        own = random.Random(source.random())
        while time.monotonic() < ends:
            with contextlib.suppress(OSError):
                await _connect(target, garbage(own), tally)

    await asyncio.gather(*(one(number) for number in range(AT_ONCE)))
    return tally


async def _connect(target: str, said: bytes, tally: Counter[str]) -> None:
    reader, writer = await http2.raw_connection(target)
    tally["connections"] += 1
    try:
        writer.write(said)
        async with asyncio.timeout(READ_S):
            await writer.drain()
            while await reader.read(65536):
                tally["answers"] += 1
        tally["ended by the server"] += 1
    except TimeoutError:
        tally["left open by the server"] += 1
    finally:
        writer.transport.abort()
