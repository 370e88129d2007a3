"""Lost, slow and stalled connections between real gRPC clients and a server."""

from __future__ import annotations

import asyncio
import gc
import random
import statistics
import time
import tracemalloc
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from headrace import AsyncClient, AsyncRequestHandle
from headrace.v1 import generation_pb2 as pb
from headrace.v1 import generation_service_pb2 as rpc
from headrace.v1.generation_service_pb2_grpc import GenerationServiceStub

from engine.contract.request import GenerationRequest
from service.delivery.session import MAX_REPLIES
from tests.service.connections import SMALL_WINDOW, SlowEngine, check_lost, connection
from tests.service.fake_engine import EOS, FakeEngine, default_script, model_info
from tests.service.fault_proxy import SeededSchedule, fault_proxy
from tests.service.helpers import (
    DEADLINE_S,
    Names,
    Session,
    check_course,
    finished_of,
    ids_of,
    refused,
    serving,
    spec,
    text_of,
    until,
)

LEASE = {"seconds": 120}


def oracle(prompt: str) -> str:
    """The output for a prompt: 30 to 90 characters, some of several bytes."""
    source = random.Random(prompt)
    return "".join(source.choice("abcdefé€😀 ") for _ in range(source.randint(30, 90)))


def script(request: GenerationRequest, choice: int) -> Sequence[int]:
    """The oracle's, as tokens; each choice its own."""
    return [*oracle(f"{bytes(request.prompt).decode()}/{choice}").encode(), EOS]


def check_whole(name: str, events: list[pb.ResultEvent], n: int) -> None:
    """All of a request is there: gapless, nothing twice, and what the oracle says."""
    check_course(events, n=n)
    for choice in range(n):
        said = oracle(f"{name}/{choice}")
        assert text_of(events, choice) == said
        assert ids_of(events, choice) == [*said.encode(), EOS]
        assert finished_of(events, choice).reason == pb.FINISH_REASON_STOP


def is_over(events: list[pb.ResultEvent], n: int) -> bool:
    """Whether the last terminal event is there."""
    return sum(event.HasField("finished") for event in events) == n


