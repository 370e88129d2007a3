"""Reads the standard variables of OpenTelemetry.

The SDK reads most of them itself: endpoints, headers, certificates, intervals, queues. If it does
not know a value, however, it only logs a line and uses another value, and metrics do not go where
their operator expects them. Here such a value is an error at start-up.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from engine.contract.errors import ConfigError

OTLP, CONSOLE, PROMETHEUS = "otlp", "console", "prometheus"
GRPC, HTTP = "grpc", "http/protobuf"
PROTOCOLS = (GRPC, HTTP)
_EXPORTERS = {
    "TRACES": (OTLP, CONSOLE),
    "METRICS": (OTLP, PROMETHEUS, CONSOLE),
    "LOGS": (),
}
_SAMPLERS = (
    "always_on",
    "always_off",
    "traceidratio",
    "parentbased_always_on",
    "parentbased_always_off",
    "parentbased_traceidratio",
)
_TEMPORALITIES = ("cumulative", "delta", "lowmemory")
_COMPRESSIONS = {GRPC: ("gzip",), HTTP: ("none", "gzip", "deflate")}
_POSITIVE = (
    "OTEL_METRIC_EXPORT_INTERVAL",
    "OTEL_METRIC_EXPORT_TIMEOUT",
    "OTEL_BSP_SCHEDULE_DELAY",
    "OTEL_BSP_EXPORT_TIMEOUT",
    "OTEL_BSP_MAX_QUEUE_SIZE",
    "OTEL_BSP_MAX_EXPORT_BATCH_SIZE",
    "OTEL_EXPORTER_OTLP_TIMEOUT",
    "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT",
    "OTEL_EXPORTER_OTLP_METRICS_TIMEOUT",
)
_PROPAGATORS = ("tracecontext", "baggage", "none")
_FILES = ("OTEL_CONFIG_FILE", "OTEL_EXPERIMENTAL_CONFIG_FILE")
_HOST = "OTEL_EXPORTER_PROMETHEUS_HOST"
_PORT = "OTEL_EXPORTER_PROMETHEUS_PORT"
_DEFAULT_HOST, _DEFAULT_PORT = "localhost", 9464
_CONTENT = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
_CONTENT_OF = {"": False, "false": False, "no_content": False, "true": True, "span_only": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetryConfig:
    """Which telemetry is enabled; none by default.

    Attributes:
        traces: where spans go: OTLP or CONSOLE; empty if there are no spans.
        metrics: where metrics go: some of OTLP, PROMETHEUS, CONSOLE.
        traces_protocol, metrics_protocol: one of PROTOCOLS, for OTLP.
        prometheus_host, prometheus_port: where Prometheus' page is served; port 0 takes a free
            port.
        content: whether spans contain prompts and outputs.
        has_own_name: whether the environment sets the service's name.
    """

    traces: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()
    traces_protocol: str = GRPC
    metrics_protocol: str = GRPC
    prometheus_host: str = _DEFAULT_HOST
    prometheus_port: int = _DEFAULT_PORT
    content: bool = False
    has_own_name: bool = False

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ) -> TelemetryConfig:
        """Read the environment.

        Raises:
            ConfigError: it asks for something that is not supported.
        """
        if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
            return cls()
        _exporters(environ, "LOGS")
        traces, metrics = _exporters(environ, "TRACES"), _exporters(environ, "METRICS")
        if traces or metrics:
            _check_values(environ)
        return cls(
            traces=traces,
            metrics=metrics,
            traces_protocol=_protocol(environ, "TRACES", traces),
            metrics_protocol=_protocol(environ, "METRICS", metrics),
            prometheus_host=environ.get(_HOST, "").strip() or _DEFAULT_HOST,
            prometheus_port=_port(environ, metrics),
            content=bool(traces) and _content(environ),
            has_own_name=bool(environ.get("OTEL_SERVICE_NAME"))
            or "service.name" in environ.get("OTEL_RESOURCE_ATTRIBUTES", ""),
        )


def _exporters(environ: Mapping[str, str], signal: str) -> tuple[str, ...]:
    """Return the exporters of a signal, which are a list, as in the specification."""
    name = f"OTEL_{signal}_EXPORTER"
    offered = _EXPORTERS[signal]
    wanted = [part.strip().lower() for part in environ.get(name, "").split(",") if part.strip()]
    if not wanted:
        endpoints = ("OTEL_EXPORTER_OTLP_ENDPOINT", f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT")
        return (OTLP,) if OTLP in offered and any(environ.get(one) for one in endpoints) else ()
    if wanted == ["none"]:
        return ()
    for one in wanted:
        if one not in offered:
            logs = " (the log goes to stderr; see --log-format)" if signal == "LOGS" else ""
            raise ConfigError(
                name,
                f"is {environ[name][:64]!r}, and {one[:64]!r} is not offered{logs}; leave it out, "
                f"or set it to {_or(*offered, 'none')}",
            )
    return tuple(dict.fromkeys(wanted))


def _protocol(environ: Mapping[str, str], signal: str, exporters: tuple[str, ...]) -> str:
    if OTLP not in exporters:
        return GRPC
    names = f"OTEL_EXPORTER_OTLP_{signal}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"
    protocol = _one_of(environ, names, PROTOCOLS, GRPC)
    names = f"OTEL_EXPORTER_OTLP_{signal}_COMPRESSION", "OTEL_EXPORTER_OTLP_COMPRESSION"
    _one_of(environ, names, _COMPRESSIONS[protocol], _COMPRESSIONS[protocol][0])
    return protocol


def _check_values(environ: Mapping[str, str]) -> None:
    """Refuse values that the SDK would replace."""
    for name in _FILES:
        if environ.get(name):
            raise ConfigError(name, "is set, and files of this kind are not read; set variables")
    _one_of(environ, ("OTEL_TRACES_SAMPLER",), _SAMPLERS, _SAMPLERS[0])
    temporality = "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE"
    _one_of(environ, (temporality,), _TEMPORALITIES, _TEMPORALITIES[0])
    for name in _POSITIVE:
        if (text := environ.get(name, "").strip()) and not 0 < _number(text) < float("inf"):
            raise ConfigError(name, f"is {text[:64]!r}; it must be a number above 0")
    for one in environ.get("OTEL_PROPAGATORS", "").split(","):
        if one.strip() not in ("", *_PROPAGATORS):
            raise ConfigError(
                "OTEL_PROPAGATORS",
                f"names {one.strip()[:64]!r}, which is not offered; give some of "
                f"{_or(*_PROPAGATORS)}",
            )
    argument = environ.get("OTEL_TRACES_SAMPLER_ARG", "").strip()
    if argument and not 0 <= _number(argument) <= 1:
        raise ConfigError(
            "OTEL_TRACES_SAMPLER_ARG", f"is {argument[:64]!r}; it must be between 0 and 1"
        )
    for name in ("", "TRACES_", "METRICS_"):
        name = f"OTEL_EXPORTER_OTLP_{name}HEADERS"
        if not all("=" in part for part in environ.get(name, "").split(",") if part.strip()):
            # The value may be a secret.
            raise ConfigError(name, "is not a list like name=value,name=value")


def _port(environ: Mapping[str, str], metrics: tuple[str, ...]) -> int:
    text = environ.get(_PORT, "").strip()
    if PROMETHEUS not in metrics or not text:
        return _DEFAULT_PORT
    if not (text.isascii() and text.isdigit() and int(text[:6]) < 65536):
        raise ConfigError(_PORT, f"is {text[:64]!r}; it must be a port, from 0 to 65535")
    return int(text)


def _content(environ: Mapping[str, str]) -> bool:
    text = environ.get(_CONTENT, "").strip().lower()
    if text not in _CONTENT_OF:
        raise ConfigError(
            _CONTENT,
            f"is {text[:64]!r}; content goes to spans or nowhere: set it to true, span_only, "
            "false or no_content",
        )
    return _CONTENT_OF[text]


def _one_of(
    environ: Mapping[str, str], names: tuple[str, ...], offered: tuple[str, ...], default: str
) -> str:
    """Return the value of the first of these variables that is set."""
    for name in names:
        text = environ.get(name, "").strip().lower()
        if text and text not in offered:
            raise ConfigError(
                name, f"is {text[:64]!r}, which is not offered; set it to {_or(*offered)}"
            )
        if text:
            return text
    return default


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")


def _or(*choices: str) -> str:
    *most, last = choices
    return f"{', '.join(most)} or {last}" if most else last
