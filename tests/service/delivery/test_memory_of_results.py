"""What results take in the front end's process, as the system counts it, at the default limits: in
a real server with the demo model, by several callers at a time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from google.protobuf import duration_pb2
from headrace.v1 import generation_pb2 as pb
from headrace.v1 import generation_service_pb2 as rpc
from headrace.v1.generation_service_pb2_grpc import GenerationServiceStub

from tests.service.door.callers_file import bearer
from tests.service.helpers import Refused, refused
from tests.service.real_server import RealServer, real_server

logger = logging.getLogger(__name__)

pytestmark = [pytest.mark.slow, pytest.mark.asyncio, pytest.mark.timeout(600)]

MIB = 1 << 20
MOST = 252_000_000 + 64_000_000
"""How much the front end may grow: what docs/operations.md says of all that requests and results
hold, and 64 MB for what is beside it: copies, gRPC's buffers, what allocators keep.
"""
LEFT = 96_000_000
"""How much may be left of it later."""
LATER_S = 10.0
WIDEST: dict[str, Any] = {"logprobs": 20, "logprob_token_ids": range(108)}
"""128 candidates a token: 2 kB in memory, 6 kB in a message."""
OWN_CONNECTION = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", -1),
]


class Watched:
    """The front end's resident memory, in bytes: at the start, and the most since."""

    def __init__(self, server: RealServer) -> None:
        self._process = psutil.Process(server.process.pid)
        self.start = self.most = self.now

    @property
    def now(self) -> int:
        memory: int = self._process.memory_info().rss
        return memory

    async def watch(self) -> None:
        """Until it is cancelled."""
        while True:
            self.most = max(self.most, self.now)
            await asyncio.sleep(0.02)


@asynccontextmanager
async def watched(server: RealServer) -> AsyncIterator[Watched]:
    """Checks, at the end of the block and later, what the front end takes."""
    memory = Watched(server)
    watching = asyncio.create_task(memory.watch())
    try:
        yield memory
    finally:
        watching.cancel()
    grown = memory.most - memory.start
    await asyncio.sleep(LATER_S)
    left = memory.now - memory.start
    logger.info("the front end grew by %d MB; %d MB are left", grown // 10**6, left // 10**6)
    assert grown <= MOST
    assert left <= LEFT


def stub_of(server: RealServer) -> tuple[grpc.aio.Channel, Any]:
    channel = grpc.aio.insecure_channel(server.addresses[0], options=OWN_CONNECTION)
    return channel, GenerationServiceStub(channel)


def asked(name: str, **fields: Any) -> pb.GenerationSpec:
    stop = {"ignore_eos": True, **fields.pop("stop")}
    return pb.GenerationSpec(
        request_id=name, text={"text": "Once upon a time"}, stop=stop, **fields
    )


@pytest.fixture
def server(callers: Path) -> Any:
    with real_server(
        "--listen", "127.0.0.1:0", "--auth-file", str(callers), "--max-hold", "5"
    ) as server:
        server.wait_until_ready()
        yield server


async def leave_unread(stub: Any, who: str, count: int) -> list[Any]:
    """Streams that nobody reads, with the most candidates."""
    calls = []
    for _ in range(count):
        spec = asked("", output=WIDEST, stop={"max_tokens": 1500})
        call = stub.StreamResult(metadata=bearer(who))
        await call.write(rpc.StreamResultRequest(add=rpc.AddCommand(spec=spec)))
        calls.append(call)
    return calls


async def read_all(stub: Any, who: str, seconds: float) -> int:
    """A leased session that reads everything; returns how many requests it was refused."""
    call = stub.StreamResult(metadata=bearer(who))
    lease = rpc.OpenCommand(lease=duration_pb2.Duration(seconds=60))
    await call.write(rpc.StreamResultRequest(open=lease))
    number = refusals = 0

    async def more() -> None:
        nonlocal number
        number += 1
        spec = asked(f"r{number}", output={"logprobs": 20}, stop={"max_tokens": 1000})
        await call.write(rpc.StreamResultRequest(add=rpc.AddCommand(spec=spec)))

    for _ in range(34):
        await more()
    until = time.monotonic() + seconds
    async for message in call:
        refusals += len(message.rejections)
        for event in message.events:
            assert not event.HasField("failed"), event
            if event.HasField("finished") and time.monotonic() < until:
                await more()
        if time.monotonic() > until:
            break
    call.cancel()
    return refusals


async def test_results_that_nobody_reads_and_a_reader_beside_them(server: RealServer) -> None:
    channel, stub = stub_of(server)
    others = [stub_of(server) for _ in range(3)]  # a connection has at most 256 calls
    async with channel, watched(server):
        calls = [call for _, each in others for call in await leave_unread(each, "bob", 100)]
        await asyncio.sleep(20.0)  # until nothing more of theirs has room
        refusals = await read_all(stub, "alice", 60.0)
        assert refusals == 0
        for call in calls:
            call.cancel()
        for other, _ in others:
            await other.close()


@pytest.mark.parametrize("kind", ["AddRequest", "Generate"])
async def test_a_result_that_cannot_have_room_is_refused_and_the_largest_is_read(
    server: RealServer, kind: str
) -> None:
    channel, stub = stub_of(server)
    async with channel, watched(server):
        method = getattr(stub, kind)
        message = rpc.AddRequestRequest if kind == "AddRequest" else rpc.GenerateRequest

        async def ask(name: str, tokens: int) -> Any:
            spec = asked(name, n=16, output=WIDEST, stop={"max_tokens": tokens})
            return await method(message(spec=spec), metadata=bearer("alice"), timeout=120)

        error: Refused = await refused(ask("a", 1900))
        assert error.code is grpc.StatusCode.INVALID_ARGUMENT
        _, _, rest = error.message.partition("enough for ")
        fit = int(rest.partition(":")[0])
        answer = await ask("b", fit)
        if kind == "Generate":
            assert [len(choice.tokens) for choice in answer.choices] == [fit] * 16
        else:
            tokens, next_seq, done = 0, 1, False
            while not done:
                wanted = rpc.GetResultRequest(
                    request_id="b", from_seq=next_seq, wait={"seconds": 60}, until_done=True
                )
                read = await stub.GetResult(wanted, metadata=bearer("alice"))
                tokens += sum(len(event.delta.tokens) for event in read.events)
                next_seq, done = read.next_seq, read.done
            assert tokens == 16 * fit
            await channel.close()
