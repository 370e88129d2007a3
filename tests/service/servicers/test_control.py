"""ControlService: figures, live requests, cancels, pause, drain, prefix cache and log level."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from headrace.v1 import control_service_pb2 as pb
from headrace.v1 import generation_pb2
from headrace.v1 import generation_service_pb2 as rpc
from headrace.v1.control_service_pb2_grpc import ControlServiceStub

from engine.contract.config import ContinuousBatchingConfig, LoadConfig
from engine.process.local_client import LocalEngineClient
from service.config import ServiceConfig
from service.server import HeadraceServer
from tests.service.fake_engine import FakeEngine, model_info, says
from tests.service.helpers import (
    DEADLINE_S,
    Harness,
    check_course,
    finished_of,
    ids_of,
    kinds,
    refused,
    serving,
    spec,
    text_of,
    until,
)

DEMO = str(Path(__file__).parents[3] / "models" / "demo")
ANYBODY = "anonymous"


async def statistics(h: Harness) -> pb.Statistics:
    """The figures."""
    answer = await h.control.GetStatistics(pb.GetStatisticsRequest(), timeout=DEADLINE_S)
    found: pb.Statistics = answer.statistics
    return found


async def next_of(watch: Any) -> pb.Statistics:
    """A watch's next message."""
    async with asyncio.timeout(DEADLINE_S):
        message = await watch.read()
    assert message is not grpc.aio.EOF
    found: pb.Statistics = message.statistics
    return found


def watch(h: Harness, interval_s: float | None = None) -> Any:
    """A new watch."""
    request = pb.WatchStatisticsRequest()
    if interval_s is not None:
        request.interval.FromMilliseconds(round(interval_s * 1000))
    return h.control.WatchStatistics(request)


# ---- figures ---------------------------------------------------------------------------------


async def test_the_figures_are_those_of_the_engine_and_of_the_front_end() -> None:
    engine = FakeEngine(script=says("abc"), auto=False)
    async with serving(engine, log_level="warning") as h:
        before = await statistics(h)
        assert before.phase == pb.SERVER_PHASE_READY
        assert before.log_level == pb.LOG_LEVEL_WARNING
        assert before.instance_id == h.server.instance_id
        assert before.model == "fake"
        assert before.server_version
        assert abs(before.sample_time.ToSeconds() - time.time()) < DEADLINE_S
        assert before.engine == pb.EngineStatistics(last_step_duration={})
        assert before.front_end == pb.FrontEndStatistics()
        for absent in ("rates", "pause", "drain"):
            assert not before.HasField(absent)
        await h.generation.AddRequest(rpc.AddRequestRequest(spec=spec(request_id="kept")))
        engine.run()
        session = h.session()
        await session.add(spec(request_id="a"))
        await session.read()
        engine.step()
        after = await statistics(h)
        assert (after.engine.running, after.engine.requests_accepted) == (1, 2)
        assert (after.engine.steps, after.engine.generated_tokens) == (engine.steps, 5)
        assert after.front_end.live_requests == 1
        assert (after.front_end.open_streams, after.front_end.streamed_requests) == (1, 1)
        assert after.front_end.kept_results == 1
        assert after.front_end.kept_result_bytes > 0
        assert after.uptime_duration.ToNanoseconds() > before.uptime_duration.ToNanoseconds()
        engine.run()
        await session.end()


