"""The engine's process is killed, or stopped, at moments drawn from a seed, under a real service.

Each moment is a situation (what the clients are doing), a signal, and a delay. Whatever it is:
every live request ends once, with UNAVAILABLE and when to try again, within a bound; readiness goes
and comes back; what is asked then is answered as if nothing had been; and in the end nothing is
left of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import torch
from google.rpc import status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from headrace.v1 import generation_pb2 as pb
from headrace.v1 import generation_service_pb2 as rpc
from headrace.v1.generation_service_pb2_grpc import GenerationServiceStub
from transformers import AutoModelForCausalLM

from engine.contract.config import ContinuousBatchingConfig, LoadConfig
from engine.contract.engine_client import ModelInfo, ProgressSink, StepSink
from engine.contract.outputs import StepOutputs
from engine.process.process_client import ProcessEngineClient
from service.config import ServiceConfig
from service.server import HeadraceServer
from tests.service.fault_proxy import OWN_CONNECTION, fault_proxy
from tests.service.helpers import (
    Harness,
    Names,
    Session,
    check_course,
    details,
    refused,
    spec,
    until,
)

DEMO = str(Path(__file__).parents[2] / "models" / "demo")
GENERATION = "headrace.v1.GenerationService"
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE.value[0]
HANG_TIMEOUT_S = 1.0
TOLERANCE_S = 1.0
"""A death must be known after this, a hang after its timeout and this."""
LOAD_S = 90.0
RETENTION_S = 3.0
PROMPTS = ((5, 6, 7), tuple(range(40, 140)), (11, 300, 1200, 9))
LONG = {"max_tokens": 1500, "ignore_eos": True}


class Engine(ProcessEngineClient):
    """The engine's process, whose steps and lines are counted on the way."""

    def __init__(self) -> None:
        super().__init__(
            DEMO,
            ContinuousBatchingConfig(
                block_size=32, num_blocks=512, max_batch_tokens=128, max_requests_per_batch=6
            ),
            LoadConfig(threads=1, dtype="float32"),
            log_level="error",
            hang_timeout_s=HANG_TIMEOUT_S,
        )
        self.steps = 0
        self.lines: list[str] = []

    async def start(self, sink: StepSink, progress: ProgressSink) -> ModelInfo:
        def count(step: StepOutputs) -> None:
            self.steps += step.step is not None
            sink(step)

        self.lines.clear()
        return await super().start(count, self.lines.append)

    def strike(self, number: signal.Signals) -> float:
        """Send the process a signal; returns after how long that must be known."""
        assert self.pid is not None
        os.kill(self.pid, number)
        if number is signal.SIGKILL:
            return TOLERANCE_S
        return max(HANG_TIMEOUT_S, 20 * max(self._durations, default=0.0)) + TOLERANCE_S


@dataclass(frozen=True, slots=True)
class End:
    """When and how a request ended. `cancelled`: by its own client, before that."""

    at: float
    status: status_pb2.Status
    cancelled: bool = False


Victim = Awaitable[End]


class Line:
    """A session that is read all the time."""

    def __init__(self, stub: Any, lease_s: int = 0) -> None:
        self.session = Session(stub.StreamResult())
        self.tokens: Counter[str] = Counter()
        self.ends: dict[str, asyncio.Future[End]] = {}
        self.events: dict[str, list[pb.ResultEvent]] = {}
        self.accepted: set[str] = set()
        self._names = Names()
        self._lease_s = lease_s
        self._reading: asyncio.Task[None] | None = None

    async def open(self) -> None:
        if self._lease_s:
            await self.session.send(open=rpc.OpenCommand(lease={"seconds": self._lease_s}))
        self._reading = asyncio.create_task(self._read())

    async def add(self, name: str, **fields: Any) -> None:
        self.expect(name)
        wanted: dict[str, Any] = {"tokens": {"ids": PROMPTS[0]}, "stop": LONG, **fields}
        await self.session.add(spec(request_id=name, **wanted))

    def expect(self, name: str) -> None:
        self.ends[name] = asyncio.get_running_loop().create_future()
        self.events.setdefault(name, [])

    async def _read(self) -> None:
        while (message := await self.session.call.read()) is not grpc.aio.EOF:
            now = time.monotonic()
            for rejection in message.rejections:
                assert not self.events[rejection.request_id]
                self._end(rejection.request_id, now, rejection.status)
            for name, event in self._names.take(message):
                self._take(name, event, now)

    def _take(self, name: str, event: pb.ResultEvent, now: float) -> None:
        self.events[name].append(event)
        self.tokens[name] += len(event.delta.token_ids)
        match event.WhichOneof("event"):
            case "accepted":
                self.accepted.add(name)
            case "failed":
                tokens = sum(len(one.delta.token_ids) for one in self.events[name])
                assert event.failed.usage.completion_tokens == tokens
                self._end(name, now, event.failed.status)
            case "finished":
                cancelled = event.finished.reason == pb.FINISH_REASON_CANCELLED
                self._end(name, now, status_pb2.Status(), cancelled=cancelled)

    def _end(self, name: str, now: float, status: status_pb2.Status, **more: Any) -> None:
        assert not self.ends[name].done(), f"{name} ended twice"
        self.ends[name].set_result(End(now, status, **more))

    async def lost(self) -> None:
        """Wait until the connection's end was seen."""
        assert self._reading is not None
        with contextlib.suppress(grpc.aio.AioRpcError):
            await self._reading

    async def close(self) -> None:
        """All requests have ended: the session ends with OK, and each had its course."""
        await self.session.call.done_writing()
        assert self._reading is not None
        await self._reading
        assert await self.session.call.code() is grpc.StatusCode.OK
        for events in self.events.values():
            if events:  # else it was refused
                check_course(events)


