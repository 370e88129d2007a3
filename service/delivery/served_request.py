"""One request from its start until its id is free. Only this object changes the request's state.

    engine ──▶ push ──▶ EventLog ──take──▶ its stream (a mailbox), or `read` (GetResult)
                 └──▶ state (`states`), counts (admission), timers, calls to the engine

Only `_become` sets `state`. It checks the table of `states`, and performs the actions for leaving
one state and entering another. Each event has a method named after it: `attach`, `lost`, `cancel`,
`lease_over`, … So the callers (the registry, a stream, a timer) need not know the states.

In addition to its stream, calls may wait for a request (`joined`): calls of Generate for its whole
result, and retries of AddRequest for the engine's answer. If a request exists only for such calls,
it is cancelled when the last of them has left.

Whether the engine holds the request because its output is not read (`flow`) is separate from the
state: `is_held`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import time
from collections.abc import Iterator
from typing import Protocol

from engine.contract.errors import EngineUnavailableError, HeadraceError
from engine.contract.outputs import RequestFailure, RequestOutput
from service.admission.admission_control import AdmissionControl, Holding
from service.delivery.charges import UNIT, RequestCharge, in_units
from service.delivery.engine_calls import EngineCalls
from service.delivery.events import Accepted, Failed, NumberedEvent, ReadResult, at_most
from service.delivery.flow import FlowOptions
from service.delivery.kept import LONG
from service.delivery.log import EventLog
from service.delivery.session import MAX_BATCH_BYTES, ResultStream
from service.delivery.states import TRANSITIONS, State
from service.delivery.submission import NO_LABELS, LivesBy, Submission
from service.delivery.timers import Timer
from service.delivery.waiters import Waiters
from service.errors.result_errors import OutputNotReadError, ResultsFullError, TooManyWaitError

logger = logging.getLogger(__name__)

MAX_WAITING_CALLS = 16
"""The number of calls that may wait for one request. Each receives a copy of the whole result at
the same moment. A caller that retries has one or two, because calls whose loss was not noticed yet
also wait.
"""


class RequestKeeper(Protocol):
    """The registry's interface to its requests: it finds and counts them.

    Attributes:
        admission, engine, flow: the limits, the calls to the engine, and how much output may be
            unread.
        leases, holds: the timers of requests.
    """

    admission: AdmissionControl
    engine: EngineCalls
    flow: FlowOptions
    leases: Timer[ServedRequest]
    holds: Timer[ServedRequest]

    def has_ended(self, request: ServedRequest) -> None:
        """Record that a request is no longer live."""
        ...

    def keep(self, request: ServedRequest) -> None:
        """Keep an ended request's result. It may be dropped immediately."""
        ...

    def keep_read(self, request: ServedRequest, size: int) -> None:
        """Record how many bytes of a live request's read output are kept."""
        ...

    def unkeep(self, request: ServedRequest) -> None:
        """Stop keeping a request's results."""
        ...

    def forget(self, request: ServedRequest) -> None:
        """Free a request's id."""
        ...

    def expect_reader(self, stream: ResultStream, request: ServedRequest) -> None:
        """Watch a stream's reader, because one of its requests has ended."""
        ...

    def stop_admitting(self, request: ServedRequest) -> None:
        """Cancel the admission of a request."""
        ...


