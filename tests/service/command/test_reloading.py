"""SIGHUP: each option that it changes, tried while requests run, and all that it must not do."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from headrace.v1 import generation_service_pb2 as rpc
from headrace.v1.generation_service_pb2_grpc import GenerationServiceStub

from service.command import config_file
from service.command.config_file import compare, filled
from service.command.flags import FILE, Given, flags
from service.command.reloading import ConfigSource, Reloading
from service.command.serve_options import options_of
from tests.service.certificates import Pair, needs_openssl, port_of, secure, shown
from tests.service.door.callers_file import bearer, entry, replace
from tests.service.fake_engine import FakeEngine, says
from tests.service.helpers import (
    Harness,
    Refused,
    Session,
    check_course,
    ids_of,
    refused,
    serving,
    spec,
    text_of,
    until,
)
from tests.service.real_server import WAIT_S, RealServer, real_server

TEXT = "what is said while files are read"
MIB = 1 << 20


def defaults() -> dict[str, Any]:
    """What flags and variables give that nobody has set."""
    found = {name: flag.parameter().default for name, flag in flags().items()}
    return {**found, "listen": ["127.0.0.1:0"]}


def text_with(**values: str) -> str:
    """A config file's text. `values`: by field, in TOML."""
    lines = {flags()[name].section: "" for name in values}
    for name, value in values.items():
        lines[flags()[name].section] += f"{flags()[name].name} = {value}\n"
    return "".join(f"[{section}]\n{text}" for section, text in lines.items())


class Loaded:
    """A server with a config file, and requests in flight."""

    def __init__(self, h: Harness, path: Path, source: ConfigSource) -> None:
        self.h, self.path, self.readings = h, path, 0
        config = source.config_of(source.given)

        def config_of(given: Given) -> Any:
            self.readings += 1
            return source.config_of(given)

        self.reloading = Reloading(h.server, config, ConfigSource(source.given, config_of))

    async def reload(self, text: str | None = None) -> None:
        """What SIGHUP does, once the file has this text."""
        if text is not None:
            replace(self.path, text)
        self.reloading.begin()
        await self.settled()

    async def settled(self) -> None:
        """Wait until nothing is read any more."""
        task = self.reloading._task
        assert task is not None
        await asyncio.wait_for(asyncio.shield(task), 30)


@asynccontextmanager
async def loaded(
    tmp_path: Path, text: str, channel_of: Callable[[Harness], Any] | None = None, **call: Any
) -> AsyncIterator[Loaded]:
    """Such a server. At the end, the requests must have got all that they were to get."""
    path = tmp_path / "headrace.toml"
    replace(path, text)
    values = {**defaults(), FILE: str(path)}
    given = filled(Given(values, frozenset({"listen"})))
    source = ConfigSource(given, lambda again: options_of(again).service)
    config = source.config_of(given)
    options = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    engine = FakeEngine(script=says(TEXT), auto=False)
    async with serving(engine, **options) as served:
        channel = served.channel if channel_of is None else channel_of(served)
        h = Harness(served.server, engine, channel)
        session = Session(h.generation.StreamResult(**call))
        await session.add(spec(request_id="a", stop={"max_tokens": 100}))
        await session.read_until(lambda message: message.events)
        stream = h.generation.GenerateStream(
            rpc.GenerateStreamRequest(spec=spec(request_id="b", stop={"max_tokens": 100})), **call
        )
        events = list((await stream.read()).events)
        engine.step()
        yield Loaded(h, path, source)
        engine.run()
        await session.end()
        check_course(session.events()["a"])
        assert text_of(session.events()["a"]) == TEXT
        while (message := await stream.read()) is not grpc.aio.EOF:
            events += message.events
        check_course(events)
        assert text_of(events) == TEXT
        assert await stream.code() is grpc.StatusCode.OK
        if channel_of is not None:
            await channel.close()


@pytest.fixture(autouse=True)
def _levels() -> Iterator[None]:
    """Logging, as it was."""
    names = ("", "service.door.auth", "service.door.tls")
    before = {name: logging.getLogger(name).level for name in names}
    yield
    for name, level in before.items():
        logging.getLogger(name).setLevel(level)


# ---- what changes --------------------------------------------------------------------------------