@dataclass
class Place:
    """The service, and what one moment uses of it."""

    h: Harness
    engine: Engine
    source: random.Random
    stack: AsyncExitStack

    async def line(self, stub: Any = None, lease_s: int = 0) -> Line:
        line = Line(stub or self.h.generation, lease_s)
        await line.open()
        self.stack.push_async_callback(line.close)
        return line

    async def running(self, count: int, **options: Any) -> Line:
        """A session whose requests have each made some tokens."""
        line = await self.line(**options)
        wanted = {f"r{i}": self.source.randint(1, 40) for i in range(count)}
        for name in wanted:
            await line.add(name)
        await until(lambda: all(line.tokens[name] >= n for name, n in wanted.items()))
        return line


async def ended(call: Awaitable[Any]) -> End:
    """How an RPC ends that must be refused."""
    error = await refused(call)
    return End(time.monotonic(), error.status)


async def drain(call: Any) -> None:
    """Read a stream to its end."""
    async for _ in call:
        pass


# ---- situations: each returns who is hit ---------------------------------------------------------


async def idle(place: Place) -> list[Victim]:
    return []


async def queued(place: Place) -> list[Victim]:
    line = await place.running(6)
    names = [f"q{i}" for i in range(place.source.randint(3, 12))]
    for name in names:
        await line.add(name)
    await until(lambda: line.accepted.issuperset(names))
    assert not any(line.tokens[name] for name in names)  # all six places are taken
    return list(line.ends.values())


async def being_taken_in(place: Place) -> list[Victim]:
    line = await place.line()
    for i in range(place.source.randint(1, 10)):
        await line.add(f"s{i}")
    return list(line.ends.values())


async def prefilling(place: Place) -> list[Victim]:
    line = await place.line()
    steps = place.engine.steps
    await line.add("p", tokens={"ids": [7] * 1800}, stop={"max_tokens": 20})
    wanted = place.source.randint(1, 8)  # of fifteen
    await until(lambda: place.engine.steps >= steps + wanted)
    assert not line.tokens["p"]
    return list(line.ends.values())


async def decoding(place: Place) -> list[Victim]:
    line = await place.running(place.source.randint(1, 6))
    return list(line.ends.values())


async def of_every_kind(place: Place) -> list[Victim]:
    """Unary calls, streams and a session at the same time."""
    generation = place.h.generation
    one = spec("Once", stop=LONG)
    victims: list[Victim] = [
        asyncio.ensure_future(ended(place.h.generate(one))),
        asyncio.ensure_future(
            ended(drain(generation.GenerateStream(rpc.GenerateStreamRequest(spec=one))))
        ),
    ]
    line = await place.running(3)
    await until(lambda: place.h.registry.live == 5)
    return [*victims, *line.ends.values()]


async def being_cancelled(place: Place) -> list[Victim]:
    line = await place.running(5)
    await line.session.send(cancel=rpc.CancelCommand(request_id="r0"))
    cancelling = asyncio.ensure_future(
        place.h.generation.Cancel(rpc.CancelRequest(request_ids=["r1", "r2"]))
    )
    place.stack.push_async_callback(asyncio.wait_for, cancelling, TOLERANCE_S)
    return list(line.ends.values())


