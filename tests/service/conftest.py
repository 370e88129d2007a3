"""One real server for all tests that only talk to it; a file of callers; and telemetry for all
servers of a run with `--with-telemetry`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider

from service.telemetry import setup
from service.telemetry.figures import Figures
from service.telemetry.telemetry_config import OTLP, TelemetryConfig
from tests.service.certificates import Pair, make_certificate
from tests.service.door.callers_file import CALLERS, replace
from tests.service.real_server import RealServer, demo_server

EVERYTHING = TelemetryConfig(traces=(OTLP,), metrics=(OTLP,), content=True)


@pytest.fixture(scope="session")
def demo() -> RealServer:
    """A ready server with the demo model, on TCP and on a Unix socket."""
    return demo_server()


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    """Certificates: of the server before and after, of an authority and its clients, of a stranger.

    "both" has names of two callers; "sans" has its caller's only among its alternative names.
    """
    folder = tmp_path_factory.mktemp("certificates")
    ca = make_certificate(folder, "ca-", subject="an authority")

    def client(name: str, subject: str, alternative: str = "DNS:other") -> Pair:
        return make_certificate(folder, name, subject=subject, alternative=alternative, signer=ca)

    return {
        "first": make_certificate(folder, "first-"),
        "second": make_certificate(folder, "second-"),
        "ca": ca,
        "alice": client("alice-", "alice.example"),
        "sans": client("sans-", "somebody", "DNS:x.example,URI:spiffe://example/bob"),
        "both": client("both-", "alice.example", "URI:spiffe://example/bob"),
        "nobody": client("nobody-", "nobody.example"),
        "stranger": make_certificate(folder, "stranger-", subject="alice.example"),
    }


@pytest.fixture
def callers(tmp_path: Path) -> Path:
    path = tmp_path / "callers.toml"
    replace(path, CALLERS)
    return path


class Open(SpanProcessor):
    """The spans that have begun and not ended."""

    def __init__(self) -> None:
        self.spans: dict[int, str] = {}

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        self.spans[span.get_span_context().span_id] = span.name

    def on_end(self, span: ReadableSpan) -> None:
        context = span.get_span_context()
        assert context is not None
        assert self.spans.pop(context.span_id, None) is not None, f"{span.name} ended twice"


@pytest.fixture(autouse=True)
def with_telemetry(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """With `--with-telemetry`, each server of this process has all its telemetry on, unless it has
    some of its own; and every span ends once.
    """
    if not request.config.getoption("--with-telemetry"):
        yield
        return
    make, spans = setup.set_up, Open()

    def tracers(_config: TelemetryConfig) -> TracerProvider:
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(spans)
        return provider

    def set_up(config: TelemetryConfig, figures: Figures) -> setup.ServerTelemetry:
        if config.traces or config.metrics:
            return make(config, figures)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(setup, "_tracer_provider", tracers)
            patch.setattr(
                setup,
                "_meter_provider",
                lambda *_: MeterProvider([InMemoryMetricReader()], shutdown_on_exit=False),
            )
            return make(EVERYTHING, figures)

    monkeypatch.setattr(setup, "set_up", set_up)
    yield
    assert not spans.spans, "these spans have not ended"