@dataclass
class Client:
    """One client of the storm: a few requests, and a connection that breaks again and again.

    Attributes:
        kind: "leased" attaches again by sessions; "reading" opens one leased session, and after
            its loss reads by GetResult; "added" starts by AddRequest and attaches by sessions;
            "bare" has no lease: what it lost is cancelled.
        target: the proxy.
        lost: how often the connection was lost while requests were unfinished.
    """

    kind: str
    number: int
    target: str
    requests: int
    lost: int = 0
    events: dict[str, list[pb.ResultEvent]] = field(default_factory=dict)
    n: dict[str, int] = field(default_factory=dict)
    known: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        source = random.Random(self.number)
        for i in range(self.requests):
            name = f"{self.kind}{self.number}-{i}"
            self.events[name] = []
            self.n[name] = source.choice([1, 1, 1, 2])

    @property
    def left(self) -> list[str]:
        """The requests whose end is not there yet."""
        return [name for name, run in self.events.items() if not is_over(run, self.n[name])]

    def spec(self, name: str) -> pb.GenerationSpec:
        return spec(name, request_id=name, n=self.n[name])

    async def run(self) -> None:
        if self.kind == "added":
            await self.start_all()
        while self.left:
            try:
                async with asyncio.timeout(DEADLINE_S), connection(self.target) as stub:
                    if self.kind == "reading" and self.lost:
                        await self.read(stub)
                    else:
                        await self.attend(stub)
            except grpc.aio.AioRpcError as error:
                check_lost(error)
                self.lost += 1
            except asyncio.InvalidStateError:  # a write after the end, says grpcio
                self.lost += 1
            if self.kind == "bare":
                break

    async def start_all(self) -> None:
        """AddRequest for each, until it was taken in."""
        while any(name not in self.known for name in self.events):
            try:
                async with connection(self.target) as stub:
                    for name in self.events:
                        await self.start(stub, name)
            except grpc.aio.AioRpcError as error:
                check_lost(error)
                self.lost += 1

    async def start(self, stub: Any, name: str) -> None:
        """AddRequest for one whose start is not certain. An earlier AddRequest is answered again;
        where it was a session's `add` that was taken in, the name belongs to that.
        """
        if name in self.known:
            return
        try:
            await stub.AddRequest(rpc.AddRequestRequest(spec=self.spec(name)), timeout=DEADLINE_S)
        except grpc.aio.AioRpcError as error:
            if self.kind == "added" or error.code() is not grpc.StatusCode.ALREADY_EXISTS:
                raise
        self.known.add(name)

    async def attend(self, stub: Any) -> None:
        """One session: start or attach, and read until all is there, or the connection is lost."""
        session, names = Session(stub.StreamResult()), Names()
        if self.kind != "bare":
            await session.send(open=rpc.OpenCommand(lease=LEASE))
        for number, name in enumerate(self.left, 1):
            if name in self.known:
                wanted = len(self.events[name]) + 1
                command: dict[str, Any] = {
                    "attach": rpc.AttachCommand(request_id=name, from_seq=wanted)
                }
            else:
                command = {"add": rpc.AddCommand(spec=self.spec(name))}
            await session.send(number, **command)
        while self.left:
            message = await session.call.read()
            if message is grpc.aio.EOF:
                await session.call  # raises what ended it
                raise AssertionError("the session ended before its requests")
            for rejection in message.rejections:  # an add whose answer was lost with its stream
                code = rejection.status.code
                assert code == grpc.StatusCode.ALREADY_EXISTS.value[0], rejection
                self.known.add(rejection.request_id)
                attach = rpc.AttachCommand(request_id=rejection.request_id, from_seq=1)
                await session.send(attach=attach)
            for name, event in names.take(message):
                self.collect(name, event)
        await session.call.done_writing()
        assert await session.call.read() is grpc.aio.EOF

    async def read(self, stub: Any) -> None:
        """Read by GetResult, waiting for more."""
        for name in self.left:
            await self.start(stub, name)  # where its add was lost with the stream
            done = False
            while not done:
                answer = await stub.GetResult(
                    rpc.GetResultRequest(
                        request_id=name,
                        from_seq=len(self.events[name]) + 1,
                        wait={"seconds": 30},
                    )
                )
                for event in answer.events:
                    self.collect(name, event)
                assert answer.next_seq == len(self.events[name]) + 1
                done = answer.done

    def collect(self, name: str, event: pb.ResultEvent) -> None:
        """Append an event, which must follow on what is there."""
        run = self.events[name]
        assert event.seq == len(run) + 1
        run.append(event)
        self.known.add(name)

    def check(self) -> None:
        for name, run in self.events.items():
            check_whole(name, run, self.n[name])


async def storm(kinds: dict[str, int], requests: int, *, unix: bool, seed: int) -> None:
    """Clients whose connections are cut, half-closed, stalled, slowed while their requests run."""
    engine = SlowEngine(script=script, info=model_info(max_running_requests=256))
    schedule = SeededSchedule(seed, after=(60, 9000), spared=0.1)
    clients: list[Client] = []
    freed: list[float] = []
    async with (
        serving(
            engine, result_retention_s=120, max_kept_results=10_000, max_kept_bytes=1 << 30
        ) as h,
        fault_proxy(h.server.addresses[0], schedule, unix=unix) as proxy,
    ):
        registry = h.registry

        async def run(client: Client) -> None:
            await client.run()
            if client.kind != "bare":
                return
            began = time.monotonic()
            names = [("anonymous", name) for name in client.events]
            await until(lambda: not any(name in registry.requests for name in names))
            freed.append(time.monotonic() - began)

        for kind, count in kinds.items():
            clients += [Client(kind, i, proxy.target, requests) for i in range(count)]
        random.Random(seed).shuffle(clients)
        await asyncio.gather(*(run(client) for client in clients))
        await until(lambda: not registry.streams)
        assert registry.live == registry.stats().streamed_requests == engine.num_live == 0
    for client in clients:
        if client.kind != "bare":
            client.check()
    lost = {kind: sum(c.lost for c in clients if c.kind == kind) for kind in kinds}
    assert all(lost.values()), lost  # else nothing was tried
    bare = [name for c in clients if c.kind == "bare" for name in c.left if c.lost]
    cancelled = {engine_id.split("/", 1)[1].split("#")[0] for engine_id in engine.cancelled}
    assert cancelled
    assert cancelled <= set(bare)  # nobody else's
    assert statistics.median(freed) < 1.0


async def test_200_sessions_whose_connections_break() -> None:
    counts = {"leased": 100, "reading": 30, "added": 30, "bare": 40}
    await storm(counts, 2, unix=False, seed=7)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_400_sessions_whose_connections_break() -> None:
    counts = {"leased": 200, "reading": 60, "added": 60, "bare": 80}
    await storm(counts, 4, unix=True, seed=1)