async def test_figures_while_the_model_loads_and_while_the_engine_is_gone() -> None:
    engine = FakeEngine(load_gate=asyncio.Event(), restartable=True)
    async with serving(engine, ready=False) as h:
        loading = await statistics(h)
        assert loading.phase == pb.SERVER_PHASE_LOADING
        assert (loading.model, loading.HasField("engine")) == ("", False)
        assert await h.control.ListRequests(pb.ListRequestsRequest()) == pb.ListRequestsResponse()
        for call in (
            h.control.Pause(pb.PauseRequest()),
            h.control.Resume(pb.ResumeRequest()),
            h.control.ResetPrefixCache(pb.ResetPrefixCacheRequest()),
        ):
            error = await refused(call)
            assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "LOADING")
        assert engine.load_gate is not None
        engine.load_gate.set()
        await h.server.ready()
        engine.load_gate.clear()
        engine.die(RuntimeError("gone"))
        await until(lambda: h.server.state.phase.value == "restarting")
        gone = await statistics(h)
        assert gone.phase == pb.SERVER_PHASE_RESTARTING
        assert (gone.model, gone.HasField("engine")) == ("fake", False)
        error = await refused(h.control.Pause(pb.PauseRequest()))
        assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "ENGINE_RESTARTING")
        engine.load_gate.set()
        await until(lambda: h.server.state.phase.value == "ready")
        await until(lambda: h.server.supervisor.restarts)
        back = await statistics(h)
        assert back.engine_restarts == 1
        assert back.HasField("engine")


async def test_an_engine_that_does_not_answer_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.servicers.operator_control.ENGINE_ANSWER_S", 0.01)
    async with serving(FakeEngine(stats_gate=asyncio.Event())) as h:
        found = await statistics(h)
        assert found.phase == pb.SERVER_PHASE_READY
        assert not found.HasField("engine")


async def test_a_watch_begins_at_once_and_tells_rates() -> None:
    engine = FakeEngine(script=says("x", eos=False), auto=False)
    async with serving(engine) as h:
        slow = watch(h, 3600)
        first = await next_of(slow)  # at once, and not in an hour
        assert not first.HasField("rates")
        quick = watch(h, 0.1)
        start = await next_of(quick)
        session = h.session()
        await session.add(spec(request_id="a", stop={"max_tokens": 7}))
        await session.read()
        for _ in range(5):
            engine.step()
        while True:
            found = await next_of(quick)
            assert found.HasField("rates")
            if found.rates.generated_tokens:
                break
            assert found.rates.steps == 0
        window_s = found.rates.window.ToNanoseconds() / 1e9
        assert 0.09 < window_s < DEADLINE_S
        assert found.rates.generated_tokens * window_s == pytest.approx(5)
        assert found.rates.steps * window_s == pytest.approx(5)
        assert found.sample_time.ToNanoseconds() > start.sample_time.ToNanoseconds()
        assert found.rates.requests_finished == 0
        engine.run()
        await session.end()
        slow.cancel()
        quick.cancel()


async def test_no_rates_across_a_restart() -> None:
    engine = FakeEngine(script=says("abc"), restartable=True)
    async with serving(engine) as h:
        await h.generate(spec())
        call = watch(h, 0.1)
        await next_of(call)
        engine.die(RuntimeError("gone"))
        while (found := await next_of(call)).engine_restarts == 0:
            assert found.phase in (pb.SERVER_PHASE_READY, pb.SERVER_PHASE_RESTARTING)
        assert not found.HasField("rates")
        assert (await next_of(call)).HasField("rates")
        call.cancel()


@pytest.mark.parametrize(
    "interval",
    [
        {"nanos": 99_000_000},
        {},
        {"seconds": 3601},
        {"seconds": -1},
        {"nanos": 2_000_000_000},
    ],
)
async def test_bad_intervals(interval: dict[str, int]) -> None:
    async with serving() as h:
        call = h.control.WatchStatistics(pb.WatchStatisticsRequest(interval=interval))
        error = await refused(call.read())
        assert (error.code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, "interval")


# ---- live requests ---------------------------------------------------------------------------


