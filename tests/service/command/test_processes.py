"""What becomes of the server's processes: by signals, without files, without each other."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from headrace.v1 import generation_service_pb2 as rpc
from headrace.v1 import generation_service_pb2_grpc

from tests.service.door.callers_file import entry, replace
from tests.service.helpers import DEADLINE_S, refused, spec
from tests.service.real_server import WAIT_S, real_server

FILES = 128
CONNECTIONS = 300
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.mark.timeout(240)
async def test_an_engine_comes_back_though_strangers_take_all_connections(tmp_path: Path) -> None:
    few = ("sh", "-c", f'ulimit -n {FILES}; exec "$@"', "sh")
    address = f"unix:{tmp_path}/s"
    with real_server("--listen", "127.0.0.1:0", "--listen", address, before=few) as server:
        await asyncio.to_thread(server.wait_until_ready)
        assert f"open files: at most {FILES}" in server.said
        assert "connections: at most 32 on each address, not 1024" in server.said
        with ExitStack() as strangers:
            host, _, port = server.addresses[0].rpartition(":")
            for _ in range(CONNECTIONS):
                one = socket.create_connection((host, int(port)), DEADLINE_S)
                strangers.enter_context(one)
                one.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0")
            async with grpc.aio.insecure_channel(address) as channel:
                watch = health_pb2_grpc.HealthStub(channel).Watch(
                    health_pb2.HealthCheckRequest(service="headrace.v1.GenerationService")
                )
                assert (await watch.read()).status == SERVING
                psutil.Process(server.process.pid).children()[0].kill()
                assert (await watch.read()).status == NOT_SERVING
                async with asyncio.timeout(2 * WAIT_S):
                    assert (await watch.read()).status == SERVING
                generation: Any = generation_service_pb2_grpc.GenerationServiceStub(channel)
                short = spec("Once", stop={"max_tokens": 4, "ignore_eos": True})
                answer = await generation.Generate(rpc.GenerateRequest(spec=short))
                assert len(answer.choices[0].token_ids) == 4


def test_json_is_all_that_is_said_and_an_engine_s_last_words_are_there() -> None:
    with real_server("--listen", "127.0.0.1:0", "--log-format", "json") as server:
        server.read_until("Stop it with")
        [engine] = psutil.Process(server.process.pid).children()
        engine.send_signal(signal.SIGABRT)
        server.read_until("the engine serves again")
        server.signal(signal.SIGTERM)
        assert server.ended() == 0
    lines = [json.loads(line) for line in server.said.splitlines()]
    for line in lines:
        assert line.keys() - {"traceback"} == {"time", "level", "process", "logger", "message"}
    said = [line["message"] for line in lines if line["logger"] == "headrace-server"]
    assert said[0].endswith(": starting")
    assert any(line.endswith("loading the model") for line in said)
    assert any("Listening on" in line for line in said)
    assert said[-1] == "Stopped."
    of_engine = [line for line in lines if line["process"] == "engine"]
    assert any(line["logger"] == "engine.loading.memory" for line in of_engine)
    written = [line["message"] for line in of_engine if line["logger"] == "stderr"]
    assert "Fatal Python error: Aborted" in written


def test_a_stopped_engine_ends_with_its_front_end() -> None:
    with real_server("--listen", "127.0.0.1:0") as server:
        server.wait_until_ready()
        [engine] = psutil.Process(server.process.pid).children()
        engine.suspend()
        handle = os.pidfd_open(engine.pid)
        try:
            server.signal(signal.SIGKILL)
            server.process.wait(WAIT_S)
            ended, _, _ = select.select([handle], [], [], WAIT_S)
            assert ended
        finally:
            if engine.is_running():
                engine.kill()
            os.close(handle)


@pytest.mark.timeout(240)
async def test_a_hangup_reads_the_callers_again_and_a_terminal_may_go(tmp_path: Path) -> None:
    callers = tmp_path / "callers.toml"
    replace(callers, entry("alice", '"*"', "one"))

    def allows(token: str) -> tuple[tuple[str, str]]:
        return (("authorization", f"Bearer {token}"),)

    with real_server("--listen", "127.0.0.1:0", "--auth-file", str(callers)) as server:
        await asyncio.to_thread(server.wait_until_ready)
        async with grpc.aio.insecure_channel(server.addresses[0]) as channel:
            generation: Any = generation_service_pb2_grpc.GenerationServiceStub(channel)
            long = rpc.GenerateStreamRequest(
                spec=spec("Once", stop={"max_tokens": 1500, "ignore_eos": True})
            )
            short = rpc.GenerateRequest(spec=spec("Once", stop={"max_tokens": 1}))
            stream = generation.GenerateStream(long, metadata=allows("one"))
            await stream.read()
            server.signal(signal.SIGHUP)
            await asyncio.to_thread(server.read_until, "callers were read again")
            callers.write_text("[[callers]]\nidentity = broken\n")
            server.signal(signal.SIGHUP)
            await asyncio.to_thread(server.read_until, "callers stay as they were")
            await generation.Generate(short, metadata=allows("one"))
            server.said = ""
            replace(callers, entry("alice", '"*"', "one") + entry("bob", '"*"', "two"))
            server.signal(signal.SIGHUP)
            await asyncio.to_thread(server.read_until, "callers were read again")
            await generation.Generate(short, metadata=allows("two"))
            error = await refused(generation.Generate(short, metadata=allows("three")))
            assert error.code is grpc.StatusCode.UNAUTHENTICATED
            server.signal(signal.SIGTERM)
            async with asyncio.timeout(WAIT_S):
                while await stream.read() is not grpc.aio.EOF:
                    pass
                assert await stream.code() is grpc.StatusCode.OK
        assert await asyncio.to_thread(server.ended) == 0
