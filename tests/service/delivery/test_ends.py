"""How requests end: every cell of the table in docs/sessions.md, which is read from there.

A cell is (RPC, what happens, the state that the request is in). The engine goes step by step, so
that "within one engine step" is counted and not timed: once what happened has reached the engine,
one step must bring the documented result, and the engine then holds nothing of the request.
"""

from __future__ import annotations

import asyncio
import re
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from headrace.v1 import generation_pb2 as pb
from headrace.v1 import generation_service_pb2 as rpc
from headrace.v1.generation_service_pb2_grpc import GenerationServiceStub

from engine.contract.outputs import RequestFailure, RequestOutput
from tests.service.ends import (
    CELLS,
    EVENTS,
    MAX_TOKENS,
    NAME,
    RPCS,
    TABLE,
    Caller,
    Cell,
    Outcome,
    Scene,
    of_events,
)
from tests.service.fake_engine import FakeEngine, _Live, model_info
from tests.service.fake_server import ended, process, read_until
from tests.service.fault_proxy import OWN_CONNECTION, FaultProxy, fault_proxy
from tests.service.helpers import (
    DEADLINE_S,
    Harness,
    Session,
    check_course,
    finished_of,
    refused,
    serving,
    spec,
    until,
)

DECODED = 2
"""How many tokens there are when something happens to a decoding request."""


@dataclass(eq=False)
class StagedEngine(FakeEngine):
    """Has room for one request, and takes two steps for a prompt, so that all three states of a
    request can be stood still in.
    """

    prefilled: dict[str, int] = field(default_factory=dict)
    stepped: int = 0

    def step(self) -> bool:
        self.stepped += 1
        return super().step()

    def _outputs(self, live: _Live, now: float) -> list[RequestOutput]:
        untouched = live.failure is None and all(one.end is None for one in live.left)
        name = live.spec.request_id
        if live.running and untouched and self.prefilled.setdefault(name, 0) < 1:
            self.prefilled[name] += 1
            return []
        return super()._outputs(live, now)

    def live_of(self, name: str) -> _Live | None:
        """What it has of a request."""
        return self._live.get(self.engine_id(name))

    def holds(self, name: str) -> bool:
        """Whether it has a request of this name."""
        return any(f"/{name}#" in engine_id for engine_id in self._live)

    def run_out(self) -> None:
        """Step until nothing is left; a step of a prompt alone has no outputs."""
        while self._live:
            self.step()

    def engine_id(self, name: str) -> Any:
        """The engine's name of a live request."""
        return next(engine_id for engine_id in self._live if f"/{name}#" in engine_id)


class SteppedScene(Scene):
    """A scene in which what happened has reached the engine once an event returns; one step must
    then do.
    """

    async def finish(self) -> None:
        """It ends by itself: two steps for the prompt at most, and one for each token."""
        self.engine.run_out()

    async def cancel(self) -> None:
        answer = await self.h.generation.Cancel(rpc.CancelRequest(request_ids=[NAME]))
        assert answer.results[0].status == rpc.CANCEL_STATUS_CANCELLED
        await self._cancelled()

    async def pass_limit(self) -> None:
        self.engine.time_out(self.engine.engine_id(NAME))

    async def error(self) -> None:
        self.engine.fail(self.engine.engine_id(NAME), RequestFailure("it broke", "e1"))

    async def drain(self) -> None:
        await super().drain()
        self.engine.run_out()

    async def die(self) -> None:
        self.engine.die(RuntimeError("the device is gone"))

    async def half_close(self) -> None:
        await super().half_close()
        self.engine.run_out()

    async def let_go(self) -> None:
        """Wait until no stream has it: it is then cancelled, or goes on."""
        await super().let_go()
        if self.caller.kind == "Generate":
            await until(lambda: self.caller.waiting == (self.caller.other is not None))
        if self.caller.kind != "AddRequest" and not self.kept:
            await self._cancelled()

    async def _cancelled(self) -> None:
        await until(lambda: any(f"/{NAME}#" in name for name in self.engine.cancelled))

    @property
    def kept(self) -> bool:
        """Whether it goes on without its stream."""
        return bool(self.h.registry.find("anonymous", NAME).log.keep)


RUNS_ON = {"finish", "server drains", "half-close"}
"""What lets the request run to its end."""