async def test_live_requests_and_how_far_they_are() -> None:
    engine = FakeEngine(script=says("x", eos=False), auto=False, submit_gate=asyncio.Event())
    assert engine.submit_gate is not None
    async with serving(engine) as h:
        session = h.session()
        await session.add(
            spec(
                "hello",
                request_id="a",
                n=2,
                scheduling={"priority": 3, "time_limit": {"seconds": 60}},
            )
        )
        await until(lambda: h.registry.live)

        async def listed() -> list[pb.LiveRequest]:
            answer = await h.control.ListRequests(pb.ListRequestsRequest())
            assert answer.total_size == len(answer.requests)
            return list(answer.requests)

        [one] = await listed()
        assert one.state == pb.REQUEST_STATE_SUBMITTED
        engine.submit_gate.set()
        await session.read()
        await h.generation.AddRequest(rpc.AddRequestRequest(spec=spec(request_id="b")))
        first, second = await listed()
        assert [first.request_id, second.request_id] == ["a", "b"]
        assert first.state == second.state == pb.REQUEST_STATE_WAITING
        engine.step()
        engine.step()
        first, second = await listed()
        assert first.state == pb.REQUEST_STATE_GENERATING
        assert (first.identity, first.prompt_tokens) == (ANYBODY, 5)
        assert (first.output_tokens, second.output_tokens) == (4, 2)
        assert (first.n, first.priority, first.streaming) == (2, 3, True)
        assert first.time_limit.seconds == 60
        assert (second.n, second.priority, second.streaming) == (1, 0, False)
        assert first.age_duration.ToNanoseconds() >= second.age_duration.ToNanoseconds() > 0
        name = pb.RequestName(identity=ANYBODY, request_id="b")
        await h.control.CancelRequests(pb.CancelRequestsRequest(requests=[name]))
        _, second = await listed()
        assert second.state == pb.REQUEST_STATE_CANCELLING
        await until(lambda: engine.cancelled)
        engine.step()
        [first] = await listed()
        assert first.request_id == "a"
        h.registry.cancel_all()
        await until(lambda: len(engine.cancelled) == 2)
        engine.run()
        await session.end()


async def test_thousands_of_requests_in_pages_while_some_end_and_some_come() -> None:
    info = model_info(max_queue_size=0)
    engine = FakeEngine(script=says("x", eos=False), auto=False, info=info)
    async with serving(engine, max_open_requests=10_000) as h:
        session = h.session()
        for number in range(3000):
            await session.add(spec("x", request_id=f"r{number}"))
        await until(lambda: engine.num_live == 3000)
        found: list[str] = []
        request = pb.ListRequestsRequest(page_size=700, identity=ANYBODY)
        while True:
            answer = await h.control.ListRequests(request, timeout=DEADLINE_S)
            assert 0 < len(answer.requests) <= 700
            found += [one.request_id for one in answer.requests]
            if not answer.next_page_token:
                break
            request.page_token = answer.next_page_token
            if len(found) == 700:  # the page's last one, and one that is still to come, end
                names = [
                    pb.RequestName(identity=ANYBODY, request_id=name) for name in ("r699", "r2000")
                ]
                done = await h.control.CancelRequests(pb.CancelRequestsRequest(requests=names))
                assert {one.status for one in done.results} == {rpc.CANCEL_STATUS_CANCELLED}
                await until(lambda: len(engine.cancelled) == 2)
                engine.step()
                await session.add(spec("x", request_id="new"))
                await until(lambda: engine.num_live == 2999)
        assert found == [f"r{n}" for n in range(3000) if n != 2000] + ["new"]
        assert answer.total_size == 2999
        small = await h.control.ListRequests(pb.ListRequestsRequest())
        assert (len(small.requests), small.total_size) == (100, 2999)
        large = await h.control.ListRequests(pb.ListRequestsRequest(page_size=2**32 - 1))
        assert (len(large.requests), bool(large.next_page_token)) == (1000, True)
        nobody = await h.control.ListRequests(pb.ListRequestsRequest(identity="nobody"))
        assert nobody == pb.ListRequestsResponse()
        session.call.cancel()


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.ListRequestsRequest(page_token="r7"), "page_token"),
        (pb.ListRequestsRequest(page_token="9" * 21), "page_token"),
        (pb.ListRequestsRequest(page_token="²"), "page_token"),
    ],
)
async def test_bad_pages(request_: pb.ListRequestsRequest, field: str) -> None:
    async with serving() as h:
        error = await refused(h.control.ListRequests(request_))
        assert (error.code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, field)