# Clients that do not read

REQUESTS = 4
"""Requests of each session."""
LOGPROBS = 5
HELD_BYTES = 48 + 310 + 13 * LOGPROBS + 100
"""What delivery reckons for a token with its candidates, and for an event."""
EVENT_BYTES = 200
MOST_EVENTS = 16
"""Of a request whose client does not read, whatever its length."""
MEMORY_FACTOR = 4
"""How much more memory than that the objects may take in Python."""


async def open_session(stack: AsyncExitStack, target: str, name: str, tokens: int) -> Session:
    """A session with a connection of its own and some requests that were taken in; every other one
    has a lease.
    """
    channel = await stack.enter_async_context(
        grpc.aio.insecure_channel(target, options=SMALL_WINDOW)
    )
    session = Session(GenerationServiceStub(channel).StreamResult())
    if name.endswith(("0", "2", "4", "6", "8")):
        await session.send(open=rpc.OpenCommand(lease=LEASE))
    for i in range(REQUESTS):
        request_id = f"{name}/{i}"
        await session.add(
            spec(
                request_id,
                request_id=request_id,
                stop={"max_tokens": tokens},
                output={"logprobs": LOGPROBS},
            )
        )
    await session.read_until(lambda _: len(session.events()) == REQUESTS)
    return session


async def stalled_readers(stalled: int, live: int, tokens: int) -> None:
    """Some sessions stop reading after their requests were taken in; others read on."""
    engine = FakeEngine(auto=False, info=model_info(max_running_requests=1024))
    async with serving(engine, result_retention_s=120) as h, AsyncExitStack() as stack:
        target = h.server.addresses[0]
        stuck = [await open_session(stack, target, f"s{i}", tokens) for i in range(stalled)]
        readers = [await open_session(stack, target, f"l{i}", tokens) for i in range(live)]
        logs = [one.log for (_, name), one in h.registry.requests.items() if name.startswith("s")]
        assert len(logs) == stalled * REQUESTS
        # The live ones get each step before the next one is made, in one message.
        start = tokens // 4
        for step in range(tokens):
            if step == start:  # by now all writers of the others are blocked
                gc.collect()
                tracemalloc.start()
            engine.step()
            for reader in readers:
                message = await reader.read()
                reader.messages.clear()  # else it would be measured too
                assert [*tokens_by_request(message).values()] == [1] * REQUESTS
        gc.collect()
        grown, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        # What the stalled ones cost: their output, once, in a few events each.
        assert engine.num_live == 0
        assert not any(log.delivered for log in logs)
        assert max(log.next_seq - log.cursor for log in logs) <= MOST_EVENTS
        unread = sum(log.held_size for log in logs)
        assert unread <= len(logs) * (tokens * HELD_BYTES + MOST_EVENTS * EVENT_BYTES)
        # Not by what is unread: what a blocked writer holds was taken, and is there all the same.
        made = len(logs) * (tokens - start) * HELD_BYTES
        assert grown <= MEMORY_FACTOR * made
        # Nothing is lost once they read again.
        oracle_of = {bytes(request.prompt).decode(): request for request in engine.submitted}
        for session in stuck:
            await session.end()
            for name, events in session.events().items():
                check_course(events)
                assert len(events) <= MOST_EVENTS
                assert ids_of(events) == list(default_script(oracle_of[name]))[:tokens]
                assert text_of(events) == bytes(ids_of(events)).decode()
        assert h.registry.stats().streamed_requests == 0


@pytest.mark.parametrize("lease", [False, True])
async def test_results_that_nobody_reads_are_given_up(lease: bool) -> None:
    """A client that reads nothing for minutes does not fill the server with what has ended."""
    engine = FakeEngine(auto=False, tokens_per_step=50)
    async with serving(engine, max_open_requests=2) as h:
        h.registry.unread_s = 2.0
        async with connection(h.server.addresses[0], SMALL_WINDOW) as stub:
            session = Session(stub.StreamResult())
            if lease:
                await session.send(open=rpc.OpenCommand(lease=LEASE))
            for name in ("a", "b"):
                await session.add(
                    spec(request_id=name, stop={"max_tokens": 1000}, output={"logprobs": 20})
                )
            await session.read_until(lambda _: len(session.events()) == 2)
            for _ in range(20):
                engine.step()
                await asyncio.sleep(0)
            assert h.registry.stats().streamed_requests == 2
            error = await refused(h.generate(spec()))
            assert error.reason == "TOO_MANY_OPEN_REQUESTS"
            await until(lambda: h.registry.stats().streamed_requests == 0)
            # Its results stay as long as any that are kept.
            assert bool(h.registry.requests) == lease
            error = await refused(read_all(session))
            assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert error.reason == "RESULTS_NOT_READ"


