"""The states of a request in the front end, and one table of the transitions between them. Only
`ServedRequest` changes states; docs/sessions.md shows them.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping


class State(enum.Enum):
    """The states of a request from its start until its id is free again. The value describes the
    state.
    """

    ADMITTING = "the engine has not yet answered whether it accepts the request"
    LIVE = "it waits or runs; its results go to a stream, or are kept (AddRequest, Generate)"
    LEASED = "it waits or runs, but its stream is lost; it is cancelled when its lease ends"
    ABANDONED = "its results are no longer wanted: the engine is told to end it"
    ENDED = "it has ended, and its stream has not taken all of its events"
    KEPT = "it has ended, and its results are kept for GetResult and `attach`"
    GONE = "it is forgotten, and its id is free"

    @property
    def is_live(self) -> bool:
        """Whether the request has not ended, so that the engine may have it."""
        return self in _LIVE


_LIVE = frozenset((State.ADMITTING, State.LIVE, State.LEASED, State.ABANDONED))

_CLOSES = "the server closes"

TRANSITIONS: Mapping[State, Mapping[State, str]] = {
    State.ADMITTING: {
        State.LIVE: "the engine accepted it",
        State.ABANDONED: "all who wait for it left, and it is neither AddRequest's nor leased",
        State.ENDED: "it ended before the engine's answer was seen",
        State.KEPT: "the same, and its results are to be kept",
        State.GONE: "the engine refused it, or " + _CLOSES,
    },
    State.LIVE: {
        State.LEASED: "its stream was lost, and had a lease",
        State.ABANDONED: "its stream was lost, and had none; or the last Generate left",
        State.ENDED: "it ended",
        State.KEPT: "it ended, and its results are to be kept",
        State.GONE: "it ended, and only Generate had it, which does not keep it; or " + _CLOSES,
    },
    State.LEASED: {
        State.LIVE: "a stream attached to it; or its lease ended, and a Generate waits for it",
        State.KEPT: "it ended",
        State.GONE: _CLOSES,
    },
    State.ABANDONED: {
        State.LIVE: "a stream attached to it before it had ended",
        State.GONE: "it ended, or the engine does not have it",
    },
    State.ENDED: {
        State.GONE: "its stream took the last event, was lost, or is not read; or it has none",
    },
    State.KEPT: {
        State.ENDED: "its retention passed, or others need the room; a stream still has it",
        State.GONE: "its retention passed, or others need the room",
    },
    State.GONE: {},
}
"""The possible next states of each state, and when a request enters them."""