async def waited_for(place: Place) -> list[Victim]:
    """GetResult waits for the ends of requests that came by AddRequest."""
    generation = place.h.generation

    async def wait(name: str) -> End:
        answer = await generation.GetResult(
            rpc.GetResultRequest(request_id=name, until_done=True, wait={"seconds": 60})
        )
        assert answer.done
        check_course(list(answer.events))
        return End(time.monotonic(), answer.events[-1].failed.status)

    names = [f"w{place.source.getrandbits(64)}" for _ in range(3)]
    for name in names:
        added = spec("Once", request_id=name, stop=LONG)
        await generation.AddRequest(rpc.AddRequestRequest(spec=added))
    waits: list[Victim] = [asyncio.ensure_future(wait(name)) for name in names]
    find = place.h.registry.find
    await until(lambda: all(find("anonymous", name).readers for name in names))
    return waits


async def resumed(place: Place) -> list[Victim]:
    """A connection was cut, and another one attaches to its requests."""
    proxy = await place.stack.enter_async_context(fault_proxy(place.h.server.addresses[0]))
    channel = await place.stack.enter_async_context(
        grpc.aio.insecure_channel(proxy.target, options=OWN_CONNECTION)
    )
    before = Line(GenerationServiceStub(channel), lease_s=60)
    await before.open()
    names = [f"c{place.source.getrandbits(64)}" for _ in range(3)]
    for name in names:
        await before.add(name)
    await until(lambda: all(before.tokens[name] >= 5 for name in names))
    proxy.cut()
    await before.lost()
    line = await place.line(lease_s=60)
    for name in names:
        events = before.events[name]
        line.expect(name)
        line.events[name] = events
        wanted = len(events) + 1
        await line.session.send(attach=rpc.AttachCommand(request_id=name, from_seq=wanted))
    return list(line.ends.values())


async def loading(place: Place) -> list[Victim]:
    """The engine is being started again already."""
    engine, state = place.engine, place.h.server.state
    engine.lines.clear()
    engine.strike(signal.SIGKILL)
    await until(lambda: state.phase.value == "restarting")
    # Not the warm-up: it is over before it can be struck for certain.
    mark = place.source.choice(["starting", "importing", "importing", "loading"])
    async with asyncio.timeout(LOAD_S):
        while not any(line.startswith(mark) for line in list(engine.lines)):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    await until(lambda: engine.pid is not None)
    error = await refused(place.h.generate(spec()))
    assert error.reason == "ENGINE_RESTARTING"
    return [asyncio.ensure_future(ended(place.h.generate(spec())))]


Situation = Callable[[Place], Awaitable[list[Victim]]]
SITUATIONS: tuple[Situation, ...] = (
    idle, queued, being_taken_in, prefilling, decoding, of_every_kind, being_cancelled, waited_for,
    resumed, loading,
)  # fmt: skip


# ---- what is watched meanwhile -------------------------------------------------------------------


class Health:
    """A Watch of readiness: every change, and when it came."""

    def __init__(self, channel: Any) -> None:
        self._call = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(service=GENERATION)
        )
        self.changes: list[tuple[float, bool]] = []

    async def run(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            async for answer in self._call:
                is_ready = answer.status == health_pb2.HealthCheckResponse.SERVING
                self.changes.append((time.monotonic(), is_ready))


class Stalls:
    """How long this process stood still: a busy machine's fault, not the service's."""

    def __init__(self) -> None:
        self.total_s = 0.0

    async def run(self) -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(0.02)
            late = time.monotonic() - began - 0.02
            self.total_s += late if late > 0.02 else 0.0


def oracle() -> list[list[int]]:
    """What transformers makes of the prompts."""
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=12,
            min_new_tokens=12,
            eos_token_id=None,
            pad_token_id=0,
        )
        found.append(output[0, len(prompt) :].tolist())
    return found


async def check_answers(h: Harness, expected: list[list[int]]) -> None:
    """The service answers as if nothing had been."""
    answers = await asyncio.gather(
        *(
            h.generate(
                spec(
                    tokens={"ids": prompt},
                    sampling={"temperature": 0},
                    stop={"max_tokens": 12, "ignore_eos": True},
                )
            )
            for prompt in PROMPTS
        )
    )
    assert [list(answer.choices[0].token_ids) for answer in answers] == expected


@asynccontextmanager
async def service() -> AsyncIterator[tuple[Harness, Engine]]:
    engine = Engine()
    config = ServiceConfig(listen=("127.0.0.1:0",), result_retention_s=RETENTION_S)
    # Without a delay: it would double with each death.
    server = HeadraceServer(config, engine, restart_delay_s=0)
    await server.start()
    try:
        await server.ready()
        async with grpc.aio.insecure_channel(server.addresses[0]) as channel:
            yield Harness(server, engine, channel), engine  # type: ignore[arg-type]
    finally:
        await server.stop()


