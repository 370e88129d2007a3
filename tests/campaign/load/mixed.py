"""Open-loop load of all kinds: requests arrive independently of how earlier ones ended."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from headrace.v1 import generation_pb2 as pb
from headrace.v1 import generation_service_pb2 as rpc
from headrace.v1.generation_service_pb2_grpc import GenerationServiceStub

from tests.campaign.hostile.sending import Sender, told

RATE = 8.0
"""The average number of requests per second."""
MOST_OPEN = 400
"""The maximum number of open requests; any above it are counted but not sent."""
PATIENCE_S = 120.0
SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}'
PREFIX = "Once upon a time there was a small house by the river, and in it lived an old man. " * 12
CHAT = {
    "messages": [{"role": pb.CHAT_ROLE_USER, "content": "What is the weather?"}],
    "tools": [{"name": "weather", "parameters_json": SCHEMA}],
}
SHARED = "A story that many begin with: "


class Load:
    """The load on one server.

    Attributes:
        tally: the number of requests by how they ended.
    """

    def __init__(self, sender: Sender, source: random.Random) -> None:
        self.tally: Counter[str] = Counter()
        self.kinds: Counter[str] = Counter()
        self._sender = sender
        self._metadata = sender.credentials()
        self._stub: Any = GenerationServiceStub(sender.channel)
        self.source = source
        self._open: set[asyncio.Task[None]] = set()
        self._number = 0

    @property
    def sent(self) -> int:
        return sum(self.kinds.values())

    async def run(self, seconds: float) -> None:
        """Send for the given time, then wait for whatever is still open."""
        ends = time.monotonic() + seconds
        due = time.monotonic()
        while (now := time.monotonic()) < ends:
            if now < due:
                await asyncio.sleep(min(due - now, ends - now))
                continue
            due += self.source.expovariate(RATE)
            if len(self._open) >= MOST_OPEN:
                self.tally["not sent: too many are open"] += 1
                continue
            task = asyncio.create_task(self._one())
            self._open.add(task)
            task.add_done_callback(self._open.discard)
        if self._open:
            _, late = await asyncio.wait(self._open, timeout=PATIENCE_S)
            self.tally["stuck"] += len(late)

    async def _one(self) -> None:
        name = self.source.choice(list(KINDS))
        self.kinds[name] += 1
        try:
            await KINDS[name](self)
            self.tally["OK"] += 1
        except grpc.aio.AioRpcError as error:
            self.tally[told(error)] += 1
        except asyncio.CancelledError:
            self.tally["cancelled by its caller"] += 1

    def _spec(self, text: str = "", **more: Any) -> pb.GenerationSpec:
        source = self.source
        more.setdefault("stop", {"max_tokens": source.randint(2, 24)})
        if "chat" not in more:
            more["text"] = {"text": text or f"The {source.choice('abcdefgh')} "}
        return pb.GenerationSpec(**more)

    def _name(self) -> str:
        self._number += 1
        return f"load-{self._number}"

    async def generate(self, **more: Any) -> None:
        await self._stub.Generate(
            rpc.GenerateRequest(spec=self._spec(**more)), metadata=self._metadata
        )

    async def stream(self, most: int | None = None, channel: Any = None, **more: Any) -> None:
        """Read a stream; its caller may leave after a given number of messages."""
        stub: Any = self._stub if channel is None else GenerationServiceStub(channel)
        request = rpc.GenerateStreamRequest(spec=self._spec(**more))
        call, came = stub.GenerateStream(request, metadata=self._metadata), 0
        async for _ in call:
            came += 1
            if most is not None and came >= most:
                call.cancel()

    async def session(self) -> None:
        """Send five requests on one stream and cancel one of them."""
        call = self._stub.StreamResult(metadata=self._metadata)
        names = [self._name() for _ in range(5)]
        for name in names:
            spec = self._spec(request_id=name)
            await call.write(rpc.StreamResultRequest(add=rpc.AddCommand(spec=spec)))
        cancel = rpc.CancelCommand(request_id=self.source.choice(names))
        await call.write(rpc.StreamResultRequest(cancel=cancel))
        await call.done_writing()
        async for _ in call:
            pass

    async def added(self) -> None:
        spec = self._spec(request_id=self._name())
        await self._stub.AddRequest(rpc.AddRequestRequest(spec=spec), metadata=self._metadata)
        question = rpc.GetResultRequest(
            request_id=spec.request_id, until_done=True, wait={"seconds": 60}
        )
        await self._stub.GetResult(question, metadata=self._metadata)

    async def disconnected(self) -> None:
        """Read a stream on a separate connection that is closed midway."""
        with contextlib.suppress(grpc.aio.AioRpcError, TimeoutError):
            async with self._sender.connect() as channel:
                async with asyncio.timeout(self.source.random() * 0.3):
                    await self.stream(channel=channel, stop={"max_tokens": 200})


KINDS: dict[str, Callable[[Load], Awaitable[None]]] = {
    "Generate": Load.generate,
    "GenerateStream": Load.stream,
    "sessions": Load.session,
    "AddRequest": Load.added,
    "disconnected": Load.disconnected,
    "cancelled": lambda load: load.stream(most=load.source.randint(1, 5), stop={"max_tokens": 100}),
    "grammars": lambda load: load.generate(structured_output={"json_schema": SCHEMA}),
    "tools": lambda load: load.stream(chat=CHAT),
    "shared prefixes": lambda load: load.stream(
        text=SHARED + PREFIX + str(load.source.randint(0, 5))
    ),
}
