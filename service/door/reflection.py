"""Server reflection, so that tools such as grpcurl need no proto files.

grpcio serves only grpc.reflection.v1alpha. v1 has the same messages under another name, so the
same servicer answers both. v1 is not listed, because there is no descriptor of it to reflect.
Protobuf's own pool does not find methods by name, which `grpcurl describe` asks for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import FileDescriptor
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

_V1 = "grpc.reflection.v1.ServerReflection"


class _Pool:
    """The default pool, which also finds methods."""

    def __init__(self) -> None:
        self._pool: Any = descriptor_pool.Default()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def FindFileContainingSymbol(self, symbol: str) -> FileDescriptor:
        """Return the file that defines the message, service, enum, field or method with this full
        name.

        Raises:
            KeyError: there is no such symbol.
        """
        try:
            found: FileDescriptor = self._pool.FindFileContainingSymbol(symbol)
        except KeyError:
            name, _, method = symbol.rpartition(".")
            service = self._pool.FindServiceByName(name)
            if method not in service.methods_by_name:
                raise
            found = service.file
        return found


def add_reflection(server: grpc.aio.Server, services: Sequence[str]) -> None:
    """Serve reflection for these services (and itself), under both names."""
    names = (*services, reflection.SERVICE_NAME)
    servicer: Any = reflection.aio.ReflectionServicer(names, pool=_Pool())
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    server.add_registered_method_handlers(_V1, {"ServerReflectionInfo": handler})
