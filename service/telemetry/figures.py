"""The source of the front end's metrics, each declared once, for everything that reports to
operators.

    admission, places, refusals, supervisor, … ──▶ Figures ─┬─▶ telemetry.metrics
                                                            └─▶ operator_control ──▶ `headrace top`

Both therefore report the same values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

from engine.contract.startup import Transfer
from engine.contract.stats import counter, gauge
from service.errors.refusals import RefusalKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Functions that read the front end's metrics. All may be called from any thread. What
    FrontEndStatistics has, too, has its field's name.

    Attributes:
        transfer: the progress of the model's download, even after its end; None if nothing was
            downloaded.
        live_request_bytes: as admission counts them.
        refusals: how many there were of each kind.
        startup: how many seconds each phase of the last start took, in order; empty if it has not
            ended.
    """

    transfer: Callable[[], Transfer | None] = gauge(
        "headrace.download.bytes",
        "By",
        "Bytes of the model that was downloaded for this start, by whether they are here.",
        default=MISSING,
    )
    live_request_bytes: Callable[[], int] = gauge(
        "headrace.requests.bytes",
        "By",
        "About how many bytes live requests hold, in both processes.",
        default=MISSING,
    )
    unknown_field_messages: Callable[[], int] = counter(
        "headrace.messages.unknown_fields",
        "{message}",
        "Messages of clients with fields that this server does not know, and ignored.",
        default=MISSING,
    )
    refusals: Callable[[], Mapping[RefusalKind, int]] = counter(
        "headrace.refusals",
        "{refusal}",
        "Calls and commands of sessions that were refused, by reason.",
        default=MISSING,
    )
    phase: Callable[[], str] = gauge(
        "headrace.server.phase", "{server}", "1 for the phase of the server.", default=MISSING
    )
    engine_restarts: Callable[[], int] = counter(
        "headrace.engine.restarts",
        "{restart}",
        "How often the engine was started again, because it had stopped.",
        default=MISSING,
    )
    door_restarts: Callable[[], int] = counter(
        "headrace.openai.restarts",
        "{restart}",
        "How often the process that serves OpenAI's HTTP API was started again.",
        default=MISSING,
    )
    open_sessions: Callable[[], int] = gauge(
        "headrace.sessions.open", "{session}", "Open sessions.", default=MISSING
    )
    startup: Callable[[], Mapping[str, float]] = gauge(
        "headrace.startup.duration",
        "s",
        "How long the last start took, by what was started.",
        default=MISSING,
    )

    def read(self) -> Mapping[str, Any]:
        """Return the current values, by name."""
        return {one.name: getattr(self, one.name)() for one in fields(self)}