def _callers(path: Path, **services: str) -> Path:
    """A file of callers; each one's token is their name."""
    path.write_text(
        "".join(
            f'[[callers]]\nidentity = "{name}"\nservices = ["{service}"]\n'
            f'token_sha256 = "{hashlib.sha256(name.encode()).hexdigest()}"\n'
            for name, service in services.items()
        )
    )
    path.chmod(0o640)
    return path


def _as(who: str) -> tuple[tuple[str, str], ...]:
    """The metadata that somebody sends."""
    return (("authorization", f"Bearer {who}"),)


async def test_an_operator_sees_and_cancels_everybodys_requests(tmp_path: Path) -> None:
    engine = FakeEngine(script=says("x", eos=False), auto=False)
    callers = _callers(
        tmp_path / "callers.toml",
        alice="GenerationService",
        bob="GenerationService",
        ops="ControlService",
    )
    async with serving(engine, auth_file=str(callers)) as h:
        sessions = {who: h.session(metadata=_as(who)) for who in ("alice", "bob")}
        for who, session in sessions.items():
            await session.add(spec(request_id=f"of-{who}"))
            await session.read()
        listing = pb.ListRequestsRequest()
        for who in sessions:  # whoever generates is no operator
            error = await refused(h.control.ListRequests(listing, metadata=_as(who)))
            assert error.code is grpc.StatusCode.PERMISSION_DENIED
        answer = await h.control.ListRequests(listing, metadata=_as("ops"))
        assert [(one.identity, one.request_id) for one in answer.requests] == [
            ("alice", "of-alice"),
            ("bob", "of-bob"),
        ]
        listing.identity = "bob"
        answer = await h.control.ListRequests(listing, metadata=_as("ops"))
        assert [one.request_id for one in answer.requests] == ["of-bob"]
        names = [
            pb.RequestName(identity=identity, request_id=name)
            for identity, name in (
                ("bob", "of-bob"),
                ("alice", "of-bob"),
                ("alice", "of-alice"),
                ("bob", "of-bob"),
            )
        ]
        call = pb.CancelRequestsRequest(requests=names)
        done = await h.control.CancelRequests(call, metadata=_as("ops"))
        assert [(one.identity, one.request_id) for one in done.results] == [
            (name.identity, name.request_id) for name in names
        ]
        assert [one.status for one in done.results] == [
            rpc.CANCEL_STATUS_CANCELLED,
            rpc.CANCEL_STATUS_NOT_FOUND,
            rpc.CANCEL_STATUS_CANCELLED,
            rpc.CANCEL_STATUS_CANCELLED,
        ]
        await until(lambda: set(engine.cancelled) == {one.request_id for one in engine.submitted})
        engine.run()
        for who, session in sessions.items():
            await session.end()
            events = session.events()[f"of-{who}"]
            check_course(events)
            assert finished_of(events).reason == generation_pb2.FINISH_REASON_CANCELLED


@pytest.mark.parametrize(
    ("names", "field"),
    [
        ([], "requests"),
        ([("a", "b")] * 1025, "requests"),
        ([("a", "b"), ("", "b")], "requests[1].identity"),
        ([("a", "")], "requests[0].request_id"),
    ],
)
async def test_bad_cancels(names: list[tuple[str, str]], field: str) -> None:
    async with serving() as h:
        requests = [pb.RequestName(identity=one, request_id=other) for one, other in names]
        error = await refused(h.control.CancelRequests(pb.CancelRequestsRequest(requests=requests)))
        assert (error.code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, field)


# ---- pause -----------------------------------------------------------------------------------