CELL = re.compile(
    r"[A-Z_]+( or [A-Z]+)?, "
    r"(ended|goes on|LENGTH|CANCELLED|TIME_LIMIT|Failed [A-Z]+|no end)"
)


def test_the_table_is_whole() -> None:
    """Each row is tried here, and each cell says something that the test understands."""
    assert [*dict.fromkeys(event for event, _ in TABLE)] == list(EVENTS)
    for cell in TABLE.values():
        assert cell == "—" or CELL.fullmatch(cell), cell


@asynccontextmanager
async def scene(
    kind: str, state: str, *, deadline_s: float | None, lease: bool, another: bool
) -> AsyncIterator[SteppedScene | None]:
    """A server, and the target in its state; None where the deadline was there first."""
    engine = StagedEngine(auto=False, info=model_info(max_running_requests=1))
    async with (
        serving(engine, result_retention_s=60) as h,
        fault_proxy(h.server.addresses[0]) as proxy,
        grpc.aio.insecure_channel(proxy.target, options=OWN_CONNECTION) as channel,
    ):
        if state == "queued":
            blocker = spec(request_id="blocker", stop={"max_tokens": 4})
            await h.generation.AddRequest(rpc.AddRequestRequest(spec=blocker))
            engine.step()
        caller = Caller(kind, h, GenerationServiceStub(channel))
        try:
            await caller.start(deadline_s=deadline_s, lease=lease, another=another)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            if deadline_s is None:
                raise
            yield None
            return
        engine.step()
        if state == "decoding":
            for _ in range(DECODED):
                engine.step()
        yield SteppedScene(h, engine, proxy, caller)


def is_in(scene: Scene, state: str) -> bool:
    """Whether the target is in a state."""
    live = scene.engine.live_of(NAME)
    if live is None:
        return False
    generated = live.choices[0].generated
    if state == "queued":
        return not live.running
    return live.running and generated == (DECODED if state == "decoding" else 0)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: f"{cell.kind}-{cell.event}-{cell.state}")
async def test_a_cell(cell: Cell) -> None:
    """See the table."""
    deadline_s = 0.15 if cell.event.startswith("RPC deadline") else None
    while not await _try(cell.kind, cell.event, cell.state, deadline_s):
        assert deadline_s is not None
        deadline_s *= 2  # a busy machine: the deadline was there before the state
        assert deadline_s < DEADLINE_S


async def _try(kind: str, event: str, state: str, deadline_s: float | None) -> bool:
    lease, another = "lease" in event, "another waits" in event
    status, end = TABLE[event, kind].split(", ")
    async with scene(kind, state, deadline_s=deadline_s, lease=lease, another=another) as there:
        if there is None or not there.engine.holds(NAME) or there.engine.cancelled:
            return False
        assert is_in(there, state)
        engine, registry = there.engine, there.h.registry
        await there.happen(event)
        if event not in RUNS_ON and end != "goes on":
            steps = engine.stepped
            if event not in ("server stops", "engine dies"):
                engine.step()
                assert engine.stepped == steps + 1
                assert not engine.holds(NAME)  # one step was enough
        if event == "half-close":
            outcome = await there.tasks.pop()
        else:
            outcome = await there.caller.outcome()
        check_outcome(outcome, status, end, state)
        if end == "goes on":
            assert engine.holds(NAME)
            assert not engine.cancelled
            await check_resumes(there)
            if there.caller.other is not None:
                assert len((await there.caller.other).choices[0].token_ids) == MAX_TOKENS
        elif end == "ended":
            await until(lambda: ("anonymous", NAME) not in registry.requests)
        assert not engine.holds(NAME)
        engine.run_out()
        for task in there.tasks:
            await task
        await until(lambda: not registry.stats().streamed_requests and not registry.live)
        assert engine.num_live == 0
    return True


def check_outcome(outcome: Outcome, status: str, end: str, state: str) -> None:
    """The outcome is what the table says, and its usage what was delivered."""
    assert outcome.status in status.split(" or ")
    done = DECODED if state == "decoding" else 0
    if end in ("ended", "goes on", "no end"):
        assert (outcome.end, outcome.tokens <= done) == ("", True)
        return
    assert outcome.end == end
    assert outcome.usage is not None
    assert outcome.usage.prompt_tokens == 2
    assert outcome.usage.completion_tokens == outcome.tokens
    assert outcome.tokens == (MAX_TOKENS if end == "LENGTH" else done)


