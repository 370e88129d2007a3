"""One request of a real server, in all that tells of it: its trace and the metrics that a receiver
of OTLP got, and Prometheus' page. They agree.
"""

from __future__ import annotations

import asyncio
import re
import signal
from pathlib import Path
from typing import Any

import grpc
import pytest
from headrace.v1 import generation_pb2 as pb
from headrace.v1 import generation_service_pb2 as rpc
from headrace.v1.generation_service_pb2_grpc import GenerationServiceStub
from opentelemetry.proto.trace.v1 import trace_pb2

from tests.service.real_server import real_server
from tests.service.receivers import RECEIVERS, Received, attributes_of, scrape, value

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
METHOD = "headrace.v1.GenerationService/Generate"
TOKENS = 40
POINTS = ["headrace.accepted", "headrace.scheduled", "headrace.first_token", "headrace.last_token"]


def close(seconds: float) -> Any:
    """Equal within 5 % or 2 ms."""
    return pytest.approx(seconds, rel=0.05, abs=0.002)


def told_of(received: Received, name: str) -> Any:
    """A histogram's data point, of the one request or its call."""
    [point] = [
        point
        for point in received.last(name)
        if attributes_of(point).get("rpc.method", METHOD) == METHOD
    ]
    return point


async def test_a_trace_a_receiver_and_the_page_agree(tmp_path: Path) -> None:
    asked = pb.GenerationSpec(
        request_id="the-one",
        text={"text": "Once upon a time"},
        stop={"max_tokens": TOKENS, "ignore_eos": True},
    )
    with RECEIVERS["grpc"]() as received:
        variables = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": received.endpoint,
            "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
            "OTEL_METRICS_EXPORTER": "otlp,prometheus",
            "OTEL_EXPORTER_PROMETHEUS_PORT": "0",
        }
        with real_server("--listen", f"unix:{tmp_path}/s", **variables) as server:
            server.wait_until_ready()
            async with grpc.aio.insecure_channel(server.addresses[0]) as channel:
                answer = await GenerationServiceStub(channel).Generate(
                    rpc.GenerateRequest(spec=asked),
                    metadata=(("traceparent", f"00-{TRACE}-{CALLER}-01"),),
                )
            url = re.search(r"metrics at (\S+)", server.said)
            assert url is not None
            _, page = await asyncio.to_thread(scrape, url[1])
            while METHOD not in page:  # the call ends after its answer was received
                _, page = await asyncio.to_thread(scrape, url[1])
            server.signal(signal.SIGTERM)  # it exports the rest
            assert await asyncio.to_thread(server.ended) == 0

    kinds = {span.kind: span for span in received.spans()}
    call = kinds[trace_pb2.Span.SPAN_KIND_SERVER]
    request = kinds[trace_pb2.Span.SPAN_KIND_INTERNAL]
    assert {span.trace_id.hex() for span in (call, request)} == {TRACE}
    assert {span.parent_span_id.hex() for span in (call, request)} == {CALLER}
    assert [link.span_id for link in request.links] == [call.span_id]
    told = attributes_of(request)
    assert told["headrace.request.id"] == answer.request_id == "the-one"
    assert told["gen_ai.usage.output_tokens"] == TOKENS

    at = {event.name: event.time_unix_nano / 1e9 for event in request.events}
    assert list(at) == POINTS
    begin, end = request.start_time_unix_nano / 1e9, request.end_time_unix_nano / 1e9
    accepted, scheduled, first, last = at.values()
    phases = [accepted - begin, scheduled - accepted, first - scheduled, last - first, end - last]
    assert min(phases) >= 0
    assert sum(phases) == close(end - begin)
    in_call = (call.end_time_unix_nano - call.start_time_unix_nano) / 1e9
    assert in_call >= end - begin - 0.002

    for name, seconds in (
        ("gen_ai.server.request.duration", end - accepted),
        ("headrace.request.queue.duration", scheduled - accepted),
        ("gen_ai.server.time_to_first_token", first - accepted),
        ("rpc.server.call.duration", None),
    ):
        point = told_of(received, name)
        assert point.count == 1, name
        if seconds is None:
            assert point.sum >= in_call - 0.002  # the span is within the call
        else:
            assert point.sum == close(seconds), name
        shown = name.replace(".", "_") + "_seconds"
        labels = {"rpc_method": METHOD} if name.startswith("rpc.") else {}
        assert value(page, f"{shown}_count", **labels) == 1
        assert value(page, f"{shown}_sum", **labels) == pytest.approx(point.sum), name
    per_token = told_of(received, "gen_ai.server.time_per_output_token")
    assert per_token.sum * (TOKENS - 1) == close(last - first)
    model = attributes_of(told_of(received, "gen_ai.server.request.duration"))
    assert model["gen_ai.request.model"] == told["gen_ai.request.model"]
    assert model["gen_ai.operation.name"] == told["gen_ai.operation.name"] == "text_completion"
