"""What an engine reports to OpenTelemetry. No other package of `engine` uses that library.

    instruments ── metrics of steps, requests and statistics ──┬─▶ observer: the Python API's
    spans ──────── a request's span, made from its times ──────┘    (`engine.Telemetry`)
                                                               └─▶ service.telemetry

Each metric has one provider: that of `service.telemetry` in a server, or the one that a script
passes to `engine.Telemetry`. A server's engine has no observer, so nothing is reported twice.
"""
