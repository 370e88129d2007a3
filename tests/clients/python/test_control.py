"""The operator's side of the client and of the command, against the server with a fake engine."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import pty
import re
import select
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import headrace
import pytest
from headrace.cli.app import app
from headrace.cli.top import line, picture
from headrace.v1 import control_service_pb2 as pb
from rich.console import Console
from typer.testing import CliRunner, Result

from service.config import ServiceConfig
from service.server import HeadraceServer
from tests.service.fake_engine import FakeEngine, byte_tokenizer, model_info, says

WAIT = 30.0
COMMAND = [sys.executable, "-c", "from headrace_command import main; main()"]


class Server:
    """A server on an event loop of its own."""

    def __init__(self, **options: Any) -> None:
        info = model_info(max_queue_size=0)
        self.engine = FakeEngine(script=says("x", eos=False), auto=False, info=info)
        self._begun: Future[tuple[HeadraceServer, asyncio.AbstractEventLoop]] = Future()
        self._ended: asyncio.Event | None = None
        self._options = options
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._thread.start()
        self.server, self._loop = self._begun.result(WAIT)
        self.target = self.server.addresses[0]

    async def _run(self) -> None:
        config = ServiceConfig(listen=("127.0.0.1:0",), **self._options)
        server = HeadraceServer(
            config, self.engine, tokenizer_loader=lambda _info: byte_tokenizer()
        )
        await server.start()
        await server.ready()
        self._ended = asyncio.Event()
        self._begun.set_result((server, asyncio.get_running_loop()))
        await self._ended.wait()
        await server.stop()

    def do(self, action: Callable[[], Any]) -> Any:
        """Do something on the server's event loop."""

        async def act() -> Any:
            return action()

        return asyncio.run_coroutine_threadsafe(act(), self._loop).result(WAIT)

    def stop(self) -> None:
        if self._ended is not None:
            self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(WAIT)
        assert not self._thread.is_alive()


@pytest.fixture
def server() -> Iterator[Server]:  # type: ignore[override]
    running = Server()
    yield running
    running.stop()


@pytest.fixture
def client(server: Server) -> Iterator[headrace.Client]:
    with headrace.Client(server.target) as opened:
        yield opened


@pytest.fixture
def run(server: Server) -> Callable[..., Result]:
    return lambda *words: CliRunner().invoke(app, ["--target", server.target, *words])


@pytest.fixture
def root_level() -> Iterator[None]:
    level = logging.getLogger().level
    yield
    logging.getLogger().setLevel(level)


@pytest.mark.usefixtures("root_level")
def test_what_the_client_can_do(server: Server, client: headrace.Client) -> None:
    control = client.control
    for number in range(1030):
        client.add_request("x", request_id=f"r{number}", max_tokens=5)
    found = [one.request_id for one in control.requests()]
    assert found == [f"r{number}" for number in range(1030)]
    assert list(control.requests("nobody")) == []
    assert control.statistics().front_end.live_requests == 1030
    looks = control.watch(0.1)
    first, second = next(looks), next(looks)
    assert (first.HasField("rates"), second.HasField("rates")) == (False, True)
    looks.close()  # type: ignore[attr-defined]
    assert not control.pause("a look").was_paused
    assert server.engine.paused
    assert control.statistics().pause.reason == "a look"
    statuses = control.cancel(("anonymous", f"r{number}") for number in (*range(1030), 9999))
    assert len(statuses) == 1031
    assert statuses["anonymous", "r7"] is headrace.CancelStatus.CANCELLED
    assert statuses["anonymous", "r9999"] is headrace.CancelStatus.NOT_FOUND
    assert control.resume()
    assert not control.resume()
    control.reset_prefix_cache()
    assert server.engine.resets == 1
    before = control.set_log_level("error")
    assert (before, control.set_log_level("info")) == ("info", "error")
    with pytest.raises(ValueError, match="one of debug"):
        control.set_log_level("loud")  # type: ignore[arg-type]
    with pytest.raises(headrace.InvalidArgumentError, match="interval"):
        next(control.watch(0.01))
    server.do(server.engine.run)
    watched = control.watch(60)
    next(watched)
    answer = control.drain(9, "done")
    assert (answer.drain.timeout.seconds, answer.live_requests) == (9, 0)
    assert next(watched).drain.reason == "done"
    assert list(watched) == []


def test_where_it_is_not_served() -> None:
    server = Server(control=False)
    try:
        with headrace.Client(server.target) as client:
            with pytest.raises(headrace.NotSupportedError):
                client.control.statistics()
            with pytest.raises(headrace.NotSupportedError):
                next(client.control.watch())
        done = CliRunner().invoke(app, ["--target", server.target, "top"])
        assert done.exit_code == 1
    finally:
        server.stop()