async def a_session(h: Harness) -> str:
    """Whether one more session is let in."""
    session = h.session()
    await session.send(1, open=rpc.OpenCommand())
    try:
        await session.read()
    except grpc.aio.AioRpcError as error:
        return Refused(error).reason
    await session.end()
    return "in"


async def a_watch(h: Harness) -> str:
    """Whether two Watches are let in."""
    stub: Any = health_pb2_grpc.HealthStub(h.channel)
    calls = [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(2)]
    try:
        for call in calls:
            await call.read()
    except grpc.aio.AioRpcError as error:
        return Refused(error).reason
    finally:
        for call in calls:
            call.cancel()
        await until(lambda: h.server.limits.health_watches.is_empty)
    return "in"


async def a_request(h: Harness, text: str = "hi") -> str:
    """Whether one more request is let in."""
    try:
        await h.generation.AddRequest(rpc.AddRequestRequest(spec=spec(text)))
    except grpc.aio.AioRpcError as error:
        return Refused(error).reason
    return "in"


async def a_large_request(h: Harness) -> str:
    """What refuses a message of a megabyte: no context takes as much."""
    call = h.generation.AddRequest(rpc.AddRequestRequest(spec=spec("x" * 1_000_000)))
    return "memory" if "max_live_bytes" in (await refused(call)).message else "context"


async def the_drain_time(h: Harness) -> float:
    """How long a drain that begins now may take."""
    return h.server._config.drain_timeout_s


async def the_level(h: Harness) -> tuple[int, list[str]]:
    """The level of this process, and what the engine was told."""
    return logging.getLogger().level, h.engine.log_levels


async def the_levels(h: Harness) -> tuple[int, int, list[str]]:
    """The levels of two modules, and what the engine was told."""
    levels = (logging.getLogger(f"service.door.{name}").level for name in ("auth", "tls"))
    return (*levels, h.engine.log_levels[1:])


@dataclass(frozen=True)
class Case:
    """A value before and after, in TOML, and what is seen."""

    before: str
    after: str
    look: Callable[[Harness], Awaitable[Any]]
    seen: Any
    seen_after: Any


CASES = {
    "max_sessions": Case("9", "1", a_session, "in", "TOO_MANY_SESSIONS"),
    "max_sessions_per_identity": Case("9", "1", a_session, "in", "TOO_MANY_SESSIONS_OF_IDENTITY"),
    "max_watches": Case("9", "1", a_watch, "in", "TOO_MANY_WATCHES"),
    "max_open_requests": Case("99", "2", a_request, "in", "TOO_MANY_OPEN_REQUESTS"),
    "max_requests_per_identity": Case("9", "2", a_request, "in", "TOO_MANY_REQUESTS_OF_IDENTITY"),
    "max_reserved_tokens": Case("0", "300", a_request, "in", "TOO_MANY_TOKENS"),
    "max_reserved_tokens_per_identity": Case(
        "9999", "300", a_request, "in", "TOO_MANY_TOKENS_OF_IDENTITY"
    ),
    "max_live_bytes": Case("0", str(MIB), a_large_request, "context", "memory"),
    "drain_timeout_s": Case("30", "7.5", the_drain_time, 30.0, 7.5),
    "log_level": Case('"error"', '"debug"', the_level, None, (logging.DEBUG, ["debug"])),
    "log_level_of": Case(
        '["service.door.auth=debug"]',
        '["service.door.tls=error"]',
        the_levels,
        None,
        (logging.NOTSET, logging.ERROR, ["service.door.auth=notset", "service.door.tls=error"]),
    ),
}
TRIED_BELOW = {"auth_file", "tls_cert", "tls_key", "tls_client_ca"}


def test_each_option_that_it_changes_is_tried() -> None:
    assert set(CASES) | TRIED_BELOW == {
        name for name, flag in flags().items() if flag.option.reloads
    }


