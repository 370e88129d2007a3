"""The witness's continuous probes, on one event loop, each on a separate connection.

If only one of the probes stalls, the server as a whole is not stalled.

The stream repeats one greedy request with a fixed prompt. The witness first runs the request twice
undisturbed; every later run must give the same tokens in the same order.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from headrace.v1 import generation_pb2 as pb
from headrace.v1 import generation_service_pb2 as rpc
from headrace.v1 import model_service_pb2 as model
from headrace.v1.generation_service_pb2_grpc import GenerationServiceStub
from headrace.v1.model_service_pb2_grpc import ModelServiceStub

from tests.campaign.witness.memory import Watched
from tests.campaign.witness.report import Report, Timer, Watch, WitnessError, lag_figures

TICK_S = 0.005
"""The interval between two ticks of the witness's timer."""
NOTED_LAG_S = 0.01
"""The lag from which the witness records when it occurred."""
HEALTH_EVERY_S = 0.02
TOKENIZE_EVERY_S = 0.05
MEMORY_EVERY_S = 0.05
MIN_RETRY_S, MAX_RETRY_S = 0.02, 1.0
"""Bounds on the wait after a refusal, whatever the server advises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The settings of a witness.

    Attributes:
        health_target: the address for health checks; None for `target`.
        token: a bearer token; None to send none.
        prompt: the prompt of its requests, which it also tokenizes.
        pids: the processes whose memory is watched, by name.
    """

    target: str
    health_target: str | None = None
    token: str | None = None
    prompt: str = "Once upon a time"
    tokens: int = 500
    pids: Mapping[str, int]
    ready_s: float = 60.0


class Observer:
    """Runs the probes. Created by `observing`."""

    def __init__(self, plan: Plan, channels: Mapping[str, grpc.aio.Channel]) -> None:
        self._plan = plan
        self._generation: Any = GenerationServiceStub(channels["stream"])
        self._models: Any = ModelServiceStub(channels["tokenize"])
        self._health: Any = health_pb2_grpc.HealthStub(channels["health"])
        self._metadata = () if plan.token is None else (("authorization", f"Bearer {plan.token}"),)
        self._expected: list[int] = []
        self._expected_ids: list[int] = []
        self._watched = {name: Watched(pid) for name, pid in plan.pids.items()}
        self._gaps, self._firsts = Watch(), Watch()
        self._tokenizes, self._healths = Watch(), Watch()
        self.begin()

    def begin(self) -> None:
        """Begin a new window. Earlier data is discarded, and open waits are measured from now."""
        now = self._began = time.monotonic()
        self._timer = Timer()
        for watch in (self._gaps, self._firsts, self._tokenizes, self._healths):
            watch.reset(now)
        for watched in self._watched.values():
            watched.begin()
        self._tokens = self._requests = self._wrong = self._lost = 0
        self._wrong_texts = self._not_serving = 0
        self._refusals: Counter[str] = Counter()

    def report(self) -> Report:
        now, timer = time.monotonic(), self._timer
        return Report(
            seconds=now - self._began,
            tokens=self._tokens,
            requests=self._requests,
            gaps=self._gaps.waits(now, timer),
            first_tokens=self._firsts.waits(now, timer),
            tokenize=self._tokenizes.waits(now, timer),
            health=self._healths.waits(now, timer),
            wrong_tokens=self._wrong,
            lost_tokens=self._lost,
            wrong_texts=self._wrong_texts,
            not_serving=self._not_serving,
            refusals=dict(self._refusals),
            ticks=timer.ticks,
            lag=lag_figures(timer),
            memory={name: watched.memory() for name, watched in self._watched.items()},
        )

    async def learn(self) -> None:
        """Do the undisturbed runs. Raises WitnessError, AioRpcError."""
        runs = [await self._undisturbed() for _ in range(2)]
        if runs[0] != runs[1]:
            raise WitnessError(
                "the server gave other tokens in a second run of the same greedy request, before "
                "anything was tried; serve the model in float32, where they are equal"
            )
        self._expected = runs[0]
        self._expected_ids = list((await self._tokenize()).token_ids)

    def probes(self) -> list[Coroutine[Any, Any, None]]:
        """Return the probes' coroutines, none of which ends by itself."""
        return [self._tick(), self._look(), self._stream(), self._tokenizing(), self._asking()]

    async def _tick(self) -> None:
        due = time.monotonic() + TICK_S
        while True:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            now = time.monotonic()
            self._timer.tick(now, max(0.0, now - due), NOTED_LAG_S)
            due = now + TICK_S

    async def _look(self) -> None:
        while True:
            for watched in self._watched.values():
                watched.sample()
            await asyncio.sleep(MEMORY_EVERY_S)

    async def _asking(self) -> None:
        while True:
            self._healths.begin("check", time.monotonic())
            try:
                answer = await self._health.Check(health_pb2.HealthCheckRequest())
                serving = answer.status == health_pb2.HealthCheckResponse.SERVING
            except grpc.aio.AioRpcError as error:
                serving = False
                self._refusals[f"health: {named(error)}"] += 1
            self._healths.end("check", time.monotonic())
            self._not_serving += not serving
            await asyncio.sleep(HEALTH_EVERY_S)

    async def _tokenizing(self) -> None:
        while True:
            self._tokenizes.begin("call", time.monotonic())
            try:
                answer = await self._tokenize()
            except grpc.aio.AioRpcError as error:
                self._tokenizes.drop("call")
                await self._refused(error)
                continue
            self._tokenizes.end("call", time.monotonic())
            self._wrong_texts += list(answer.token_ids) != self._expected_ids
            await asyncio.sleep(TOKENIZE_EVERY_S)

    async def _tokenize(self) -> model.TokenizeResponse:
        text = pb.TextInput(text=self._plan.prompt)
        answer: model.TokenizeResponse = await self._models.Tokenize(
            model.TokenizeRequest(text=text), metadata=self._metadata
        )
        return answer

    async def _undisturbed(self) -> list[int]:
        found: list[int] = []
        async for event in self._events():
            found += event.delta.token_ids
        if len(found) != self._plan.tokens:
            raise WitnessError(
                f"{len(found)} tokens came where {self._plan.tokens} were asked for; ask for fewer"
            )
        return found

    async def _stream(self) -> None:
        number = 0
        while True:
            number += 1
            self._firsts.begin(number, time.monotonic())
            while not await self._request(number):
                pass
            self._gaps.drop(number)

    async def _request(self, number: int) -> bool:
        """Try a request once. Returns False if it was refused."""
        received, accepted = 0, False
        try:
            async for event in self._events():
                accepted = True
                new = list(event.delta.token_ids)
                if not new:
                    continue
                now = time.monotonic()
                (self._gaps if received else self._firsts).end(number, now)
                self._gaps.begin(number, now)
                right = self._expected[received : received + len(new)]
                self._wrong += sum(
                    index >= len(right) or right[index] != token for index, token in enumerate(new)
                )
                self._tokens += len(new)
                received += len(new)
        except grpc.aio.AioRpcError as error:
            if not accepted:
                await self._refused(error)
                return False
            self._refusals[f"failed: {named(error)}"] += 1
        if not received:
            self._firsts.drop(number)
        self._lost += max(0, len(self._expected) - received)
        self._requests += received == len(self._expected)
        return True

    async def _events(self) -> AsyncIterator[pb.ResultEvent]:
        spec = pb.GenerationSpec(
            text=pb.TextInput(text=self._plan.prompt),
            sampling=pb.SamplingOptions(temperature=0.0),
            stop=pb.StopOptions(max_tokens=self._plan.tokens, ignore_eos=True),
        )
        call = self._generation.GenerateStream(
            rpc.GenerateStreamRequest(spec=spec), metadata=self._metadata
        )
        try:
            async for message in call:
                for event in message.events:
                    yield event
        finally:
            call.cancel()

    async def _refused(self, error: grpc.aio.AioRpcError) -> None:
        self._refusals[named(error)] += 1
        advised = 0.0
        for key, value in error.trailing_metadata() or ():
            if key == "grpc-retry-pushback-ms":
                with contextlib.suppress(ValueError):
                    advised = int(value) / 1000
        await asyncio.sleep(min(max(advised, MIN_RETRY_S), MAX_RETRY_S))


