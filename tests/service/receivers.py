"""Receivers of OTLP, by gRPC and by HTTP, and a scraper of Prometheus' page."""

from __future__ import annotations

import asyncio
import gzip
import threading
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as metrics_pb
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2_grpc as metrics_rpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as trace_pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as trace_rpc
from prometheus_client.parser import text_string_to_metric_families

from service.server import HeadraceServer
from service.telemetry.telemetry_config import TelemetryConfig
from tests.service.helpers import DEADLINE_S

PAGE = TelemetryConfig(metrics=("prometheus",), prometheus_host="127.0.0.1", prometheus_port=0)


class Received:
    """What came in.

    Attributes:
        metrics, traces: the messages.
        headers: of the last message, in lower case.
        endpoint: the receiver's URL.
    """

    def __init__(self) -> None:
        self.metrics: list[metrics_pb.ExportMetricsServiceRequest] = []
        self.traces: list[trace_pb.ExportTraceServiceRequest] = []
        self.headers: dict[str, str] = {}
        self.endpoint = ""

    def spans(self) -> list[Any]:
        """All spans."""
        return [
            span
            for message in self.traces
            for resource in message.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def last(self, name: str) -> list[Any]:
        """The data points of a metric, in the last message that has it."""
        for message in reversed(self.metrics):
            for resource in message.resource_metrics:
                for scope in resource.scope_metrics:
                    for metric in scope.metrics:
                        if metric.name == name:
                            return list(getattr(metric, metric.WhichOneof("data")).data_points)
        return []

    def names(self) -> set[str]:
        """The names of all metrics."""
        return {
            metric.name
            for message in self.metrics
            for resource in message.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }


def attributes_of(holder: Any) -> dict[str, Any]:
    """The attributes of a span, an event, a point or a resource."""
    found = {}
    for pair in holder.attributes:
        kind = pair.value.WhichOneof("value")
        value = getattr(pair.value, kind)
        if kind == "array_value":
            value = [getattr(one, one.WhichOneof("value")) for one in value.values]
        found[pair.key] = value
    return found


@contextmanager
def by_grpc() -> Iterator[Received]:
    """A receiver by gRPC."""
    received = Received()

    class Metrics(metrics_rpc.MetricsServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            received.headers = dict(context.invocation_metadata())
            received.metrics.append(request)
            return metrics_pb.ExportMetricsServiceResponse()

    class Traces(trace_rpc.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            received.headers = dict(context.invocation_metadata())
            received.traces.append(request)
            return trace_pb.ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(2))
    metrics_rpc.add_MetricsServiceServicer_to_server(Metrics(), server)  # type: ignore[no-untyped-call]
    trace_rpc.add_TraceServiceServicer_to_server(Traces(), server)  # type: ignore[no-untyped-call]
    received.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield received
    finally:
        server.stop(None).wait()


@contextmanager
def by_http() -> Iterator[Received]:
    """A receiver by HTTP."""
    received = Received()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            received.headers = {name.lower(): value for name, value in self.headers.items()}
            if self.path == "/v1/metrics":
                received.metrics.append(metrics_pb.ExportMetricsServiceRequest.FromString(body))
                answer = metrics_pb.ExportMetricsServiceResponse().SerializeToString()
            elif self.path == "/v1/traces":
                received.traces.append(trace_pb.ExportTraceServiceRequest.FromString(body))
                answer = trace_pb.ExportTraceServiceResponse().SerializeToString()
            else:
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    received.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield received
    finally:
        server.shutdown()
        server.server_close()


RECEIVERS: dict[str, Callable[[], Any]] = {"grpc": by_grpc, "http/protobuf": by_http}
"""The receivers, by OTEL_EXPORTER_OTLP_PROTOCOL."""


def scrape(url: str, accept: str = "") -> tuple[str, str]:
    """The content type and the text of a page."""
    request = urllib.request.Request(url, headers={"Accept": accept} if accept else {})
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
        return answer.headers["Content-Type"], answer.read().decode()


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """The samples of a page by name and labels."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(text: str, name: str, **labels: str) -> float:
    """The one value with this name and at least these labels."""
    [found] = [
        number
        for (one, has), number in samples(text).items()
        if one == name and labels.items() <= dict(has).items()
    ]
    return found


def page_of(server: HeadraceServer) -> str:
    """The URL of a server's page."""
    served = server._telemetry.page
    assert served is not None
    return served.url


async def scraped(server: HeadraceServer, more: str = "") -> str:
    """A server's page. `more`: added to its URL."""
    _, text = await asyncio.to_thread(scrape, page_of(server) + more)
    return text
