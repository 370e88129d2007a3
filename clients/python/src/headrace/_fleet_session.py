"""One session over several servers: which server has each request, and where a request goes when
that server has no room, drains or dies. Does no I/O.

1. `add` chooses a server (`FleetState.choose`) and gives the request to the `SessionCore` of the
   stream there (`Links`), which the flavour opens when the first request goes there.
2. The flavour passes each stream's messages to `receive`, and its end to `lost`.
3. A request that a server refuses goes elsewhere, or waits as long as the server said.
4. When a stream is lost, requests with no delivered output are sent again elsewhere under the same
   ids. Requests that have begun are reattached to the server that has them. Both wait for a server
   until the lease has passed. Without a lease, requests that have begun fail with their output so
   far.

A request's record and handle stay the same wherever it goes. Like `SessionCore`, nothing here is
thread-safe by itself. `FleetState`, which is shared with other sessions, is used under `guard`.
"""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Unpack

from headrace._attempts import WRONG_INSTANCE, is_worth_a_retry, lacks_adapter, note_failure
from headrace._deadline import timed_out
from headrace._fleet import LOAD_INTERVAL, PATIENCE_SECONDS, FleetState, Server
from headrace._fleet_links import Links
from headrace._fleet_record import FleetRecord, ServerLink, assert_fleet
from headrace._fold import Fold
from headrace._session import Record, SessionOptions, copy_of, duplicate
from headrace.errors import (
    AlreadyExistsError,
    CallCancelledError,
    HeadraceError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)
from headrace.options import choices_of
from headrace.results import ServerLoad
from headrace.v1.generation_pb2 import GenerationSpec
from headrace.v1.generation_service_pb2 import StreamResultResponse

_MOST_LOSSES = 5
"""How often a request is sent again after its server was lost or not ready."""
_AGAIN_SECONDS = 1.0
"""How long such a request waits if the retry budget is used up."""
_FIRST_REATTACH = 0.1
_LONGEST_REATTACH = 1.0


