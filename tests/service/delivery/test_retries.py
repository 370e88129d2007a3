"""AddRequest and Generate again, with the same id and the same content."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from headrace.v1 import generation_pb2 as pb
from headrace.v1 import generation_service_pb2 as rpc

from engine.contract.engine_client import Admission
from engine.contract.errors import QueueFullError
from engine.contract.outputs import RequestFailure
from engine.contract.request import GenerationRequest
from service.delivery.served_request import MAX_WAITING_CALLS
from service.delivery.states import State
from tests.service.connections import SlowEngine, check_lost, connection
from tests.service.door.callers_file import bearer, guarded
from tests.service.fake_engine import EOS, FakeEngine
from tests.service.fault_proxy import Fault, SeededSchedule, fault_proxy
from tests.service.helpers import (
    DEADLINE_S,
    Harness,
    check_course,
    finished_of,
    refused,
    serving,
    spec,
    text_of,
    until,
)

CODE = grpc.StatusCode
LEASE: Any = {"seconds": 60}


def serial_script() -> Any:
    """Each computation says another text, so that a result tells which one it is of."""
    made: list[str] = []

    def script(request: GenerationRequest, _choice: int) -> Sequence[int]:
        made.append(request.request_id)
        return [*f"computed {len(made):05}".encode(), EOS]

    return script


def counting(**options: Any) -> FakeEngine:
    return FakeEngine(script=serial_script(), **options)


def add(h: Harness, name: str = "a", metadata: Any = None, **fields: Any) -> Any:
    message = rpc.AddRequestRequest(spec=spec(request_id=name, **fields))
    return h.generation.AddRequest(message, timeout=DEADLINE_S, metadata=metadata)


def generate(h: Harness, name: str = "a", metadata: Any = None, **fields: Any) -> Any:
    message = rpc.GenerateRequest(spec=spec(request_id=name, **fields))
    return h.generation.Generate(message, timeout=DEADLINE_S, metadata=metadata)


def get(h: Harness, name: str = "a") -> Any:
    message = rpc.GetResultRequest(request_id=name, until_done=True, wait={"seconds": 30})
    return h.generation.GetResult(message, timeout=DEADLINE_S)


def waiting(h: Harness, name: str = "a") -> int:
    """How many calls wait for a request."""
    request = h.registry.requests.get(("anonymous", name))
    return 0 if request is None else int(request.waiting)


async def many(h: Harness, count: int, **fields: Any) -> list[Any]:
    """So many calls of Generate, all of which wait."""
    calls = []
    for number in range(1, count + 1):
        calls.append(asyncio.ensure_future(generate(h, **fields)))
        await until(lambda number=number: waiting(h) == number and h.engine.num_live)
    return calls


# AddRequest


async def test_addrequest_again_gets_the_first_answer() -> None:
    engine = counting(auto=False)
    async with serving(engine) as h:
        first = await add(h)
        assert await add(h) == first
        engine.step()
        assert await add(h) == first
        engine.run()
        assert await add(h) == first
        assert (await get(h)).events[0].accepted == first.accepted
    assert len(engine.submitted) == 1
    assert first.accepted.request_id == "a"


async def test_addrequest_again_waits_while_the_first_is_admitted() -> None:
    engine = counting(submit_gate=asyncio.Event())
    async with serving(engine) as h:
        calls = [asyncio.ensure_future(add(h)) for _ in range(3)]
        await until(lambda: waiting(h) == 3)
        calls[0].cancel()
        await until(lambda: waiting(h) == 2)
        assert not any(call.done() for call in calls[1:])
        engine.submit_gate.set()  # type: ignore[union-attr]
        one, other = await asyncio.gather(*calls[1:])
        assert one == other == await add(h)
    assert len(engine.submitted) == 1


@dataclass(eq=False)
class RefusingEngine(FakeEngine):
    """Refuses the first request, once its gate is open."""

    gate: asyncio.Event = field(default_factory=asyncio.Event)
    refused: bool = False

    async def submit(self, request: GenerationRequest) -> Admission:
        if not self.refused:
            self.refused = True
            await self.gate.wait()
            raise QueueFullError(1, 0.5)
        return await super().submit(request)


@pytest.mark.parametrize("call", [add, generate])
async def test_what_the_engine_refused_is_tried_again_by_each_call(call: Any) -> None:
    engine = RefusingEngine(script=serial_script())
    async with serving(engine) as h:
        first = asyncio.ensure_future(refused(call(h)))
        await until(lambda: waiting(h) == 1)
        again = asyncio.ensure_future(call(h))
        await until(lambda: waiting(h) == 2)
        engine.gate.set()
        assert (await first).code is CODE.RESOURCE_EXHAUSTED
        await again
        await until(lambda: not h.registry.live)
    assert len(engine.submitted) == 1


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize(("first", "second"), [(add, generate), (generate, add)])
async def test_other_content_or_another_call_is_refused(
    first: Any, second: Any, kept: bool
) -> None:
    engine = counting(auto=False)
    async with serving(engine) as h:
        call = asyncio.ensure_future(first(h))
        await until(lambda: engine.num_live)
        if kept:
            engine.run()
            await call
        changed: dict[str, Any] = {"stop": {"max_tokens": 3}}
        for other in (first(h, **changed), first(h, text="ho"), second(h), second(h, **changed)):
            error = await refused(other)
            assert (error.code, error.reason) == (CODE.ALREADY_EXISTS, "DUPLICATE_REQUEST_ID")
            assert "with other content" in error.message
        stream = rpc.GenerateStreamRequest(spec=spec(request_id="a"))
        assert (await refused(h.generation.GenerateStream(stream).read())).code is (
            CODE.ALREADY_EXISTS
        )
        session = h.session()
        await session.add(spec(request_id="a"))
        [rejection] = (await session.read()).rejections
        assert rejection.status.code == CODE.ALREADY_EXISTS.value[0]
        engine.run()
        await call
        await session.end()
    assert len(engine.submitted) == 1


async def test_a_request_of_a_session_is_not_had_by_a_retry() -> None:
    async with serving(counting(auto=False)) as h:
        session = h.session()
        await session.add(spec(request_id="a"))
        await session.read_until(lambda m: m.events)
        for call in (add(h), generate(h)):
            assert (await refused(call)).code is CODE.ALREADY_EXISTS
        h.engine.run()
        await session.end()


async def test_unknown_fields_are_content_and_the_order_of_a_map_is_not() -> None:
    engine = counting()
    async with serving(engine) as h:
        biases = [(i, float(i)) for i in range(1, 40)]
        wanted = spec(request_id="a", sampling={"logit_bias": dict(biases)})
        turned = spec(request_id="a", sampling={"logit_bias": dict(reversed(biases))})
        newer = pb.GenerationSpec.FromString(wanted.SerializeToString() + b"\xa2\x7d\x01x")
        assert newer != wanted
        first = await h.generation.AddRequest(rpc.AddRequestRequest(spec=wanted))
        assert await h.generation.AddRequest(rpc.AddRequestRequest(spec=turned)) == first
        error = await refused(h.generation.AddRequest(rpc.AddRequestRequest(spec=newer)))
        assert error.code is CODE.ALREADY_EXISTS
    assert len(engine.submitted) == 1


async def test_identities_have_requests_of_their_own(callers: Path) -> None:
    engine = counting()
    async with guarded(callers, engine) as h:
        alice, again, bob = [
            await generate(h, metadata=bearer(who)) for who in ("alice", "alice", "bob")
        ]
        assert alice == again != bob
    assert len(engine.submitted) == 2


# Generate


async def test_generate_again_waits_for_the_first_and_is_kept() -> None:
    engine = counting(auto=False)
    async with serving(engine) as h:
        calls = await many(h, 3)
        engine.run()
        one, *others = await asyncio.gather(*calls)
        assert all(other == one for other in others)
        assert await generate(h) == one
        kept = await get(h)
        check_course(list(kept.events))
        assert text_of(kept.events) == one.choices[0].text == "computed 00001"
        session = h.session()
        await session.send(attach=rpc.AttachCommand(request_id="a", from_seq=1))
        await session.end()
        assert session.events()["a"] == list(kept.events)
        assert h.registry.stats().kept_results == 1
    assert len(engine.submitted) == 1


async def test_without_an_id_nothing_is_kept() -> None:
    async with serving(counting()) as h:
        one, other = [await h.generate(spec()) for _ in range(2)]
        assert one.choices[0].text != other.choices[0].text
        await until(lambda: not h.registry.requests)
        assert h.registry.stats().kept_results == 0


async def test_who_leaves_leaves_the_others_alone() -> None:
    engine = counting(auto=False)
    async with serving(engine) as h:
        calls = await many(h, 3)
        engine.step()
        for call in calls[:2]:  # the first one, which began it, too
            call.cancel()
        await until(lambda: waiting(h) == 1)
        assert not engine.cancelled
        engine.run()
        assert (await calls[2]).choices[0].text == "computed 00001"
    assert len(engine.submitted) == 1


async def test_the_last_one_that_leaves_ends_it_and_a_retry_starts_it_anew() -> None:
    engine = counting(auto=False)
    async with serving(engine) as h:
        for call in await many(h, 2):
            call.cancel()
        request = h.registry.find("anonymous", "a")
        await until(lambda: request.state is State.ABANDONED and engine.cancelled)
        again = [asyncio.ensure_future(generate(h)) for _ in range(2)]
        await until(lambda: request.waiting == 2)
        assert len(engine.submitted) == 1  # the engine has not ended the first one
        engine.step()
        await until(lambda: len(engine.submitted) == 2 and waiting(h) == 2)
        engine.run()
        one, other = await asyncio.gather(*again)
        assert one == other
        assert one.choices[0].text == "computed 00002"
    assert len(engine.submitted) == 2


async def test_who_leaves_before_the_engine_s_answer() -> None:
    """The first one leaves, another stays; then that one leaves too."""
    engine = counting(submit_gate=asyncio.Event())
    async with serving(engine) as h:
        first, other = [asyncio.ensure_future(generate(h)) for _ in range(2)]
        await until(lambda: waiting(h) == 2)
        first.cancel()
        await until(lambda: waiting(h) == 1)
        assert not engine.cancelled
        other.cancel()
        await until(lambda: engine.cancelled and not h.registry.requests)
        assert h.registry.admission.is_empty
        assert not h.registry.under_way
        again = asyncio.ensure_future(generate(h))
        await until(lambda: waiting(h) == 1)
        engine.submit_gate.set()  # type: ignore[union-attr]
        assert (await again).choices[0].text == "computed 00001"
    assert len(engine.submitted) == 1


async def test_cancel_ends_it_for_all() -> None:
    engine = counting(auto=False)
    async with serving(engine) as h:
        calls = await many(h, 2)
        engine.step()
        await h.generation.Cancel(rpc.CancelRequest(request_ids=["a"]))
        await until(lambda: engine.cancelled)
        engine.step()
        one, other = await asyncio.gather(*calls)
        assert one == other == await generate(h)
        assert one.choices[0].finished.reason == pb.FINISH_REASON_CANCELLED
    assert len(engine.submitted) == 1


async def test_a_failure_is_told_to_all_and_not_kept() -> None:
    engine = counting(auto=False, restartable=True)
    async with serving(engine) as h:
        errors = [asyncio.ensure_future(refused(call)) for call in await many(h, 2)]
        engine.fail(engine.submitted[0].request_id, RequestFailure("it broke", "e1"))
        engine.step()
        assert [(await error).code for error in errors] == [CODE.INTERNAL] * 2
        assert not h.registry.requests
        errors = [asyncio.ensure_future(refused(call)) for call in await many(h, 2)]
        engine.die(RuntimeError("the device is gone"))
        await until(lambda: h.server.state.phase.value == "restarting")
        told = [await error for error in errors]
        assert [error.code for error in told] == [CODE.UNAVAILABLE] * 2
        assert all("RetryInfo" in error.details for error in told)
        assert not h.registry.requests
        await until(lambda: h.server.state.phase.value == "ready")
        again = asyncio.ensure_future(generate(h))
        await until(lambda: engine.num_live)
        engine.run()
        assert (await again).choices[0].text == "computed 00003"


async def test_a_drain_lets_all_who_wait_have_the_result() -> None:
    engine = counting(auto=False)
    async with serving(engine) as h:
        calls = await many(h, 2)
        draining = asyncio.ensure_future(h.server.drain(60))
        await until(lambda: h.server.state.phase.value == "draining")
        engine.run()
        one, other = await asyncio.gather(*calls)
        assert one == other
        await draining


async def test_a_drain_waits_for_a_retry_that_waits_for_the_end_of_the_first() -> None:
    engine = counting(auto=False)
    async with serving(engine) as h:
        [call] = await many(h, 1)
        call.cancel()
        request = h.registry.find("anonymous", "a")
        await until(lambda: request.state is State.ABANDONED and engine.cancelled)
        again = asyncio.ensure_future(generate(h))
        await until(lambda: request.waiting == 1)
        draining = asyncio.ensure_future(h.server.drain(60))
        await until(lambda: h.server.state.phase.value == "draining")
        idle = asyncio.ensure_future(h.registry.wait_idle())
        engine.step()
        await until(lambda: len(engine.submitted) == 2)
        assert not idle.done()
        engine.run()
        assert (await again).choices[0].text == "computed 00002"
        await draining
        await idle


@pytest.mark.parametrize("max_kept", [0, 10])
async def test_a_session_that_attaches_and_a_call_that_waits_both_get_it(max_kept: int) -> None:
    engine = counting(auto=False)
    async with serving(engine, max_kept_results=max_kept) as h:
        [call] = await many(h, 1)
        session = h.session()
        await session.send(attach=rpc.AttachCommand(request_id="a", from_seq=1))
        await session.read_until(lambda m: m.events)
        engine.run()
        await session.end()
        check_course(session.events()["a"])
        assert (await call).choices[0].text == text_of(session.events()["a"]) == "computed 00001"
        assert h.registry.stats().kept_results == min(max_kept, 1)


async def test_a_session_that_attached_keeps_it_when_the_last_call_leaves() -> None:
    engine = counting(auto=False)
    async with serving(engine) as h:
        [call] = await many(h, 1)
        session = h.session()
        await session.send(attach=rpc.AttachCommand(request_id="a", from_seq=1))
        await session.read_until(lambda m: m.events)
        call.cancel()
        await until(lambda: not waiting(h))
        assert not engine.cancelled
        [again] = await many(h, 1)
        session.call.cancel()
        await until(lambda: not h.registry.streams)
        assert not engine.cancelled
        again.cancel()
        await until(lambda: engine.cancelled)
        engine.step()
        await until(lambda: not h.registry.requests)


async def test_a_lease_and_a_call_that_waits() -> None:
    """While either is there the request goes on; it ends with the last of them."""
    engine = counting(auto=False)
    async with serving(engine) as h:
        [call] = await many(h, 1)
        request = h.registry.find("anonymous", "a")
        for lease, left in (({"nanos": 1_000_000}, State.LIVE), (LEASE, State.LEASED)):
            session = h.session()
            await session.send(open=rpc.OpenCommand(lease=lease))
            await session.send(attach=rpc.AttachCommand(request_id="a", from_seq=1))
            await session.read_until(lambda m: m.events)
            session.call.cancel()
            await until(lambda: not h.registry.streams)
            await until(lambda left=left: request.state is left)
        call.cancel()
        await until(lambda: not waiting(h))
        assert (request.state, engine.cancelled) == (State.LEASED, [])
        engine.run()
        assert finished_of((await get(h)).events).reason == pb.FINISH_REASON_STOP


async def test_who_attaches_to_what_was_left_gets_its_end_and_a_retry_does_not() -> None:
    engine = counting(auto=False)
    async with serving(engine) as h:
        [call] = await many(h, 1)
        call.cancel()
        request = h.registry.find("anonymous", "a")
        await until(lambda: request.state is State.ABANDONED)
        session = h.session()
        await session.send(attach=rpc.AttachCommand(request_id="a", from_seq=1))
        await session.read_until(lambda m: m.attached)
        assert (await refused(generate(h))).code is CODE.ALREADY_EXISTS
        engine.step()
        await session.end()
        assert finished_of(session.events()["a"]).reason == pb.FINISH_REASON_CANCELLED
        again = asyncio.ensure_future(generate(h))
        await until(lambda: engine.num_live)
        engine.run()
        assert (await again).choices[0].text == "computed 00002"


# What a retry costs


async def test_a_retry_takes_no_place_and_no_tokens() -> None:
    engine = counting(auto=False)
    limits = {"max_open_requests": 1, "max_reserved_tokens": 300}
    async with serving(engine, **limits) as h:
        calls = await many(h, 3, stop={"max_tokens": 290})
        admission = h.registry.admission
        assert (admission.open_requests, admission.reserved_tokens) == (1, 292)
        assert (await refused(add(h, "b"))).code is CODE.RESOURCE_EXHAUSTED
        engine.run()
        await asyncio.gather(*calls)
        await until(lambda: admission.is_empty)  # the answers too are no longer being sent


async def test_a_retry_s_message_counts_while_it_waits() -> None:
    engine = counting(auto=False)
    async with serving(engine, max_live_bytes=1 << 20) as h:
        admission = h.registry.admission
        calls = await many(h, 1, text="x" * 2000)
        before = admission.live_bytes
        calls += [asyncio.ensure_future(generate(h, text="x" * 2000))]
        await until(lambda: waiting(h) == 2)
        assert before + 4000 <= admission.live_bytes
        calls.pop().cancel()
        await until(lambda: waiting(h) == 1)
        assert admission.live_bytes == before
        engine.run()
        await calls[0]
        assert admission.is_empty


async def test_how_many_may_wait_is_bounded() -> None:
    engine = counting(auto=False)
    async with serving(engine) as h:
        calls = await many(h, MAX_WAITING_CALLS)
        error = await refused(generate(h))
        assert (error.code, error.reason) == (CODE.RESOURCE_EXHAUSTED, "TOO_MANY_WAITING_CALLS")
        assert error.details["ErrorInfo"].metadata["max_waiting_calls"] == str(MAX_WAITING_CALLS)
        assert "RetryInfo" in error.details
        calls.pop().cancel()
        await until(lambda: waiting(h) == MAX_WAITING_CALLS - 1)
        calls.append(asyncio.ensure_future(generate(h)))
        await until(lambda: waiting(h) == MAX_WAITING_CALLS)
        engine.run()
        assert len({call.SerializeToString() for call in await asyncio.gather(*calls)}) == 1
    assert len(engine.submitted) == 1


# Many


@dataclass(eq=False)
class WatchingEngine(SlowEngine):
    """Sees whether a name is computed twice at a time, or again after it ended for somebody.

    Attributes:
        registry: the server's.
        finished_names: what ended before all had left it.
        broken: names for which that was so.
        started: how often each name was begun.
    """

    registry: Any = None
    finished_names: set[str] = field(default_factory=set)
    broken: list[str] = field(default_factory=list)
    started: Counter[str] = field(default_factory=Counter)

    async def submit(self, request: GenerationRequest) -> Admission:
        name = request.request_id.split("#")[0]
        if name in self.finished_names or any(one.startswith(f"{name}#") for one in self._live):
            self.broken.append(name)
        self.started[name] += 1
        return await super().submit(request)

    def _forget(self, live: Any) -> None:
        super()._forget(live)
        name = live.spec.request_id.split("#")[0]
        if self.registry.requests["anonymous", name.split("/")[1]].state is not State.ABANDONED:
            self.finished_names.add(name)


@dataclass
class Retrying:
    """A caller of many requests, one after the other, whose connections break and who leaves some.

    Attributes:
        call: the RPC's name.
        names: what it calls, in an order of its own.
        got: the answers, of those that it has stayed for.
        cuts, left: how many connections it lost with a call under way, and calls it left.
    """

    call: str
    names: list[str]
    target: str
    source: random.Random
    got: dict[str, bytes] = field(default_factory=dict)
    cuts: int = 0
    left: int = 0

    async def run(self) -> None:
        todo = list(self.names)
        while todo:
            try:
                async with connection(self.target) as stub:
                    while todo:
                        await self._one(stub, todo[-1])
                        todo.pop()
            except grpc.aio.AioRpcError as error:
                check_lost(error)
                self.cuts += 1

    async def _one(self, stub: Any, name: str) -> None:
        wanted = spec(name, request_id=name)
        if self.call == "AddRequest":
            call = stub.AddRequest(rpc.AddRequestRequest(spec=wanted), timeout=DEADLINE_S)
        else:
            call = stub.Generate(rpc.GenerateRequest(spec=wanted), timeout=DEADLINE_S)
        if self.source.random() < 0.4:  # it leaves, now or while it waits
            for _ in range(self.source.choice([0, 5, 20, 100, 400])):
                await asyncio.sleep(0)
            call.cancel()
            self.left += 1
            return
        self.got[name] = (await call).SerializeToString(deterministic=True)


async def storm(call: str, ids: int, seed: int) -> None:
    """Three callers of each id, each on connections that break."""
    engine = WatchingEngine(script=serial_script())
    breaks = (Fault.CUT, Fault.CLOSE, Fault.HALF_CLOSE, Fault.STALL)
    schedule = SeededSchedule(seed, breaks, after=(60, 700))
    source = random.Random(seed)
    names = [f"r{i}" for i in range(ids)]
    groups = [names[i::20] for i in range(20)]
    async with (
        serving(engine, max_kept_results=10 * ids, max_kept_bytes=1 << 30) as h,
        fault_proxy(h.server.addresses[0], schedule) as proxy,
    ):
        engine.registry = h.registry
        callers = [
            Retrying(call, group, proxy.target, random.Random(f"{seed}/{i}/{j}"))
            for i, group in enumerate(groups)
            for j in range(3)
        ]
        source.shuffle(callers)
        await asyncio.gather(*(caller.run() for caller in callers))
        await until(lambda: not h.registry.live)
        assert not any(request.waiting for request in h.registry.requests.values())
        await until(lambda: h.registry.admission.is_empty)
        if call == "Generate":  # one is left by all and called again, whatever chance has brought
            engine.hold_at = engine.steps
            left = asyncio.ensure_future(h.generate(spec(request_id="left")))
            await until(lambda: engine.started["anonymous/left"])
            left.cancel()
            await until(lambda: any("/left#" in name for name in engine.cancelled))
            engine.go_on()
            await until(lambda: not h.registry.live)
            await h.generate(spec(request_id="left"))
        answers: dict[str, set[bytes]] = {}
        for caller in callers:
            for name, answer in caller.got.items():
                answers.setdefault(name, set()).add(answer)
        if call == "Generate":  # what is kept is what was answered
            for name in list(answers)[:50]:
                [answer] = answers[name]
                kept = await get(h, name)
                told = rpc.GenerateResponse.FromString(answer).choices[0].text
                assert text_of(kept.events) == told
    assert engine.broken == []
    assert all(len(told) == 1 for told in answers.values())
    assert len(answers) > ids / 2
    assert sum(caller.cuts for caller in callers) > ids / 2
    assert sum(caller.left for caller in callers) > ids / 4
    if call == "AddRequest":
        assert set(engine.started.values()) == {1}
        assert set(engine.finished_names) >= {f"anonymous/{name}" for name in answers}
    else:
        assert max(engine.started.values()) > 1


@pytest.mark.parametrize("call", ["AddRequest", "Generate"])
async def test_retried_calls_with_random_cuts(call: str) -> None:
    await storm(call, 150, seed=3)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("call", ["AddRequest", "Generate"])
async def test_1000_retried_calls_with_random_cuts(call: str) -> None:
    await storm(call, 1000, seed=0)
