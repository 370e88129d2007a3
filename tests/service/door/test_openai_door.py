"""The server's HTTP door: started, started again, drained and refused, with the real child around
the fake engine. (What the door answers: tests/clients/python.)
"""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import os
import select
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import typer
from headrace.v1.control_service_pb2 import GetStatisticsRequest
from headrace.v1.control_service_pb2_grpc import ControlServiceStub

from engine.contract.errors import ConfigError
from service.command import cli
from service.config import ServiceConfig
from service.door import openai_door
from service.door.address import Address
from service.door.network_config import DEFAULT_OPENAI, NetworkOptions
from service.door.transport import grpc_options
from service.server import grpc_servers
from tests.service.certificates import make_certificate, needs_openssl
from tests.service.fake_engine import FakeEngine, says
from tests.service.helpers import (
    DEADLINE_S,
    Harness,
    check_course,
    refused,
    serving,
    spec,
    until,
)
from tests.service.real_server import ROOT, RealServer

DOOR = {"openai": "127.0.0.1:0"}


@asynccontextmanager
async def with_door(engine: FakeEngine | None = None, **options: Any) -> AsyncIterator[Harness]:
    async with serving(engine, **{**DOOR, **options}) as h:
        assert h.server.door is not None
        assert await h.server.door.answers(DEADLINE_S)
        yield h


class Http:
    """A client of the door. Its methods wait, in threads."""

    def __init__(self, address: Address, source: str = "127.0.0.1", ca: Path | None = None) -> None:
        self._connection = (
            http.client.HTTPConnection(
                address.host, address.port, DEADLINE_S, source_address=(source, 0)
            )
            if ca is None
            else http.client.HTTPSConnection(
                address.host, address.port, timeout=DEADLINE_S,
                context=ssl.create_default_context(cafile=str(ca)),
            )
        )  # fmt: skip
        self._response: http.client.HTTPResponse | None = None

    def _post(self, path: str, body: dict[str, Any]) -> http.client.HTTPResponse:
        head = {"Content-Type": "application/json"}
        self._connection.request("POST", path, json.dumps(body), head)
        return self._connection.getresponse()

    async def ask(self, path: str, **body: Any) -> tuple[int, Any]:
        """The status, and the body."""

        def run() -> tuple[int, Any]:
            response = self._post(path, body)
            return response.status, json.loads(response.read())

        return await asyncio.to_thread(run)

    async def begin(self, **body: Any) -> None:
        """Begin a stream of a completion."""
        body = {"model": "fake", "stream": True, **body}
        self._response = await asyncio.to_thread(self._post, "/v1/completions", body)
        assert self._response.status == 200

    async def event(self) -> str:
        """The next event's data; empty: the stream has ended."""

        def run() -> str:
            assert self._response is not None
            while line := self._response.readline():
                if line.startswith(b"data: "):
                    return line.decode().removeprefix("data: ").strip()
            return ""

        return await asyncio.to_thread(run)

    def close(self) -> None:
        if self._response is not None:
            self._response.close()
        self._connection.close()


@pytest.fixture
def clients() -> Iterator[list[Http]]:
    """Those that a test opens; closed at its end."""
    opened: list[Http] = []
    yield opened
    for client in opened:
        client.close()


def client_of(h: Harness, clients: list[Http], *more: Any) -> Http:
    assert h.server.door is not None
    clients.append(Http(h.server.door.address, *more))
    return clients[-1]


def child_of(h: Harness) -> int:
    """The child's process id."""
    assert h.server.door is not None
    process = h.server.door._process
    assert process is not None
    return process.pid


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def shown_of(pid: int, name: str) -> bytes:
    """What everybody of this user sees of a process."""
    return Path(f"/proc/{pid}/{name}").read_bytes()


def mode_of(folder: Path) -> int | None:
    """Who may use it; None: it is not there."""
    return folder.stat().st_mode & 0o777 if folder.exists() else None


async def test_it_answers_and_its_clients_are_callers_by_their_address(clients: list[Http]) -> None:
    engine = FakeEngine(script=says("a river"))
    async with with_door(engine) as h:
        for source in ("127.0.0.1", "127.0.0.2"):
            status, body = await client_of(h, clients, source).ask(
                "/v1/chat/completions",
                model="fake",
                messages=[{"role": "user", "content": "What?"}],
            )
            assert status == 200
            assert body["choices"][0]["message"]["content"] == "a river"
        assert [request.caller for request in engine.submitted] == ["127.0.0.1", "127.0.0.2"]


