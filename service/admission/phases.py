"""The phases of the process, and which of them accept no new work."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Phase(enum.Enum):
    """The phases of the process."""

    LOADING = "loading"
    READY = "ready"
    RESTARTING = "restarting"
    DRAINING = "draining"
    FAILED = "failed"


NO_NEW_WORK = {
    Phase.FAILED: ("ENGINE_STOPPED", "the engine has stopped; the server takes no requests"),
    Phase.RESTARTING: (
        "ENGINE_RESTARTING",
        "the engine has failed and is being started again; try again soon",
    ),
    Phase.DRAINING: (
        "DRAINING",
        "the server is shutting down and takes no new requests; use another one",
    ),
}
"""The phases in which no requests are accepted although the model was loaded. Each has a reason and
a message.
"""


@dataclass(frozen=True, slots=True)
class Drain:
    """A drain of the server.

    Attributes:
        reason: the operator's reason; empty if a signal started the drain.
        since: wall-clock seconds.
        timeout_s: the seconds after which live requests are cancelled.
    """

    reason: str
    since: float
    timeout_s: float
