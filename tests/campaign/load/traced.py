"""The memory that a request leaves behind in the front end, as counted by Python's allocator.

The same number of requests runs several times on a server with a scripted engine, and the memory
after each round is compared with that after the previous round. The smallest difference counts: it
includes what every request leaves behind, but not caches that fill up.
"""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from itertools import pairwise

from headrace.v1 import generation_service_pb2 as rpc
from headrace.v1.generation_service_pb2_grpc import GenerationServiceStub

from tests.service.fake_engine import FakeEngine, says
from tests.service.helpers import Harness, serving, spec, until

ROUNDS = 4
MOST_BYTES = 100.0
"""The most bytes that a request may leave behind."""


async def bytes_per_request(count: int) -> float:
    engine = FakeEngine(script=says("some words"))
    async with serving(engine, result_retention_s=0) as h:
        await _round(h, engine, 200)
        tracemalloc.start()
        try:
            found = [await _settled(h, engine, count) for _ in range(ROUNDS)]
        finally:
            tracemalloc.stop()
    return min(after - before for before, after in pairwise(found)) / count


async def _settled(h: Harness, engine: FakeEngine, count: int) -> int:
    await _round(h, engine, count)
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


async def _round(h: Harness, engine: FakeEngine, count: int) -> None:
    """Send requests: one fifth by each of the RPCs, and one fifth that are cancelled."""
    stub = GenerationServiceStub(h.channel)
    for number in range(count // 5):
        name = f"r{number}"
        await h.generate(spec("a"))
        await h.stream(spec("b"))
        await stub.AddRequest(rpc.AddRequestRequest(spec=spec("c", request_id=name)))
        await until(lambda: not h.registry.live)
        for request in list(h.registry.requests.values()):
            request.keep_no_more()
        session = h.session()
        await session.add(spec("d", request_id=name))
        await session.end()
        call = stub.GenerateStream(rpc.GenerateStreamRequest(spec=spec("e")))
        await call.read()
        call.cancel()
        await until(lambda: not h.registry.requests)
    # The scripted engine keeps what it was asked, for tests to look at.
    for kept in (engine.submitted, engine.cancelled, engine.finished, engine._prefixes):
        kept.clear()
    await asyncio.sleep(0)
