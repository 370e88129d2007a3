"""A caller waits for no end of another's backlog: the real engine behind the real service."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from headrace.v1 import control_service_pb2
from headrace.v1 import generation_pb2 as pb
from headrace.v1 import generation_service_pb2 as rpc
from headrace.v1.control_service_pb2_grpc import ControlServiceStub
from headrace.v1.generation_service_pb2_grpc import GenerationServiceStub

from engine.contract.config import ContinuousBatchingConfig, LoadConfig
from engine.process.local_client import LocalEngineClient
from service.config import ServiceConfig
from service.server import HeadraceServer

DEMO = str(Path(__file__).parents[2] / "models" / "demo")
BACKLOG = 24
WAIT_S = 60.0


@asynccontextmanager
async def serving(tmp_path: Path, scheduler: str) -> AsyncIterator[str]:
    """A server with four places in the batch, who knows two callers; its address."""
    callers = tmp_path / "callers.toml"
    callers.write_text(
        "".join(
            f'[[callers]]\nidentity = "{name}"\nservices = ["*"]\n'
            f'token_sha256 = "{hashlib.sha256(name.encode()).hexdigest()}"\n'
            for name in ("busy", "other")
        )
    )
    batching = ContinuousBatchingConfig(
        num_blocks=256, max_requests_per_batch=4, max_queue_size=256, scheduler_type=scheduler
    )
    engine = LocalEngineClient(DEMO, batching, LoadConfig(device="cpu", threads=1))
    config = ServiceConfig(
        listen=("127.0.0.1:0",), auth_file=str(callers), scheduler=scheduler, drain_timeout_s=0
    )
    server = HeadraceServer(config, engine)
    await server.start()
    try:
        await server.ready()
        yield server.addresses[0]
    finally:
        await server.stop()


def bearer(name: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {name}")]


def spec(index: int, max_tokens: int) -> pb.GenerationSpec:
    return pb.GenerationSpec(
        text=pb.TextInput(text=f"Story {index}. Once upon a time"),
        stop=pb.StopOptions(max_tokens=max_tokens, ignore_eos=True),
    )


@pytest.mark.parametrize("scheduler", ["fair", "fifo"])
async def test_who_asks_for_little_is_done_before_another_s_backlog(
    tmp_path: Path, scheduler: str
) -> None:
    async with (
        serving(tmp_path, scheduler) as address,
        grpc.aio.insecure_channel(address) as channel,
    ):
        generation = GenerationServiceStub(channel)
        backlog = [
            generation.Generate(
                rpc.GenerateRequest(spec=spec(index, 150)), metadata=bearer("busy"), timeout=WAIT_S
            )
            for index in range(BACKLOG)
        ]
        control = ControlServiceStub(channel)
        question = control_service_pb2.GetStatisticsRequest()
        async with asyncio.timeout(WAIT_S):
            while True:  # until the batch is full, and the others wait
                answer = await control.GetStatistics(question, metadata=bearer("other"))
                if answer.statistics.engine.waiting == BACKLOG - 4:
                    break
        await generation.Generate(
            rpc.GenerateRequest(spec=spec(99, 3)), metadata=bearer("other"), timeout=WAIT_S
        )
        left = sum(not call.done() for call in backlog)
        answer = await control.GetStatistics(question, metadata=bearer("other"))
        rows = {row.caller: row for row in answer.statistics.engine.callers}
        if scheduler == "fair":
            assert left >= BACKLOG - 4, "it waited for the ends of others"
        else:
            assert left < 4, "without `fair` it comes after the backlog"
        assert rows["busy"].service > rows["other"].service > 0
        for call in backlog:
            call.cancel()
        await asyncio.gather(*backlog, return_exceptions=True)
