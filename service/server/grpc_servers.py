"""The process's gRPC servers: which services each has, and what every call passes through.

    a call ─▶ Recovery ─▶ spans ─▶ Entrance ─▶ servicer

If only some addresses serve ControlService, the process has two gRPC servers with otherwise the
same servicers. What a call may reach therefore depends on the socket that it came through, not on
an address that it claims. The HTTP door's process connects to a third server.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from headrace.v1 import (
    control_service_pb2,
    control_service_pb2_grpc,
    generation_service_pb2,
    generation_service_pb2_grpc,
    model_service_pb2,
    model_service_pb2_grpc,
)

from engine.contract.errors import ConfigError
from service.config import ServiceConfig
from service.door.address import Address
from service.door.auth import Authenticator
from service.door.health import HealthServicer
from service.door.interceptors import Entrance, Recovery
from service.door.reading import Reading
from service.door.reflection import add_reflection
from service.door.tls import Tls
from service.door.transport import grpc_options
from service.door.unknown_methods import make_server
from service.server.server_limits import ServerLimits
from service.servicers.control_servicer import ControlServicer
from service.servicers.generation_servicer import GenerationServicer
from service.servicers.model_servicer import ModelServicer
from service.servicers.operator_control import Control
from service.state import ServerState
from service.telemetry.setup import ServerTelemetry

SERVICES = (
    generation_service_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name,
    model_service_pb2.DESCRIPTOR.services_by_name["ModelService"].full_name,
)
CONTROL = control_service_pb2.DESCRIPTOR.services_by_name["ControlService"].full_name
GATEWAY = "vllm.grpc.engine.VllmEngine"
_HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
_DOOR_STREAMS = 4096
"""The most concurrent calls on the HTTP door's connection, which carries all of its clients."""


def credentials_of(
    config: ServiceConfig, door_secret: str | None = None
) -> tuple[Authenticator, Tls]:
    """Read the callers' file and the TLS files. `door_secret` is the secret of the HTTP door.

    Raises:
        ConfigError: one of them cannot be used.
    """
    authenticator = Authenticator(
        config.auth_file,
        client_certificates=config.tls_client_ca is not None,
        door_secret=None if config.openai is None else door_secret,
    )
    return authenticator, Tls(config)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerParts:
    """What all gRPC servers of the process share."""

    state: ServerState
    limits: ServerLimits
    health: HealthServicer
    control: Control
    recovery: Recovery
    reading: Reading


class GrpcServers:
    """Makes the gRPC servers, each once.

    Attributes:
        made: the servers, by whether they serve ControlService; the key None is the door's server.
    """

    def __init__(
        self,
        config: ServiceConfig,
        parts: ServerParts,
        authenticator: Authenticator,
        telemetry: ServerTelemetry,
    ) -> None:
        self.made: dict[bool | None, grpc.aio.Server] = {}
        self._config = config
        self._parts = parts
        self._authenticator = authenticator
        self._telemetry = telemetry

    def at(self, address: Address) -> grpc.aio.Server:
        """Return the server that listens at an address."""
        has_control = self._config.serves_control(address)
        if has_control not in self.made:
            self.made[has_control] = self._make(has_control, self._config)
        return self.made[has_control]

    def for_door(self) -> grpc.aio.Server:
        """Return the server for the HTTP door's process."""
        config = replace(self._config, max_streams_per_connection=_DOOR_STREAMS)
        self.made[None] = server = self._make(False, config)
        return server

    def _make(self, has_control: bool, config: ServiceConfig) -> grpc.aio.Server:
        parts, telemetry, metrics = self._parts, self._telemetry, self._telemetry.metrics
        server = make_server(
            self._authenticator,
            None if metrics is None else metrics.unknown_call_ended,
            # Recovery is outermost; spans also cover calls that the entrance refuses.
            interceptors=(
                parts.recovery,
                *telemetry.interceptors,
                Entrance(self._authenticator, parts.state, parts.reading, config.max_send_bytes),
            ),
            options=grpc_options(config, config.max_queue_size),
        )
        generation_service_pb2_grpc.add_GenerationServiceServicer_to_server(
            GenerationServicer(parts.state, parts.limits.sessions), server
        )
        model_service_pb2_grpc.add_ModelServiceServicer_to_server(ModelServicer(), server)
        health_pb2_grpc.add_HealthServicer_to_server(parts.health, server)
        names = [*SERVICES, _HEALTH]
        if has_control:
            control_service_pb2_grpc.add_ControlServiceServicer_to_server(
                ControlServicer(parts.control, parts.limits.watches), server
            )
            names.insert(0, CONTROL)
        if config.gateway:
            names.append(_add_gateway(server, parts.control))
        add_reflection(server, names)
        return server


def _add_gateway(server: grpc.aio.Server, control: Control) -> str:
    """Add the gateways' protocol to the server and return the service's name.

    Raises:
        ConfigError: its stubs are not installed.
    """
    try:
        from service.gateway.servicer import add_gateway
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "smg_grpc_proto":
            raise
        raise ConfigError(
            "gateway",
            "needs the package smg-grpc-proto, which is not installed: "
            "pip install 'headrace-server[gateway]'",
        ) from error
    return add_gateway(server, control)