@dataclass(frozen=True, slots=True)
class Holdings:
    """What this process has."""

    descriptors: int
    threads: int
    tasks: int
    resident: int

    @classmethod
    def now(cls) -> Holdings:
        gc.collect()
        process = psutil.Process()
        return cls(
            process.num_fds(),
            threading.active_count(),
            len(asyncio.all_tasks()),
            process.memory_info().rss,
        )


def check_end(end: End, struck: float, bound: float, *, situation: Situation) -> None:
    if end.cancelled:
        assert situation is being_cancelled
        return
    assert end.status.code == UNAVAILABLE, end.status
    assert details(end.status)["RetryInfo"].retry_delay.ToMilliseconds() > 0
    assert end.at - struck <= bound


async def moment(
    place: Place, situation: Situation, number: signal.Signals, health: Health, stalls: Stalls
) -> float:
    """One moment; returns how long it took until the last client knew."""
    engine, state = place.engine, place.h.server.state
    changes = len(health.changes)
    victims = await situation(place)
    await asyncio.sleep(place.source.random() * 0.02)
    pid, struck, stalled = engine.pid, time.monotonic(), stalls.total_s
    bound = engine.strike(number)
    async with asyncio.timeout(60):
        ends = [await victim for victim in victims]
        while len(health.changes) <= changes:  # noqa: ASYNC110  # what is waited for has no event
            await asyncio.sleep(0.005)
        while engine.pid == pid:  # noqa: ASYNC110  # likewise
            await asyncio.sleep(0.005)
    bound += stalls.total_s - stalled
    for end in ends:
        check_end(end, struck, bound, situation=situation)
    gone_at, is_ready = health.changes[changes]
    assert not is_ready
    assert gone_at - struck <= bound  # in `loading` readiness went before
    async with asyncio.timeout(LOAD_S):
        while state.phase.value != "ready":  # noqa: ASYNC110  # likewise
            await asyncio.sleep(0.005)
    await until(lambda: health.changes[-1][1])
    assert [ready for _, ready in health.changes[changes:]] == [False, True]
    return max([gone_at, *(end.at for end in ends)]) - struck


@pytest.mark.slow
@pytest.mark.timeout(1500)  # three minutes; a busy machine takes many times that to import torch
async def test_the_engine_is_killed_or_stopped_at_20_moments(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")  # noqa: T201  # to try the same again
    source = random.Random(seed)
    moments = [(one, number) for one in SITUATIONS for number in (signal.SIGKILL, signal.SIGSTOP)]
    source.shuffle(moments)
    expected = oracle()
    before: Holdings | None = None
    others = processes()
    async with service() as (h, engine):
        health, stalls = Health(h.channel), Stalls()
        watching = [asyncio.create_task(one.run()) for one in (health, stalls)]
        await until(lambda: health.changes)
        for turn, (situation, number) in enumerate(moments):
            caplog.clear()
            async with AsyncExitStack() as stack:
                place = Place(h, engine, source, stack)
                took = await moment(place, situation, number, health, stalls)
            print(f"{situation.__name__} {number.name}: known after {took:.2f} s")  # noqa: T201
            await check_answers(h, expected)
            check_log(caplog.records)
            if turn == 3:
                before = Holdings.now()
        await until(lambda: not h.registry.requests)  # what AddRequest keeps
        assert before is not None
        check_nothing_is_left(h, engine, before, others)
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
    assert engine.pid is None
    assert not processes() - others


def check_log(records: list[logging.LogRecord]) -> None:
    """Nothing surprised the service: tracebacks are for defects."""
    assert not [record.getMessage() for record in records if record.exc_info]


def processes() -> set[int]:
    """Those of this one and of its children."""
    return {child.pid for child in psutil.Process().children(recursive=True)}


def check_nothing_is_left(h: Harness, engine: Engine, before: Holdings, others: set[int]) -> None:
    """Sixteen moments later: had each left something, it would show. `others`: the processes that
    earlier tests share.
    """
    registry = h.registry
    assert (
        registry.live
        == registry.stats().streamed_requests
        == registry.kept.count
        == registry.kept.size
        == 0
    )
    assert registry.admission.is_empty
    left = [
        registry.streams, registry.live_requests(), registry.under_way,
        engine._live, engine._admitted, engine._calls,
    ]  # fmt: skip
    assert not any(left), left
    assert processes() - others == {engine.pid}
    now = Holdings.now()
    assert now.descriptors <= before.descriptors + 4
    assert now.threads <= before.threads + 2
    assert now.tasks <= before.tasks
    assert now.resident <= before.resident + (32 << 20)
