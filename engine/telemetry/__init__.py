"""What an engine tells OpenTelemetry. No other module of `engine` knows that library.

    instruments ── metrics of steps, requests and statistics ──┬─▶ observer: the Python API's
    spans ──────── a request's span, made from its times ──────┘    (`engine.Telemetry`)
                                                               └─▶ service.telemetry

Each metric has one provider: that of `service.telemetry` in a server, or the one that a script
gives to `engine.Telemetry`. A server's engine has no observer, so nothing is told twice.
"""
