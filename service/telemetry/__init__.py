"""What operators see from outside: metrics and traces, with OpenTelemetry.

    OTEL_… variables ─▶ telemetry_config ─▶ setup ──▶ one provider of metrics ─▶ OTLP, console, page
                                               └───▶ one provider of spans ───▶ OTLP, console
    engine's steps, statistics ──▶ metrics
    ends of calls, refusals ─────▶ metrics

Everything is off unless the environment enables it. Nothing that a caller sends becomes the name or
an attribute of a metric, except the names of a limited number of callers (`metrics`). The number of
series is therefore bounded.
"""