async def test_ended_results_that_are_attached_and_not_read_are_given_up() -> None:
    large = spec(request_id="a", stop={"max_tokens": 12_000}, output={"logprobs": 20})
    engine = FakeEngine(info=model_info(max_context_tokens=20_000), tokens_per_step=400)
    async with serving(engine) as h, connection(h.server.addresses[0], SMALL_WINDOW) as stub:
        h.registry.unread_s = 0.2
        await h.generation.AddRequest(rpc.AddRequestRequest(spec=large))
        await until(lambda: not engine.num_live)
        session = Session(stub.StreamResult())
        await session.send(attach=rpc.AttachCommand(request_id="a"))
        await session.read()
        await until(lambda: h.registry.stats().streamed_requests == 0)
        assert (await refused(read_all(session))).reason == "RESULTS_NOT_READ"
        answer = await h.generation.GetResult(rpc.GetResultRequest(request_id="a"))
        assert answer.events  # it is kept all the same


async def test_a_long_wait_for_credit_is_not_cut_by_the_wait_for_a_reader() -> None:
    for max_hold_s in (60.0, 1000.0):
        async with serving(FakeEngine(), max_hold_s=max_hold_s) as h:
            assert h.registry.unread_s == max(300.0, 2 * max_hold_s)


async def test_what_has_just_ended_is_not_given_up_for_what_ended_before() -> None:
    async with serving(FakeEngine(auto=False)) as h:
        session = h.session()
        await session.send(open=rpc.OpenCommand(initial_credit=1))
        await session.add(spec(request_id="a", stop={"max_tokens": 1}))
        while not any(event.HasField("finished") for event in session.events().get("a", [])):
            h.engine.step()
            await session.read()
        [stream] = h.registry.streams
        await session.add(spec(request_id="b", stop={"max_tokens": 5}))
        while not ids_of(session.events().get("b", [])):
            h.engine.step()
            await session.read()
        h.registry.clock = lambda: time.monotonic() + 1000  # nothing was taken for long
        while h.engine.num_live:
            h.engine.step()
        h.registry.check_reader(stream)
        assert not stream.given_up
        h.registry.clock = lambda: time.monotonic() + 2000
        h.registry.check_reader(stream)
        assert stream.given_up
        assert (await refused(read_all(session))).reason == "RESULTS_NOT_READ"


async def test_who_reads_is_not_given_up_for_what_ended_long_ago() -> None:
    async with serving(FakeEngine(auto=False)) as h:
        session = h.session()
        await session.send(open=rpc.OpenCommand(initial_credit=1))
        await session.add(spec(request_id="a", stop={"max_tokens": 5}))
        await session.read_until(lambda m: m.events)
        [stream] = h.registry.streams
        h.registry.clock = lambda: time.monotonic() - 1000
        h.engine.run()  # `a` waits for credit
        h.registry.clock = time.monotonic
        await session.add(spec(request_id="b"))
        await session.read_until(lambda _: "b" in session.events())
        h.registry.check_reader(stream)
        assert not stream.given_up
        h.registry.clock = lambda: time.monotonic() + 1000
        h.registry.check_reader(stream)
        assert stream.given_up
        assert (await refused(read_all(session))).reason == "RESULTS_NOT_READ"


async def read_all(session: Session) -> None:
    """Read what still comes."""
    while await session.call.read() is not grpc.aio.EOF:
        pass


def tokens_by_request(message: rpc.StreamResultResponse) -> dict[int, int]:
    """How many tokens of each request a message has."""
    deltas = [event for event in message.events if event.HasField("delta")]
    return {event.request_number: len(event.delta.tokens) for event in deltas}


async def test_20_sessions_that_stop_reading_hold_up_nobody() -> None:
    await stalled_readers(20, 4, 160)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_100_sessions_that_stop_reading_hold_up_nobody() -> None:
    await stalled_readers(100, 8, 240)


