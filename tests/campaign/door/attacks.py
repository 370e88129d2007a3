"""Attacks on the HTTP door (`headrace openai`), its process, and an HTTP caller who behaves."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import itertools
import json
import random
import signal
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.rig.gateways import door
from benchmarks.rig.serving import Process
from tests.campaign.low_priority import low_priority
from tests.service.real_server import clean_environment

PATIENCE_S = 10.0
"""How long an attacker waits for an answer."""
CHAT = {"messages": [{"role": "user", "content": "Tell me a story."}]}


def open_door(target: str, folder: Path) -> AbstractContextManager[Process]:
    """Run the door in front of a server. Raises SystemFailure."""
    environment = clean_environment()
    return door(target, folder / "door.log", environment=environment, ending=signal.SIGKILL)


class Neighbour(threading.Thread):
    """A caller that streams one chat after another through the door until it is closed.

    Attributes:
        answers: the number of streams that completed.
    """

    def __init__(self, port: int, token: str) -> None:
        super().__init__(daemon=True)
        self.answers = 0
        self.wrong: list[str] = []
        self._port = port
        self._headers = {"content-type": "application/json", "authorization": f"Bearer {token}"}
        self._worst = 0.0
        self._at = time.monotonic()
        self._over = threading.Event()

    def begin(self) -> None:
        """Discard what was recorded so far and start a new measurement."""
        self._worst, self._at, self.wrong, self.answers = 0.0, time.monotonic(), [], 0

    @property
    def worst_s(self) -> float:
        """The longest time without an event, in seconds."""
        return max(self._worst, time.monotonic() - self._at)

    def run(self) -> None:
        body = json.dumps(CHAT | {"stream": True, "max_tokens": 200, "ignore_eos": True})
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
        while not self._over.is_set():
            try:
                connection.request("POST", "/v1/chat/completions", body, self._headers)
                answer = connection.getresponse()
                last = b""
                for line in answer:
                    now = time.monotonic()
                    self._worst, self._at = max(self._worst, now - self._at), now
                    last = line.strip() or last
                if answer.status != 200 or last != b"data: [DONE]":
                    self.wrong.append(f"{answer.status}: {last[:200]!r}")
                    time.sleep(0.05)
                else:
                    self.answers += 1
            except (OSError, http.client.HTTPException) as error:
                self.wrong.append(repr(error))
                connection.close()
                time.sleep(0.05)
        connection.close()

    def close(self) -> None:
        self._over.set()
        self.join(60)


# ---- an attacker ---------------------------------------------------------------------------------


@dataclass
class Attacker:
    """Connections and requests for one attack on the door.

    Attributes:
        until: when the attack ends, in monotonic seconds.
        answers: the number of answers by HTTP status; "closed" counts connections that closed
            without an answer.
    """

    port: int
    token: str
    until: float
    answers: Counter[str] = field(default_factory=Counter)

    @property
    def has_time(self) -> bool:
        return time.monotonic() < self.until

    async def again(self, number: int, one: Callable[[int], Awaitable[object]]) -> None:
        """Run `number` workers that each repeat a coroutine until time is up."""

        async def on(index: int) -> None:
            while self.has_time:
                await one(index)

        await asyncio.gather(*map(on, range(number)))

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a connection with a small receive buffer, so that unread data fills it quickly."""
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        await asyncio.wait_for(loop.sock_connect(sock, ("127.0.0.1", self.port)), PATIENCE_S)
        return await asyncio.open_connection(sock=sock, limit=4096)

    def head(self, *lines: str, path: str = "/v1/chat/completions", length: int = -1) -> bytes:
        found = [f"POST {path} HTTP/1.1", f"Host: 127.0.0.1:{self.port}"]
        found += ["Content-Type: application/json", f"Authorization: Bearer {self.token}", *lines]
        found += [f"Content-Length: {length}"] if length >= 0 else []
        return "\r\n".join([*found, "", ""]).encode()

    def post(self, body: Any, *lines: str, path: str = "/v1/chat/completions") -> bytes:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.head(*lines, path=path, length=len(data)) + data

    async def say(self, *pieces: bytes, keep: float = 0.0) -> bytes:
        """Send bytes and return the first bytes of the answer.

        keep: seconds for which the connection then stays open without reading more.
        """
        answer = b""
        try:
            reader, writer = await self.open()
        except (OSError, TimeoutError):
            self.answers["no connection"] += 1
            return b""
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(PATIENCE_S + keep):
                with contextlib.suppress(ConnectionError):
                    for piece in pieces:
                        writer.write(piece)
                        await writer.drain()
                answer = await reader.read(2048)
                await asyncio.sleep(min(keep, max(self.until - time.monotonic(), 0)))
        self.answers[answer[9:12].decode() or "closed"] += 1
        writer.transport.abort()
        return answer


