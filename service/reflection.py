"""Server reflection, so that grpcurl and its like need no proto files.

grpcio serves grpc.reflection.v1alpha only. v1 has the same messages under another name, so the
same servicer answers both; v1 is not listed, because its descriptor is not there to be reflected.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

_V1 = "grpc.reflection.v1.ServerReflection"


def add_reflection(server: grpc.aio.Server, services: Sequence[str]) -> None:
    """Serve reflection of these services (and of itself), under both names."""
    servicer: Any = reflection.aio.ReflectionServicer((*services, reflection.SERVICE_NAME))
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(_V1, {"ServerReflectionInfo": handler}),)
    )
