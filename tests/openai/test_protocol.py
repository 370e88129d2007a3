"""How long, and how much, a connection to the HTTP door may take: with short times, on a socket."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn
from headrace.openai import protocol

PATIENCE_S = 20.0
SHORT_S = 0.1
LARGE = 32 << 20
HEAD = b"POST / HTTP/1.1\r\nHost: localhost\r\n"


class App:
    """Answers with so many bytes, without reading; `/wait` waits for the client's end.

    Attributes:
        size: of answers.
        left: set when a client has left that `/wait` waited for.
    """

    def __init__(self) -> None:
        self.size = 2
        self.left = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        head = [(b"content-length", str(self.size).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": b"a" * self.size, "more_body": True})
        if scope["path"] == "/wait":
            while (await receive())["type"] != "http.disconnect":
                pass
            self.left.set()
        else:
            await send({"type": "http.response.body", "body": b""})


@contextlib.asynccontextmanager
async def serving(app: App) -> AsyncIterator[int]:
    """The port where the application is."""
    config = uvicorn.Config(
        app, http=protocol.make_protocol(), ws="none", lifespan="off", log_config=None
    )
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as sock:
        task = asyncio.create_task(server._serve([sock]))
        try:
            yield sock.getsockname()[1]
        finally:
            server.should_exit = server.force_exit = True
            await task


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HEAD_SECONDS", "LINGER_SECONDS", "UNREAD_SECONDS"):
        monkeypatch.setattr(protocol, name, SHORT_S)


async def end_of(reader: asyncio.StreamReader) -> bytes:
    """All that comes until the door ends the connection."""
    found = b""
    async with asyncio.timeout(PATIENCE_S):
        with contextlib.suppress(ConnectionError):
            while piece := await reader.read(65536):
                found += piece
    return found


@pytest.mark.parametrize(
    ("said", "answers"),
    [
        (b"", []),
        (b"\r\n", [b"408"]),
        (b"GET / HT", [b"408"]),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\nGET / HT", [b"200"]),
    ],
)
async def test_a_head_has_its_time(said: bytes, answers: list[bytes]) -> None:
    async with serving(App()) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(said)
        found = await end_of(reader)
        writer.close()
    assert [part[:3] for part in found.split(b"HTTP/1.1 ")[1:]] == answers


async def test_the_rest_of_a_body_that_was_answered_has_its_time() -> None:
    async with serving(App()) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD + b"Content-Length: 1000000000\r\n\r\n")
        assert (await reader.readuntil(b"aa")).startswith(b"HTTP/1.1 200")

        async def goes_on() -> None:
            while True:
                writer.write(b"a" * 1000)
                await writer.drain()
                await asyncio.sleep(0)

        with pytest.raises(ConnectionError):
            await asyncio.wait_for(goes_on(), PATIENCE_S)
        writer.close()


async def test_blank_lines_begin_a_head() -> None:
    async with serving(App()) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD + b"Content-Length: 0\r\n\r\n")
        await reader.readuntil(b"aa")
        writer.write(b"\r\n")
        assert b" 408 " in await end_of(reader)
        writer.close()


async def test_a_connection_goes_on_after_a_body_that_was_answered_before_its_end() -> None:
    async with serving(App()) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(3):
            writer.write(HEAD + b"Content-Length: 4\r\n\r\n")
            assert (await reader.readuntil(b"aa")).startswith(b"HTTP/1.1 200")
            writer.write(b"rest")
        writer.close()


async def test_an_answer_that_nobody_reads_ends() -> None:
    app = App()
    app.size = LARGE
    async with serving(app) as port:
        with socket.create_connection(("127.0.0.1", port)) as sock:
            sock.sendall(b"POST /wait HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n")
            async with asyncio.timeout(PATIENCE_S):
                await app.left.wait()


async def test_a_reader_who_is_slow_has_its_answer() -> None:
    app = App()
    app.size = LARGE
    async with serving(app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 16)
        writer.write(HEAD + b"Content-Length: 0\r\n\r\n")
        found = 0
        async with asyncio.timeout(PATIENCE_S):
            while found < LARGE:
                found += len(await reader.readexactly(1 << 20))
                await asyncio.sleep(SHORT_S / 4)
        writer.close()


async def test_connections_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "MAX_CONNECTIONS", 4)
    monkeypatch.setattr(protocol, "HEAD_SECONDS", PATIENCE_S)
    async with serving(App()) as port:
        there = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        assert b" 503 " in await end_of(there[2][0])
        for _, writer in there:
            writer.close()
            await writer.wait_closed()


async def test_a_client_that_goes_has_gone_for_all_that_it_sent() -> None:
    app = App()
    async with serving(app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        one = b"POST /wait HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n"
        writer.write(one * (protocol.MAX_PIPELINED + 2))
        await end_of(reader)  # it sent too many before their turn
        async with asyncio.timeout(PATIENCE_S):
            await app.left.wait()
        writer.close()
