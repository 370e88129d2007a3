"""Draining, in this process and as a process with signals."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from headrace.v1 import control_service_pb2 as control_pb
from headrace.v1 import generation_pb2 as pb
from headrace.v1 import generation_service_pb2 as rpc
from headrace.v1 import generation_service_pb2_grpc
from headrace.v1.control_service_pb2_grpc import ControlServiceStub

from service.telemetry import setup as telemetry
from tests.campaign import drains
from tests.service.fake_engine import FakeEngine, says
from tests.service.fake_server import ended, process, read_until
from tests.service.helpers import (
    DEADLINE_S,
    Session,
    check_course,
    refused,
    serving,
    spec,
    text_of,
    until,
)


async def test_drain_ends_watches_and_idle_sessions_and_finishes_live_requests() -> None:
    async with serving(FakeEngine(script=says("abc"), auto=False), result_retention_s=60) as h:
        watch = health_pb2_grpc.HealthStub(h.channel).Watch(
            health_pb2.HealthCheckRequest(service="headrace.v1.GenerationService")
        )
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        idle, live = h.session(), h.session()
        await idle.send(1, open=rpc.OpenCommand())
        await idle.read()
        await live.add(spec(request_id="a"))
        await live.read()
        h.engine.step()
        await h.generation.AddRequest(rpc.AddRequestRequest(spec=spec(request_id="b")))
        draining = asyncio.ensure_future(h.server.drain(60))
        # The idle session and the Watch end at once, while a request is live.
        await idle.rest()
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert await watch.read() is grpc.aio.EOF
        # New work is refused, on new RPCs and on sessions that are still there; the rest is served.
        error = await refused(h.generate(spec()))
        assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        late = h.session()
        await late.add(spec(request_id="d"))
        assert (await refused(late.call.read())).reason == "DRAINING"
        await live.add(spec(request_id="c"), 7)
        message = await live.read_until(lambda m: m.rejections)
        assert message.rejections[0].status.code == grpc.StatusCode.UNAVAILABLE.value[0]
        waiting = asyncio.ensure_future(
            h.generation.GetResult(
                rpc.GetResultRequest(request_id="b", until_done=True, wait={"seconds": 30})
            )
        )
        await until(lambda: h.registry.find("anonymous", "b").readers)
        assert not draining.done()
        h.engine.run()
        await live.rest()
        assert (await waiting).done
        began = time.monotonic()
        await draining
        assert time.monotonic() - began < 2
        assert h.engine.closed
    check_course(live.events()["a"])
    assert text_of(live.events()["a"]) == "abc"


async def test_a_drain_waits_for_a_request_that_is_being_converted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving(FakeEngine(script=says("abc"))) as h:
        gate, reached = asyncio.Event(), asyncio.Event()
        encoder = h.server.state.front.encoder
        real = encoder.encode_text

        async def slow(*arguments: Any, **more: Any) -> Any:
            reached.set()
            await gate.wait()
            return await real(*arguments, **more)

        monkeypatch.setattr(encoder, "encode_text", slow)
        answer = asyncio.ensure_future(h.generate(spec()))
        await asyncio.wait_for(reached.wait(), DEADLINE_S)
        draining = asyncio.ensure_future(h.server.drain())
        await until(lambda: h.server.state.phase.value == "draining")
        idle = asyncio.ensure_future(h.registry.wait_idle())
        await asyncio.wait({idle}, timeout=0.05)
        assert not idle.done()
        gate.set()
        assert (await answer).choices[0].text == "abc"
        await draining
        await idle


async def test_after_the_drain_timeout_the_rest_is_cancelled() -> None:
    async with serving(FakeEngine(script=says("x", eos=False), auto=False)) as h:
        engine = h.engine
        session = h.session()
        await session.add(spec(request_id="a", stop={"stop_strings": ["never"]}))
        await until(lambda: engine.num_live == 1)
        engine.step()
        await session.read()  # and from here the request goes on for ever: nobody steps
        draining = asyncio.ensure_future(h.server.drain(0.01))
        await until(lambda: engine.cancelled)
        engine.step()
        await session.rest()
        await draining
    events = session.events()["a"]
    check_course(events)
    assert events[-1].finished.reason == pb.FINISH_REASON_CANCELLED


async def test_stop_ends_live_requests_and_leaves_nothing() -> None:
    async with serving(FakeEngine(auto=False)) as h:
        call = asyncio.ensure_future(h.generate(spec()))
        await until(lambda: h.engine.num_live == 1)
        await h.server.stop()
        error = await refused(call)
        assert error.code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
        assert not h.registry.requests
        await h.server.stop()  # again: harmless


async def test_the_servers_stop_when_the_last_call_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Whoever is told to go away before the end of its call may lose the end.
    async with serving(FakeEngine(script=says("x", eos=False), auto=False)) as h:
        calls, open_at_stop = h.server.recovery, []
        for server in h.server.servers:
            real = server.stop

            async def stop(grace: float | None, real: Any = real) -> None:
                open_at_stop.append(len(calls.open))
                await real(grace)

            monkeypatch.setattr(server, "stop", stop)
        session = h.session()
        await session.add(spec(request_id="a"))
        answer = asyncio.ensure_future(h.generate(spec()))
        await until(lambda: h.engine.num_live == 2)
        assert len(calls.open) == 2
        draining = asyncio.ensure_future(h.server.drain())
        h.engine.run()
        await draining
        assert open_at_stop == [0]
        await session.rest()
        await answer


async def test_a_client_that_does_not_go_away_holds_a_drain_for_a_bounded_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("service.server.server._CONNECTIONS_GRACE_S", 0.05)
    async with serving() as h:
        host, port = h.server.addresses[0].rsplit(":", 1)
        reader, writer = await asyncio.open_connection(host, int(port))
        # The beginning of a connection, and then no word, not even an answer to pings.
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0")
        assert await reader.readexactly(9)
        async with asyncio.timeout(DEADLINE_S):
            await h.server.drain()
            await reader.read()  # to its end
        writer.close()


async def test_while_the_model_loads() -> None:
    gate = asyncio.Event()
    async with serving(FakeEngine(load_gate=gate, script=says("x")), ready=False) as h:
        health = health_pb2_grpc.HealthStub(h.channel)
        name = "headrace.v1.ModelService"
        live = await health.Check(health_pb2.HealthCheckRequest())
        ready = await health.Check(health_pb2.HealthCheckRequest(service=name))
        assert live.status == health_pb2.HealthCheckResponse.SERVING
        assert ready.status == health_pb2.HealthCheckResponse.NOT_SERVING
        error = await refused(h.generate(spec()))
        assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "LOADING")
        gate.set()
        await h.server.ready()
        ready = await health.Check(health_pb2.HealthCheckRequest(service=name))
        assert ready.status == health_pb2.HealthCheckResponse.SERVING
        await h.generate(spec())


async def test_stop_while_the_model_loads() -> None:
    async with serving(FakeEngine(load_gate=asyncio.Event()), ready=False) as h:
        await h.server.stop()


class SilentCollector:
    """A provider of spans or metrics whose last export takes until `answered`."""

    def __init__(self) -> None:
        self.asked, self.answered, self.ended = (threading.Event() for _ in range(3))

    def shutdown(self) -> None:
        self.asked.set()
        if self.answered.wait(DEADLINE_S):
            self.ended.set()


async def test_the_loop_goes_on_while_the_last_spans_and_metrics_are_exported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spans, metrics = SilentCollector(), SilentCollector()
    made = telemetry.ServerTelemetry(provider=spans, meter_provider=metrics)
    monkeypatch.setattr(telemetry, "set_up", lambda *_: made)
    monkeypatch.setattr(telemetry, "LAST_EXPORT_S", 2 * DEADLINE_S)
    async with serving() as h:
        stopping = asyncio.ensure_future(h.server.stop())
        await until(lambda: spans.asked.is_set() and metrics.asked.is_set())  # neither waits
        assert not stopping.done()
        for collector in (spans, metrics):
            collector.answered.set()
        await stopping
        assert spans.ended.is_set()
        assert metrics.ended.is_set()


async def test_a_collector_that_does_not_answer_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    spans = SilentCollector()
    made = telemetry.ServerTelemetry(provider=spans)
    monkeypatch.setattr(telemetry, "set_up", lambda *_: made)
    monkeypatch.setattr(telemetry, "LAST_EXPORT_S", 0.05)
    async with serving() as h:
        await h.server.stop()
        assert not spans.ended.is_set()
    assert "were not exported within 0.05 s" in caplog.text
    spans.answered.set()


# As a process


async def test_the_first_signal_drains_and_the_second_ends_at_once(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/s"
    async with process(address) as server:
        said = await read_until(server, "Stop it with")
        assert f'headrace generate "Once upon a time" --target unix:{tmp_path}/s' in said
        async with grpc.aio.insecure_channel(address) as channel:
            session = Session(
                generation_service_pb2_grpc.GenerationServiceStub(channel).StreamResult()
            )
            await session.add(spec(request_id="a", stop={"max_tokens": 1_000_000}))
            await session.read()
            server.send_signal(signal.SIGTERM)
            await read_until(server, "Draining: 1 live")
            await session.send(cancel=rpc.CancelCommand(request_id="a"))
            await session.rest()
            check_course(session.events()["a"])
        assert await ended(server) == 0
    assert not (tmp_path / "s").exists()

    async with process(address) as server:
        await read_until(server, "Stop it with")
        async with grpc.aio.insecure_channel(address) as channel:
            session = Session(
                generation_service_pb2_grpc.GenerationServiceStub(channel).StreamResult()
            )
            await session.add(spec(request_id="a", stop={"max_tokens": 1_000_000}))
            await session.read()
            server.send_signal(signal.SIGINT)
            await read_until(server, "Draining")
            server.send_signal(signal.SIGINT)
            assert await ended(server) == 128 + signal.SIGINT
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("by_operator", [False, True], ids=["signal", "operator"])
async def test_every_last_message_of_a_drained_server_arrives(
    tmp_path: Path, by_operator: bool
) -> None:
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        outcome = await drains.drain_once(folder, by_operator=by_operator)
        assert outcome.failures == []


async def test_what_a_client_has_not_read_when_the_server_is_gone_is_not_lost(
    tmp_path: Path,
) -> None:
    address = f"unix:{tmp_path}/s"
    async with process(address) as server:
        await read_until(server, "Stop it with")
        async with grpc.aio.insecure_channel(address) as channel:
            session = Session(
                generation_service_pb2_grpc.GenerationServiceStub(channel).StreamResult()
            )
            await session.add(spec(request_id="a", stop={"max_tokens": 50}))
            await session.read()
            server.send_signal(signal.SIGTERM)
            assert await ended(server) == 0
            await session.rest()
            check_course(session.events()["a"])


async def test_a_second_signal_leaves_a_socket_that_another_server_has_bound(
    tmp_path: Path,
) -> None:
    path = tmp_path / "s"
    async with process(f"unix:{path}") as server:
        await read_until(server, "Stop it with")
        async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
            session = Session(
                generation_service_pb2_grpc.GenerationServiceStub(channel).StreamResult()
            )
            await session.add(spec(request_id="a", stop={"max_tokens": 1_000_000}))
            await session.read()
            server.send_signal(signal.SIGTERM)
            await read_until(server, "Draining")
            path.unlink()
            with socket.socket(socket.AF_UNIX) as other:
                other.bind(str(path))
                server.send_signal(signal.SIGTERM)
                assert await ended(server) == 128 + signal.SIGTERM
                assert path.exists()


async def test_a_model_that_cannot_be_loaded_and_a_signal_while_loading(tmp_path: Path) -> None:
    async with process(f"unix:{tmp_path}/s", "--refuse") as server:
        await read_until(server, "the model cannot be served: the model is of a kind")
        assert await ended(server) == 1
    async with process(f"unix:{tmp_path}/s", "--hang") as server:
        await read_until(server, "loading the model")
        server.send_signal(signal.SIGTERM)
        assert await ended(server) == 0


async def test_an_operators_drain_ends_the_process(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/s"
    async with process(address) as server:
        await read_until(server, "Stop it with")
        async with grpc.aio.insecure_channel(address) as channel:
            control: Any = ControlServiceStub(channel)
            session = Session(
                generation_service_pb2_grpc.GenerationServiceStub(channel).StreamResult()
            )
            await session.add(spec(request_id="a", stop={"max_tokens": 1_000_000}))
            await session.read()
            answer = await control.Drain(
                control_pb.DrainRequest(timeout={"seconds": 20}, reason="a new version")
            )
            assert answer.live_requests == 1
            said = await read_until(server, "Draining: 1 live request, at most 20 s")
            assert "draining, at most 20 s: a new version" in said
            await session.send(cancel=rpc.CancelCommand(request_id="a"))
            await session.rest()
            check_course(session.events()["a"])
        assert await ended(server) == 0
    assert not (tmp_path / "s").exists()


async def test_an_operators_drain_while_the_model_loads(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/s"
    async with process(address, "--hang") as server:
        await read_until(server, "loading the model")
        async with grpc.aio.insecure_channel(address) as channel:
            control: Any = ControlServiceStub(channel)
            answer = await control.Drain(control_pb.DrainRequest(), timeout=DEADLINE_S)
            assert not answer.was_draining
        assert await ended(server) == 0
    assert not (tmp_path / "s").exists()


async def test_a_signal_while_the_model_loads_ends_what_is_open_with_an_answer(
    tmp_path: Path,
) -> None:
    address = f"unix:{tmp_path}/s"
    async with process(address, "--hang") as server:
        await read_until(server, "loading the model")
        async with grpc.aio.insecure_channel(address) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(
                health_pb2.HealthCheckRequest(service="headrace.v1.GenerationService")
            )
            control: Any = ControlServiceStub(channel)
            figures = control.WatchStatistics(
                control_pb.WatchStatisticsRequest(interval={"seconds": 60})
            )
            for call in (watch, figures):
                assert await call.read() is not grpc.aio.EOF
            server.send_signal(signal.SIGTERM)
            for call in (watch, figures):
                async with asyncio.timeout(DEADLINE_S):
                    while await call.read() is not grpc.aio.EOF:
                        pass
                    assert await call.code() is grpc.StatusCode.OK
        assert await ended(server) == 0