async def test_its_connection_carries_more_clients_than_another_may(clients: list[Http]) -> None:
    async with with_door(FakeEngine(script=says("x")), max_streams_per_connection=3) as h:
        asked = [
            client_of(h, clients, f"127.0.0.{number}").ask(
                "/v1/completions", model="fake", prompt="hi"
            )
            for number in range(1, 11)
        ]
        answers = await asyncio.wait_for(asyncio.gather(*asked), DEADLINE_S)
        assert [status for status, _ in answers] == [200] * 10


async def test_it_cannot_steer_the_server() -> None:
    async with with_door() as h:
        [path] = h.server.sockets._files
        async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
            stub: Any = ControlServiceStub(channel)
            error = await refused(stub.GetStatistics(GetStatisticsRequest()))
            assert error.code is grpc.StatusCode.UNIMPLEMENTED


async def test_the_secret_is_in_no_place_where_others_look(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    async with with_door() as h:
        seen = [shown_of(child_of(h), name) for name in ("cmdline", "environ")]
        assert all(seen)
        secret = h.server._door_secret
        assert len(secret) == 64
        assert not any(secret.encode() in one for one in seen)
        assert secret not in caplog.text
        [folder] = {Path(path).parent for path in h.server.sockets._files}
        assert mode_of(folder) == 0o700
    assert mode_of(folder) is None


async def test_the_child_may_die_again_and_again_and_no_stream_of_grpc_notices(
    clients: list[Http], caplog: pytest.LogCaptureFixture
) -> None:
    engine = FakeEngine(auto=False)
    async with with_door(engine) as h:
        door = h.server.door
        assert door is not None
        session = h.session()
        await session.add(spec(request_id="r", stop={"max_tokens": 8}))
        for restarts in (1, 2, 3):
            await until(lambda: engine.submitted)
            engine.step()
            await session.read()
            os.kill(child_of(h), signal.SIGKILL)
            await until(lambda: door.restarts == restarts)  # noqa: B023 - awaited here
            engine.step()
            assert await door.answers(DEADLINE_S)
            status, _ = await client_of(h, clients).ask("/tokenize", model="fake", prompt="hi")
            assert status == 200
        engine.run()
        await session.end()
        check_course(session.events()["r"])
    assert caplog.text.count("the HTTP door has ended (signal 9)") == 3


async def test_a_drain_lets_a_stream_end_and_takes_no_more(clients: list[Http]) -> None:
    engine = FakeEngine(auto=False)
    async with with_door(engine) as h:
        assert h.server.door is not None
        pid, stream = child_of(h), client_of(h, clients)
        beginning = asyncio.create_task(stream.begin(prompt="hi", max_tokens=3))
        await until(lambda: engine.submitted)
        engine.step()
        await beginning
        drain = h.server.begin_drain()

        async def closed() -> None:
            while True:
                try:
                    _, writer = await asyncio.open_connection(
                        h.server.door.address.host, h.server.door.address.port
                    )
                except ConnectionRefusedError:
                    return
                except ConnectionResetError:  # it waited at the socket that was being closed
                    continue
                writer.close()
                await asyncio.sleep(0)

        await asyncio.wait_for(closed(), DEADLINE_S)
        assert not drain.done()
        engine.run()
        events = [event async for event in rest(stream)]
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length"
        await asyncio.wait_for(drain, DEADLINE_S)
        assert not is_there(pid)
        assert h.server.door.restarts == 0


async def rest(stream: Http) -> AsyncIterator[str]:
    while event := await stream.event():
        yield event


async def test_a_child_that_does_not_end_holds_no_drain_up() -> None:
    async with with_door() as h:
        pid = child_of(h)
        os.kill(pid, signal.SIGSTOP)
        await asyncio.wait_for(h.server.drain(), DEADLINE_S)
        assert not is_there(pid)


async def test_what_the_child_cannot_do_is_told_and_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(**DOOR) as h:
        door = h.server.door
        assert door is not None
        door._command[0] = "/no/such/python"
        await door.answers(DEADLINE_S)
        os.kill(child_of(h), signal.SIGKILL)
        await until(lambda: door.restarts >= 2)
        assert "it cannot be started: [Errno 2]" in caplog.text


@needs_openssl
async def test_it_uses_the_server_s_certificate(clients: list[Http], tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path)
    async with with_door(tls_cert=str(cert), tls_key=str(key), listen=(f"unix:{tmp_path}/s",)) as h:
        status, _ = await client_of(h, clients, "127.0.0.1", cert).ask(
            "/tokenize", model="fake", prompt="hi"
        )
        assert status == 200


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["starlette", "uvicorn", "httptools"])
async def test_without_its_packages_the_option_says_what_to_install(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=rf"{name}.*pip install 'headrace\[openai\]'"):
        async with serving(**DOOR):
            pass