async def slow_heads(at: Attacker) -> None:
    """Heads that come a byte at a time, and never end."""

    async def one() -> None:
        with contextlib.suppress(OSError, TimeoutError):
            _, writer = await at.open()
            at.answers["opened"] += 1
            for byte in at.head("X-Slow: " + "a" * 10_000):
                writer.write(bytes((byte,)))
                await asyncio.sleep(0.25)
                if not at.has_time:
                    break
            writer.transport.abort()

    await asyncio.gather(*(one() for _ in range(500)))


async def connections(at: Attacker) -> None:
    """As many connections as there can be."""
    opened = []

    async def one(_: int) -> None:
        try:
            opened.append(await at.open())
            at.answers["opened"] += 1
        except (OSError, TimeoutError):
            at.answers["no connection"] += 1

    for begin in range(0, 10_000, 250):
        await asyncio.gather(*map(one, range(begin, begin + 250)))
    await asyncio.sleep(max(at.until - time.monotonic(), 0))
    for _, writer in opened:
        writer.transport.abort()


async def nested_bodies(at: Attacker) -> None:
    """16 MiB of nested JSON, and what passes the bounds on bytes and values with most work."""
    few = 290_000
    user, escape = {"role": "user", "content": "a"}, b"\\n"
    tool = {"type": "function", "function": {"name": "a"}}
    kinds = [
        b'{"messages":' + b"[" * (16 << 20),
        b'{"messages":' + b"[" * few + b"]" * few + b"}",
        b'{"messages":[' + b'{"a":' * (few // 2) + b"1" + b"}" * (few // 2) + b"]}",
        b'{"messages":[{"role":"user","content":"' + escape * (4 << 20) + b'"}]}',
        b'{"messages":[' + b",".join([b"1" * 4000] * 1900) + b"]}",
        json.dumps({"messages": [user] * 58_000}).encode(),
        json.dumps({"messages": [user], "tools": [tool] * 40_000}).encode(),
        json.dumps({"messages": [user], "logit_bias": dict.fromkeys(range(140_000), 1)}).encode(),
        json.dumps({"messages": [{"role": "user", "content": "a " * (4 << 20)}]}).encode()[
            :8388608
        ],
        json.dumps({"messages": [{"role": "user", "content": "a " * (4_190_000)}]}).encode(),
    ]
    bodies = itertools.cycle(kinds)
    await at.again(8, lambda _: at.say(at.post(next(bodies))))


async def pipelined(at: Attacker) -> None:
    """Requests that are sent before their turn."""
    get = f"GET /health HTTP/1.1\r\nHost: 127.0.0.1:{at.port}\r\n\r\n".encode()
    stream = at.post(CHAT | {"stream": True, "max_tokens": 50})

    kinds = [
        get * 10,
        get * 1000,
        stream * 5,
        stream + get * 1000,
        stream * 100,
        stream + stream[:99],
    ]
    await at.again(18, lambda index: at.say(kinds[index % 6], keep=0.5))


async def chunks(at: Attacker) -> None:
    """Chunks of one byte, with endless extensions, sizes and trailers; and endless heads."""
    head = at.head("Transfer-Encoding: chunked")
    kinds: list[list[bytes]] = [
        [head, b"5;" + b"a" * 10_000_000],
        [
            head,
            b"5;a=" + b"a" * 50_000 + b"\r\n",
            *([b"hello\r\n5;" + b"a" * 50_000 + b"\r\n"] * 100),
        ],
        [head, b"0" * 1_000_000 + b"5\r\nhello\r\n0\r\n\r\n"],
        [head, b"fffffffffffffffff\r\nhello"],
        [head, b"7fffffffffffffff\r\n" + b"a" * 10_000_000],
        [head, b"-5\r\nhello\r\n0\r\n\r\n"],
        [head, b"1\r\n \r\n" * 1_000_000],
        [head, b"2\r\n{}\r\n0\r\n" + b"x: y\r\n" * 1_000_000],
        [head, b"2\r\n{}\r\n0\r\nx: " + b"y" * 10_000_000],
        [b"GET /health HTTP/1.1\r\nx: " + b"y" * 10_000_000],
        [b"GET /health HTTP/1.1\r\n" + b"x: y\r\n" * 1_000_000],
        [b"GET /" + b"y" * 10_000_000],
        [b"\r\n" * 5_000_000],
    ]
    await at.again(len(kinds), lambda index: at.say(*kinds[index]))


async def vanishing(at: Attacker) -> None:
    """Clients that go, with a reset, at every byte of a request; and while it is answered."""
    whole = at.post(CHAT | {"stream": True, "max_tokens": 30})

    async def one(cuts: list[int]) -> None:
        for cut in cuts:
            if not at.has_time:
                return
            with contextlib.suppress(OSError, TimeoutError):
                reader, writer = await at.open()
                writer.write(whole[:cut])
                await asyncio.sleep(0.002)
                if cut > len(whole):
                    await asyncio.wait_for(reader.read(cut - len(whole)), PATIENCE_S)
                linger = struct.pack("ii", 1, 0)
                writer.get_extra_info("socket").setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, linger
                )
                writer.transport.abort()
                at.answers["gone"] += 1

    cuts = list(range(1, len(whole) + 40))
    while at.has_time:
        await asyncio.gather(*(one(cuts[i::8]) for i in range(8)))