def named(error: grpc.aio.AioRpcError) -> str:
    """Return the code of an error, and its reason if there is one."""
    code: str = error.code().name
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            for detail in status_pb2.Status.FromString(value).details:
                info = error_details_pb2.ErrorInfo()
                if detail.Unpack(info):
                    return f"{code} {info.reason}"
    return code


@asynccontextmanager
async def observing(plan: Plan) -> AsyncIterator[Observer]:
    """Yield an observer that has learned the expected results and keeps watching. Raises
    WitnessError if there is no server, or it cannot be witnessed.
    """
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with contextlib.AsyncExitStack() as stack:
        channels = {
            name: await stack.enter_async_context(
                grpc.aio.insecure_channel(target, options=options)
            )
            for name, target in (
                ("stream", plan.target),
                ("tokenize", plan.target),
                ("health", plan.health_target or plan.target),
            )
        }
        await _until_ready(plan, channels["health"])
        observer = Observer(plan, channels)
        try:
            await observer.learn()
        except grpc.aio.AioRpcError as error:
            raise WitnessError(
                f"{plan.target} refused the undisturbed run: {named(error)}: {error.details()}"
            ) from error
        observer.begin()
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(probe) for probe in observer.probes()]
            try:
                yield observer
            finally:
                for task in running:
                    task.cancel()


async def _until_ready(plan: Plan, channel: grpc.aio.Channel) -> None:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    request = health_pb2.HealthCheckRequest(service="headrace.v1.GenerationService")
    status = "it does not answer"
    try:
        async with asyncio.timeout(plan.ready_s):
            while True:
                try:
                    answer = await stub.Check(request, wait_for_ready=True)
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        return
                    status = "it is not serving"
                except grpc.aio.AioRpcError as error:
                    status = named(error)
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise WitnessError(
            f"{plan.target} was not ready within {plan.ready_s:g} s: {status}"
        ) from None