@pytest.mark.usefixtures("root_level")
def test_the_commands(server: Server, client: headrace.Client, run: Callable[..., Result]) -> None:
    client.add_request("abc", request_id="a", max_tokens=5)
    said = run("control", "list").stdout
    assert said.startswith("anonymous a waiting age=")
    assert said.endswith(" prompt=3 output=0 n=1 priority=0\n")
    client.add_request("abc", request_id="c", labels={"team": "search", "a": "é"}, max_tokens=5)
    assert run("control", "list").stdout.endswith(
        ' priority=0 labels={"a": "\\u00e9", "team": "search"}\n'
    )
    assert run("control", "list", "--identity", "nobody").stdout == ""
    assert json.loads(run("control", "stats").stdout)["front_end"]["live_requests"] == "2"
    assert run("control", "pause", "--reason", "why").stdout == "paused\n"
    assert run("control", "pause").stdout == "paused (it was already)\n"
    assert run("control", "resume").stdout == "resumed\n"
    assert run("control", "resume").stdout == "it was not paused\n"
    assert run("control", "reset-prefix-cache").stdout == "reset\n"
    assert run("control", "log-level", "warning").stdout == "warning; it was info\n"
    assert run("control", "log-level", "loud").exit_code == 2
    done = run("control", "cancel", "a", "b")
    assert (done.stdout, done.exit_code) == ("a cancelled\nb not_found\n", 1)
    done = run("control", "cancel", "a", "--identity", "other")
    assert (done.stdout, done.exit_code) == ("a not_found\n", 1)
    assert run("control", "drain", "--timeout", "60").stdout == (
        "drains: 2 live requests, at most 60 s\n"
    )
    assert run("control", "drain").stdout.startswith("drains already: 2 live")
    server.do(server.engine.run)


def test_top_in_lines(server: Server, run: Callable[..., Result]) -> None:
    lines = run("top", "-i", "0.1", "-c", "2").stdout.splitlines()
    assert len(lines) == 2
    assert " ready live=0 running=0 waiting=0 blocks=0/0" in lines[0]
    assert "generated/s" not in lines[0]
    assert "generated/s=0.0" in lines[1]
    [one] = run("top", "-c", "1", "--json").stdout.splitlines()
    assert json.loads(one)["instance_id"] == server.server.instance_id
    assert run("top", "-i", "0.01").exit_code == 2


def top_on_a_terminal(target: str, *options: str, key: bytes = b"") -> tuple[int, str]:
    """Run `top` on a terminal of 80 columns, and press a key once it has shown something; its exit
    code and what it showed. The terminal is then as it was before.
    """
    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    said = b""
    pressed = False
    with subprocess.Popen(
        ["setsid", "--ctty", *COMMAND, "--target", target, "top", "-i", "0.1", *options],
        stdin=theirs,
        stdout=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "80"},
    ) as process:
        until = time.monotonic() + WAIT
        while process.poll() is None or select.select([ours], [], [], 0)[0]:
            assert time.monotonic() < until, said
            if select.select([ours], [], [], 0.1)[0]:
                said += os.read(ours, 65536)
            if key and not pressed and b"refused" in said:
                os.write(ours, key)
                pressed = True
    assert termios.tcgetattr(theirs) == before
    os.close(theirs)
    os.close(ours)
    return process.returncode, said.decode()


@pytest.mark.parametrize(("key", "code"), [(b"q", 0), (b"xQ", 0), (b"\x03", 130)])
def test_a_key_ends_top(server: Server, key: bytes, code: int) -> None:
    ended, text = top_on_a_terminal(server.target, key=key)
    assert ended == code
    assert "q or Ctrl-C quits" in text


def test_top_holds_in_80_columns() -> None:
    """What is long goes on in the next line; nothing is cut."""
    callers = ["search", "spiffe://mesh.example/ns/here/sa/" + "a-long-name-" * 9]
    figures = pb.EngineStatistics(running=256, waiting=8192, blocks_used=1, blocks_total=262144)
    found = pb.Statistics(model="m" * 100, instance_id="i", engine=figures)
    for name in callers:
        found.engine.callers.add(caller=name, running=128, waiting=4096, service=123456789012)
    console = Console(width=80, color_system=None)
    with console.capture() as capture:
        console.print(picture(found, "dns:///headrace.here.svc.cluster.local:50051"))
    lines = capture.get().splitlines()
    assert max(map(len, lines)) <= 80
    shown = "".join("".join(lines).split())
    for text in (*callers, found.model, "dns:///headrace.here.svc.cluster.local:50051"):
        assert text in shown


def test_top_on_a_terminal(server: Server) -> None:
    code, text = top_on_a_terminal(server.target, "-c", "2")
    assert code == 0
    assert "q or Ctrl-C quits" in text
    assert f"fake at {server.target}  ready" in text
    assert "0 running, 0 waiting" in text
    assert "tokens generated" in text


