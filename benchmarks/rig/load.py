"""Requests for a server, as `headrace bench` sends them, and what the server says of them."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import (
    AsyncIterator,
    Callable,
    Coroutine,
    Generator,
    Iterable,
    Iterator,
    Sequence,
)
from dataclasses import dataclass
from typing import Any, cast

import grpc
import headrace
from headrace.async_session import AsyncSession
from headrace.cli.bench.load import Load, LoadRun
from headrace.cli.bench.measures import Tally
from headrace.cli.bench.prompts import Lengths, Prompts
from headrace.options import build_spec
from headrace.v1 import generation_service_pb2 as rpc
from headrace.v1.generation_pb2 import GenerationSpec
from headrace.v1.generation_service_pb2_grpc import GenerationServiceStub

from benchmarks.rig.serving import WAIT_S, Process

OWN_CONNECTION = (("grpc.use_local_subchannel_pool", 1),)


def connect(
    server: Process, token: str | None = None, options: Sequence[tuple[str, int]] = OWN_CONNECTION
) -> headrace.AsyncClient:
    """Return a client with a connection of its own. token: the caller's. options: the channel's."""
    return headrace.AsyncClient(
        server.address, token=token, rpc_timeout=None, channel_options=options
    )


@dataclass(frozen=True, slots=True)
class Stories:
    """Requests for stories, no two alike, each to its full length. Implements `Prompts`."""

    output: Lengths
    seed: int = 0

    def request(self, number: int) -> GenerationSpec:
        """Return request number 0, 1, …"""
        chance = random.Random(f"{self.seed} {number}")
        return build_spec(
            f"Story {self.seed}, {number} of a river and a mill. Once upon a time",
            {"max_tokens": self.output.draw(chance), "temperature": 0.0, "ignore_eos": True},
        )


@dataclass(frozen=True, slots=True)
class Chats:
    """Chats of one message, each to its full length. Implements `Prompts`.

    Attributes:
        text: returns the message of number 0, 1, …
        temperature: 0 for greedy answers.
    """

    text: Callable[[int], str]
    tokens: int
    temperature: float = 0.0

    def request(self, number: int) -> GenerationSpec:
        """Return request number 0, 1, …"""
        return build_spec(
            [{"role": "user", "content": self.text(number)}],
            {"max_tokens": self.tokens, "ignore_eos": True, "temperature": self.temperature},
        )


class Calls:
    """A client as `LoadRun` wants a session, with a call for each request."""

    def __init__(self, client: headrace.AsyncClient, *, streamed: bool = True) -> None:
        """Create it. streamed: whether requests are streamed, or answered as a whole."""
        self._client = client
        self._streamed = streamed

    def submit(self, spec: GenerationSpec) -> _Call:
        return _Call(self._client, spec, self._streamed)

    async def close(self, *, cancel: bool = False) -> None:
        """Do nothing: the calls end with their tasks."""


class _Call:
    """One request: its chunks, then its result."""

    def __init__(self, client: headrace.AsyncClient, spec: GenerationSpec, streamed: bool) -> None:
        self._client = client
        self._spec = spec
        self._streamed = streamed
        self._result: headrace.Result | None = None

    async def __aiter__(self) -> AsyncIterator[headrace.Chunk]:
        if not self._streamed:
            self._result = await self._client.generate(self._spec)
            return
        async with self._client.stream(self._spec) as stream:
            async for chunk in stream:
                yield chunk
            self._result = await stream.result()

    def __await__(self) -> Generator[Any, None, headrace.Result]:
        async def result() -> headrace.Result:
            assert self._result is not None
            return self._result

        return result().__await__()


async def send(
    sessions: Sequence[Calls | AsyncSession], prompts: Prompts, requests: int, at_once: int
) -> Tally:
    """Send this many requests, as many at once, and return what was measured. Raises RuntimeError
    if one was refused or failed.
    """
    tally = Tally()
    await _run(sessions, prompts, at_once, tally, requests).run()
    if tally.done != requests:
        raise RuntimeError(f"{tally.done} of {requests}: {tally.refused} {tally.failed}")
    return tally


async def play(
    server: Process, specs: Sequence[GenerationSpec], at_once: int
) -> tuple[list[dict[str, Any]], int]:
    """Send requests, so many at the same time.

    Returns:
        Of each request: when it was sent, "arrived", its "tokens" and their "times", in seconds
        since the start, and its "usage". And how many steps the server took.
    """
    room = asyncio.Semaphore(at_once)
    async with connect(server) as client:
        before, began = (await client.control.statistics()).engine.steps, time.perf_counter()

        async def ask(spec: GenerationSpec) -> dict[str, Any]:
            async with room, client.stream(spec) as stream:
                arrived = time.perf_counter() - began
                tokens: list[int] = []
                times: list[float] = []
                async for chunk in stream:
                    tokens += chunk.token_ids
                    times += [time.perf_counter() - began] * len(chunk.token_ids)
                usage = (await stream.result()).usage
                return {"arrived": arrived, "tokens": tokens, "times": times, "usage": usage}

        replies = await asyncio.gather(*map(ask, specs))
        return replies, (await client.control.statistics()).engine.steps - before


def messages(address: str, specs: Iterable[GenerationSpec]) -> Iterator[rpc.StreamResultResponse]:
    """Add requests on one session, and yield the server's messages as they are."""
    commands = (
        rpc.StreamResultRequest(command_id=number, add=rpc.AddCommand(spec=spec))
        for number, spec in enumerate(specs, 1)
    )
    with grpc.insecure_channel(address) as channel:
        yield from GenerationServiceStub(channel).StreamResult(commands, timeout=WAIT_S)