async def test_a_pause_and_what_goes_on_in_it() -> None:
    engine = FakeEngine(script=says("abcdef"), auto=False)
    async with serving(engine) as h:
        session = h.session()
        await session.add(spec(request_id="a"))
        await session.add(spec(request_id="c"))
        await until(lambda: engine.num_live == 2)
        engine.step()
        began = time.time()
        first = await h.control.Pause(pb.PauseRequest(reason="a look\nat the device"))
        assert not first.was_paused
        assert first.pause.reason == "a look at the device"
        assert began - 1 < first.pause.start_time.ToSeconds() <= time.time()
        second = await h.control.Pause(pb.PauseRequest(reason="and another"))
        assert second.was_paused
        assert second.pause.start_time == first.pause.start_time
        assert (await statistics(h)).pause == second.pause
        assert engine.paused
        steps = engine.steps
        await session.add(spec(request_id="b"))
        await session.read_until(lambda m: "b" in session.events())
        assert not engine.step()
        await session.send(cancel=rpc.CancelCommand(request_id="c"))
        await until(lambda: engine.cancelled)
        engine.step()
        await session.read_until(lambda _: "finished" in kinds(session.events().get("c", [])))
        assert engine.steps == steps + 1
        await h.control.ResetPrefixCache(pb.ResetPrefixCacheRequest())
        assert engine.resets == 1
        assert (await h.control.Resume(pb.ResumeRequest())).was_paused
        assert not (await statistics(h)).HasField("pause")
        assert not (await h.control.Resume(pb.ResumeRequest())).was_paused
        engine.run()
        await session.end()
        for name in "ab":
            check_course(session.events()[name])
            assert text_of(session.events()[name]) == "abcdef"


async def test_a_pause_is_carried_out_when_its_caller_has_gone() -> None:
    engine = FakeEngine(pause_gate=asyncio.Event())
    assert engine.pause_gate is not None
    async with serving(engine) as h:
        call = h.control.Pause(pb.PauseRequest(reason="gone"))
        await until(lambda: engine.paused)
        call.cancel()
        engine.pause_gate.set()
        await until(lambda: not h.server.control.tasks)
        assert (await statistics(h)).pause.reason == "gone"
        assert (await h.control.Resume(pb.ResumeRequest())).was_paused
        assert not engine.paused


async def test_a_pause_outlives_the_engine() -> None:
    engine = FakeEngine(script=says("abc"), restartable=True)
    async with serving(engine) as h:
        await h.control.Pause(pb.PauseRequest(reason="stay"))
        engine.die(RuntimeError("gone"))
        await until(lambda: h.server.supervisor.restarts)
        assert engine.paused
        call = asyncio.ensure_future(h.generate(spec()))
        await until(lambda: engine.num_live)
        assert (await statistics(h)).pause.reason == "stay"
        await h.control.Resume(pb.ResumeRequest())
        assert (await call).choices[0].text == "abc"


async def test_long_reasons_are_refused() -> None:
    async with serving() as h:
        for call in (
            h.control.Pause(pb.PauseRequest(reason="é" * 129)),
            h.control.Drain(pb.DrainRequest(reason="x" * 257)),
        ):
            error = await refused(call)
            assert (error.code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, "reason")
        assert h.server.state.phase.value == "ready"


