"""How long a shutdown may take, by the server's own constants."""

from engine.process import child as engine_process
from service.server import server
from service.telemetry.setup import LAST_EXPORT_S

REST_S = (
    server._CANCEL_GRACE_S
    + server._CALLS_GRACE_S
    + server._CONNECTIONS_GRACE_S
    + engine_process._EXIT_GRACE_S
    + LAST_EXPORT_S
)
"""Seconds after the drain timeout."""
