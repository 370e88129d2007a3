"""Tracing by OpenTelemetry, when its standard environment variables ask for it.

The SDK reads OTEL_EXPORTER_OTLP_ENDPOINT and the rest itself; here it is only decided whether
there is tracing at all. The library's interceptor makes the spans and propagates contexts; health
checks are left out. It records cancelled, timed-out and failed RPCs as OK, so `SpanStatus` stands
inside it and sets what really happened.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry import trace
from opentelemetry.trace import Status, StatusCode

from service.errors import code_of
from service.interceptors import Continuation, Handler, Stream, Unary, wrap

_HEALTH = "/grpc.health."
_CODE = "rpc.grpc.status_code"


@dataclass(frozen=True, slots=True)
class Telemetry:
    """What tracing adds to the server. `provider`: ours, to be shut down at the end; None:
    somebody else's.
    """

    interceptors: tuple[grpc.aio.ServerInterceptor, ...] = ()
    provider: Any = None

    def shutdown(self) -> None:
        """Export what is left."""
        if self.provider is not None:
            self.provider.shutdown()


def is_wanted(environ: Mapping[str, str]) -> bool:
    """Whether the environment asks for tracing."""
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    exporter = environ.get("OTEL_TRACES_EXPORTER", "")
    if exporter:
        return exporter.lower() != "none"
    return any(
        environ.get(name)
        for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    )


def set_up(environ: Mapping[str, str]) -> Telemetry:
    """Set up tracing if the environment asks for it."""
    if not is_wanted(environ):
        return Telemetry()
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import (
        BatchSpanProcessor,
        ConsoleSpanExporter,
        SpanExporter,
    )

    # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES win over this default.
    resource = Resource({"service.name": "headrace"}).merge(Resource.create())
    if not environ.get("OTEL_SERVICE_NAME") and "service.name" not in environ.get(
        "OTEL_RESOURCE_ATTRIBUTES", ""
    ):
        resource = resource.merge(Resource({"service.name": "headrace"}))
    exporter: SpanExporter
    if environ.get("OTEL_TRACES_EXPORTER", "").lower() == "console":
        exporter = ConsoleSpanExporter()
    else:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        exporter = OTLPSpanExporter()
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Telemetry(interceptors(provider), provider)


def interceptors(provider: trace.TracerProvider) -> tuple[grpc.aio.ServerInterceptor, ...]:
    """The library's interceptor and ours inside it."""
    from opentelemetry.instrumentation.grpc import aio_server_interceptor
    from opentelemetry.instrumentation.grpc.filters import negate

    library: Any = aio_server_interceptor  # without types

    def is_health(details: Any) -> bool:
        return str(details.method).startswith(_HEALTH)

    return (
        library(tracer_provider=provider, filter_=negate(is_health)),
        SpanStatus(),
    )


class SpanStatus(grpc.aio.ServerInterceptor):
    """Sets the span's status to what the RPC's will be."""

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler:
        """Wrap one RPC's handler."""
        return wrap(await continuation(handler_call_details), self._unary, self._stream)

    def _unary(self, behavior: Unary) -> Unary:
        async def call(request: Any, context: Any) -> Any:
            try:
                return await behavior(request, context)
            except BaseException as error:
                _record(error, context)
                raise

        return call

    def _stream(self, behavior: Stream) -> Stream:
        async def call(request: Any, context: Any) -> AsyncIterator[Any]:
            try:
                async for response in behavior(request, context):
                    yield response
            except BaseException as error:
                _record(error, context)
                raise

        return call


def _record(error: BaseException, context: Any) -> None:
    if isinstance(error, grpc.aio.AbortError):
        return  # the library's context wrapper saw it
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        left = context.time_remaining()
        timed_out = left is not None and left <= 0
        code = grpc.StatusCode.DEADLINE_EXCEEDED if timed_out else grpc.StatusCode.CANCELLED
    else:
        code = code_of(error)
    span = trace.get_current_span()
    span.set_attribute(_CODE, code.value[0])
    span.set_status(Status(StatusCode.ERROR, code.name))
