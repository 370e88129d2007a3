"""The source of the front end's metrics, for everything that reports to operators.

    admission, places, refusals, supervisor, … ──▶ Figures ─┬─▶ telemetry.metrics
                                                            └─▶ operator_control ──▶ `headrace top`

Both therefore report the same values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from engine.contract.startup import Transfer
from service.errors.refusals import RefusalKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Functions that read the front end's metrics. All may be called from any thread.

    Attributes:
        live_bytes: how many bytes the requests hold now, as admission counts them.
        unknown_fields: how many messages had fields that this server does not know.
        refusals: how many refusals there were of each kind.
        phase: the phase of the server.
        restarts: how often the engine was restarted.
        door_restarts: how often the HTTP door was restarted.
        sessions: how many sessions are open.
        startup: how many seconds each phase of the last start took, in order; empty if it has not
            ended.
        transfer: the progress of the model's download, even after its end; None if nothing was
            downloaded.
    """

    live_bytes: Callable[[], int]
    unknown_fields: Callable[[], int]
    refusals: Callable[[], Mapping[RefusalKind, int]]
    phase: Callable[[], str]
    restarts: Callable[[], int]
    door_restarts: Callable[[], int]
    sessions: Callable[[], int]
    startup: Callable[[], Mapping[str, float]]
    transfer: Callable[[], Transfer | None]
