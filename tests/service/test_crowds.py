"""Thousands of calls at the same moment: each is answered, or refused by admission with a reason
and a time to come again. gRPC's own limits, which say neither, lie above admission's.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack

import grpc
import pytest
from headrace.v1 import generation_service_pb2 as rpc
from headrace.v1.generation_service_pb2_grpc import GenerationServiceStub

from tests.service.fake_engine import FakeEngine, model_info
from tests.service.fault_proxy import OWN_CONNECTION
from tests.service.helpers import Refused, serving, spec

CROWD = 3000
ACCEPTED = 200
PATIENCE_S = 120.0


@pytest.mark.parametrize("connections", [pytest.param(1, marks=pytest.mark.slow), 30])
async def test_each_call_of_a_crowd_is_answered_or_told_when_to_come_again(
    connections: int,
) -> None:
    info = model_info(max_queue_size=ACCEPTED - 64, max_running_requests=64)
    engine = FakeEngine(info=info, auto=False)
    async with serving(engine) as h, AsyncExitStack() as stack:
        stubs = [
            GenerationServiceStub(
                await stack.enter_async_context(
                    grpc.aio.insecure_channel(h.server.addresses[0], options=OWN_CONNECTION)
                )
            )
            for _ in range(connections)
        ]
        refusals: list[Refused] = []
        all_said = asyncio.Event()

        async def call(number: int) -> str:
            message = rpc.GenerateRequest(spec=spec(stop={"max_tokens": 1}))
            try:
                await stubs[number % connections].Generate(message, timeout=PATIENCE_S)
            except grpc.aio.AioRpcError as error:
                refusals.append(Refused(error))
                if len(refusals) == CROWD - ACCEPTED:
                    all_said.set()
                return error.code().name
            return "OK"

        calls = asyncio.gather(*(call(number) for number in range(CROWD)))
        async with asyncio.timeout(PATIENCE_S):
            await all_said.wait()  # the queue is full, and everybody else knows it
            while not calls.done():
                engine.step()
                await asyncio.sleep(0.001)
            codes = Counter(await calls)
        assert codes == {"OK": ACCEPTED, "RESOURCE_EXHAUSTED": CROWD - ACCEPTED}
        for refusal in refusals:
            assert refusal.reason == "QUEUE_FULL"
            assert refusal.details["RetryInfo"].retry_delay.ToMilliseconds() > 0
