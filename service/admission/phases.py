"""The phases of the process, and those in which it takes no new work."""

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
"""The phases in which no requests are accepted although the model was loaded, each with a reason
and a message.
"""


@dataclass(frozen=True, slots=True)
class Drain:
    """A drain of the server.

    Attributes:
        reason: the operator's; empty if a signal started it.
        since: wall-clock seconds.
        timeout_s: after how many seconds live requests are cancelled.
    """

    reason: str
    since: float
    timeout_s: float