async def stopped_readers(at: Attacker) -> None:
    """Streams and long answers that nobody reads."""
    stream = CHAT | {"stream": True, "max_tokens": 1500, "ignore_eos": True, "logprobs": True}
    whole = CHAT | {"n": 4, "max_tokens": 200, "ignore_eos": True, "logprobs": True}
    tops = {"top_logprobs": 20}
    kinds = [at.post(stream | tops), at.post(stream), at.post(whole | tops)]
    await at.again(24, lambda index: at.say(kinds[index % len(kinds)], keep=1000))


async def many_tokens(at: Attacker) -> None:
    """Ten thousand tokens, each another caller."""
    body = json.dumps(CHAT | {"max_tokens": 1}).encode()

    async def one(numbers: range) -> None:
        for number in numbers:
            if at.has_time:
                other = Attacker(at.port, f"token-{number}", at.until, at.answers)
                await other.say(other.post(body))

    await asyncio.gather(*(one(range(i, 10_000, 16)) for i in range(16)))


async def leaving(at: Attacker) -> None:
    """Clients that leave while their request waits, or comes."""
    chance = random.Random(1)
    body = at.post(CHAT | {"n": 4, "max_tokens": 500, "ignore_eos": True})
    large = at.head(length=4 << 20) + b'{"messages": "' + b"a" * (1 << 20)

    async def one(index: int) -> None:
        with contextlib.suppress(OSError, TimeoutError):
            _, writer = await at.open()
            writer.write(large if index % 3 == 0 else body)
            await asyncio.sleep(chance.random() * 0.2)
            writer.transport.abort()
            at.answers["left"] += 1

    await at.again(24, one)


async def many_prompts(at: Attacker) -> None:
    """Bodies of 1,024 prompts, with choices of each."""
    texts = {"prompt": ["Once"] * 1024, "max_tokens": 4}
    kinds = [texts, texts | {"n": 16}, texts | {"stream": True}, texts | {"n": 1024}]
    await at.again(8, lambda index: at.say(at.post(kinds[index % 4], path="/v1/completions")))


Attack = Callable[[Attacker], Awaitable[None]]
ATTACKS: dict[str, Attack] = {
    one.__name__.replace("_", "-"): one
    for one in (
        slow_heads, connections, nested_bodies, pipelined, chunks, vanishing, stopped_readers,
        many_tokens, leaving, many_prompts,
    )
}  # fmt: skip


def attacked(name: str, port: int, seconds: float, token: str) -> dict[str, int]:
    """Run an attack in a separate process and return its tally of answers."""
    with low_priority() as process:
        return process.apply(_attack, (name, port, seconds, token))


def _attack(name: str, port: int, seconds: float, token: str) -> dict[str, int]:
    at = Attacker(port, token, time.monotonic() + seconds)
    asyncio.run(ATTACKS[name](at))
    return dict(at.answers)
