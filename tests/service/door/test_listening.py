"""Addresses, TLS, health, reflection, tracing: what surrounds the RPCs."""

from __future__ import annotations

import asyncio
import errno
import grp
import os
import socket
import stat
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from headrace.v1 import generation_service_pb2 as rpc
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from engine.contract.errors import ConfigError
from service.config import ServiceConfig
from service.server import HeadraceServer
from service.telemetry import setup as telemetry
from service.telemetry.request_spans import Spans
from tests.service.certificates import make_certificate, needs_openssl
from tests.service.fake_engine import FakeEngine, says
from tests.service.helpers import DEADLINE_S, Harness, check_course, refused, serving, spec, until

HEALTH = health_pb2.HealthCheckResponse


async def test_unix_socket_its_mode_and_a_stale_file(tmp_path: Path) -> None:
    path = tmp_path / "headrace.sock"
    with socket.socket(socket.AF_UNIX) as left_over:  # its owner dies without removing it
        left_over.bind(str(path))
    listen = ("127.0.0.1:0", f"unix:{path}")
    async with serving(FakeEngine(script=says("x")), listen=listen, unix_socket_mode=0o600) as h:
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        async with grpc.aio.insecure_channel(h.server.addresses[1]) as channel:
            other = Harness(h.server, h.engine, channel)
            session = other.session()
            await session.add(spec(request_id="a"))
            await session.end()
            check_course(session.events()["a"])
        with pytest.raises(ConfigError, match="another server listens"):
            async with serving(listen=(f"unix:{path}",)):
                pass
    assert not path.exists()


async def test_a_server_that_ends_leaves_the_socket_of_the_one_that_follows(
    tmp_path: Path,
) -> None:
    path = tmp_path / "headrace.sock"
    listen = (f"unix:{path}",)
    closing, gate = asyncio.Event(), asyncio.Event()

    class Engine(FakeEngine):
        async def close(self) -> None:
            closing.set()
            await gate.wait()
            await super().close()

    async with serving(Engine(), listen=listen) as old:
        draining = asyncio.ensure_future(old.server.drain(0))
        async with asyncio.timeout(DEADLINE_S):
            await closing.wait()  # the gRPC server has stopped
        async with serving(FakeEngine(script=says("x")), listen=listen) as new:
            gate.set()
            await draining
            async with grpc.aio.insecure_channel(new.server.addresses[0]) as channel:
                result = await Harness(new.server, new.engine, channel).generate(spec())
                assert result.choices[0].text == "x"
    assert not path.exists()


async def test_a_start_that_fails_leaves_no_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "headrace.sock"
    async with serving() as h:
        for listen in ((f"unix:{path}", *h.server.addresses), (f"unix:{path}",) * 2):
            with pytest.raises(ConfigError, match="cannot listen"):
                async with serving(listen=listen):
                    pass
            assert not path.exists()

    def refuse(*_arguments: Any) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    for name in ("chown", "chmod"):
        with monkeypatch.context() as patched:
            patched.setattr(os, name, refuse)
            with pytest.raises(ConfigError, match="Operation not permitted"):
                async with serving(listen=(f"unix:{path}",), unix_socket_group="1"):
                    pass
        assert not path.exists()


@pytest.mark.parametrize("name", ["a%20b", "a%2fb", "a%", "a b", "a#b", "a?b", "a:b", "@a", "é"])
async def test_the_path_of_a_unix_socket_is_what_was_written(tmp_path: Path, name: str) -> None:
    listen = (f"unix:{tmp_path}/{name}",)
    async with serving(FakeEngine(script=says("x")), listen=listen) as h:
        assert os.listdir(tmp_path) == [name]
        async with grpc.aio.insecure_channel(h.server.addresses[0]) as channel:
            result = await Harness(h.server, h.engine, channel).generate(spec())
            assert result.choices[0].text == "x"
    assert not os.listdir(tmp_path)


async def test_the_group_of_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "headrace.sock"
    mine = os.stat(tmp_path).st_gid
    [gid, *_] = sorted({*os.getgroups(), *((1,) if os.geteuid() == 0 else ())} - {mine}) or [mine]
    for name in (str(gid), grp.getgrgid(gid).gr_name):
        async with serving(listen=(f"unix:{path}",), unix_socket_group=name):
            status = os.stat(path)
            assert (status.st_gid, stat.S_IMODE(status.st_mode)) == (gid, 0o660)
    for name in ("no such group", str(2**32 - 1), "-1"):
        with pytest.raises(ConfigError, match="is no group"):
            async with serving(listen=(f"unix:{path}",), unix_socket_group=name):
                pass


async def test_the_age_of_a_connection_ends_no_call() -> None:
    engine = FakeEngine(script=says("abc"), auto=False)
    async with serving(engine, max_connection_age_s=1.0) as h:
        session = h.session()
        await session.add(spec(request_id="a"))
        await session.read()
        states = [h.channel.get_state()]
        async with asyncio.timeout(DEADLINE_S):
            while grpc.ChannelConnectivity.IDLE not in states:  # told to connect anew
                await h.channel.wait_for_state_change(states[-1])
                states.append(h.channel.get_state())
        engine.run()
        await session.end()
        check_course(session.events()["a"])


async def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("data")
    with pytest.raises(ConfigError, match="not a socket"):
        async with serving(listen=(f"unix:{path}",)):
            pass
    assert path.read_text() == "data"