class FleetCore:
    """The bookkeeping of one session over several servers.

    Args:
        state: the servers.
        guard: a context manager held around every use of `state`.
        open_link: opens the stream of a link.
        later: schedules an action of the flavour after a number of seconds.
        restarts: whether output counts as delivered only when the request has ended.
        options: the session's options.
    """

    def __init__(
        self,
        state: FleetState,
        guard: AbstractContextManager[Any],
        open_link: Callable[[ServerLink], None],
        later: Callable[[float, Callable[[], list[Record]]], None],
        *,
        restarts: bool = False,
        **options: Unpack[SessionOptions],
    ) -> None:
        self.records: dict[str, Record] = {}
        """The live requests, by id."""
        self.closing = False
        self.ended = False
        self._state = state
        self._guard = guard
        self._later = later
        self._restarts = restarts
        room_timeout = options.get("room_timeout")
        self._room_timeout = math.inf if room_timeout is None else room_timeout
        interval = options.get("load_interval")
        self.links = Links(
            open_link,
            self._refused,
            self.records.keys(),
            {
                **options,
                "load_interval": LOAD_INTERVAL if interval is None else interval,
                "room_timeout": 0,  # here it is decided who is sent again
            },
        )
        self._changed: dict[int, Record] = {}

    # ---- what the session's user does ------------------------------------------------------------

    def add(self, spec: GenerationSpec) -> Record:
        """Starts a request; see `SessionCore.add`."""
        self._check_open()
        if not spec.request_id:
            spec.request_id = uuid.uuid4().hex
        record = FleetRecord(Fold(spec.request_id, n=choices_of(spec)), spec)
        record.give_up_at = time.monotonic() + self._room_timeout
        self._register(record)
        self._place(record)
        return record

    def attach(self, fold: Fold) -> Record:
        """Continues a request; see `SessionCore.attach`.

        It attaches to the server that has the request, or, if that is unknown, to one server after
        another.
        """
        self._check_open()
        record = FleetRecord(fold, None)
        record.ask_until = time.monotonic() + PATIENCE_SECONDS
        if fold.done:
            return record
        self._register(record)
        with self._guard:
            record.instance_id = self._state.owner(fold.request_id)
            found = self._state.by_instance(record.instance_id)
        if found:
            self._attach_at(found[0], record)
        else:
            record.instance_id = ""
            self._ask_next(record, self._not_found(record))
        return record

    def cancel(self, record: Record) -> None:
        """Requests the end of a request; see `SessionCore.cancel`."""
        assert_fleet(record).cancelled = True
        link = assert_fleet(record).link
        if link is not None:
            link.core.cancel(record)
        elif self.records.get(record.request_id) is record:
            self._cancel_here(assert_fleet(record))
            self._later(0.0, self.take_changed)  # its reader is woken there

    def _cancel_here(self, record: FleetRecord) -> None:
        """Ends a request that is not on any server."""
        record.turn += 1
        if record.was_sent and not record.fold.chunks:
            self._fail(record, CallCancelledError("it was cancelled while it waited for a server"))
            return
        if record.instance_id:  # where it may run on
            self.links.left_behind(record.instance_id, record.request_id)
        record.fold.cancelled()
        self.records.pop(record.request_id, None)
        self._changed[id(record)] = record

    def expire(self, now: float) -> list[Record]:
        """Fails the requests whose time has run out; see `SessionCore.expire`."""
        for record in [assert_fleet(one) for one in self.records.values() if one.due <= now]:
            record.turn += 1
            if (link := record.link) is not None:
                link.core.cancel(record)
                link.core.forget(record)
                record.link = None
                with self._guard:
                    self._state.over(link.server)
            self._fail(record, timed_out(record.timeout or 0.0, record.request_id))
        return self.take_changed()

    def pay(self, record: Record, chunks: int) -> None:
        """Returns credit for chunks; see `SessionCore.pay`."""
        link = assert_fleet(record).link
        if link is not None:
            link.core.pay(record, chunks)

    def pay_all(self, record: Record) -> None:
        """Returns credit for all output; see `SessionCore.pay_all`."""
        record.unlimited = True
        self.pay(record, len(record.fold.chunks))

    def close(self, *, cancel: bool) -> None:
        """Accepts no more requests; see `SessionCore.close`."""
        self.closing = True
        for record in list(self.records.values()):
            if cancel:
                self.cancel(record)
            self.pay_all(record)
        self._close_links()

    @property
    def lease(self) -> float | None:
        """The shortest granted lease; see `Links.lease`."""
        return self.links.lease

    @property
    def load(self) -> ServerLoad | None:
        """The servers' combined load; see `Links.load`."""
        return self.links.load

    # ---- what the servers do ---------------------------------------------------------------------

    def receive(self, link: ServerLink, response: StreamResultResponse) -> list[Record]:
        """Processes one message from a server. Returns the records that changed."""
        for record in link.core.receive(response):
            self._changed[id(record)] = record
            self._note_place(link, assert_fleet(record))
            if record.fold.done:
                self._ended(link, assert_fleet(record))
        with self._guard:
            if response.instance_id:
                link.server.instance_id = response.instance_id
            if response.HasField("load") and link.core.load is not None:
                link.server.take_load(link.core.load, self._state.clock())
        return self.take_changed()

    def lost(self, link: ServerLink, error: HeadraceError | None) -> list[Record]:
        """Handles the end of a stream. `error` is None if the server ended it normally."""
        records = link.core.give_up()
        self.links.lost(link)
        broken = error or UnavailableError("the server ended the session before its requests")
        is_loss = is_worth_a_retry(broken)
        with self._guard:
            for _ in records:
                self._state.over(link.server)
            if is_loss and not self.is_done:  # a server that ends an idle session drains
                note_failure(self._state, link.server, broken)
        for record in records:
            moved = assert_fleet(record)
            moved.link = None
            if moved.number or not moved.attaching or not moved.lost_until:  # it may be there
                until = time.monotonic() + (link.core.lease or 0.0)
                moved.lost_until = max(until, moved.lost_until)
                moved.reattached = moved.number = 0
            if is_loss and not self.ended:
                self._move(link, moved, broken)
            else:
                self._fail(moved, copy_of(broken))
        return self.take_changed()

    def server_changed(self) -> list[Record]:
        """Places the waiting requests again, because a server may have become usable."""
        for record in [assert_fleet(one) for one in self.records.values()]:
            if record.wants_server:
                self._place(record)
        return self.take_changed()

    def end(self, error: HeadraceError) -> list[Record]:
        """Fails all remaining requests, because the client was closed."""
        self.ended = self.closing = True
        for record in list(self.records.values()):
            self._fail(record, copy_of(error))
        return self.take_changed()

    def take_changed(self) -> list[Record]:
        """Returns the records that changed since the last call, so that their readers can be
        woken.
        """
        changed = list(self._changed.values())
        self._changed.clear()
        self._close_links()
        return changed

    # ---- where requests go -----------------------------------------------------------------------

    def _place(self, record: FleetRecord, avoid: Server | None = None) -> None:
        """Sends a request to a server, or makes it wait for one."""
        with self._guard:
            state = self._state
            avoided = () if avoid is None else (avoid,)
            without = record.lacking
            server = state.choose(record.keys, avoid=avoided, without=without)
            room_in = state.room_in(without) if server is None else None
            if room_in is not None and time.monotonic() + room_in > record.give_up_at:
                server = state.choose(record.keys, avoid=avoided, without=without, even_full=True)
            if server is not None:
                state.begun(server)
        if server is not None:
            self._send_to(server, record)
        elif room_in is not None:
            self._wait(record, room_in)
        elif not record.wants_server:
            record.wants_server = True
            record.turn += 1
            patience = max(PATIENCE_SECONDS, record.lost_until - time.monotonic())
            self._later_for(record, patience, lambda: self._fail(record, self._nobody()))

    def _send_to(self, server: Server, record: FleetRecord) -> None:
        if record.sent is None:
            raise TypeError("a request that another stream started is attached, not sent")
        link = self._link_to(server, record)
        if link is None:
            return
        record.link, record.attaching, record.wants_server = link, False, False
        record.was_sent = True
        record.instance_id = ""
        record.turn += 1
        link.core.put(record, record.sent)
        if record.cancelled:
            link.core.cancel(record)

    def _wait(self, record: FleetRecord, seconds: float) -> None:
        """Places a request after `seconds`."""
        record.wants_server = False
        record.turn += 1
        self._later_for(record, seconds, lambda: self._place(record))

    def _later_for(self, record: FleetRecord, seconds: float, act: Callable[[], None]) -> None:
        """Calls `act` after `seconds`, unless the request has been sent, waited or ended since."""
        turn = record.turn

        def act_if_due() -> list[Record]:
            if record.turn == turn and self.records.get(record.request_id) is record:
                act()
            return self.take_changed()

        self._later(seconds, act_if_due)

    def _nobody(self) -> HeadraceError:
        with self._guard:
            return self._state.nobody()

    def _refused(
        self, link: ServerLink, refused: Record, error: HeadraceError
    ) -> HeadraceError | None:
        """Handles a server's refusal of a request.

        Returns the error that ends the request, or None if it continues.
        """
        record = assert_fleet(refused)
        record.link = None
        with self._guard:
            self._state.over(link.server)
        failure: HeadraceError | None = error
        if record.attaching:
            failure = self._not_attached(link, record, error)
        elif record.cancelled and is_worth_a_retry(error):
            failure = CallCancelledError("it was cancelled before a server had room")
        elif isinstance(error, AlreadyExistsError) and record.losses:
            self._attach_at(link.server, record)  # it had arrived after all
            failure = None
        elif isinstance(error, ResourceExhaustedError) and error.retry_after is not None:
            failure = self._find_room(link.server, record, error, error.retry_after)
        elif isinstance(error, UnavailableError) and record.losses < _MOST_LOSSES:
            with self._guard:
                note_failure(self._state, link.server, error)
            self._send_again(record, link.server)
            failure = None
        elif lacks_adapter(error) and not record.cancelled:
            record.lacking.add(link.server)
            with self._guard:
                is_another_ready = self._state.room_in(record.lacking) is not None
            if is_another_ready:
                self._place(record)
                failure = None
        if failure is not None:
            self.records.pop(record.request_id, None)
        return failure

    def _find_room(
        self, server: Server, record: FleetRecord, error: HeadraceError, seconds: float
    ) -> HeadraceError | None:
        """Moves a request from a full server to another, or makes it wait `seconds`.

        Returns `error` if it cannot wait that long.
        """
        with self._guard:
            self._state.full(server, seconds)
            may = self._state.budget.failed()
            choose = partial(self._state.choose, record.keys, without=record.lacking)
            other = choose(avoid=(server,)) if may else None
        if other is not None and other is not server:
            self._place(record, server)
            return None
        if time.monotonic() + seconds > record.give_up_at:
            return error
        self._wait(record, seconds)
        return None

    def _move(self, link: ServerLink, record: FleetRecord, error: HeadraceError) -> None:
        """Moves or reattaches a request whose stream, and perhaps server, was lost."""
        begun = bool(record.fold.chunks) and not self._restarts
        if record.sent is None or begun or record.losses >= _MOST_LOSSES:
            self._reattach(link, record, error)
            return
        if record.cancelled:
            self._fail(record, CallCancelledError("it was cancelled, and its server was lost"))
            return
        self.links.left_behind(link.core.instance_id, record.request_id)
        record.fold.restart()
        record.paid = 0
        self._send_again(record, link.server)

    def _send_again(self, record: FleetRecord, avoid: Server) -> None:
        """Sends a request elsewhere, immediately if the budget allows it."""
        record.losses += 1
        with self._guard:
            may = self._state.budget.failed()
            spread = self._state.jitter()
        if may:
            self._place(record, avoid)
        else:
            self._wait(record, _AGAIN_SECONDS * (0.5 + spread))

    def _note_place(self, link: ServerLink, record: FleetRecord) -> None:
        """Records that a server has a request, because it has sent a message about it."""
        if record.instance_id != link.core.instance_id:
            record.instance_id = link.core.instance_id
            with self._guard:
                self._state.note_owner(record.request_id, record.instance_id)

    def _ended(self, link: ServerLink, record: FleetRecord) -> None:
        """Ends a request, unless its server failed before delivering any output."""
        error = record.fold.error
        with self._guard:
            if record.link is link:
                self._state.over(link.server)
            if error is None:
                self._state.budget.succeeded()
            self._state.ended_alone(record.request_id)
        record.link = None
        is_lost = isinstance(error, UnavailableError) and record.sent is not None
        delivered = bool(record.fold.chunks) and not self._restarts
        if is_lost and not delivered and not record.cancelled and record.losses < _MOST_LOSSES:
            record.fold.restart()
            record.paid = 0
            self._changed.pop(id(record), None)
            self._send_again(record, link.server)
            return
        self.records.pop(record.request_id, None)
        if record.losses:
            self.links.ended(link.core.instance_id, record.request_id)

    # ---- requests that live somewhere ------------------------------------------------------------

    def _attach_at(self, server: Server, record: FleetRecord) -> None:
        with self._guard:
            self._state.begun(server)
        link = self._link_to(server, record)
        if link is None:
            return
        record.link, record.attaching = link, True
        link.core.put_attached(record, record.instance_id)

    def _reattach(self, link: ServerLink, record: FleetRecord, error: HeadraceError) -> None:
        """Reattaches a request to the server that has it, until its lease has passed."""
        pause = min(_FIRST_REATTACH * 2**record.reattached, _LONGEST_REATTACH)
        if not record.instance_id or time.monotonic() + pause > record.lost_until:
            self._fail(record, copy_of(error))
            return
        record.reattached += 1

        record.turn += 1
        self._later_for(record, pause, lambda: self._attach_at(link.server, record))

    def _not_attached(
        self, link: ServerLink, record: FleetRecord, error: HeadraceError
    ) -> HeadraceError | None:
        """Handles a server's refusal to attach a request.

        Returns the error that ends the request, or None if it continues.
        """
        if record.sent is None and not record.instance_id and isinstance(error, NotFoundError):
            record.asked.add(link.server)
            self._ask_next(record, error)
            return None
        if error.reason == WRONG_INSTANCE and link.server not in record.asked:
            record.asked.add(link.server)
            with self._guard:
                link.server.instance_id = error.metadata.get("instance_id", "")
                found = self._state.by_instance(record.instance_id)
            if found and len(record.asked) == 1:  # followed once
                self._attach_at(found[0], record)
                return None
        if record.sent is not None and isinstance(error, NotFoundError):
            if not record.fold.chunks and record.losses < _MOST_LOSSES:
                self._send_again(record, link.server)
                return None
            return UnavailableError("the server that had the request was lost, and it with it")
        return error

    def _ask_next(self, record: FleetRecord, error: HeadraceError) -> None:
        """Tries to attach a request on the next server that may have it."""
        with self._guard:
            left = [one for one in self._state.reachable() if one not in record.asked]
            is_settled = self._state.is_settled
        if left:
            self._attach_at(left[0], record)
        elif is_settled or time.monotonic() > record.ask_until:
            self._fail(record, error)
        else:
            record.turn += 1
            again = partial(self._ask_next, record, error)
            self._later_for(record, _FIRST_REATTACH, again)

    def _not_found(self, record: FleetRecord) -> HeadraceError:
        return NotFoundError(f"no server has request {record.request_id!r}")

    # ---- housekeeping ----------------------------------------------------------------------------

    def _link_to(self, server: Server, record: FleetRecord) -> ServerLink | None:
        """Returns the stream to a server for a new request there.

        Returns None if the client is closed; the request has then failed.
        """
        try:
            return self.links.to(server)
        except UnavailableError as error:
            with self._guard:
                self._state.over(server)
            self._fail(record, error)
            return None

    def _fail(self, record: Record, error: HeadraceError) -> None:
        record.fold.fail(error)
        self.records.pop(record.request_id, None)
        self._changed[id(record)] = record

    @property
    def is_done(self) -> bool:
        """Whether the session is closed and no requests are left."""
        return self.closing and not self.records

    def _close_links(self) -> None:
        if self.is_done:
            self.links.close()

    def _register(self, record: Record) -> None:
        if record.request_id in self.records:
            raise duplicate(record.request_id)
        self.records[record.request_id] = record

    def _check_open(self) -> None:
        if self.closing:
            raise UnavailableError("the session is being closed; it takes no more requests")
