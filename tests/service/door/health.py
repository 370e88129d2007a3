"""The address at which health alone is answered, asked."""

from __future__ import annotations

from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.service.helpers import DEADLINE_S, Harness

SERVING = health_pb2.HealthCheckResponse.SERVING


def target_of(h: Harness) -> str:
    assert h.server.health_bound is not None
    return h.server.health_bound.target


def check(target: str, service: str = "") -> Any:
    """Ask, and keep the calling thread until there is an answer."""
    with grpc.insecure_channel(target) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=service)
        return stub.Check(request, timeout=DEADLINE_S).status
