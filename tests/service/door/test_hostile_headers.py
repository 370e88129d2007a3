"""What strangers put in a call's headers reaches no log, fills none, and stops nobody."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from headrace.v1 import generation_service_pb2 as rpc
from headrace.v1 import generation_service_pb2_grpc

from tests.service.door.callers_file import entry, replace
from tests.service.helpers import DEADLINE_S, spec
from tests.service.raw_http2 import Header, call
from tests.service.real_server import ServerProcess

TOKEN = "alice-s3cret-0123456789"
SECRET = TOKEN.encode()
HEALTH = b"/grpc.health.v1.Health/Check"
GENERATE = b"/headrace.v1.GenerationService/Generate"
NO_METHODS = [
    b"/", b"", b"//", b"/a", b"a", b"/a/b/c", b"/a/b c", b"/a/" + b"b" * 5000, b"/\xff/\xfe",
    b"/headrace.v1.GenerationService/\xff", "/é/ü".encode(), b"/grpc.health.v1.Health/Nothing",
]  # fmt: skip
HEADERS: list[Header] = [
    (b"authorization", b"Bearer " + SECRET + b"\xe9"),
    (b"authorization", b"bearer  " + SECRET + b"\xff\xfe"),
    (b"authorization-bin", SECRET + b"\xff!"),
    (b"x-a", SECRET + b"\xff"),
    (b"x-a", SECRET + b"\n\x00\x1b"),
    (b"x-bin", SECRET + b"!"),
    (b"x-a\xff", SECRET),
    (b"x a", SECRET),
    (b"Authorization", SECRET),
    (b"cookie", SECRET + b"\xff"),
    (b"host", SECRET + b"\xff"),
    (b"te", SECRET),
    (b"traceparent", SECRET + b"\xff"),
    (b"tracestate", SECRET + b"\xff"),
    (b"user-agent", SECRET + b"\xff"),
    (b"content-type", b"application/" + SECRET),
    (b"content-length", SECRET),
    (b"grpc-timeout", SECRET),
    (b"grpc-encoding", SECRET),
    (b"grpc-accept-encoding", SECRET),
    (b"grpc-status", SECRET),
    (b"grpc-previous-rpc-attempts", SECRET),
    (b"grpc-tags-bin", SECRET),
    (b":method", SECRET),
    (b":scheme", SECRET),
    (b":authority", SECRET + b"\xff"),
]
GOOD = (("authorization", f"Bearer {TOKEN}"),)
UNAUTHENTICATED, UNIMPLEMENTED = 16, 12


@contextmanager
def serving(folder: Path, **environment: str) -> Iterator[ServerProcess]:
    """A server's process with a fake engine, that knows one caller."""
    callers = folder / "callers.toml"
    replace(callers, entry("alice", '["GenerationService", "ModelService"]', TOKEN))
    command = [sys.executable, "-m", "tests.service.fake_server", "127.0.0.1:0"]
    server = ServerProcess([*command, f"--auth={callers}"], environment)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.close()


@pytest.mark.parametrize("traces", ["none", "console"])
async def test_headers_stay_out_of_the_log(traces: str, tmp_path: Path) -> None:
    with serving(tmp_path, OTEL_TRACES_EXPORTER=traces) as server:
        address = server.addresses[0]
        async with grpc.aio.insecure_channel(address) as channel:
            generation: Any = generation_service_pb2_grpc.GenerationServiceStub(channel)
            endless = spec(stop={"max_tokens": 1_000_000})
            stream = generation.GenerateStream(
                rpc.GenerateStreamRequest(spec=endless), metadata=GOOD
            )
            await stream.read()
            await asyncio.to_thread(be_hostile, address)
            async with asyncio.timeout(DEADLINE_S):
                assert await stream.read() is not grpc.aio.EOF  # nobody was cut off
            stream.cancel()
        server.signal(signal.SIGTERM)
        assert await asyncio.to_thread(server.ended) == 0
    said = server.said
    assert TOKEN not in said
    assert "Invalid encoding" in said  # the fact stays
    assert "unexpected error" not in said
    assert len(said) < 100_000


def be_hostile(address: str) -> None:
    """Send all of it, without a token and with it, and one kind often."""
    good = (b"authorization", b"Bearer " + SECRET)
    for path in NO_METHODS:
        assert call(address, path) == UNAUTHENTICATED, path
        assert call(address, path, [good]) == UNIMPLEMENTED, path
    for header in HEADERS:
        for path in (HEALTH, GENERATE, b"/"):
            call(address, path, [header])
    many = [(b"x-%d" % number, SECRET + b"\xff" * 600) for number in range(20)]
    for _ in range(100):
        call(address, GENERATE, many)
    assert call(address, HEALTH) == 0


async def test_what_names_no_method_is_not_logged(tmp_path: Path) -> None:
    with serving(tmp_path, OTEL_TRACES_EXPORTER="console") as server:
        address = server.addresses[0]
        before = server.said
        for path in NO_METHODS:
            for _ in range(3):
                await asyncio.to_thread(call, address, path)
        server.signal(signal.SIGTERM)
        assert await asyncio.to_thread(server.ended) == 0
    after = server.said.removeprefix(before)
    assert [line for line in after.splitlines() if "rain" not in line] == ["Stopped."]