async def test_a_taken_port_is_a_clear_error() -> None:
    async with serving() as h:
        server = HeadraceServer(ServiceConfig(listen=h.server.addresses), FakeEngine())
        with pytest.raises(ConfigError, match="the port is taken"):
            await server.start()
        await server.stop()


@needs_openssl
async def test_tls(tmp_path: Path) -> None:
    cert, key = await asyncio.to_thread(make_certificate, tmp_path)
    options = {"tls_cert": str(cert), "tls_key": str(key)}
    async with serving(FakeEngine(script=says("x")), listen=("0.0.0.0:0",), **options) as h:
        port = h.server.addresses[0].rpartition(":")[2]
        credentials = grpc.ssl_channel_credentials(cert.read_bytes())
        async with grpc.aio.secure_channel(f"localhost:{port}", credentials) as channel:
            result = await Harness(h.server, h.engine, channel).generate(spec())
            assert result.choices[0].text == "x"
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            error = await refused(Harness(h.server, h.engine, channel).generate(spec()))
            assert error.code is grpc.StatusCode.UNAVAILABLE
    swapped = ServiceConfig(tls_cert=str(key), tls_key=str(cert), listen=("127.0.0.1:0",))
    with pytest.raises(ConfigError, match="tls_cert"):
        await HeadraceServer(swapped, FakeEngine()).start()
    gone = ServiceConfig(tls_cert="/no/file", tls_key="/no/file", listen=("127.0.0.1:0",))
    with pytest.raises(ConfigError, match="cannot be read"):
        await HeadraceServer(gone, FakeEngine()).start()


async def test_health_check_list_and_watch() -> None:
    async with serving() as h:
        stub = health_pb2_grpc.HealthStub(h.channel)
        listed = await stub.List(health_pb2.HealthListRequest())
        assert {name: entry.status for name, entry in listed.statuses.items()} == {
            "": HEALTH.SERVING,
            "headrace.v1.GenerationService": HEALTH.SERVING,
            "headrace.v1.ModelService": HEALTH.SERVING,
            "headrace.v1.ControlService": HEALTH.SERVING,
        }
        unknown = health_pb2.HealthCheckRequest(service="nothing")
        assert (await refused(stub.Check(unknown))).code is grpc.StatusCode.NOT_FOUND
        strange = stub.Watch(unknown)
        assert (await strange.read()).status == HEALTH.SERVICE_UNKNOWN
        watch = stub.Watch(health_pb2.HealthCheckRequest(service="headrace.v1.ModelService"))
        assert (await watch.read()).status == HEALTH.SERVING
        h.engine.die(RuntimeError("gone"))
        assert (await watch.read()).status == HEALTH.NOT_SERVING
        live = await stub.Check(health_pb2.HealthCheckRequest())
        assert live.status == HEALTH.SERVING
        strange.cancel()
        watch.cancel()


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection(version: str) -> None:
    async with serving() as h:
        call = h.channel.stream_stream(
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        listed = (await call.read()).list_services_response
        await call.write(
            reflection_pb2.ServerReflectionRequest(
                file_containing_symbol="headrace.v1.GenerationService"
            )
        )
        found = (await call.read()).file_descriptor_response
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
    assert {service.name for service in listed.service} == {
        "headrace.v1.GenerationService",
        "headrace.v1.ModelService",
        "headrace.v1.ControlService",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    assert found.file_descriptor_proto


async def test_unknown_methods_are_unimplemented() -> None:
    async with serving() as h:
        call = h.channel.unary_unary("/headrace.v1.GenerationService/Nothing")(b"")
        assert (await refused(call)).code is grpc.StatusCode.UNIMPLEMENTED


async def test_spans_tell_what_happened(monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    made = telemetry.ServerTelemetry(Spans(provider))
    monkeypatch.setattr(telemetry, "set_up", lambda *_: made)
    engine = FakeEngine(script=says("x"))
    async with serving(engine) as h:
        await h.generate(spec())
        await h.stream(spec())
        await refused(h.generate(spec(adapter="x")))
        engine.auto = False
        assert engine.loop is not None
        engine.loop.cancel()
        call = h.generation.GenerateStream(rpc.GenerateStreamRequest(spec=spec()))
        await call.read()
        call.cancel()
        await refused(h.generation.Generate(rpc.GenerateRequest(spec=spec()), timeout=1.0))
        await health_pb2_grpc.HealthStub(h.channel).Check(health_pb2.HealthCheckRequest())
        await until(
            lambda: [s.kind for s in exporter.get_finished_spans()].count(SpanKind.SERVER) == 5
        )
    spans = [
        (
            span.name.rpartition("/")[2],
            span.status.status_code.name,
            (span.attributes or {})["rpc.grpc.status_code"],
        )
        for span in exporter.get_finished_spans()
        if span.kind is SpanKind.SERVER
    ]
    expected = [
        ("Generate", "ERROR", 12),  # an error by the conventions
        ("Generate", "UNSET", 0),
        ("GenerateStream", "UNSET", 1),
        ("GenerateStream", "UNSET", 0),
    ]
    # The server learns of the deadline from its own clock, or from the client that gives up.
    over = [("Generate", "UNSET", 1), ("Generate", "ERROR", 4)]
    assert sorted(spans) in [sorted([*expected, one]) for one in over]
