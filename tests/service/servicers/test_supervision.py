"""The engine dies, and the service goes on: requests end, readiness goes and comes back."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from headrace.v1 import generation_pb2 as pb
from headrace.v1 import generation_service_pb2 as rpc

from engine.contract.config import ContinuousBatchingConfig, LoadConfig
from engine.contract.errors import EngineUnavailableError
from engine.process.process_client import ProcessEngineClient
from service.config import ServiceConfig
from service.door import unknown_methods
from service.door.listening import ListeningError
from service.server import HeadraceServer
from tests.service.fake_engine import FakeEngine, says
from tests.service.helpers import (
    DEADLINE_S,
    Harness,
    check_course,
    details,
    ids_of,
    refused,
    serving,
    spec,
    until,
)

GENERATION = "headrace.v1.GenerationService"
DEMO = str(Path(__file__).parents[3] / "models" / "demo")


async def _is_ready(h: Harness) -> bool:
    stub = health_pb2_grpc.HealthStub(h.channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest(service=GENERATION))
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def test_a_dead_engine_is_started_again() -> None:
    engine = FakeEngine(script=says("abc"), auto=False, restartable=True)
    async with serving(engine) as h:
        session = h.session()
        await session.add(spec(request_id="a"))
        await session.read_until(lambda m: m.events)
        engine.step()
        engine.load_gate = asyncio.Event()
        engine.die(RuntimeError("gone"))
        await until(lambda: h.server.state.phase.value == "restarting")
        assert not await _is_ready(h)
        # What was running has failed, and may be tried again; what is new is told when.
        await session.read_until(lambda m: any(e.HasField("failed") for e in m.events))
        failed = session.events()["a"][-1].failed
        assert failed.status.code == grpc.StatusCode.UNAVAILABLE.value[0]
        assert details(failed.status)["RetryInfo"].retry_delay.ToMilliseconds() > 0
        error = await refused(h.generate(spec(request_id="b")))
        assert (error.code, error.reason) == (
            grpc.StatusCode.UNAVAILABLE,
            "ENGINE_RESTARTING",
        )
        assert "RetryInfo" in error.details
        engine.load_gate.set()
        await until(lambda: h.server.state.phase.value == "ready")
        assert await _is_ready(h)
        call = asyncio.ensure_future(h.generate(spec(request_id="a")))
        await until(lambda: engine.num_live)
        engine.run()
        assert (await call).choices[0].text == "abc"
        await session.end()


async def test_it_is_tried_until_it_works() -> None:
    engine = FakeEngine(script=says("abc"), restartable=True)
    async with serving(engine) as h:
        engine.load_error = RuntimeError("no memory")
        engine.die(RuntimeError("gone"))
        await until(lambda: h.server.state.phase.value == "restarting")
        await asyncio.sleep(0.05)
        assert h.server.state.phase.value == "restarting"
        engine.load_error = None
        await until(lambda: h.server.state.phase.value == "ready")
        assert (await h.generate(spec())).choices[0].text == "abc"


async def test_one_line_says_why_it_could_not_be_started_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = FakeEngine(restartable=True)
    async with serving(engine) as h:
        for error, has_traceback in (
            (EngineUnavailableError("its process ended"), False),
            (RuntimeError("a defect"), True),
        ):
            caplog.clear()
            engine.load_error = error
            engine.die(RuntimeError("gone"))
            told = "the engine could not be started again"
            await until(lambda told=told: told in caplog.text)
            engine.load_error = None
            await until(lambda: h.server.state.phase.value == "ready")
            lines = [one for one in caplog.records if one.getMessage().startswith(told)]
            assert str(error) in caplog.text
            assert [bool(one.exc_info) for one in lines] == [has_traceback] * len(lines)


@pytest.mark.parametrize("rpc_name", ["AddRequest", "Generate", "StreamResult"])
async def test_its_death_under_callers_who_have_gone_is_no_error(
    rpc_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """They called, and went before the engine had answered."""
    engine = FakeEngine(auto=False, restartable=True, submit_gate=asyncio.Event())
    assert engine.submit_gate is not None
    async with serving(engine) as h:
        call: Any
        if rpc_name == "AddRequest":
            call = h.generation.AddRequest(rpc.AddRequestRequest(spec=spec(request_id="a")))
        elif rpc_name == "Generate":
            call = h.generation.Generate(rpc.GenerateRequest(spec=spec(request_id="a")))
        else:
            session = h.session()
            await session.send(open=rpc.OpenCommand(lease={"seconds": 60}))
            await session.add(spec(request_id="a"))
            call = session.call
        await until(lambda: h.registry.under_way)
        call.cancel()
        await until(lambda: not h.server.recovery.open)
        engine.die(RuntimeError("gone"))
        engine.submit_gate.set()
        await until(lambda: not h.registry.live and not h.registry.under_way)
        await until(lambda: h.server.state.phase.value == "ready")
    gc.collect()  # asyncio tells of an error that was lost when its task is freed
    assert not [one.getMessage() for one in caplog.records if one.exc_info]


async def test_an_engine_of_this_process_stays_dead_and_kept_results_can_be_read() -> None:
    engine = FakeEngine(script=says("abc"))
    async with serving(engine) as h:
        await h.generation.AddRequest(rpc.AddRequestRequest(spec=spec(request_id="a")))
        await until(lambda: h.registry.live == 0)
        failure = RuntimeError("gone")
        engine.die(failure)
        async with asyncio.timeout(DEADLINE_S):
            assert await h.server.failed() is failure
        assert not await _is_ready(h)
        error = await refused(h.generate(spec()))
        assert error.reason == "ENGINE_STOPPED"
        assert (await h.generation.GetResult(rpc.GetResultRequest(request_id="a"))).done


def check_usage(events: list[pb.ResultEvent], n: int) -> None:
    """An engine's death was the end, and what was delivered until then is its usage."""
    check_course(events, n=n)
    usage = events[-1].failed.usage
    assert usage.prompt_tokens == events[0].accepted.prompt_tokens > 0
    delivered = [len(ids_of(events, choice)) for choice in range(n)]
    assert usage.completion_tokens == sum(delivered)
    assert min(delivered) > 0


