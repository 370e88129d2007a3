"""Concurrent requests of all kinds on one server, with random events and faults.

    client ──▶ one request after another, by a random RPC, ended in a random way
    engine ──▶ forward passes, allocations and samples that fail now and then

Each request is checked by what its client sees: numbers without gaps, one end for each choice, the
script's tokens, and usage. At the end of a round, nothing may be left of any request.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import grpc
from headrace.v1 import generation_pb2 as pb
from headrace.v1 import generation_service_pb2 as rpc
from headrace.v1.generation_service_pb2_grpc import GenerationServiceStub

from engine.scheduler.scheduled_batch import ScheduledBatch
from service.delivery.states import State
from tests.campaign.ends.engine import Gate, ScriptedEngine
from tests.campaign.ends.play import left_at_last
from tests.engine.fake_runner import expected_tokens
from tests.service.fault_proxy import OWN_CONNECTION, fault_proxy
from tests.service.helpers import (
    Harness,
    Session,
    check_course,
    ids_of,
    kinds,
    serving,
    spec,
    until,
)

CLIENTS = 24
MOST_TOKENS = 40
FAILING = 1 / 150
"""The probability that a step fails in one of the ways."""
BROKEN = 1 / 100
"""The probability that no token can be sampled for a request."""
RPCS = ("Generate", "Generate with an id", "GenerateStream", "StreamResult", "leased", "AddRequest")
WAYS = (*("finish",) * 6, *("cancel", "RPC cancelled") * 2, "deadline", "cut", "time limit")
SOON_S = 0.02
"""The longest time in seconds until something happens to a request."""
PATIENCE_S = 60.0
READ_S = 0.5
"""The time limit for reading what a call delivered, counted from the call's end."""


class Crowd:
    """One round of requests.

    Attributes:
        ends: the number of requests by kind of end.
    """

    def __init__(self, source: random.Random, count: int) -> None:
        self.source = source
        self.count = count
        self.ends: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.numbers = iter(range(count))


async def crowds(crowd: Crowd, folder: Path) -> None:
    path = folder / "gate"
    path.unlink(missing_ok=True)
    engine = ScriptedEngine(
        Gate(path), overlap=crowd.source.random() < 0.5, max_requests=crowd.source.choice((4, 12))
    )
    async with (
        serving(engine, result_retention_s=600, max_kept_results=10**6) as h,  # type: ignore[arg-type]
    ):
        engine.runner.hook = Trouble(engine, crowd.source)
        async with asyncio.TaskGroup() as clients:
            for _ in range(CLIENTS):
                clients.create_task(Client(crowd, h).run())
        registry = h.registry
        await until(lambda: not registry.live and not registry.stats().streamed_requests)
        for request in list(registry.requests.values()):
            if request.state is State.KEPT:
                request.keep_no_more()
        crowd.wrong += await left_at_last(h, engine)


class Trouble:
    """Random faults in the engine; called at the start of each step."""

    def __init__(self, engine: ScriptedEngine, source: random.Random) -> None:
        self._engine = engine
        self._source = random.Random(source.random())
        self._allocate = engine.kv_cache.allocate

    def __call__(self, batch: ScheduledBatch) -> None:
        chance, runner, kv_cache = self._source, self._engine.runner, self._engine.kv_cache
        for part in batch.requests:
            name = part.request.request_id
            if not part.start and chance.random() < BROKEN:
                runner.invalid.add(name)
        if chance.random() > FAILING:
            return
        match chance.randrange(3):
            case 0:
                runner.fail_results = 1
            case 1:
                raise MemoryError("out of device memory")
            case _:
                allocate = self._allocate

                def fail(*_: object) -> bool:
                    kv_cache.allocate = allocate  # type: ignore[method-assign]
                    raise RuntimeError("the allocator fails")

                kv_cache.allocate = fail  # type: ignore[method-assign,assignment]