@pytest.mark.timeout(240)
async def test_a_pause_of_the_real_engine_changes_no_token() -> None:
    """That it crosses to an engine's process: see tests/engine/process/test_process_client.py."""
    batching = ContinuousBatchingConfig(block_size=32, num_blocks=256)
    engine = LocalEngineClient(DEMO, batching, LoadConfig(dtype="float32", threads=1))
    server = HeadraceServer(
        ServiceConfig(listen=("127.0.0.1:0",), log_level="error"), engine, restart_delay_s=0.01
    )
    await server.start()
    try:
        await server.ready()
        async with grpc.aio.insecure_channel(server.addresses[0]) as channel:
            h = Harness(server, engine, channel)  # type: ignore[arg-type]
            wanted = {
                "sampling": {"temperature": 1, "seed": 5},
                "stop": {"max_tokens": 120, "ignore_eos": True},
            }
            plain = (await h.generate(spec("Once", **wanted))).choices[0].token_ids
            session = h.session()
            for name in ("a", "b", "c"):
                await session.add(spec("Once", request_id=name, **wanted))
            await session.read_until(lambda m: ids_of(session.events().get("a", ())))
            await h.control.Pause(pb.PauseRequest(reason="test"), timeout=DEADLINE_S)
            before = await statistics(h)
            name = pb.RequestName(identity=ANYBODY, request_id="c")
            await h.control.CancelRequests(pb.CancelRequestsRequest(requests=[name]))
            await session.read_until(lambda _: "finished" in kinds(session.events().get("c", [])))
            await h.control.ResetPrefixCache(pb.ResetPrefixCacheRequest(), timeout=DEADLINE_S)
            after = await statistics(h)
            assert after.engine.steps == before.engine.steps > 0
            assert after.engine.blocks_cached == 0
            assert after.engine.running + after.engine.waiting == 2
            assert after.engine.blocks_total > after.engine.blocks_used > 0
            await h.control.Resume(pb.ResumeRequest(), timeout=DEADLINE_S)
            await session.end()
            for name_ in ("a", "b"):
                assert ids_of(session.events()[name_]) == list(plain)
            # A drain ends a pause, and what is live still ends as it should.
            await h.control.Pause(pb.PauseRequest(), timeout=DEADLINE_S)
            call = asyncio.ensure_future(h.generate(spec("Once", **wanted)))
            await until(lambda: server.registry.live)
            await h.control.Drain(pb.DrainRequest(), timeout=DEADLINE_S)
            assert (await call).choices[0].token_ids == plain
            await server.drain()
    finally:
        await server.stop()


# ---- drain -----------------------------------------------------------------------------------


async def test_a_drain_and_a_watch_that_sees_its_end() -> None:
    engine = FakeEngine(script=says("abc"), auto=False)
    async with serving(engine) as h:
        session = h.session()
        await session.add(spec(request_id="a"))
        await session.read()
        await h.control.Pause(pb.PauseRequest())
        call = watch(h, 0.1)
        assert (await next_of(call)).phase == pb.SERVER_PHASE_READY
        long = watch(h, 3600)
        await next_of(long)
        begun = await h.control.Drain(
            pb.DrainRequest(timeout={"seconds": 60}, reason="a new version")
        )
        assert (begun.was_draining, begun.live_requests) == (False, 1)
        assert (begun.drain.reason, begun.drain.timeout.seconds) == ("a new version", 60)
        assert (await refused(h.generate(spec()))).reason == "DRAINING"
        assert (await refused(h.control.Pause(pb.PauseRequest()))).reason == "DRAINING"
        again = await h.control.Drain(pb.DrainRequest(timeout={"seconds": 1}))
        assert again.was_draining
        assert again.drain == begun.drain
        while (found := await next_of(call)).phase != pb.SERVER_PHASE_DRAINING:
            pass
        assert found.drain == begun.drain
        assert found.front_end.live_requests == 1
        assert not found.HasField("pause")
        assert not engine.paused
        engine.run()
        began = time.monotonic()
        await session.rest()
        last = await next_of(long)  # an hour early: the server stops
        assert last.front_end.live_requests == 0
        async with asyncio.timeout(DEADLINE_S):
            assert await long.read() is grpc.aio.EOF
            assert await long.code() is grpc.StatusCode.OK
            while await call.read() is not grpc.aio.EOF:
                pass
            await h.server.drain()
        assert time.monotonic() - began < 3  # nothing waited for the grace
    assert text_of(session.events()["a"]) == "abc"


async def test_a_drain_whose_time_is_over_cancels_the_rest() -> None:
    engine = FakeEngine(script=says("x", eos=False), auto=False)
    async with serving(engine, drain_timeout_s=3600) as h:
        session = h.session()
        await session.add(spec(request_id="a"))
        await session.read()
        await h.control.Drain(pb.DrainRequest(timeout={}))
        await until(lambda: engine.cancelled)
        engine.step()
        await session.rest()
        await h.server.drain()
        assert finished_of(session.events()["a"]).reason == generation_pb2.FINISH_REASON_CANCELLED