@contextlib.asynccontextmanager
async def loaded(calls: Calls, prompts: Prompts, at_once: int) -> AsyncIterator[Tally]:
    """Keep this many requests running or waiting during the block."""
    tally = Tally()
    run = _run([calls], prompts, at_once, tally)
    async with running(run.run()):
        yield tally
        run.interrupt()


def _run(
    sessions: Sequence[Calls | AsyncSession],
    prompts: Prompts,
    at_once: int,
    tally: Tally,
    requests: int | None = None,
) -> LoadRun:
    load = Load(requests, None, at_once, None, "constant", room_timeout=WAIT_S, seed=0)
    return LoadRun(cast(Sequence[AsyncSession], sessions), prompts, load, tally)


@contextlib.asynccontextmanager
async def running(*coroutines: Coroutine[Any, Any, object]) -> AsyncIterator[None]:
    """Run these during the block; their failures are raised here."""
    tasks = [asyncio.ensure_future(one) for one in coroutines]
    try:
        yield
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def until(
    client: headrace.AsyncClient, condition: Callable[[Any], bool], *, every_s: float = 0.1
) -> None:
    """Wait until the server's statistics satisfy a condition."""
    async with asyncio.timeout(WAIT_S):
        while not condition(await client.control.statistics()):  # noqa: ASYNC110 - another's
            await asyncio.sleep(every_s)


async def measured(
    client: headrace.AsyncClient, server: Process, seconds: float
) -> dict[str, float]:
    """Return what a server does meanwhile, as its engine counts it, and the CPU time of its front
    end.
    """
    before, began = (await client.control.statistics()).engine, time.perf_counter()
    cpu_s = server.cpu_s()
    await asyncio.sleep(seconds)
    cpu_s = server.cpu_s() - cpu_s
    after, seconds = (await client.control.statistics()).engine, time.perf_counter() - began
    generated = after.generated_tokens - before.generated_tokens
    return {
        "tokens_per_s": (generated + after.prompt_tokens - before.prompt_tokens) / seconds,
        "generated_per_s": generated / seconds,
        "requests_per_s": (after.requests_finished - before.requests_finished) / seconds,
        "steps_per_s": (after.steps - before.steps) / seconds,
        "preemptions": after.preemptions - before.preemptions,
        "cpu_us_per_token": cpu_s / generated * 1e6,
    }