async def test_a_server_that_listens_no_more_is_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process that is alive and deaf would stay so for ever."""
    async with serving(FakeEngine()) as h:
        failing = asyncio.ensure_future(h.server.failed())
        come = asyncio.Event()
        # What comes of a defect in gRPC's one loop.
        monkeypatch.setattr(unknown_methods, "_refuse", lambda *_: come.set())
        # Nobody answers it, and gRPC's loop ends with its last call.
        call = h.channel.unary_unary("/a/b")(b"")
        await asyncio.wait_for(come.wait(), DEADLINE_S)
        call.cancel()
        async with asyncio.timeout(DEADLINE_S):
            failure = await failing
        assert isinstance(failure, ListeningError)
        assert isinstance(failure.__cause__, TypeError)


@pytest.mark.timeout(240)
async def test_a_real_engine_process_that_hangs() -> None:
    engine = ProcessEngineClient(
        DEMO,
        ContinuousBatchingConfig(block_size=32, num_blocks=256),
        LoadConfig(threads=1),
        log_level="error",
        hang_timeout_s=1.0,
    )
    server = HeadraceServer(ServiceConfig(listen=("127.0.0.1:0",)), engine, restart_delay_s=0.01)
    await server.start()
    try:
        await server.ready()
        async with grpc.aio.insecure_channel(server.addresses[0]) as channel:
            h = Harness(server, engine, channel)  # type: ignore[arg-type]
            long = spec("Once", stop={"max_tokens": 1500, "ignore_eos": True})
            call = asyncio.ensure_future(refused(h.generate(long)))
            session = h.session()
            for name, n in (("one", 1), ("three", 3)):
                twin = spec("Once", request_id=name, n=n, stop=long.stop)
                await session.add(twin)
                kept = spec("Once", request_id=f"kept-{name}", n=n, stop=long.stop)
                await h.generation.AddRequest(rpc.AddRequestRequest(spec=kept))
            live = server.registry.live_requests
            await until(lambda: [one.log.output_tokens > 30 for one in live()] == [True] * 5)
            assert engine.pid is not None
            os.kill(engine.pid, signal.SIGSTOP)
            async with asyncio.timeout(DEADLINE_S):
                error = await call
            assert error.code is grpc.StatusCode.UNAVAILABLE
            await until(lambda: server.state.phase.value == "restarting")
            await session.end()
            for name, n in (("one", 1), ("three", 3)):
                answer = await h.generation.GetResult(
                    rpc.GetResultRequest(request_id=f"kept-{name}")
                )
                for events in (session.events()[name], list(answer.events)):
                    check_usage(events, n)
            async with asyncio.timeout(4 * DEADLINE_S):
                while not await _is_ready(h):  # noqa: ASYNC110  # a probe polls
                    await asyncio.sleep(0.05)
            short = spec("Once", sampling={"temperature": 0}, stop={"max_tokens": 4})
            assert len((await h.generate(short)).choices[0].token_ids) == 4
    finally:
        await server.stop()
    assert engine.pid is None