@pytest.mark.parametrize("seconds", [-1, 86_401])
async def test_bad_drain_timeouts(seconds: int) -> None:
    async with serving() as h:
        error = await refused(h.control.Drain(pb.DrainRequest(timeout={"seconds": seconds})))
        assert (error.code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, "timeout")
        assert h.server.state.phase.value == "ready"


# ---- log level -------------------------------------------------------------------------------


@pytest.fixture
def root_level() -> Iterator[None]:
    """The root logger's level, put back."""
    level = logging.getLogger().level
    yield
    logging.getLogger().setLevel(level)


@pytest.mark.usefixtures("root_level")
async def test_the_log_level_also_while_the_model_loads() -> None:
    engine = FakeEngine(load_gate=asyncio.Event())
    async with serving(engine, ready=False) as h:
        for level, name, before in (
            (pb.LOG_LEVEL_DEBUG, "debug", pb.LOG_LEVEL_INFO),
            (pb.LOG_LEVEL_ERROR, "error", pb.LOG_LEVEL_DEBUG),
        ):
            answer = await h.control.SetLogLevel(pb.SetLogLevelRequest(level=level))
            assert answer.previous_level == before
            assert logging.getLogger().level == getattr(logging, name.upper())
            assert engine.log_levels[-1] == name
            assert (await statistics(h)).log_level == level


@pytest.mark.usefixtures("root_level")
async def test_bad_levels() -> None:
    async with serving() as h:
        for level in (0, 5):
            request = pb.SetLogLevelRequest(level=level)  # type: ignore[arg-type]
            error = await refused(h.control.SetLogLevel(request))
            assert (error.code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, "level")
        assert not h.engine.log_levels


# ---- where it is served ----------------------------------------------------------------------


async def _is_served(target: str) -> bool:
    async with grpc.aio.insecure_channel(target) as channel:
        stub: Any = ControlServiceStub(channel)
        call = stub.GetStatistics(pb.GetStatisticsRequest(), timeout=DEADLINE_S)
        code = await call.code()
        assert code in (grpc.StatusCode.OK, grpc.StatusCode.UNIMPLEMENTED)
        return code is grpc.StatusCode.OK


@pytest.mark.parametrize(
    ("control", "served"),
    [(None, [True, False, True]), (True, [True] * 3), (False, [False] * 3)],
)
async def test_where_it_is_served(tmp_path: Path, control: bool | None, served: list[bool]) -> None:
    listen = ("127.0.0.1:0", "0.0.0.0:0", f"unix:{tmp_path}/s")
    async with serving(
        FakeEngine(script=says("x")), listen=listen, insecure=True, control=control
    ) as h:
        targets = [target.replace("0.0.0.0", "127.0.0.1") for target in h.server.addresses]
        assert [await _is_served(target) for target in targets] == served
        for target in targets:  # all else is served everywhere
            async with grpc.aio.insecure_channel(target) as channel:
                other = Harness(h.server, h.engine, channel)
                assert (await other.generate(spec())).choices[0].text == "x"
        health = await health_pb2_grpc.HealthStub(h.channel).List(health_pb2.HealthListRequest())
        assert ("headrace.v1.ControlService" in health.statuses) is any(served)


async def test_health_says_that_it_needs_no_model() -> None:
    async with serving(FakeEngine(load_gate=asyncio.Event()), ready=False) as h:
        health = health_pb2_grpc.HealthStub(h.channel)
        request = health_pb2.HealthCheckRequest(service="headrace.v1.ControlService")
        assert (await health.Check(request)).status == health_pb2.HealthCheckResponse.SERVING


async def test_unknown_fields_are_ignored_and_counted() -> None:
    async with serving() as h:
        request = pb.PauseRequest.FromString(b"\x98\x06\x01")  # field 99
        await h.control.Pause(request)
        assert h.engine.paused
        assert h.server.state.incoming.unknown == 1
        request.required_capabilities.append("soft_pause")
        error = await refused(h.control.Pause(request))
        assert (error.code, error.reason) == (grpc.StatusCode.UNIMPLEMENTED, "CAPABILITY_MISSING")