@pytest.mark.parametrize("name", CASES)
async def test_it_changes_while_requests_run(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    case = CASES[name]
    async with loaded(tmp_path, text_with(**{name: case.before})) as it:
        seen = await case.look(it.h)
        assert case.seen is None or seen == case.seen
        await it.reload(text_with(**{name: case.after}))
        assert await case.look(it.h) == case.seen_after
        [line] = [one for one in caplog.messages if one.startswith("SIGHUP: ")]
        assert f"that it names: changed: {flags()[name].name} (" in line
        assert "restart" not in line
        await it.reload(text_with(**{name: case.before}))
        seen = await case.look(it.h)
        assert case.seen is None or seen == case.seen


async def test_another_callers_file_counts_while_requests_run(tmp_path: Path) -> None:
    old, new = tmp_path / "old.toml", tmp_path / "new.toml"
    replace(old, entry("alice", '"*"', "alice's secret") + entry("bob", '"*"', "bob's secret"))
    replace(new, entry("alice", '"*"', "alice's secret") + entry("carol", '"*"', "another secret"))
    carol = (("authorization", "Bearer another secret"),)
    text = text_with(auth_file=f'"{old}"')
    async with loaded(tmp_path, text, metadata=bearer("alice")) as it:

        async def refusal(metadata: Any) -> str:
            message = rpc.AddRequestRequest(spec=spec())
            try:
                await it.h.generation.AddRequest(message, metadata=metadata)
            except grpc.aio.AioRpcError as error:
                return Refused(error).reason
            return ""

        assert [await refusal(one) for one in (bearer("bob"), carol)] == ["", "TOKEN_INVALID"]
        await it.reload(text_with(auth_file=f'"{new}"'))
        assert [await refusal(one) for one in (bearer("bob"), carol)] == ["TOKEN_INVALID", ""]
        replace(new, entry("alice", '"*"', "alice's secret"))  # which is watched as the old one was
        assert await refusal(carol) == "TOKEN_INVALID"


@needs_openssl
async def test_other_certificates_count_for_new_connections(
    tmp_path: Path, pairs: dict[str, Pair]
) -> None:
    def text(server: str, authority: str) -> str:
        return text_with(
            tls_cert=f'"{pairs[server][0]}"',
            tls_key=f'"{pairs[server][1]}"',
            tls_client_ca=f'"{pairs[authority][0]}"',
        )

    def channel_of(h: Harness) -> Any:
        return secure(port_of(h), pairs["first"], pairs["alice"])

    async with loaded(tmp_path, text("first", "ca"), channel_of) as it:
        port = port_of(it.h)
        assert await shown(port) == pairs["first"][0].read_text()
        await it.reload(text("second", "stranger"))
        assert await shown(port) == pairs["second"][0].read_text()
        for name, lets_in in (("stranger", True), ("alice", False)):
            async with secure(port, pairs["second"], pairs[name]) as channel:
                adding = rpc.AddRequestRequest(spec=spec())
                call = GenerationServiceStub(channel).AddRequest(adding, timeout=30)
                if lets_in:
                    await call
                else:
                    assert (await refused(call)).code is grpc.StatusCode.UNAVAILABLE


@needs_openssl
async def test_no_file_is_used_if_one_of_them_cannot_be(
    tmp_path: Path, pairs: dict[str, Pair]
) -> None:
    old, new = tmp_path / "old.toml", tmp_path / "new.toml"
    replace(old, entry("alice", '"*"', "alice's secret"))
    replace(new, entry("bob", '"*"', "bob's secret"))

    def text(callers: Path, key: str) -> str:
        cert, key = f'"{pairs["first"][0]}"', f'"{pairs[key][1]}"'
        return text_with(auth_file=f'"{callers}"', tls_cert=cert, tls_key=key, max_sessions="9")

    def channel_of(h: Harness) -> Any:
        return secure(port_of(h), pairs["first"])

    good = text(old, "first")
    async with loaded(tmp_path, good, channel_of, metadata=bearer("alice")) as it:
        await it.reload(text(new, "second").replace("sessions = 9", "sessions = 8"))
        adding = rpc.AddRequestRequest(spec=spec())
        await it.h.generation.AddRequest(adding, metadata=bearer("alice"))
        error = await refused(it.h.generation.AddRequest(adding, metadata=bearer("bob")))
        assert error.reason == "TOKEN_INVALID"
        assert it.h.server._config.max_sessions == 9


# ---- what does not -------------------------------------------------------------------------------


async def test_what_needs_a_restart_is_left_and_said_each_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(config_file, "_MAX_SHOWN", 500)  # the folder's name may be long
    async with loaded(tmp_path, text_with(max_sessions="9", max_queue_size="9")) as it:
        await it.reload()
        changed = text_with(max_sessions="8", max_queue_size="8", auth_file='"x"', model='"y"')
        replace(tmp_path / "x", entry("alice", '"*"', "alice's secret"))
        await it.reload(changed.replace('"x"', f'"{tmp_path}/x"'))
        await it.reload()
        left = f"auth-file (none → {tmp_path}/x), model (none → y), max-queue-size (9 → 8)"
        start = f"SIGHUP: {it.path} was read again, with the files that it names: "
        assert [one.removeprefix(start) for one in caplog.messages if "SIGHUP" in one] == [
            "nothing has changed",
            f"changed: max-sessions (9 → 8); left for a restart: {left}",
            f"left for a restart: {left}",
        ]
        assert await a_request(it.h) == "in"  # without a token


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ("[network]\nmax-sessions = 1\nmax-watches = 0\n", "[network] max-watches is 0; it must"),
        ("[network]\nmax-sessions = 1\nlisten\n", "is not TOML: "),
        ("[network]\nmax-sessions = 1\ntls-cert = 'x'\n", "[network] tls-cert: and --tls-key bel"),
        ("[network]\nmax-sessions = 1\nauth-file = 'none'\n", "none cannot be read: No such file"),
        (
            # A mix of what runs and what is new, since one of them needs a restart.
            "[requests-and-results]\nmax-reserved-tokens = 200\ndefault-max-tokens = 100\n",
            "which is 256, or 0 (what needs a restart is as it runs)",
        ),
        ("", "has more than 64 KiB"),
        (None, "cannot be read: No such file or directory"),
    ],
)
async def test_a_mistake_changes_nothing(
    broken: str | None, words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    callers = tmp_path / "callers.toml"
    replace(callers, entry("alice", '"*"', "alice's secret"))
    good = text_with(auth_file=f'"{callers}"', max_sessions="9")
    async with loaded(tmp_path, good, metadata=bearer("alice")) as it:
        if broken is None:
            it.path.unlink()
        else:
            replace(it.path, broken or "#" * (10 << 20))
        await it.reload()
        [line] = [one for one in caplog.messages if "SIGHUP" in one]
        assert line.startswith(f"SIGHUP: nothing has changed: {'--config: ' * (broken == '')}")
        assert words in line
        assert "\n" not in line
        assert it.h.server._config.max_sessions == 9
        assert await it.h.generation.AddRequest(
            rpc.AddRequestRequest(spec=spec()), metadata=bearer("alice")
        )
        await it.reload(good.replace("sessions = 9", "sessions = 8"))
        assert it.h.server._config.max_sessions == 8


async def test_an_operator_s_level_stays_unless_the_file_s_changes(tmp_path: Path) -> None:
    async with loaded(tmp_path, text_with(log_level='"info"')) as it:
        control = it.h.server.control
        await control.set_log_level("error")
        await it.reload(text_with(log_level='"info"', log_level_of='["service.door.tls=debug"]'))
        assert (control.log_level, logging.getLogger().level) == ("error", logging.ERROR)
        assert logging.getLogger("service.door.tls").level == logging.DEBUG
        await it.reload(text_with(log_level='"warning"'))
        assert (control.log_level, logging.getLogger().level) == ("warning", logging.WARNING)
        assert logging.getLogger("service.door.tls").level == logging.NOTSET
    assert it.h.engine.log_levels == [
        *("error", "error", "service.door.tls=debug", "warning", "service.door.tls=notset"),
    ]


@pytest.mark.parametrize("levels", [("info", "error"), ("error", "info")])
async def test_a_change_of_the_level_is_said_at_whichever_level_shows_it(
    levels: tuple[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before, after = levels
    logging.getLogger().setLevel(before.upper())
    async with loaded(tmp_path, text_with(log_level=f'"{before}"')) as it:
        await it.reload(text_with(log_level=f'"{after}"'))
        [line] = [one for one in caplog.messages if "SIGHUP" in one]
        assert line.endswith(f"changed: log-level ({before} → {after})")


def test_the_http_door_keeps_its_certificate() -> None:
    before = {**defaults(), "tls_cert": "a", "tls_key": "a", "tls_client_ca": "a"}
    after = {**before, "tls_cert": "b", "tls_key": "b", "tls_client_ca": "b"}
    assert set(compare(before, after).now) == {"tls_cert", "tls_key", "tls_client_ca"}
    changes = compare({**before, "openai": "127.0.0.1:1"}, {**after, "openai": "127.0.0.1:1"})
    assert set(changes.later) == {"tls_cert", "tls_key"}


async def test_a_thousand_signals_are_two_readings(tmp_path: Path) -> None:
    async with loaded(tmp_path, text_with(max_sessions="9")) as it:
        replace(it.path, text_with(max_sessions="8"))
        for _ in range(500):
            it.reloading.begin()
        await until(lambda: it.readings)
        for _ in range(500):
            it.reloading.begin()
        await it.settled()
        assert it.readings <= 2
        assert it.h.server._config.max_sessions == 8


async def test_nothing_is_read_while_the_server_drains(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with loaded(tmp_path, text_with(max_sessions="9")) as it:
        draining = it.h.server.begin_drain(60)
        await it.reload(text_with(max_sessions="8"))
        assert it.readings == 0
        assert "SIGHUP: nothing is read again, since the server drains" in caplog.messages
    await asyncio.wait_for(draining, 30)


# ---- the process ---------------------------------------------------------------------------------


@pytest.mark.timeout(240)
async def test_a_server_s_signals_at_every_time_of_its_life(tmp_path: Path) -> None:
    path = tmp_path / "headrace.toml"
    replace(path, text_with(max_sessions="9", listen='["127.0.0.1:0"]'))
    asked = rpc.GenerateStreamRequest(
        spec=spec("Once", stop={"max_tokens": 400, "ignore_eos": True})
    )

    async def stream_of(server: RealServer, channel: Any) -> list[Any]:
        """All events of a long stream, from whose first message on the server is signalled."""
        stream = GenerationServiceStub(channel).GenerateStream(asked)
        events = list((await stream.read()).events)
        signalling = asyncio.create_task(asyncio.to_thread(hang_up, server))
        while (message := await asyncio.wait_for(stream.read(), WAIT_S)) is not grpc.aio.EOF:
            events += message.events
        await signalling
        assert await stream.code() is grpc.StatusCode.OK
        return events

    def hang_up(server: RealServer, times: int = 1000) -> None:
        for _ in range(times):
            server.signal(signal.SIGHUP)

    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd,
        real_server(
            *("--config", str(path), "--log-summary", "0"),
            HOME="/proc",  # where nothing can be written
            NOTIFY_SOCKET=str(tmp_path / "notify"),
        ) as server,
    ):
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(WAIT_S)
        await asyncio.to_thread(server.read_until, ": starting")
        hang_up(server, 50)
        replace(path, text_with(max_sessions="8", listen='["127.0.0.1:0"]'))
        await asyncio.to_thread(server.wait_until_ready)
        assert systemd.recv(100) == b"READY=1"
        replace(path, text_with(max_sessions="7", max_queue_size="9", listen='["127.0.0.1:0"]'))
        async with grpc.aio.insecure_channel(server.addresses[0]) as channel:
            events = await stream_of(server, channel)
            check_course(events)
            assert len(ids_of(events)) == 400
            await asyncio.to_thread(server.read_until, "max-queue-size (1024 → 9)")
            assert "→ 7); left for a restart: max-queue-size" in server.said
            path.unlink()
            hang_up(server, 1)
            await asyncio.to_thread(server.read_until, "SIGHUP: nothing has changed: ")
            stream = GenerationServiceStub(channel).GenerateStream(asked)
            await stream.read()
            server.signal(signal.SIGTERM)
            assert await asyncio.to_thread(systemd.recv, 100) == b"STOPPING=1"
            hang_up(server)
            async with asyncio.timeout(WAIT_S):
                while await stream.read() is not grpc.aio.EOF:
                    pass
            assert await stream.code() is grpc.StatusCode.OK
        assert await asyncio.to_thread(server.ended) == 0
        assert "Traceback" not in server.said
        assert "nothing is read again, since the server drains" in server.said
