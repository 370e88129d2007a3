"""The address at which health alone is answered, whatever goes on elsewhere."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from headrace.v1 import model_service_pb2 as model
from headrace.v1.model_service_pb2_grpc import ModelServiceStub

from engine.contract.errors import ConfigError
from service.config import ServiceConfig
from service.server import SERVICES, HeadraceServer
from tests.service import raw_http2
from tests.service.certificates import make_certificate, needs_openssl
from tests.service.door.health import SERVING, check, target_of
from tests.service.fake_engine import FakeEngine
from tests.service.helpers import DEADLINE_S, serving

NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def test_it_answers_while_the_event_loop_stands_still() -> None:
    async with serving(health_listen="127.0.0.1:0") as h:
        # The check is made on the event loop's own thread, which does nothing else meanwhile.
        assert check(target_of(h)) == SERVING
        assert check(target_of(h), SERVICES[0]) == SERVING


async def test_it_tells_loading_readiness_and_draining() -> None:
    async with serving(ready=False, health_listen="127.0.0.1:0") as h:
        assert check(target_of(h)) == SERVING
        assert check(target_of(h), SERVICES[0]) == NOT_SERVING
        await h.server.ready()
        assert check(target_of(h), SERVICES[0]) == SERVING
        h.server._enter_drain()
        assert check(target_of(h), SERVICES[0]) == NOT_SERVING
        assert check(target_of(h)) == SERVING
    with pytest.raises(grpc.RpcError):
        await asyncio.to_thread(check, target_of(h))


async def test_it_serves_health_alone(caplog: pytest.LogCaptureFixture) -> None:
    async with (
        serving(health_listen="127.0.0.1:0") as h,
        grpc.aio.insecure_channel(target_of(h)) as channel,
    ):
        health: Any = health_pb2_grpc.HealthStub(channel)
        models: Any = ModelServiceStub(channel)
        listed = await health.List(health_pb2.HealthListRequest(), timeout=DEADLINE_S)
        assert set(listed.statuses) >= {"", *SERVICES}
        for call, code in (
            (health.Check(health_pb2.HealthCheckRequest(service="no")), "NOT_FOUND"),
            (health.Watch(health_pb2.HealthCheckRequest()).read(), "UNIMPLEMENTED"),
            (models.GetModel(model.GetModelRequest()), "UNIMPLEMENTED"),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call
            assert refused.value.code().name == code
        for path in (b"/\xff", b"", b"/a/b"):
            await asyncio.to_thread(raw_http2.call, target_of(h), path)
        large = bytes(8 << 10)
        await asyncio.to_thread(
            raw_http2.call, target_of(h), b"/grpc.health.v1.Health/Check", (), large
        )
        assert await asyncio.to_thread(check, target_of(h)) == SERVING
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING]


@needs_openssl
async def test_it_is_plain_text_beside_tls(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    server = HeadraceServer(
        ServiceConfig(
            listen=("127.0.0.1:0",),
            health_listen="127.0.0.1:0",
            tls_cert=str(certificate),
            tls_key=str(key),
        ),
        FakeEngine(),
    )
    await server.start()
    try:
        assert server.health_bound is not None
        assert await asyncio.to_thread(check, server.health_bound.target) == SERVING
    finally:
        await server.stop()


async def test_a_unix_socket_of_health_goes_with_the_server(tmp_path: Path) -> None:
    path = tmp_path / "health.sock"
    async with serving(health_listen=f"unix:{path}"):
        assert path.is_socket()
        assert await asyncio.to_thread(check, f"unix:{path}") == SERVING
    assert not path.exists()


async def test_a_taken_address_of_health_is_told_as_such() -> None:
    async with serving() as h:
        taken = h.server.addresses[0]
        with pytest.raises(
            ConfigError, match=f"^health_listen: cannot listen on {taken}: the port"
        ):
            async with serving(health_listen=taken):
                pass


def test_what_is_no_address_of_health_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^health_listen: "):
        ServiceConfig(health_listen="50052")