async def test_an_address_that_is_taken_is_refused_at_the_start(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        at = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(
            ConfigError, match=f"cannot listen on {at}: the port is taken;.*--openai"
        ):
            async with serving(openai=at, listen=(f"unix:{tmp_path}/s",)):
                pass
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"openai": "0.0.0.0:8000"}, "openai: 0.0.0.0:8000 can be reached from other machines"),
        ({"openai": "8000"}, "openai: '8000' is not an address"),
        ({"openai": "unix:/run/x"}, "openai: is 'unix:/run/x'; it must be host:port"),
        (
            {**DOOR, "tls_cert": "c", "tls_key": "k", "tls_client_ca": "a"},
            "cannot ask its clients for certificates, as tls_client_ca wants",
        ),
    ],
)
def test_an_address_that_must_not_be(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        ServiceConfig(**options)
    assert words in f"{raised.value}"


@pytest.mark.parametrize("more", [{"insecure": True}, {"tls_cert": "c", "tls_key": "k"}])
def test_an_address_for_other_machines_that_is_allowed(more: dict[str, Any]) -> None:
    assert ServiceConfig(openai="0.0.0.0:8000", **more).openai == "0.0.0.0:8000"


@pytest.mark.parametrize(
    ("line", "openai"),
    [
        ("", None),
        ("--openai", DEFAULT_OPENAI),
        ("--openai --gateway", DEFAULT_OPENAI),
        ("--gateway --openai", DEFAULT_OPENAI),
        ("--openai 127.0.0.1:9", "127.0.0.1:9"),
        ("--openai=127.0.0.1:9 --gateway", "127.0.0.1:9"),
    ],
)
def test_the_flag_needs_no_address(line: str, openai: str | None) -> None:
    command = typer.main.get_command(cli.app).commands["serve"]  # type: ignore[attr-defined]
    given = command.make_context("serve", line.split()).params
    assert (given["openai"], given["gateway"]) == (openai, "--gateway" in line)


def test_without_the_flag_nothing_of_it_is_imported() -> None:
    program = (
        "import sys, service.command.process, service.command.cli; print([name for name in "
        "('service.door.openai_door', 'starlette', 'uvicorn', 'httptools') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout == "[]\n"


# ---- its log, and the server's end ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "logger", "level", "message"),
    [
        ("INFO 100 % of it", "headrace.openai", logging.INFO, "100 % of it"),
        ("ERROR it failed", "headrace.openai", logging.ERROR, "it failed"),
        ("Traceback (most recent call last):", "stderr", logging.WARNING, None),
    ],
)
def test_its_lines_are_lines_of_the_log(
    line: str, logger: str, level: int, message: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    loop = asyncio.new_event_loop()
    with caplog.at_level(logging.INFO):
        openai_door._log(loop, lambda: None, line)
        openai_door._log(loop, lambda: None, "DEBUG of no interest")
    loop.close()
    [record] = caplog.records
    assert (record.name, record.levelno, record.getMessage()) == (logger, level, message or line)
    assert record.processName == "openai"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_child_ends_with_the_server_however_that_ends(number: signal.Signals) -> None:
    server = RealServer(
        "--in-process", "--listen", "127.0.0.1:0", "--openai", "127.0.0.1:0",
        environment={"HEADRACE_TOKEN": "none-of-the-door-s"},
    )  # fmt: skip
    try:
        server.read_until("headrace.openai: ready: ")
        [pid] = children_of(server.process.pid)
        assert b"HEADRACE_TOKEN" not in shown_of(pid, "environ")
        end = os.pidfd_open(pid)
        server.signal(number)
        server.process.wait(DEADLINE_S)
        assert wait_for_end(end), "the child is still there"
        os.close(end)
    finally:
        server.close()


def children_of(pid: int) -> list[int]:
    """Those that are the door's process."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(one) for one in found if b"openai" in shown_of(int(one), "cmdline")]


def wait_for_end(pidfd: int) -> bool:
    return bool(select.select([pidfd], [], [], DEADLINE_S)[0])


async def test_the_door_s_connection_carries_the_calls_of_all_its_clients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    most: list[int] = []

    def options(config: NetworkOptions, max_queue_size: int) -> list[tuple[str, int]]:
        given = grpc_options(config, max_queue_size)
        most.append(dict(given)["grpc.max_concurrent_streams"])
        return given

    monkeypatch.setattr(grpc_servers, "grpc_options", options)
    async with with_door(max_streams_per_connection=3):
        assert most == [3, 4096]
