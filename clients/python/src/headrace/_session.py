"""A session's bookkeeping: which commands to send, and which request an answer belongs to.

This module does no I/O.

1. `add`, `attach` and `cancel` create a command message and remember what it was for.
2. The flavour (threads or asyncio) sends it, and passes every message from the server to `receive`.
3. `receive` folds events into their requests' records and returns the records that changed, so
   that their readers can be woken.
4. After `close`, no more requests are accepted. The flavour half-closes once the core
   `has_said_all`.
5. A request that the server has no room for is kept and put into `retries`. The flavour calls
   `again` after the delay that the server advised.
6. When the stream ends, `end` fails the live requests, so that no reader waits forever.

Nothing here is thread-safe: the threaded flavour holds its lock around every call.
"""

from __future__ import annotations

import itertools
import math
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol, TypedDict

from headrace._capabilities import with_capabilities
from headrace._deadline import timed_out
from headrace._fold import Fold
from headrace.errors import (
    AlreadyExistsError,
    CallCancelledError,
    HeadraceError,
    ResourceExhaustedError,
    UnavailableError,
    error_from_status,
    invalid_argument,
    moved_error,
)
from headrace.options import choices_of, duration
from headrace.results import ServerLoad
from headrace.v1.generation_pb2 import GenerationSpec, ResultEvent
from headrace.v1.generation_service_pb2 import (
    AddCommand,
    AttachCommand,
    CancelCommand,
    CreditCommand,
    OpenCommand,
    SessionOpened,
    StreamResultRequest,
    StreamResultResponse,
)

_PARTS = 8
"""Credit is returned once the reader has consumed this fraction (1/8) of the initial credit."""


def fold_to_attach(request_id: str, *, from_seq: int, n: int | None) -> Fold:
    """Returns the fold of a request that another stream may have started, beginning at `from_seq`.

    Raises:
        InvalidArgumentError: `n` is not given, and the event that contains it will not be sent.
    """
    if n is None and from_seq > 1:
        raise invalid_argument(
            "n", "is not given; event 1 tells it, which does not come again with this from_seq"
        )
    if n is not None and n < 1:
        raise invalid_argument("n", f"is {n}; a request has at least 1 choice")
    return Fold(request_id, n=n or 0, from_seq=from_seq)


class SessionOptions(TypedDict, total=False):
    """The options of a session; see `Client.session`."""

    lease: float | timedelta | None
    initial_credit: int
    room_timeout: float | None
    load_interval: float | timedelta | None


class Record:
    """One request of a session. `is_ours` is whether this session started it or only attached
    it.
    """

    def __init__(self, fold: Fold, *, is_ours: bool) -> None:
        self.fold = fold
        self.is_ours = is_ours
        self.wake: Callable[[], None] = lambda: None
        """Called by the flavour when the record has changed. Set by the request's handle."""
        self.on_done: Callable[[], None] | None = None
        """Called once when the request has ended. The threaded flavour holds its lock during the
        call, so the callback must not use the session.
        """
        self.number = 0
        """The request's number on the session, which identifies its events; 0 while unknown."""
        self.spec: GenerationSpec | None = None
        """The spec to send again if the server has no room; None once the server has accepted the
        request.
        """
        self.give_up_at = math.inf
        """Until when the request is sent again after refusals, in monotonic seconds."""
        self.timeout: float | None = None
        """The request's time limit in seconds. `due` is the end of that time, in monotonic seconds.
        """
        self.due = math.inf
        self.cancelled = False
        """Whether it was cancelled before the server accepted it."""
        self.refused = False
        """Whether it was refused before it had any event."""
        self.unlimited = False
        """With credits, whether everything that arrives is acknowledged immediately."""
        self.paid = 0
        """With credits, the number of the fold's chunks that count as read. `unpaid` is the number
        of their tokens that have not been reported to the server yet.
        """
        self.unpaid = 0

    @property
    def request_id(self) -> str:
        return self.fold.request_id


