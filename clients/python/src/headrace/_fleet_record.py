"""One request of a session over several servers, and the stream to one of those servers."""

from __future__ import annotations

from typing import Any

from headrace._fleet import Server
from headrace._fold import Fold
from headrace._placement import PrefixKeys, prefix_keys
from headrace._session import Record, SessionCore
from headrace.v1.generation_pb2 import GenerationSpec


class FleetRecord(Record):
    """One request and the server that has it."""

    def __init__(self, fold: Fold, spec: GenerationSpec | None) -> None:
        super().__init__(fold, is_ours=spec is not None)
        self.sent = spec
        """The spec to send elsewhere; None if another stream started the request."""
        self.keys: PrefixKeys | None = None if spec is None else prefix_keys(spec)
        self.link: ServerLink | None = None
        """The stream that the request is on; None while it waits."""
        self.was_sent = spec is None
        """Whether a server may have, or have had, the request."""
        self.losses = 0
        self.attaching = spec is None
        """Whether the last command for it was an attach rather than an add."""
        self.instance_id = ""
        """The instance id of the process that has it."""
        self.lost_until = 0.0
        """When the lease ends that lets a lost server keep the request."""
        self.reattached = 0
        self.ask_until = 0.0
        self.asked: set[Server] = set()
        """If the owner is unknown, the servers that do not have it."""
        self.lacking: set[Server] = set()
        """The servers that do not have its adapter."""
        self.wants_server = False
        """Whether it is waiting for a server to become ready."""
        self.turn = 0
        """Incremented whenever it is sent or starts to wait; cancels actions scheduled before that.
        """


class ServerLink:
    """The stream to one server. `wire` is the flavour's call."""

    def __init__(self, server: Server, core: SessionCore) -> None:
        self.server = server
        self.core = core
        self.wire: Any = None


def assert_fleet(record: Record) -> FleetRecord:
    """Checks that a record is a `FleetRecord` and returns it."""
    if not isinstance(record, FleetRecord):
        raise TypeError("the handle belongs to a session of another client")
    return record
