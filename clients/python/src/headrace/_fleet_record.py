"""One request of a session over several servers, and the stream to one of these."""

from __future__ import annotations

from typing import Any

from headrace._fleet import Server
from headrace._fold import Fold
from headrace._placement import PrefixKeys, prefix_keys
from headrace._session import Record, SessionCore
from headrace.v1.generation_pb2 import GenerationSpec


class FleetRecord(Record):
    """One request, and where it is."""

    def __init__(self, fold: Fold, spec: GenerationSpec | None) -> None:
        super().__init__(fold, is_ours=spec is not None)
        self.sent = spec
        """What to send elsewhere; None: another stream started the request."""
        self.keys: PrefixKeys | None = None if spec is None else prefix_keys(spec)
        self.link: ServerLink | None = None
        """Where it is; None: it waits."""
        self.was_sent = spec is None
        """Whether a server may have it, or had."""
        self.losses = 0
        self.attaching = spec is None
        """Whether it was attached there last, not added."""
        self.instance_id = ""
        """The process that has it, where it is attached."""
        self.lost_until = 0.0
        """Until when the server that it was lost with may have it: how long its lease is."""
        self.reattached = 0
        self.ask_until = 0.0
        self.asked: set[Server] = set()
        """With an unknown owner: who does not have it."""
        self.wants_server = False
        """Whether it waits for a server to be ready."""
        self.turn = 0
        """Grows whenever it is sent or begins to wait: an action of an earlier turn is void."""


class ServerLink:
    """The stream to one server. `wire`: the flavour's call."""

    def __init__(self, server: Server, core: SessionCore) -> None:
        self.server = server
        self.core = core
        self.wire: Any = None


def assert_fleet(record: Record) -> FleetRecord:
    """The record of a session over several servers."""
    if not isinstance(record, FleetRecord):
        raise TypeError("the handle belongs to a session of another client")
    return record
