"""The trace context of the caller goes with its calls, and with each request of a session."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from headrace import _trace
from headrace.options import build_spec
from headrace.v1.generation_pb2 import GenerationSpec
from opentelemetry import context
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