async def check_resumes(there: Scene) -> None:
    """Another session has all of it, from the first event on."""
    session = there.h.session()
    await session.send(attach=rpc.AttachCommand(request_id=NAME, from_seq=1))
    await session.read_until(lambda m: m.attached)
    there.engine.run_out()
    await session.end()
    outcome = of_events(session.events()[NAME], "OK")
    assert (outcome.end, outcome.tokens) == ("LENGTH", MAX_TOKENS)


# On its way: the engine has not said yet whether it takes the request in


@asynccontextmanager
async def on_its_way(
    kind: str, lease: bool
) -> AsyncIterator[tuple[Harness, asyncio.Future[Any], FaultProxy, asyncio.Event]]:
    """A request that waits in the engine's submit until the gate opens: the server, the RPC as the
    caller awaits it, the caller's proxy, the gate.
    """
    gate = asyncio.Event()
    engine = FakeEngine(auto=False, submit_gate=gate)
    async with (
        serving(engine, result_retention_s=60) as h,
        fault_proxy(h.server.addresses[0]) as proxy,
        grpc.aio.insecure_channel(proxy.target, options=OWN_CONNECTION) as channel,
    ):
        caller = Caller(kind, h, GenerationServiceStub(channel))
        starting = asyncio.ensure_future(start_call(caller, lease))
        await until(lambda: h.registry.live)
        yield h, starting, proxy, gate
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)


async def start_call(caller: Caller, lease: bool) -> Any:
    """Start the target and wait for the RPC's first answer."""
    wanted = spec(request_id=NAME, stop={"max_tokens": MAX_TOKENS})
    match caller.kind:
        case "Generate":
            return await caller.stub.Generate(rpc.GenerateRequest(spec=wanted))
        case "GenerateStream":
            return await caller.stub.GenerateStream(rpc.GenerateStreamRequest(spec=wanted)).read()
        case "AddRequest":
            return await caller.stub.AddRequest(rpc.AddRequestRequest(spec=wanted))
    session = Session(caller.stub.StreamResult())
    if lease:
        await session.send(open=rpc.OpenCommand(lease={"seconds": 60}))
        await session.read()
    await session.add(wanted)
    return await session.call.read()


@pytest.mark.parametrize("how", ["cancel", "lose"])
@pytest.mark.parametrize("kind", RPCS[:3])
async def test_on_its_way_without_a_lease_it_is_ended(kind: str, how: str) -> None:
    async with on_its_way(kind, lease=False) as (h, call, proxy, gate):
        call.cancel() if how == "cancel" else proxy.cut()
        await until(lambda: h.engine.cancelled)
        gate.set()
        await until(lambda: ("anonymous", NAME) not in h.registry.requests)
        assert h.engine.num_live == h.registry.live == 0


@pytest.mark.parametrize("how", ["cancel", "lose"])
@pytest.mark.parametrize("kind", ["StreamResult", "AddRequest"])
async def test_on_its_way_with_a_lease_or_by_addrequest_it_goes_on(kind: str, how: str) -> None:
    """A caller that lost its connection meanwhile may say the same again: AddRequest gets the first
    answer; another call with that id is refused, once it is known that the request was taken in.
    """
    async with on_its_way(kind, lease=True) as (h, call, proxy, gate):
        call.cancel() if how == "cancel" else proxy.cut()
        await asyncio.gather(call, return_exceptions=True)
        await until(lambda: not h.registry.streams)
        wanted = spec(request_id=NAME, stop={"max_tokens": MAX_TOKENS})
        again = asyncio.ensure_future(h.generation.AddRequest(rpc.AddRequestRequest(spec=wanted)))
        changed = spec(request_id=NAME)
        other = asyncio.ensure_future(
            refused(h.generation.AddRequest(rpc.AddRequestRequest(spec=changed)))
        )
        session = h.session()
        await session.send(1, open=rpc.OpenCommand(lease={"seconds": 60}))
        await session.send(2, attach=rpc.AttachCommand(request_id=NAME, from_seq=1))
        reading = asyncio.ensure_future(
            h.generation.GetResult(
                rpc.GetResultRequest(request_id=NAME, until_done=True, wait={"seconds": 30})
            )
        )
        done, _ = await asyncio.wait({again, other, reading}, timeout=0.05)
        assert not done  # it is open whether the request exists: they wait for that
        gate.set()
        assert (await other).code is grpc.StatusCode.ALREADY_EXISTS
        if kind == "AddRequest":
            assert (await again).accepted.request_id == NAME
        else:
            assert (await refused(again)).code is grpc.StatusCode.ALREADY_EXISTS
        await session.read_until(lambda m: m.attached)
        assert not h.engine.cancelled
        h.engine.run()
        await session.end()
        assert (await reading).done
        outcome = of_events(session.events()[NAME], "OK")
        assert (outcome.end, outcome.tokens) == ("LENGTH", MAX_TOKENS)


