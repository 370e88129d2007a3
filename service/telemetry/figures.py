"""Where the front end's figures are read, by whoever tells operators: metrics, ControlService.

    admission, places, refusals, supervisor, … ──▶ Figures ─┬─▶ telemetry.metrics
                                                            └─▶ operator_control ──▶ `headrace top`

So both tell the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from engine.contract.startup import Transfer
from service.errors.refusals import RefusalKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """All may be called from any thread.

    Attributes:
        live_bytes: how many bytes the requests hold now, as admission counts them.
        unknown_fields: how many messages had fields that this server does not know.
        refusals: how many refusals there were of each kind.
        phase: the phase of the server.
        restarts: how often the engine was started again.
        door_restarts: how often the HTTP door was started again.
        sessions: how many sessions are open.
        startup: how many seconds the phases of the last start took, in their order; empty: it has
            not ended.
        transfer: how far the download of the model is, or was; None: nothing was downloaded.
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