def test_states_of_recurrent_layers_have_a_row_and_a_word() -> None:
    numbers = {"limit": 20.0, "used": 5.0, "kept": 10.0, "copies": 33.0, "evictions": 4.0}
    others = {f"headrace.states.{name}": count for name, count in numbers.items()}
    others |= {"headrace.prefix_cache.without_state": 96.0, "headrace.else": 7.0}
    found = pb.Statistics(engine=pb.EngineStatistics(others=others))
    console = Console(width=120, color_system=None)
    with console.capture() as capture:
        console.print(picture(found, "here"))
    said = " ".join(capture.get().split())
    assert "25%: 5 of 20 states, 10 keep a prefix; 33 were kept, 4 gave way; 96 prompt" in said
    assert "7 headrace.else" in said, "what has no row of its own"
    assert "headrace.states" not in said
    assert "states=5/20" in line(found)
    assert "kv=25.0%" in line(found), "no layer attends"


def test_the_picture_shows_all_there_is() -> None:
    found = pb.Statistics(
        instance_id="hr-1",
        phase=pb.SERVER_PHASE_DRAINING,
        pause={"reason": "[red]see[/red]", "start_time": {"seconds": 0}},
        drain={"reason": "", "start_time": {"seconds": 1}},
        front_end={"live_requests": 3, "kept_result_bytes": 3 << 19},
    )
    console = Console(width=120, color_system=None)

    def shown() -> str:
        with console.capture() as capture:
            console.print(picture(found, "here"))
        return capture.get()

    said = shown()
    assert "(loading) at here  draining, paused" in said
    assert "pause since 1970-01-01T00:00:00Z: [red]see[/red]" in said
    assert "drain since 1970-01-01T00:00:01Z: (no reason)" in said
    assert "3 live" in said
    assert "1.5 MiB" in said
    assert "cannot be asked now" in said
    assert "draining+paused live=3" in line(found)
    found.engine.CopyFrom(
        pb.EngineStatistics(
            running=2,
            blocks_total=24,
            blocks_used=6,
            blocks_cached=12,
            host_blocks_total=10,
            prefix_queries=8,
            prefix_hits=2,
        )
    )
    found.rates.generated_tokens = 12.5
    said = shown()
    assert "######............      | 25%: 6 of 24 blocks, 12 keep a prefix" in said
    assert "0 of 10 blocks" in said
    assert "25%: 2 of 8 prompt tokens found" in said
    assert "12.5 tokens generated" in said
    assert "blocks=6/24 callers=0" in line(found)
    assert "of the service" not in said
    assert "over-target" not in line(found)
    found.engine.steps_with_decodes, found.engine.steps_over_target = 200, 3
    for number in range(14):
        found.engine.callers.add(caller=f"c{number}", weight=1, waiting=number, service=10)
    found.engine.callers.add(caller="[b]\x1b[2J", weight=2.5, running=99, service=50)
    found.engine.other_callers.waiting, found.engine.other_callers.service = 40, 10
    said = shown()
    assert "'[b]\\x1b[2J': 99 running, 0 waiting, 25% of the service (50), weight 2.5" in said
    assert "c13: 0 running, 13 waiting, 5% of the service (10)" in said
    assert "c2:" not in said
    assert "all others: 0 running, 43 waiting, 20% of the service (40)" in said
    assert "1.5%: 3 of 200 steps with decodes" in said
    assert "callers=14 over-target=1.5% held=0 kv=25.0% prefix-hits=25.0%" in line(found)
    assert "refused       0\n" in re.sub(" +\n", "\n", said)
    for number in range(8):
        for method in ("a", "b"):
            found.front_end.refusals.add(method=method, reason=f"[R]{number}", count=number + 1)
    said = shown()
    assert "16 [R]7, 14 [R]6, 12 [R]5, 10 [R]4, 8 [R]3, 6 [R]2, 6 for other reasons" in said
    assert line(found).split(" generated/s")[0].endswith("refused=72")


@pytest.mark.usefixtures("root_level")
async def test_the_same_for_asyncio(server: Server) -> None:
    async with headrace.AsyncClient(server.target) as client:
        control = client.control
        await client.add_request("x", request_id="a", max_tokens=5)
        assert [one.request_id async for one in control.requests()] == ["a"]
        assert (await control.statistics()).front_end.live_requests == 1
        assert not (await control.pause("a look")).was_paused
        assert await control.resume()
        await control.reset_prefix_cache()
        assert server.engine.resets == 1
        assert await control.set_log_level("error") == "info"
        assert await control.cancel([("anonymous", "a"), ("other", "a")]) == {
            ("anonymous", "a"): headrace.CancelStatus.CANCELLED,
            ("other", "a"): headrace.CancelStatus.NOT_FOUND,
        }
        with pytest.raises(headrace.InvalidArgumentError, match="interval"):
            await anext(control.watch(0.01))
        server.do(server.engine.run)
        watched = control.watch(60)
        await anext(watched)
        answer = await control.drain(9, "done")
        assert answer.drain.timeout.seconds == 9
        assert [found.drain.reason async for found in watched] == ["done"]
