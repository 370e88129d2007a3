"""The trace context of the caller goes with its calls, and with each request of a session."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from headrace import _trace
from headrace.options import build_spec
from headrace.v1.generation_pb2 import GenerationSpec
from opentelemetry import context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import format_span_id
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@contextmanager
def traced() -> Iterator[None]:
    carrier = {"traceparent": PARENT, "tracestate": "v=1"}
    token = context.attach(TraceContextTextMapPropagator().extract(carrier))
    yield
    context.detach(token)


def labels_of(spec: GenerationSpec) -> dict[str, str]:
    return {label.name: label.value for label in spec.labels}


def test_a_request_is_labelled_with_the_context_of_its_submit() -> None:
    spec = build_spec("hi", {"labels": {"team": "mill"}})
    with traced():
        _trace.label_trace(spec)
    assert labels_of(spec) == {"team": "mill", "traceparent": PARENT, "tracestate": "v=1"}


def test_what_the_user_says_stays() -> None:
    spec = build_spec("hi", {"labels": {"traceparent": "mine"}})
    with traced():
        _trace.label_trace(spec)
        assert _trace.with_trace((("traceparent", "mine"),)) == (("traceparent", "mine"),)
    assert labels_of(spec) == {"traceparent": "mine"}


def test_labels_that_would_be_refused_are_left_out() -> None:
    spec = build_spec("hi", {"labels": {f"l{i}": "" for i in range(15)}})
    with traced():
        _trace.label_trace(spec)
    assert len(spec.labels) == 16


def test_without_a_span_nothing_is_sent() -> None:
    spec = build_spec("hi", {})
    _trace.label_trace(spec)
    assert not spec.labels
    assert _trace.with_trace((("a", "b"),)) == (("a", "b"),)


def test_without_opentelemetry_nothing_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_trace, "_PROPAGATOR", None)
    with traced():
        assert _trace.with_trace(()) == ()


def test_a_request_over_http_has_a_span_that_its_caller_s_is_the_parent_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(_trace.trace, "get_tracer", provider.get_tracer)
    spec = build_spec("hi", {})
    with _trace.serving_span("POST", "/v1/completions", {"traceparent": PARENT}) as tell:
        _trace.label_trace(spec)
        tell(503)
    [span] = exporter.get_finished_spans()
    assert span.name == "POST /v1/completions"
    assert span.parent is not None
    assert format_span_id(span.parent.span_id) in PARENT
    assert format_span_id(span.context.span_id) in labels_of(spec)["traceparent"]
    assert span.attributes is not None
    assert span.attributes["http.response.status_code"] == 503
    assert not span.status.is_ok


def test_without_opentelemetry_there_is_no_span(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_trace, "_PROPAGATOR", None)
    with _trace.serving_span("GET", "/health", {}) as tell:
        tell(200)
