"""Creates the providers of metrics and spans that the config asks for, and shuts them down.

The SDK reads OTEL_EXPORTER_OTLP_ENDPOINT and other variables itself.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc

from service.errors.call_outcome import Watcher
from service.telemetry.figures import Figures
from service.telemetry.metrics import EngineView, Metrics
from service.telemetry.request_spans import Spans
from service.telemetry.telemetry_config import CONSOLE, GRPC, OTLP, PROMETHEUS, TelemetryConfig

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import MetricExporter, MetricReader
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

    from service.telemetry.page import Page

logger = logging.getLogger(__name__)

LAST_EXPORT_S = 5.0
"""How long, in seconds, the server waits at shutdown for the last export."""


@dataclass(frozen=True, slots=True)
class ServerTelemetry:
    """What telemetry adds to the server.

    Attributes:
        spans: makes spans; None if there are none.
        metrics: records measurements; None if metrics are off.
        provider, meter_provider: made here and to be shut down at the end; None if made elsewhere
            or off.
        page: Prometheus' page, bound but not started; None if there is none.
    """

    spans: Spans | None = None
    metrics: Metrics | None = None
    provider: Any = None
    meter_provider: Any = None
    page: Page | None = None

    @property
    def watchers(self) -> tuple[Watcher, ...]:
        """The watchers that are notified of each call."""
        return () if self.metrics is None else (self.metrics.watch,)

    @property
    def interceptors(self) -> tuple[grpc.aio.ServerInterceptor, ...]:
        """The interceptors between `Recovery` and `Entrance`."""
        if self.spans is None:
            return ()
        # Not needed by those who do not trace.
        from service.telemetry.call_spans import CallSpans

        return (CallSpans(self.spans),)

    async def shutdown(self) -> None:
        """Export the remaining data, for at most LAST_EXPORT_S. The event loop is not blocked, so a
        collector that does not answer cannot delay the handling of a second signal.
        """
        if self.spans is not None:
            self.spans.close()
        if self.page is not None:
            await asyncio.to_thread(self.page.close)
        providers = [one for one in (self.provider, self.meter_provider) if one is not None]
        ended = [asyncio.Event() for _ in providers]
        loop = asyncio.get_running_loop()
        for provider, event in zip(providers, ended, strict=True):
            # The two exports do not wait for each other, and nothing waits for their threads: not
            # all exporters keep the SDK's own limits. An executor's threads would be waited for.
            threading.Thread(
                target=_shut_down, args=(provider, loop, event), name="telemetry-end", daemon=True
            ).start()
        try:
            async with asyncio.timeout(LAST_EXPORT_S):
                for event in ended:
                    await event.wait()
        except TimeoutError:
            logger.warning(
                "the last spans or metrics were not exported within %g s; they are lost",
                LAST_EXPORT_S,
            )


def _shut_down(provider: Any, loop: asyncio.AbstractEventLoop, ended: asyncio.Event) -> None:
    try:
        provider.shutdown()
    except Exception:
        logger.exception("the last spans or metrics could not be exported")
    finally:
        with suppress(RuntimeError):  # it took too long, and the event loop is closed
            loop.call_soon_threadsafe(ended.set)


def set_up(config: TelemetryConfig, figures: Figures) -> ServerTelemetry:
    """Set up what the config asks for. See `Metrics` for `figures`.

    Raises:
        ConfigError: the page's address cannot be used.
    """
    provider = _tracer_provider(config) if config.traces else None
    metrics = meter_provider = page = None
    if config.metrics:
        view = _Later()
        page = _page(config, view) if PROMETHEUS in config.metrics else None
        meter_provider = _meter_provider(config, page)
        metrics = view.metrics = Metrics(meter_provider.get_meter("headrace"), figures)
    return ServerTelemetry(
        spans=Spans(provider, content=config.content) if provider is not None else None,
        metrics=metrics,
        provider=provider,
        meter_provider=meter_provider,
        page=page,
    )


class _Later:
    """What is known of the engine, from metrics that are created later than their reader."""

    metrics: Metrics | None = None

    def __call__(self) -> EngineView:
        return EngineView() if self.metrics is None else self.metrics.view()


def _page(config: TelemetryConfig, view: _Later) -> Page:
    # Not needed by those who do not scrape.
    from service.telemetry.page import Page

    return Page(config.prometheus_host, config.prometheus_port, view)


def _resource(config: TelemetryConfig) -> Resource:
    from opentelemetry.sdk.resources import Resource

    # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES override this default.
    resource = Resource.create()
    if not config.has_own_name:
        resource = resource.merge(Resource({"service.name": "headrace"}))
    return resource


def _tracer_provider(config: TelemetryConfig) -> TracerProvider:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter

    provider = TracerProvider(resource=_resource(config), shutdown_on_exit=False)
    if OTLP in config.traces:
        provider.add_span_processor(BatchSpanProcessor(_otlp_spans(config.traces_protocol)))
    if CONSOLE in config.traces:
        provider.add_span_processor(BatchSpanProcessor(ConsoleSpanExporter()))
    return provider


def _otlp_spans(protocol: str) -> SpanExporter:
    if protocol == GRPC:
        from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as by_grpc

        return by_grpc.OTLPSpanExporter()
    from opentelemetry.exporter.otlp.proto.http import trace_exporter as by_http

    exporter: SpanExporter = by_http.OTLPSpanExporter()
    return exporter


def _meter_provider(config: TelemetryConfig, page: Page | None) -> MeterProvider:
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import (
        ConsoleMetricExporter,
        PeriodicExportingMetricReader,
    )

    readers: list[MetricReader] = [] if page is None else [page.reader]
    if OTLP in config.metrics:
        readers.append(PeriodicExportingMetricReader(_otlp_metrics(config.metrics_protocol)))
    if CONSOLE in config.metrics:
        readers.append(PeriodicExportingMetricReader(ConsoleMetricExporter()))
    # Shut down by `ServerTelemetry.shutdown`, in the server's order of shutdown.
    return MeterProvider(readers, resource=_resource(config), shutdown_on_exit=False)


def _otlp_metrics(protocol: str) -> MetricExporter:
    if protocol == GRPC:
        from opentelemetry.exporter.otlp.proto.grpc import metric_exporter as by_grpc

        return by_grpc.OTLPMetricExporter()
    from opentelemetry.exporter.otlp.proto.http import metric_exporter as by_http

    exporter: MetricExporter = by_http.OTLPMetricExporter()
    return exporter
