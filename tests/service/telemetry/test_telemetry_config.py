"""What the standard variables ask for, and what is refused at the start."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from engine.contract.errors import ConfigError
from service.command.cli import app
from service.telemetry.telemetry_config import TelemetryConfig

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x:4317"}
BOTH = {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_METRICS_EXPORTER": "otlp"}


@pytest.mark.parametrize(
    ("environment", "traces", "metrics"),
    [
        ({}, (), ()),
        (ENDPOINT, ("otlp",), ("otlp",)),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://x"}, (), ("otlp",)),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://x"}, ("otlp",), ()),
        (ENDPOINT | {"OTEL_METRICS_EXPORTER": "none"}, ("otlp",), ()),
        (ENDPOINT | {"OTEL_METRICS_EXPORTER": "prometheus"}, ("otlp",), ("prometheus",)),
        ({"OTEL_METRICS_EXPORTER": "otlp, Prometheus,otlp"}, (), ("otlp", "prometheus")),
        ({"OTEL_TRACES_EXPORTER": "console"}, ("console",), ()),
        (BOTH | {"OTEL_LOGS_EXPORTER": "none"}, ("otlp",), ("otlp",)),
        (BOTH | {"OTEL_SDK_DISABLED": "TRUE", "OTEL_LOGS_EXPORTER": "x"}, (), ()),
    ],
)
def test_where_signals_go(
    environment: dict[str, str], traces: tuple[str, ...], metrics: tuple[str, ...]
) -> None:
    config = TelemetryConfig.read(environment)
    assert (config.traces, config.metrics) == (traces, metrics)


@pytest.mark.parametrize(
    ("environment", "of_traces", "of_metrics"),
    [
        ({}, "grpc", "grpc"),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, "http/protobuf", "http/protobuf"),
        ({"OTEL_EXPORTER_OTLP_METRICS_PROTOCOL": "http/protobuf"}, "grpc", "http/protobuf"),
        (
            {
                "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
                "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc",
            },
            "grpc",
            "http/protobuf",
        ),
    ],
)
def test_protocols(environment: dict[str, str], of_traces: str, of_metrics: str) -> None:
    config = TelemetryConfig.read(BOTH | environment)
    assert (config.traces_protocol, config.metrics_protocol) == (of_traces, of_metrics)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("OTEL_METRICS_EXPORTER", "otlp,statsd", "'statsd' is not offered"),
        ("OTEL_METRICS_EXPORTER", "none,otlp", "'none' is not offered"),
        ("OTEL_TRACES_EXPORTER", "zipkin", "otlp, console or none"),
        ("OTEL_TRACES_EXPORTER", "prometheus", "otlp, console or none"),
        ("OTEL_LOGS_EXPORTER", "otlp", "--log-format"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json", "grpc or http/protobuf"),
        ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "thrift", "grpc or http/protobuf"),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "zstd", "gzip"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "secret", "name=value"),
        ("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", "nothing", "cumulative, delta or"),
        ("OTEL_TRACES_SAMPLER", "sometimes", "traceidratio"),
        ("OTEL_PROPAGATORS", "tracecontext,b3", "'b3', which is not offered"),
        ("OTEL_TRACES_SAMPLER_ARG", "2", "between 0 and 1"),
        ("OTEL_METRIC_EXPORT_INTERVAL", "1m", "a number above 0"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "0", "a number above 0"),
        ("OTEL_CONFIG_FILE", "/etc/otel.yaml", "set variables"),
        ("OTEL_EXPORTER_PROMETHEUS_PORT", "http", "from 0 to 65535"),
        ("OTEL_EXPORTER_PROMETHEUS_PORT", "65536", "from 0 to 65535"),
        ("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "event_only", "span_only"),
    ],
)
def test_what_is_not_offered_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str
) -> None:
    environment = BOTH | {"OTEL_METRICS_EXPORTER": "otlp,prometheus"} | {name: value}
    with pytest.raises(ConfigError, match=said) as caught:
        TelemetryConfig.read(environment)
    assert caught.value.option == name
    assert "secret" not in str(caught.value)
    for variable, text in environment.items():
        monkeypatch.setenv(variable, text)
    done = CliRunner().invoke(app, ["serve", "--model", "/nowhere"])
    assert done.exit_code == 2
    assert name in done.output
    assert said in done.output


def test_content_is_opted_in() -> None:
    content = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
    assert not TelemetryConfig.read(BOTH).content
    assert TelemetryConfig.read(BOTH | {content: "true"}).content
    assert TelemetryConfig.read(BOTH | {content: "SPAN_ONLY"}).content
    assert not TelemetryConfig.read(BOTH | {content: "NO_CONTENT"}).content