class Client:
    """Runs one request after another, each on a connection that may be cut."""

    def __init__(self, crowd: Crowd, h: Harness) -> None:
        self.crowd = crowd
        self.h = h
        self.source = random.Random(crowd.source.random())
        self.proxy: Any = None
        self._channel: Any = None

    async def run(self) -> None:
        async with fault_proxy(self.h.server.addresses[0]) as self.proxy:
            for number in self.crowd.numbers:
                one = Request(self, number)
                try:
                    async with asyncio.timeout(PATIENCE_S):
                        await one.run()
                    end = one.check()
                except AssertionError as error:
                    end = "wrong"
                    self.crowd.wrong.append(f"{one}: {error}")
                except TimeoutError:
                    end = "stuck"
                    self.crowd.wrong.append(f"{one}: no end within {PATIENCE_S:g} s")
                self.crowd.ends[end] += 1
            await self.close()

    @property
    def stub(self) -> Any:
        """The RPC stub on this client's connection through the proxy."""
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(self.proxy.target, options=OWN_CONNECTION)
        return GenerationServiceStub(self._channel)

    async def close(self) -> None:
        """Close the channel; the next request uses a new connection."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()


class Request:
    """One request: how it is sent, what happens to it, and what was received."""

    def __init__(self, client: Client, number: int) -> None:
        source = client.source
        self.client = client
        self.h = client.h
        self.name = f"r{number}"
        self.kind = source.choice(RPCS)
        self.way = source.choice(WAYS)
        self.n = source.choice((1, 1, 1, 3))
        # Two families of prompts, so that prefixes are shared.
        self.prompt = source.choice("ab") * source.randint(1, 30) + source.choice(("", "c"))
        self.most = source.randint(1, MOST_TOKENS)
        self.soon_s = source.random() * SOON_S
        self.events: list[pb.ResultEvent] = []
        self.answer: rpc.GenerateResponse | None = None
        self.status = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.kind}, {self.way}, n={self.n}, {self.most} tokens)"

    async def run(self) -> None:
        wanted = spec(
            self.prompt,
            request_id="" if self.kind == "Generate" else self.name,
            n=self.n,
            stop={"max_tokens": self.most, "ignore_eos": True},
        )
        if self.way == "time limit":
            wanted.scheduling.time_limit.FromNanoseconds(1 + round(self.soon_s * 1e9))
        deadline_s = self.soon_s if self.way == "deadline" else None
        stub = self.client.stub
        match self.kind:
            case "Generate" | "Generate with an id":
                message = rpc.GenerateRequest(spec=wanted)
                call = stub.Generate(message, timeout=deadline_s)
            case "GenerateStream":
                streamed = rpc.GenerateStreamRequest(spec=wanted)
                call = stub.GenerateStream(streamed, timeout=deadline_s)
            case "AddRequest":
                await self.h.generation.AddRequest(rpc.AddRequestRequest(spec=wanted))
                question = rpc.GetResultRequest(
                    request_id=self.name, until_done=True, wait={"seconds": 60}
                )
                call = stub.GetResult(question, timeout=deadline_s)
            case _:
                call = stub.StreamResult(timeout=deadline_s)
        happening = asyncio.ensure_future(self._happen(call))
        try:
            await _with(call, self._read(call, wanted))
            self.status = "OK"
        except grpc.aio.AioRpcError as error:
            self.status = error.code().name
        except asyncio.InvalidStateError:  # its deadline passed while it was written to
            self.status = (await call.code()).name
        except asyncio.CancelledError:
            if not call.cancelled():
                raise
            self.status = "CANCELLED"
        finally:
            await happening
        if self.way == "cut":
            await self.client.close()
        if self.kind in ("leased", "AddRequest") and self.status != "OK":
            await self._resume()

    async def _happen(self, call: Any) -> None:
        if self.way in ("cancel", "RPC cancelled", "cut"):
            await asyncio.sleep(self.soon_s)
        if self.way == "cancel":
            await self.h.generation.Cancel(rpc.CancelRequest(request_ids=[self.name]))
        elif self.way == "RPC cancelled":
            call.cancel()
        elif self.way == "cut":
            self.client.proxy.cut()

    async def _read(self, call: Any, wanted: pb.GenerationSpec) -> None:
        if self.kind.startswith("Generate") and self.kind != "GenerateStream":
            self.answer = await call
        elif self.kind == "GenerateStream":
            async for message in call:
                self.events += message.events
        elif self.kind == "AddRequest":
            self.events = list((await call).events)
        else:
            session = Session(call)
            if self.kind == "leased":
                await session.send(open=rpc.OpenCommand(lease={"seconds": 60}))
            await session.add(wanted)
            while (message := await call.read()) is not grpc.aio.EOF:
                assert not message.rejections, str(message.rejections)
                self.events += message.events
                if self._is_over:
                    await call.done_writing()
            code = await call.code()
            if code is not grpc.StatusCode.OK:
                raise grpc.aio.AioRpcError(code, await call.initial_metadata(), None)  # type: ignore[arg-type]

    @property
    def _is_over(self) -> bool:
        found = kinds(self.events)
        return "failed" in found or found.count("finished") == self.n

    async def _resume(self) -> None:
        """Fetch the remaining events of a request that continues without its caller."""
        question = rpc.GetResultRequest(
            request_id=self.name,
            from_seq=len(self.events) + 1,
            until_done=True,
            wait={"seconds": 60},
        )
        try:
            answer = await self.h.generation.GetResult(question)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.NOT_FOUND or self.events:
                raise AssertionError(f"it did not go on: {error.details()}") from error
            self.kind = "never arrived"  # its `add`, that is
            return
        self.events += answer.events
        self.status = "OK"

    def check(self) -> str:
        if self.answer is not None:
            return self._check_answer(self.answer)
        if not self.events:
            assert self.status in ("CANCELLED", "DEADLINE_EXCEEDED", "UNAVAILABLE", "INTERNAL") or (
                self.kind == "never arrived"
            ), self.status
            self._check_why()
            return f"{self.status}, no end"
        names = kinds(self.events)
        assert [event.seq for event in self.events] == list(range(1, len(names) + 1)), "numbers"
        for choice in range(self.n):
            self._check_tokens(ids_of(self.events, choice), choice)
        if not self._is_over:
            assert self.status in ("CANCELLED", "DEADLINE_EXCEEDED", "UNAVAILABLE"), self.status
            self._check_why()
            return f"{self.status}, no end"
        check_course(self.events, n=self.n)
        if names[-1] == "failed":
            code = self.events[-1].failed.status.code
            assert code in (grpc.StatusCode.INTERNAL.value[0], grpc.StatusCode.UNAVAILABLE.value[0])
            return "Failed"
        reasons = []
        for event in self.events:
            if event.HasField("finished"):
                ids = ids_of(self.events, event.choice_index)
                reasons.append(self._check_finished(event.finished, ids, event.choice_index))
        return reasons[0]

    def _check_answer(self, answer: rpc.GenerateResponse) -> str:
        assert len(answer.choices) == self.n
        reasons = [
            self._check_finished(one.finished, list(one.token_ids), index)
            for index, one in enumerate(answer.choices)
        ]
        return reasons[0]

    def _check_finished(self, finished: pb.Finished, ids: list[int], choice: int) -> str:
        self._check_tokens(ids, choice)
        assert finished.usage.completion_tokens == len(ids), "usage"
        reason = pb.FinishReason.Name(finished.reason).removeprefix("FINISH_REASON_")
        if reason == "LENGTH":
            assert len(ids) == self.most, f"{len(ids)} of {self.most} tokens at LENGTH"
        elif reason == "TIME_LIMIT":
            assert self.way == "time limit"
        else:
            assert reason == "CANCELLED", reason
            assert self.way == "cancel", self.way
        return reason

    def _check_tokens(self, ids: list[int], choice: int) -> None:
        right = expected_tokens(list(self.prompt.encode()), self.most, choice=choice)
        assert ids == right[: len(ids)], f"wrong tokens {ids}, not {right}"

    def _check_why(self) -> None:
        """Check that an RPC that ended before its request did so because of what happened to it."""
        if self.status == "CANCELLED":
            assert self.way == "RPC cancelled", self.status
        if self.status == "DEADLINE_EXCEEDED":
            assert self.way == "deadline", self.status


async def _with(call: Any, reading: Coroutine[Any, Any, None]) -> None:
    """Read a call to its end.

    In grpcio, a write to a call that is cancelled before it is connected never returns. The write
    is therefore abandoned shortly after the call's end.
    """
    over = asyncio.Event()
    call.add_done_callback(lambda _: over.set())
    task, ended = asyncio.ensure_future(reading), asyncio.ensure_future(over.wait())
    try:
        await asyncio.wait((task, ended), return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait((task,), timeout=READ_S)
    finally:
        ended.cancel()
        task.cancel()
    await task
