"""What operators see from outside: metrics and traces, by OpenTelemetry.

    OTEL_… variables ─▶ telemetry_config ─▶ setup ──▶ one provider of metrics ─▶ OTLP, console, page
                                               └───▶ one provider of spans ───▶ OTLP, console
    engine's steps, statistics ──▶ metrics
    ends of calls, refusals ─────▶ metrics

All is off unless the environment asks for it. Nothing that a caller sends becomes the name or an
attribute of a metric, except the names of callers, of which only some are named (`metrics`): so the
number of series is bounded.
"""