class Core(Protocol):
    """The bookkeeping of a session, as its handles use it; see `SessionCore`."""

    @property
    def records(self) -> dict[str, Record]: ...

    @property
    def ended(self) -> bool: ...

    @property
    def lease(self) -> float | None: ...

    @property
    def load(self) -> ServerLoad | None: ...

    def add(self, spec: GenerationSpec) -> Record: ...

    def attach(self, fold: Fold) -> Record: ...

    def close(self, *, cancel: bool) -> None: ...

    def cancel(self, record: Record) -> None: ...

    def expire(self, now: float) -> list[Record]: ...

    def pay(self, record: Record, chunks: int) -> None: ...

    def pay_all(self, record: Record) -> None: ...


class SessionCore:
    """The bookkeeping of one session with one server."""

    def __init__(
        self,
        *,
        lease: float | timedelta | None = None,
        initial_credit: int = 0,
        room_timeout: float | None = None,
        load_interval: float | timedelta | None = None,
    ) -> None:
        self.records: dict[str, Record] = {}
        """The live requests, by id."""
        self.opened: SessionOpened | None = None
        """The server's answer to `open`, if one was sent."""
        self.load: ServerLoad | None = None
        """The load that the server reported last."""
        self.error: HeadraceError | None = None
        """Why the session ended, if it has."""
        self.ended = False
        self.closing = False
        """Whether no more requests are accepted."""
        self.outbox: list[StreamResultRequest] = []
        """Commands waiting to be sent, from `receive` and the handles. The flavour sends them."""
        self.retries: list[tuple[float, Record]] = []
        """Requests to send again, each with its delay in seconds. The flavour clears it."""
        self._room_timeout = room_timeout
        self._credit = initial_credit
        self._ids = itertools.count(1)
        self._commands: dict[int, Record] = {}
        self._numbers: dict[int, Record] = {}  # the live requests, by their numbers
        self._open_id = 0
        self.on_refusal: Callable[[Record, HeadraceError], HeadraceError | None] = _as_it_is
        """Called when a request is refused and not sent again here. Returns the error that ends it,
        or None if it goes elsewhere.
        """
        self.instance_id = ""
        """The instance id of the server's process, once it has answered."""
        if lease is not None or initial_credit or load_interval is not None:
            command = OpenCommand(initial_credit=initial_credit)
            if lease is not None:
                command.lease.CopyFrom(duration(lease, "lease"))
            if load_interval is not None:
                command.load_interval.CopyFrom(duration(load_interval, "load_interval"))
            self._open_id = next(self._ids)
            self._send(StreamResultRequest(command_id=self._open_id, open=command))

    def add(self, spec: GenerationSpec) -> Record:
        """Starts a request. If it has no id, it gets one, so that it can be cancelled immediately.

        Raises:
            AlreadyExistsError: a live request of this session has the same id.
            HeadraceError: the session has ended or is being closed.
        """
        self._check_open()
        if not spec.request_id:
            spec.request_id = uuid.uuid4().hex
        record = Record(Fold(spec.request_id, n=choices_of(spec)), is_ours=True)
        if self._room_timeout is None or self._room_timeout > 0:
            record.spec = spec
        if self._room_timeout is not None:
            record.give_up_at = time.monotonic() + self._room_timeout
        self.put(record, spec)
        return record

    def put(self, record: Record, spec: GenerationSpec) -> None:
        """Starts a request that already has a record.

        Raises:
            AlreadyExistsError: a live request of this session has the same id.
        """
        self._register(record)
        self._send_for(record, StreamResultRequest(add=AddCommand(spec=spec)))

    def attach(self, fold: Fold) -> Record:
        """Continues a request of another stream, starting with the next event that its fold needs.

        If the request has ended, nothing is sent and the record has the fold's result.

        Raises:
            AlreadyExistsError: a live request of this session has the same id.
            HeadraceError: the session has ended or is being closed.
        """
        self._check_open()
        if fold.done:
            return Record(fold, is_ours=False)
        record = Record(fold, is_ours=False)
        self.put_attached(record)
        return record

    def put_attached(self, record: Record, instance_id: str = "") -> None:
        """Continues a request that already has a record. `instance_id` names its server process.

        Raises:
            AlreadyExistsError: a live request of this session has the same id.
        """
        self._register(record)
        fold = record.fold
        record.paid, record.unpaid = len(fold.chunks), 0
        command = AttachCommand(
            request_id=fold.request_id, from_seq=fold.next_seq, instance_id=instance_id
        )
        self._send_for(record, StreamResultRequest(attach=command))

    def close(self, *, cancel: bool) -> None:
        """Accepts no more requests. Live ones either run to their end without waiting for their
        readers, or are cancelled.
        """
        self.closing = True
        for record in list(self.records.values()):
            if cancel:
                self.cancel(record)
            self.pay_all(record)  # a cancelled one, too, ends behind its last token

    @property
    def lease(self) -> float | None:
        """The granted lease in seconds; None if none was requested or the server has not
        answered.
        """
        opened = self.opened
        return None if opened is None else opened.lease.seconds + opened.lease.nanos / 1e9

    @property
    def has_said_all(self) -> bool:
        """Whether there is nothing left to send.

        While a request is live, credits or a cancellation may still be sent for it, even if the
        session is being closed.
        """
        return self.ended or (self.closing and not self.records)

    def cancel(self, record: Record) -> None:
        """Asks the server to end a request; does nothing if it has ended."""
        record.cancelled = True
        if self.records.get(record.request_id) is record and not self.ended:
            command = CancelCommand(request_id=record.request_id)
            self._send(StreamResultRequest(command_id=next(self._ids), cancel=command))

    def expire(self, now: float) -> list[Record]:
        """Fails and cancels the requests whose time has run out, and returns them."""
        over = [record for record in self.records.values() if record.due <= now]
        for record in over:
            self.cancel(record)
            self.forget(record)
            record.fold.fail(timed_out(record.timeout or 0.0, record.request_id))
        return over

    def pay(self, record: Record, chunks: int) -> None:
        """With credits, returns to the server the tokens of the request's first `chunks` chunks.

        Credit is sent once it amounts to an eighth of the initial credit.
        """
        if not self._credit or self.ended or record.fold.done:
            return
        for chunk in record.fold.chunks[record.paid : chunks]:
            record.unpaid += len(chunk.token_ids)
        record.paid = max(record.paid, chunks)
        # With many credits not a command for each step: the rest lets the server go on meanwhile.
        if record.unpaid and record.unpaid >= self._credit // _PARTS:
            command = CreditCommand(request_id=record.request_id, tokens=record.unpaid)
            record.unpaid = 0
            self._send(StreamResultRequest(command_id=next(self._ids), credit=command))

    def pay_all(self, record: Record) -> None:
        """With credits, returns credit for everything that has arrived and will arrive."""
        record.unlimited = True
        self.pay(record, len(record.fold.chunks))

    def receive(self, response: StreamResultResponse) -> list[Record]:
        """Processes one message from the server. Returns the records that changed, each once.

        If `open` was refused, the session has `ended` afterwards.
        """
        changed: dict[int, Record] = {}
        self.instance_id = response.instance_id or self.instance_id
        if response.HasField("opened"):
            self.opened = response.opened
        if response.HasField("load"):
            load = response.load
            self.load = ServerLoad(load.running, load.waiting, load.kv_cache_usage)
        for rejection in response.rejections:
            if self._open_id and rejection.command_id == self._open_id:
                return self.end(error_from_status(rejection.status))
            record = self._commands.pop(rejection.command_id, None)
            if record is not None:  # else of a cancel or a credit whose request has just ended
                error = error_from_status(rejection.status, request_id=record.request_id)
                if (delay := self._delay(record, error)) is not None:
                    self.retries.append((delay, record))
                    continue
                self.forget(record)
                if (failure := self.on_refusal(record, error)) is not None:
                    record.refused = record.fold.next_seq == 1
                    record.fold.fail(failure)
                    changed[id(record)] = record
        for detached in response.detached:
            record = self._numbers.get(detached.request_number)
            if record is not None:
                self.forget(record)
                record.fold.fail(moved_error(record.request_id))
                changed[id(record)] = record
        for attached in response.attached:
            self._commands.pop(attached.command_id, None)
            record = self.records.get(attached.request_id)
            if record is not None:
                self._number(record, attached.request_number)
        for event in response.events:
            record = self._take(event)
            if record is not None:
                changed[id(record)] = record
        for record in changed.values():
            if record.unlimited:
                self.pay(record, len(record.fold.chunks))
        return list(changed.values())

    def again(self, record: Record) -> list[Record]:
        """Resends a request that was refused for lack of room. Returns the records that changed."""
        if self.ended or self.records.get(record.request_id) is not record or not record.spec:
            return []
        if record.cancelled:
            record.fold.fail(CallCancelledError("it was cancelled before the server had room"))
            self.forget(record)
            return [record]
        self._send_for(record, StreamResultRequest(add=AddCommand(spec=record.spec)))
        return []

    def _delay(self, record: Record, error: HeadraceError) -> float | None:
        """The seconds after which to resend a refused request; None if it is not resent."""
        delay = error.retry_after
        if (
            record.spec is None
            or delay is None
            or not isinstance(error, ResourceExhaustedError)
            or time.monotonic() + delay > record.give_up_at
        ):
            return None
        return delay

    def end(self, error: HeadraceError | None) -> list[Record]:
        """Records the stream's end, fails the live requests and returns them."""
        lost = self.give_up()
        self.error = error
        if lost and error is None:
            self.error = UnavailableError("the server ended the session before its requests")
        for record in lost:
            failure = self.error or UnavailableError("the session has ended")
            record.fold.fail(copy_of(failure))
        return lost

    def give_up(self) -> list[Record]:
        """Records the stream's end, and removes the live requests and returns them unchanged."""
        self.ended = True
        lost = list(self.records.values())
        self.records.clear()
        self._commands.clear()
        self._numbers.clear()
        return lost

    def _take(self, event: ResultEvent) -> Record | None:
        record = self._numbers.get(event.request_number)
        if record is None:
            self._commands.pop(event.accepted.command_id, None)
            record = self.records.get(event.accepted.request_id)
            if record is None or record.number:  # it failed here before its last events came
                return None
            self._number(record, event.request_number)
        fold = record.fold
        fold.add(event)
        if fold.done:
            is_broken = fold.error is not None and not event.HasField("failed")
            if is_broken and record.is_ours:  # do not let it run for nobody
                self.cancel(record)
            self.forget(record)
        return record

    def _number(self, record: Record, number: int) -> None:
        """Assigns the number that the server uses for a request from now on."""
        record.number = number
        record.spec = None  # it is there
        self._numbers[number] = record

    def forget(self, record: Record) -> None:
        """Removes a request, so that it receives no more events."""
        self.records.pop(record.request_id, None)
        self._numbers.pop(record.number, None)
        record.number = 0

    def _check_open(self) -> None:
        if self.ended:
            raise copy_of(self.error) if self.error else UnavailableError("the session has ended")
        if self.closing:
            raise UnavailableError("the session is being closed; it takes no more requests")

    def _register(self, record: Record) -> None:
        if record.request_id in self.records:
            raise duplicate(record.request_id)
        self.records[record.request_id] = record

    def _send_for(self, record: Record, command: StreamResultRequest) -> None:
        command.command_id = next(self._ids)
        self._commands[command.command_id] = record
        self._send(command)

    def _send(self, command: StreamResultRequest) -> None:
        self.outbox.append(with_capabilities(command))


def wake(records: list[Record]) -> None:
    """Wakes the readers of the changed records. The threaded flavour's lock is held."""
    for record in records:
        record.wake()
        if record.fold.done and record.on_done is not None:
            record.on_done()


def copy_of(error: HeadraceError) -> HeadraceError:
    """Returns a copy of the error for one request, with a separate traceback."""
    return type(error)(error.message, status=error.status)


def duplicate(request_id: str) -> AlreadyExistsError:
    """Returns the error for a request whose id is already in use on its session."""
    return AlreadyExistsError(
        f"a request {request_id!r} is live on this session", request_id=request_id
    )


def _as_it_is(_record: Record, error: HeadraceError) -> HeadraceError:
    return error