async def test_a_client_that_writes_and_does_not_read_leaves_nothing() -> None:
    """Its commands are not read beyond the answers that wait; once it is gone, nobody waits."""
    async with serving(FakeEngine(auto=False)) as h:
        async with connection(h.server.addresses[0], SMALL_WINDOW) as stub:
            session = Session(stub.StreamResult())
            await session.add(spec(request_id="a", output={"logprobs": 100}))
            await session.read()
            command = rpc.StreamResultRequest(cancel=rpc.CancelCommand(request_id="nobody"))

            async def flood() -> None:
                while True:
                    await session.call.write(command)

            flooding = asyncio.ensure_future(flood())
            stream = next(iter(h.registry.streams))
            await until(lambda: stream.unread_replies >= MAX_REPLIES)
            assert readers()
            assert stream.unread_replies == MAX_REPLIES
            flooding.cancel()
            await asyncio.gather(flooding, return_exceptions=True)
        await until(lambda: h.engine.cancelled)
        h.engine.step()
        await until(lambda: not h.registry.requests)
        await until(lambda: not readers())


def readers() -> list[asyncio.Task[Any]]:
    """The tasks that read sessions' commands."""
    return [task for task in asyncio.all_tasks() if "read_commands" in repr(task.get_coro())]


@pytest.mark.parametrize("by_attach", [True, False], ids=["attach", "GetResult"])
async def test_a_session_lost_while_the_server_drains_is_read_to_its_end(by_attach: bool) -> None:
    """By another session or by GetResult: the drain waits for the lease."""
    engine = FakeEngine(script=script, auto=False)
    async with (
        serving(engine, result_retention_s=60) as h,
        fault_proxy(h.server.addresses[0]) as proxy,
        connection(proxy.target) as stub,
    ):
        session = Session(stub.StreamResult())
        await session.send(open=rpc.OpenCommand(lease=LEASE))
        await session.add(spec("a", request_id="a"))
        await session.read_until(lambda m: m.events)
        engine.step()
        await session.read()
        draining = asyncio.ensure_future(h.server.drain(60))
        await until(lambda: h.server.state.phase.value == "draining")
        proxy.cut()
        await until(lambda: not h.registry.streams)
        assert not draining.done()
        events = session.events()["a"]
        if by_attach:
            silent, again = h.session(), h.session()
            await silent.send(open=rpc.OpenCommand())
            await again.send(open=rpc.OpenCommand(lease=LEASE))
            await again.send(2, attach=rpc.AttachCommand(request_id="a", from_seq=len(events) + 1))
            await again.read_until(lambda m: m.attached)
            await again.add(spec("b", request_id="b"), 3)
            message = await again.read_until(lambda m: m.rejections)
            assert message.rejections[0].status.code == grpc.StatusCode.UNAVAILABLE.value[0]
            engine.run()
            await again.rest()
            rest = again.events()["a"]
            await silent.rest()
        else:
            reading = asyncio.ensure_future(
                h.generation.GetResult(
                    rpc.GetResultRequest(
                        request_id="a",
                        from_seq=len(events) + 1,
                        until_done=True,
                        wait={"seconds": 30},
                    )
                )
            )
            await until(lambda: h.registry.find("anonymous", "a").readers)
            engine.run()
            answer = await reading
            assert answer.done
            rest = list(answer.events)
        check_whole("a", [*events, *rest], 1)
        await draining


# Clients of ours


@pytest.mark.parametrize("unix", [False, True], ids=["tcp", "unix"])
async def test_the_python_client_resumes_after_a_cut(unix: bool) -> None:
    """Handles of a session with a lease go on by themselves, cut after cut, until all is there."""
    engine = SlowEngine(script=script, info=model_info(max_running_requests=64))
    async with (
        serving(engine, result_retention_s=120) as h,
        fault_proxy(h.server.addresses[0], unix=unix) as proxy,
        AsyncClient(proxy.target) as client,
        client.session(lease=60) as session,
    ):
        names = [f"r{i}" for i in range(8)]
        handles = {name: session.submit(name, request_id=name) for name in names}
        for _ in range(3):
            await some_more(list(handles.values()))
            proxy.cut()
        for name, handle in handles.items():
            assert (await handle).text == oracle(f"{name}/0")
        assert not engine.cancelled


async def some_more(handles: list[AsyncRequestHandle]) -> None:
    """Wait until each has had a few events more, or its end."""
    wanted = [handle.next_seq + 4 for handle in handles]
    await until(
        lambda: all(
            handle.done or handle.next_seq >= next_seq
            for handle, next_seq in zip(handles, wanted, strict=True)
        )
    )
