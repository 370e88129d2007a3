"""Connections of their own, which are lost or take little, and an engine slow enough for it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc
from headrace.v1.generation_service_pb2_grpc import GenerationServiceStub

from engine.contract.engine_client import Admission
from engine.contract.request import GenerationRequest
from tests.service.fake_engine import FakeEngine
from tests.service.fault_proxy import OWN_CONNECTION

SMALL_WINDOW = [*OWN_CONNECTION, ("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]
"""A client whose connection takes little before it wants to be read from."""


def check_lost(error: grpc.aio.AioRpcError) -> None:
    """The error must be what a client sees of a connection that ended. A write to a stream that is
    lost already is INTERNAL in grpcio, with this text.
    """
    assert error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED) or (
        error.code() is grpc.StatusCode.INTERNAL and error.details() == "Internal error from Core"
    ), error


@dataclass(eq=False)
class SlowEngine(FakeEngine):
    """Takes some passes of the event loop to take a request in, as the compilation of a form does,
    and some time for a step, so that connections are lost meanwhile.
    """

    source: random.Random = field(default_factory=partial(random.Random, 0))

    async def submit(self, request: GenerationRequest) -> Admission:
        for _ in range(self.source.choice([0, 0, 5, 50])):
            await asyncio.sleep(0)
        return await super().submit(request)

    async def _run_loop(self) -> None:
        while True:
            await self._work.wait()
            if not self.step():
                self._work.clear()
            await asyncio.sleep(0.003)


@asynccontextmanager
async def connection(target: str, options: Any = OWN_CONNECTION) -> AsyncIterator[Any]:
    """A stub with a connection of its own."""
    async with grpc.aio.insecure_channel(target, options=options) as channel:
        yield GenerationServiceStub(channel)