class ServedRequest:
    """One request and its state; see the module. All methods run on the event loop.

    Attributes:
        account: the account that is charged.
        identity, request_id: the owner of the request, and its id there.
        engine_id: its name in the engine, unique in this process.
        serial: its number among the process's requests, from 1.
        priority, time_limit_s, adapter: as given to the engine.
        holding: what it takes from admission's limits.
        state: its current state.
        log: its events.
        lives_by: what it needs in order not to be cancelled before its end.
        digest: the hash of its call's content. A repeated call gets this request. Empty if the call
            cannot be retried.
        labels: the caller's labels; empty once it has ended.
        waiting: the number of calls that wait for it.
        stream: the stream of its results, or None if they wait to be read.
        cancel_wanted: whether its cancellation was requested.
        is_held: whether the engine was told to hold it.
        bound: the number of untaken tokens at which it is held.
        readers: tasks that wait for its events without a stream. Each event wakes them.
    """

    def __init__(
        self,
        registry: RequestKeeper,
        submission: Submission,
        holding: Holding,
        *,
        serial: int,
        keep: bool,
    ) -> None:
        """Make a request that the engine has not accepted yet. `keep`: whether its results are kept
        initially.
        """
        request = submission.request
        self.account = submission.account
        self.identity = submission.account.identity
        self.request_id = submission.request_id
        self.engine_id = request.request_id
        self.serial = serial
        self.priority = request.priority
        self.time_limit_s = request.time_limit_s
        self.adapter = request.adapter
        self.holding = holding
        self.state = State.ADMITTING
        self.log = EventLog(
            submission.request_id,
            options=submission.options,
            text_streams=submission.texts,
            replies=submission.replies,
            ending_ids=request.stop.ending_token_ids,
            prompt=request.prompt,
            now=time.monotonic(),
            keep=keep,
        )
        self.stream: ResultStream | None = None
        self.cancel_wanted = False
        self.is_held = False
        is_kept = submission.lives_by is LivesBy.ITSELF
        self.bound, self._low = registry.flow.bounds(submission.options, request.n, is_kept=is_kept)
        self._can_be_held = not (is_kept or submission.options.final)
        self._unread = RequestCharge(registry.admission, self.account)
        self._read = 0  # bytes that count as kept while it is live
        self.readers = Waiters()
        self.lives_by = submission.lives_by
        self.digest = submission.digest
        self.labels = submission.labels
        self.waiting = 0
        self._watchers = Waiters()  # for another state
        self._registry = registry

    # The state

    def _become(self, state: State) -> None:
        before = self.state
        if state not in TRANSITIONS[before]:
            raise RuntimeError(f"a request cannot go from {before.name} to {state.name}")
        self.state = state
        registry = self._registry
        if before is State.LEASED:
            registry.leases.stop(self)
        elif before is State.KEPT:
            registry.unkeep(self)
        if before.is_live and not state.is_live:
            self.is_held = False
            self.labels = NO_LABELS  # its kept size is counted without them
            registry.has_ended(self)
        self._charge()
        if state is State.GONE:
            registry.holds.stop(self)
            registry.forget(self)
        elif state is State.KEPT:
            registry.keep(self)  # there may be too much, and then it does not stay in this state
        self._watchers.wake()

    def accept(self, accepted: Accepted, arrival: float, stream: ResultStream | None) -> None:
        """Record that the engine accepted the request at `arrival`, by its monotonic clock. Its
        results go to `stream`.
        """
        self.log.accept(accepted, arrival)
        if self.state is State.ADMITTING:
            self._become(State.LIVE)
        if stream is not None:
            self.attach(stream, 1)
        elif self.state is State.ENDED:  # nobody else takes its events
            self._become(State.GONE)
        if self.cancel_wanted:
            self._registry.engine.cancel(self.engine_id)
        if self.log.untaken >= self.bound:
            self._reach_bound()
        self.readers.wake()

    def abandon(self) -> None:
        """End the request, because no client wants it any more. A stream that attaches before its
        end still gets its events. A retry of the same call does not.
        """
        self.log.keep = False
        self.lives_by = LivesBy.STREAM
        self.digest = b""
        if self.state in (State.ADMITTING, State.LIVE):
            self._become(State.ABANDONED)

    def forget(self) -> None:
        """Forget the request, because the engine does not have it or the server closes."""
        if self.state is not State.GONE:
            self._become(State.GONE)

    def keep_no_more(self) -> None:
        """Stop keeping the results. If a stream still sends them, the request and its id stay until
        they are delivered.
        """
        if self.stream is None:
            self._become(State.GONE)
        else:
            self._become(State.ENDED)
            if not self.waiting:
                self.log.keep_all(False)

    # Memory

    def _charge(self) -> None:
        """Charge the account for the current unread output, and count the read output that is kept.
        For a kept request, `registry.keep` counts everything.
        """
        log, state = self.log, self.state
        has_reader = state is not State.KEPT and (state is not State.GONE or self.waiting > 0)
        self._unread.set(log.unread_size if has_reader else 0)
        read = in_units(log.read_size) if state.is_live else 0
        if read != self._read:
            self._read = read
            self._registry.keep_read(self, read)

    def drop_read(self) -> int:
        """Drop kept output that was read, down to half of it or half of LONG, whichever is less.
        Return the number of bytes that remain.
        """
        log = self.log
        log.drop_read(min(log.read_size, LONG) // 2)
        self._read = in_units(log.read_size)
        return self._read

    def _lack_room(self) -> None:
        """Hold or end the request, because unread results leave no room for more of its output."""
        log = self.log
        if self._can_be_held:
            self._reach_bound()
        elif not log.ended and log.accepted is not None:
            cause = self._registry.admission.no_room(self.account)
            self._unread.leave()
            self._end_unread(ResultsFullError(cause, log.output_tokens))

    # What comes from the engine

    def push(self, output: RequestOutput, now: float) -> None:
        """Add one step's output of one choice, and wake its readers. Called for every token, so
        kept short.
        """
        log = self.log
        try:
            stop = log.push(output, now)
        except Exception as error:
            self._break(now, error)
        else:
            if stop is not None:
                engine = self._registry.engine
                engine.finish(self.engine_id, stop.num_tokens, output.choice)
        if log.unread_size - self._unread.size >= UNIT:
            self._charge()
            if not self._registry.admission.has_room(self.account):
                self._lack_room()
        if log.untaken >= self.bound:
            self._reach_bound()
        stream = self.stream
        if stream is not None and log.is_takeable:
            stream.mark(self)
        if self.readers:
            self.readers.wake()
        if log.ended:
            self._end()

    def _tell(self) -> None:
        """Wake the stream and the readers, because there are new events."""
        if self.stream is not None and self.log.is_takeable:
            self.stream.mark(self)
        self.readers.wake()
        if self.log.ended:
            self._end()

    def _break(self, now: float, error: Exception) -> None:
        """End only this request, because the front end failed to process it."""
        error_id = secrets.token_hex(8)
        logger.error("delivery of a request failed [error_id=%s]", error_id, exc_info=error)
        failure = RequestFailure("the request's output could not be delivered", error_id)
        self.log.fail(failure, now)
        self._registry.engine.cancel(self.engine_id)

    def _end(self) -> None:
        """Handle the request's terminal events."""
        if not self.state.is_live:
            return
        self._watch_hold()
        if self.log.failure is not None:
            self._log_failure(self.log.failure)
        if self.stream is not None:
            self._registry.expect_reader(self.stream, self)
        is_calls = self.lives_by is LivesBy.CALLS and self.stream is None
        if is_calls and self.state is not State.LEASED:
            # A failure goes to the waiting calls, and is not kept: the same call again is a new
            # attempt.
            self.log.keep = bool(self.digest) and self.log.failure is None
        if self.log.keep:
            self._become(State.KEPT)
        elif self.state is State.ABANDONED or (is_calls and self.state is not State.ADMITTING):
            self._become(State.GONE)
        else:  # Its stream has it, or (ADMITTING) is about to; else `accept` forgets it.
            self._become(State.ENDED)

    def _log_failure(self, failed: Failed) -> None:
        """Log a failure that is not the caller's fault. The log of the failed component has the
        cause, under the same error id. Requests lost by a dead engine are not logged individually.
        """
        failure = failed.finish.failure
        if failed.error is not None or failure is None:
            return
        if failure.field is None and not failure.retryable:
            labels = f": {json.dumps(dict(self.labels))}" if self.labels else ""
            logger.warning(
                "request %s of %s failed [error_id=%s]%s",
                self.request_id,
                self.identity,
                failure.error_id,
                labels,
                extra={"request_id": self.request_id, "adapter": self.adapter},
            )

    def cancel(self) -> None:
        """Cancel the request. Its terminal event follows within one step."""
        self.cancel_wanted = True
        if self.log.accepted is not None:  # else `accept` does it
            self._registry.engine.cancel(self.engine_id)

    # Streams

    def attach(self, stream: ResultStream, from_seq: int) -> int:
        """Send the events from `from_seq` on to this stream instead of the current one. Return the
        request's number on the stream.

        Raises:
            ResultGoneError: not all of these events are available.
        """
        log = self.log
        log.check_from(from_seq)
        before = self.stream
        if before is not stream:
            if before is not None:
                before.moved_away(self)
                self._leave()
            self.stream = stream
            stream.add(self)
            if not self.state.is_live:
                self.holding.take_place()
        number = stream.requests[self]
        log.move_to(from_seq, stream.initial_credit)
        self._charge()
        if self.state.is_live:
            if self.state is not State.LIVE:
                self._become(State.LIVE)
            log.keep_all(self.lives_by is not LivesBy.STREAM or stream.lease_s > 0)
        if log.is_takeable:
            stream.mark(self)
        elif log.delivered:
            self.leave()
        if self.stream is not None:
            self._have_taken()
            if stream.is_over:  # the stream was lost while the request was on its way
                self.lost(stream.lease_s)
            elif log.ended:
                self._registry.expect_reader(stream, self)
        return number

    def take(self, limit: int) -> list[NumberedEvent]:
        """Take pending events for the stream, about `limit` bytes at most."""
        log = self.log
        events = log.take_for_stream(limit)
        self._charge()
        if log.ended and log.delivered:
            self.leave()
            return events
        credit = log.credit
        if self.is_held or (log.ended and credit is not None):
            self._have_taken()
        if (log.cursor < log.next_seq or credit is not None) and log.is_takeable and self.stream:
            self.stream.mark(self)  # the rest goes into the next message
        return events

    def lost(self, lease_s: float) -> None:
        """Handle the loss of the stream before delivery was complete. The request continues for the
        lease.
        """
        self._leave()
        self.log.credit = None
        if self.state is State.ENDED:
            self._become(State.GONE)
        elif self.state is State.LIVE and self.lives_by is not LivesBy.ITSELF:
            if lease_s > 0:
                self._become(State.LEASED)
                self._registry.leases.start(self, lease_s)
                self.readers.wake()  # a waiting call now reads it
            else:
                self._end_if_alone()

    def lease_over(self) -> None:
        """Handle the end of the lease without a new stream."""
        if self.lives_by is LivesBy.CALLS and self.waiting:
            self._become(State.LIVE)
        else:
            self.cancel()

    def _end_if_alone(self) -> None:
        """End the request if nothing waits for it: its stream was lost without a lease, or the last
        waiting call has left.
        """
        if self.lives_by is LivesBy.CALLS and self.waiting:
            return
        self.abandon()
        self.cancel()

    def leave(self) -> None:
        """Leave the stream, which has taken the last event or is not read."""
        self._leave()
        if self.state is State.ENDED:
            self._become(State.GONE)

    def _leave(self) -> None:
        if self.stream is not None:
            self.stream.remove(self)
            self.stream = None
            if not self.state.is_live:
                self.holding.release(served=True)
        self._registry.holds.stop(self)

    # Flow control

    def grant(self, tokens: int, stream: ResultStream) -> None:
        """Allow `tokens` more tokens to be sent on this stream. Has no effect if the request is on
        another stream.
        """
        log = self.log
        if self.stream is stream and log.credit is not None:
            log.credit += tokens
            if log.is_takeable:
                stream.mark(self)
            self._watch_hold()

    def _reach_bound(self) -> None:
        """Hold or end the request, because its untaken output has reached the limit."""
        if self.is_held or self.log.ended or self.log.accepted is None:
            return
        if self._registry.flow.ends:
            self.hold_over()
            return
        self.is_held = True
        self._registry.engine.hold(self.engine_id)
        self._watch_hold()

    def _have_taken(self) -> None:
        """Let the request continue if possible, because events were taken or the reader changed."""
        if self.is_held and not self.log.ended and self.log.untaken <= self._low:
            self.is_held = False
            self._registry.engine.unhold(self.engine_id)
        self._watch_hold()

    def _watch_hold(self) -> None:
        """Restart or stop the timer for how long the request is held."""
        log = self.log
        if log.ended:
            waits = log.credit is not None and not log.delivered and not log.is_takeable
        else:
            waits = self.is_held
        registry = self._registry
        if waits and self.stream is not None:
            registry.holds.start(self, registry.flow.max_hold_s)
        else:
            registry.holds.stop(self)

    def hold_over(self) -> None:
        """Handle the end of the hold: the stream took nothing for max_hold, or holding is not
        allowed.
        """
        self.log.credit = None  # its pending events are sent with its end
        if not self.log.ended:
            waited_s = self._registry.flow.max_hold_s if self.is_held else None
            self._end_unread(OutputNotReadError(self.log.untaken, waited_s))
        elif self.stream is not None:
            self.stream.mark(self)

    def _end_unread(self, error: HeadraceError) -> None:
        """End only this request, because its output is not read, or unread results take too much
        room.
        """
        self.log.flush()
        failure = RequestFailure(str(error), secrets.token_hex(8))
        self.log.fail(failure, time.monotonic(), error)
        self._registry.engine.cancel(self.engine_id)
        self._tell()

    # Reading without a stream

    async def read(self, from_seq: int, *, until_done: bool, wait_s: float) -> ReadResult:
        """Return the events from a number on, as many as fit in one message. If there are none, or
        (with `until_done`) the request has not ended, wait up to `wait_s` seconds, then return the
        available events. Nothing is consumed.

        Raises:
            ResultGoneError: not all events from `from_seq` on are available.
        """
        log = self.log
        log.check_from(from_seq)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while not (log.ended or (not until_done and log.has(from_seq)) or wait_s == 0):
                    if until_done and self.is_held and self.stream is None:
                        # It waits for a reader, which is this one. Events that were read are kept.
                        log.take_from(log.next_seq)
                        self._read_to(log.next_seq)
                    await self.readers.wait()
        log.check_from(from_seq)  # it may have been dropped meanwhile
        events = at_most(log.take_from(from_seq), MAX_BATCH_BYTES)
        next_seq = events[-1].seq + 1 if events else from_seq
        self._read_to(next_seq)
        return ReadResult(events, next_seq, log.ended and next_seq == log.next_seq)

    def _read_to(self, seq: int) -> None:
        """Record that a reader has all events before `seq`. This only matters if the request has no
        stream.
        """
        if self.stream is None and self.log.cursor < seq:
            self.log.move_to(seq)
            self._charge()
            self._have_taken()

    # Calls that wait for it

    @contextlib.contextmanager
    def joined(self) -> Iterator[None]:
        """Return a context manager within which a call waits for the request.

        Raises:
            TooManyWaitError: the maximum number of calls already wait.
        """
        if self.waiting >= MAX_WAITING_CALLS:
            raise TooManyWaitError(self.request_id, MAX_WAITING_CALLS)
        self.waiting += 1
        try:
            yield
        finally:
            self.left()

    def left(self) -> None:
        """Record that a call no longer waits for the request."""
        self.waiting -= 1
        if self.waiting:
            return
        self._charge()
        if self.state is State.ENDED:
            self.log.keep_all(False)  # its stream still has events to take
        elif self.lives_by is LivesBy.CALLS and self.stream is None:
            if self.state is State.ADMITTING:
                self._registry.stop_admitting(self)
            elif self.state is State.LIVE:
                self._end_if_alone()

    async def whole(self) -> list[NumberedEvent]:
        """Wait for the request's end and return all of its events. Only for an accepted request.

        Raises:
            RequestFailedError: it failed.
            ResultGoneError: some of its events are no longer kept.
            EngineUnavailableError: the server is closing.
        """
        log = self.log
        while not log.ended:
            if self.state is State.GONE:
                raise EngineUnavailableError("the server stops; try another one, or later")
            await self.another_state()
        log.raise_failure()
        log.check_from(1)
        return log.take_from(1)

    async def another_state(self) -> None:
        """Wait until the state changes."""
        await self._watchers.wait()