async def test_on_its_way_and_then_refused_leaves_nothing() -> None:
    """The caller is gone and the engine refuses: the name is free, and another try is another."""
    async with on_its_way("AddRequest", lease=False) as (h, call, _, gate):
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        h.engine.closed = True  # it refuses everything
        again = asyncio.ensure_future(
            h.generation.AddRequest(rpc.AddRequestRequest(spec=spec(request_id=NAME)))
        )
        done, _ = await asyncio.wait({again}, timeout=0.05)
        assert not done
        gate.set()
        assert (await refused(again)).code is grpc.StatusCode.UNAVAILABLE
        assert not h.registry.requests
        assert h.registry.live == 0


async def test_on_its_way_and_cancelled_by_its_id() -> None:
    async with on_its_way("AddRequest", lease=False) as (h, call, _, gate):
        answer = await h.generation.Cancel(rpc.CancelRequest(request_ids=[NAME]))
        assert answer.results[0].status == rpc.CANCEL_STATUS_CANCELLED
        gate.set()
        await call
        await until(lambda: h.engine.cancelled)
        h.engine.step()
        result = await h.generation.GetResult(rpc.GetResultRequest(request_id=NAME))
        assert finished_of(result.events).reason == pb.FINISH_REASON_CANCELLED


async def test_on_its_way_while_the_server_stops() -> None:
    async with on_its_way("AddRequest", lease=False) as (h, call, _, gate):
        await h.server.stop()
        await asyncio.gather(call, return_exceptions=True)
        assert not h.registry.requests
        assert not h.registry.under_way
        gate.set()


# As a process


async def finish_stream(call: Any, first: list[pb.ResultEvent]) -> float:
    """Read a GenerateStream, whose first message was read, to its end; returns when that was."""
    events = first
    while (message := await call.read()) is not grpc.aio.EOF:
        events += message.events
    check_course(events)
    assert finished_of(events).reason == pb.FINISH_REASON_LENGTH
    return time.monotonic()


async def test_a_signal_with_streams_running_and_watches_open(tmp_path: Path) -> None:
    """Every stream finishes, and the process ends with the last of them: a Watch, which would
    never end by itself, does not hold it for the grace of its last messages (5 s).
    """
    address = f"unix:{tmp_path}/s"
    async with process(address) as server:
        await read_until(server, "Stop it with")
        async with grpc.aio.insecure_channel(address) as channel:
            stub: Any = GenerationServiceStub(channel)
            health = health_pb2_grpc.HealthStub(channel)
            watches = [
                health.Watch(health_pb2.HealthCheckRequest(service=name))
                for name in ("", "headrace.v1.GenerationService")
            ]
            for watch in watches:
                assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            streams = []
            for tokens in (40, 80, 120):
                wanted = spec(stop={"max_tokens": tokens})
                call = stub.GenerateStream(rpc.GenerateStreamRequest(spec=wanted))
                streams.append((call, list((await call.read()).events)))
            session = Session(stub.StreamResult())
            await session.add(spec(request_id="a", stop={"max_tokens": 100}))
            await session.read()
            server.send_signal(signal.SIGTERM)
            reading = [asyncio.ensure_future(finish_stream(call, first)) for call, first in streams]
            await session.rest()
            check_course(session.events()["a"])
            last = max(time.monotonic(), *await asyncio.gather(*reading))
            code = await ended(server)
            took = time.monotonic() - last
            for watch in watches[1:]:
                assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            for watch in watches:
                assert await watch.read() is grpc.aio.EOF
        assert code == 0
        assert took < 4.5  # 0.1 s on an idle machine
