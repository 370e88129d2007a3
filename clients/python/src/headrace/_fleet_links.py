"""The streams of one session over several servers: one for each server that has its requests.

A stream is opened when the first request goes to its server. Copies of a request that nobody needs
any more are cancelled over these streams.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import partial

from headrace._fleet import Server
from headrace._fleet_record import ServerLink
from headrace._session import Record, SessionCore, SessionOptions
from headrace.errors import HeadraceError
from headrace.results import ServerLoad
from headrace.v1.generation_service_pb2 import CancelCommand, StreamResultRequest


class Links:
    """The streams of a session, by server.

    Args:
        open_link: opens the stream of a link.
        refused: called when a server refuses a request; see `SessionCore.on_refusal`.
        live: the ids of the session's live requests on all servers.
        options: the options of each stream.
    """

    def __init__(
        self,
        open_link: Callable[[ServerLink], None],
        refused: Callable[[ServerLink, Record, HeadraceError], HeadraceError | None],
        live: Collection[str],
        options: SessionOptions,
    ) -> None:
        self._open = open_link
        self._refused = refused
        self._live = live
        self._options = options
        self._links: dict[Server, ServerLink] = {}
        self._orphans: dict[str, set[str]] = {}
        """For each instance, the requests that have since been sent elsewhere."""

    def __iter__(self) -> Iterator[ServerLink]:
        return iter(list(self._links.values()))

    def to(self, server: Server) -> ServerLink:
        """Returns the stream to a server, opening it if necessary.

        Raises:
            UnavailableError: the client is closed.
        """
        link = self._links.get(server)
        if link is None:
            link = ServerLink(server, SessionCore(**self._options))
            link.core.on_refusal = partial(self._refused, link)
            self._open(link)
            self._links[server] = link
            self._end_orphans(link)
        return link

    def lost(self, link: ServerLink) -> None:
        """Removes a stream that has ended. The server's next request opens another."""
        if self._links.get(link.server) is link:
            del self._links[link.server]

    def close(self) -> None:
        """Half-closes all streams; nothing more will be sent."""
        for link in self:
            link.core.closing = True

    @property
    def lease(self) -> float | None:
        """The shortest lease that a server has granted, in seconds; None if none has answered
        yet.
        """
        found = [link.core.lease for link in self]
        return min((lease for lease in found if lease is not None), default=None)

    @property
    def load(self) -> ServerLoad | None:
        """The servers' latest load reports: the totals, and the usage of the fullest cache."""
        loads = [link.core.load for link in self if link.core.load is not None]
        if not loads:
            return None
        return ServerLoad(
            sum(one.running for one in loads),
            sum(one.waiting for one in loads),
            max(one.kv_cache_usage for one in loads),
        )

    # ---- what is left for nobody -----------------------------------------------------------------

    def left_behind(self, instance_id: str, request_id: str) -> None:
        """Records that a request moves elsewhere while its old instance may continue to run it.

        Without a lease, the old instance does not continue it and nothing is recorded.
        """
        if self._options.get("lease"):
            self._orphans.setdefault(instance_id, set()).add(request_id)

    def ended(self, instance_id: str, request_id: str) -> None:
        """Records that a request ended on an instance, and cancels its copies on other servers."""
        self._orphans.get(instance_id, set()).discard(request_id)
        for link in self:
            self._end_orphans(link)

    def _end_orphans(self, link: ServerLink) -> None:
        """Cancels copies of ended requests on a server.

        The copy of a live request is kept, because the request may return to this server and resume
        there.
        """
        instance_id = link.server.instance_id
        orphans = self._orphans.get(instance_id, set())
        for request_id in [one for one in orphans if one not in self._live]:
            orphans.discard(request_id)
            command = CancelCommand(request_id=request_id, instance_id=instance_id)
            link.core.outbox.append(StreamResultRequest(cancel=command))
