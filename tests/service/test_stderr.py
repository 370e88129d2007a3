"""Nobody reads what the server says: it goes on, its engine comes back, it ends as it should."""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from headrace.v1 import generation_service_pb2 as rpc
from headrace.v1 import generation_service_pb2_grpc

from tests.service.helpers import check_course, ids_of, spec
from tests.service.real_server import BIN, ROOT, WAIT_S, clean_environment

TOKENS = 1500
SERVICE = "headrace.v1.GenerationService"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Pipe:
    """A small pipe in the place of stderr."""

    def __init__(self) -> None:
        self.reading, self.writing = os.pipe()
        fcntl.fcntl(self.writing, fcntl.F_SETPIPE_SZ, 4096)

    def fill(self) -> None:
        """Nothing more goes in."""
        os.write(self.writing, b"\n" * 4096)

    def sip(self) -> None:
        """Read a little."""
        os.set_blocking(self.reading, False)
        with suppress(BlockingIOError):
            os.read(self.reading, 64)

    def close_reading(self) -> None:
        """Whoever writes is told that nobody reads."""
        os.close(self.reading)
        self.reading = -1

    def close(self) -> None:
        """Close both ends."""
        for fd in (self.reading, self.writing):
            if fd >= 0:
                os.close(fd)


@contextmanager
def serving(path: Path, stderr: int, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """A server's process with the demo model; stderr: the file, or -1: it has none."""
    command = [
        *("sh", "-c", 'exec "$@" 2>&-' if stderr < 0 else 'exec "$@"', "sh"),
        *(str(BIN / "headrace-server"), "serve", "--device", "cpu", "--threads", "1"),
        *("--listen", f"unix:{path}", *options),
    ]
    process = subprocess.Popen(
        command, cwd=ROOT, env=clean_environment(), stderr=None if stderr < 0 else stderr
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(WAIT_S)


async def until_it_is(watch: Any, wanted: int) -> None:
    """Read a health watch up to a status."""
    async with asyncio.timeout(WAIT_S):
        while (await watch.read()).status != wanted:
            pass


def nothing() -> None:
    pass


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("closed", marks=pytest.mark.slow),
        pytest.param("gone", marks=pytest.mark.slow),
        "full",
        pytest.param("slow", marks=pytest.mark.slow),
    ],
)
async def test_it_goes_on(kind: str, tmp_path: Path) -> None:
    pipe = Pipe()
    sip: Callable[[], None] = nothing
    if kind == "gone":
        pipe.close_reading()
    elif kind == "full":
        pipe.fill()
    elif kind == "slow":
        pipe.fill()
        sip = pipe.sip
    path = tmp_path / "s"
    try:
        with serving(path, -1 if kind == "closed" else pipe.writing) as process:
            await check_a_life(process, f"unix:{path}", sip)
            assert await asyncio.to_thread(process.wait, WAIT_S) == 0
    finally:
        pipe.close()


async def check_a_life(
    process: subprocess.Popen[bytes], target: str, sip: Callable[[], None]
) -> None:
    """The engine dies and is back; the process drains a live stream."""
    async with grpc.aio.insecure_channel(target) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(service=SERVICE), wait_for_ready=True
        )
        await until_it_is(watch, SERVING)
        [engine] = psutil.Process(process.pid).children()
        engine.kill()
        await until_it_is(watch, NOT_SERVING)
        await until_it_is(watch, SERVING)
        generation: Any = generation_service_pb2_grpc.GenerationServiceStub(channel)
        long = spec("Once", stop={"max_tokens": TOKENS, "ignore_eos": True})
        call = generation.GenerateStream(rpc.GenerateStreamRequest(spec=long))
        events = list((await call.read()).events)
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(WAIT_S):
            while (message := await call.read()) is not grpc.aio.EOF:
                events += message.events
                sip()
            assert await call.code() is grpc.StatusCode.OK
        check_course(events)
        assert len(ids_of(events)) == TOKENS


@pytest.mark.timeout(240)
async def test_callers_who_go_and_an_engine_that_dies_leave_no_traceback(tmp_path: Path) -> None:
    path, log = tmp_path / "s", tmp_path / "log"
    long = spec("Once", stop={"max_tokens": TOKENS, "ignore_eos": True}, output={"logprobs": 20})
    options = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
    with log.open("wb") as file, serving(path, file.fileno()) as process:
        async with grpc.aio.insecure_channel(f"unix:{path}", options=options) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(
                health_pb2.HealthCheckRequest(service=SERVICE), wait_for_ready=True
            )
            await until_it_is(watch, SERVING)
            generation: Any = generation_service_pb2_grpc.GenerationServiceStub(channel)
            for _ in range(10):
                session = generation.StreamResult()
                for _ in range(2):
                    await session.write(rpc.StreamResultRequest(add=rpc.AddCommand(spec=long)))
                stream = generation.GenerateStream(rpc.GenerateStreamRequest(spec=long))
                for call in (session, stream):
                    await call.read()
                # So long that what is being sent to them meanwhile is stuck.
                short = spec("Once", stop={"max_tokens": 100, "ignore_eos": True})
                await generation.Generate(rpc.GenerateRequest(spec=short), timeout=WAIT_S)
                session.cancel()
                stream.cancel()
            left = [
                generation.AddRequest(rpc.AddRequestRequest(spec=long)),
                generation.Generate(rpc.GenerateRequest(spec=long)),
                generation.GenerateStream(rpc.GenerateStreamRequest(spec=long)),
            ]
            await left[-1].read()
            [engine] = psutil.Process(process.pid).children()
            engine.kill()
            await until_it_is(watch, NOT_SERVING)
            for call in left:
                call.cancel()
            await until_it_is(watch, SERVING)
            process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(process.wait, WAIT_S) == 0
    said = log.read_text()
    assert "the engine serves again" in said
    assert "Traceback" not in said
    assert not [line for line in said.splitlines() if re.search(" ERROR (grpc|asyncio)", line)]
