"""The option `gateway`, with or without the stubs that it needs."""

from __future__ import annotations

import sys

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from engine.contract.errors import ConfigError
from service.config import ServiceConfig
from service.server import HeadraceServer
from tests.service.fake_engine import FakeEngine, byte_tokenizer
from tests.service.helpers import refused, serving

NAME = "vllm.grpc.engine.VllmEngine"


async def test_without_its_stubs_the_option_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [name for name in sys.modules if name.startswith("smg_grpc_proto")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "service.gateway.servicer", raising=False)
    monkeypatch.delitem(sys.modules, "service.gateway.generate_response", raising=False)
    monkeypatch.setitem(sys.modules, "smg_grpc_proto", None)
    config = ServiceConfig(listen=("127.0.0.1:0",), gateway=True)
    server = HeadraceServer(config, FakeEngine(), tokenizer_loader=lambda _info: byte_tokenizer())
    try:
        with pytest.raises(ConfigError, match=r"pip install 'headrace-server\[gateway\]'"):
            await server.start()
    finally:
        await server.stop()


async def test_off_by_default() -> None:
    async with serving() as h:
        call = h.channel.unary_unary(f"/{NAME}/HealthCheck")
        assert (await refused(call(b""))).code is grpc.StatusCode.UNIMPLEMENTED
        health = health_pb2_grpc.HealthStub(h.channel)
        error = await refused(health.Check(health_pb2.HealthCheckRequest(service=NAME)))
        assert error.code is grpc.StatusCode.NOT_FOUND
