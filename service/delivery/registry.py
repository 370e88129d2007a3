"""All requests that are running, or whose results are kept: by identity and request id.

A request enters by `start` and leaves
- when its last event was taken by its stream, where nothing is kept (Generate, GenerateStream,
  sessions without a lease);
- else when its retention after the end has passed, or when newer results need the room
  (`service.delivery.kept`).

A request whose stream is lost goes on for the stream's lease and is then cancelled; one that came
by AddRequest depends on no stream. One whose output is not read is held, or ended (`flow`). All
methods run on one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
import time
from collections.abc import Iterable, Iterator

from engine.client import EngineClient
from engine.errors import DuplicateRequestError, RequestNotFoundError
from engine.outputs import RequestFailure, StepOutputs
from engine.types import CallerKey, RequestId
from service.accounts import Account
from service.admission import AdmissionControl, Holding
from service.delivery.calls import EngineCalls
from service.delivery.errors import OutputNotReadError
from service.delivery.events import (
    ALREADY_FINISHED,
    CANCELLED,
    NOT_FOUND,
    Accepted,
    ReadResult,
    at_most,
)
from service.delivery.flow import FlowControl, FlowOptions
from service.delivery.kept import KeptResults, Retention
from service.delivery.log import RequestLog
from service.delivery.session import MAX_BATCH_BYTES, ResultStream
from service.delivery.stats import RegistryStats
from service.delivery.submission import Submission

logger = logging.getLogger(__name__)

UNREAD_S = 300.0
"""How long a stream whose client reads nothing may hold requests that have ended; twice `max_pause`
where that is longer, since a stream without credit takes nothing that long.
"""


class Registry:
    """The requests of this process."""

    def __init__(
        self,
        client: EngineClient,
        retention: Retention,
        admission: AdmissionControl,
        flow: FlowOptions,
    ) -> None:
        self._client = client
        self._admission = admission
        self._retention = retention
        self._engine = EngineCalls(client)
        self.flow = FlowControl(
            flow,
            hold=lambda log: self._engine.hold(log.engine_id),
            unhold=lambda log: self._engine.unhold(log.engine_id),
            end=self._end_unread,
        )
        self._logs: dict[tuple[str, str], RequestLog] = {}
        self._by_engine: dict[RequestId, RequestLog] = {}
        self._kept = KeptResults(retention.max_results, retention.max_bytes)
        self._numbers = itertools.count(1)
        self._serials = itertools.count(1)
        self._admitting: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._live = 0
        self._arriving = 0
        self.unread_s = max(UNREAD_S, 2 * flow.max_pause_s)
        self.streams: set[ResultStream] = set()
        self.attached = 0  # requests on streams, ended and unread ones too; counted by ResultStream

    # Starting

    def engine_id(self, identity: str, request_id: str) -> RequestId:
        """A name for the engine: tells whose request it is, and is never used twice."""
        return RequestId(f"{identity}/{request_id}#{next(self._numbers)}")

    @property
    def live(self) -> int:
        """Requests that have not ended."""
        return self._live

    def stats(self) -> RegistryStats:
        """How much there is now."""
        return RegistryStats(
            live=self._live,
            streams=len(self.streams),
            attached=self.attached,
            kept=self._kept.count,
            kept_bytes=self._kept.size,
        )

    def live_logs(self, identity: str | None = None) -> list[RequestLog]:
        """The requests that have not ended, of one identity or all, by serial."""
        logs = self._by_engine.values()
        return [log for log in logs if identity is None or log.identity == identity]

    def check_free(self, account: Account, request_id: str) -> None:
        """Refuse a name that is taken, and any request where too many are open, of this identity or
        of all.

        Raises:
            DuplicateRequestError, LimitReachedError: as they say.
        """
        if (account.identity, request_id) in self._logs:
            raise DuplicateRequestError(request_id)
        self._admission.check_place(account)
        self._admission.check_bytes(account, self._undelivered_bytes)

    def weight_of(self, account: Account) -> float:
        """How much service an account is due; see AdmissionControl."""
        return self._admission.weight_of(account)

    def _undelivered_bytes(self) -> dict[CallerKey, tuple[Account, int]]:
        """About how many bytes of results each account did not read, but for ended requests that
        are kept: these have a bound of their own.
        """
        found: dict[CallerKey, tuple[Account, int]] = {}
        for log in self._logs.values():
            if not (log.ended and log.keep) and (size := log.held_size):
                account = log.account
                _, before = found.get(account.key, (account, 0))
                found[account.key] = (account, before + size)
        return found

    def on_taken(self, num_bytes: int) -> None:
        """A stream took about so many bytes of results."""
        self._admission.delivered(num_bytes)

    @contextlib.contextmanager
    def arriving(self) -> Iterator[None]:
        """Around what is done for a request before `start`, and `start`: `wait_idle` waits for
        it.
        """
        self._arriving += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._arriving -= 1
            self._check_idle()

    def holding(self, account: Account) -> Holding:
        """For what a request is about to hold, around all that is done for it before it is live."""
        return self._admission.holding(account)

    async def start(
        self,
        submission: Submission,
        holding: Holding,
        stream: ResultStream | None,
        *,
        durable: bool = False,
        command_id: int = 0,
    ) -> RequestLog:
        """Hand a request to the engine, and its results to `stream` (or keep them, where durable).
        `holding`: what it holds, which is released at its end.

        A caller that is cancelled meanwhile takes the request with it, unless its results are to be
        kept (durable, or a lease): who asked for that may come back, and the request goes on.

        Raises:
            DuplicateRequestError, LimitReachedError: as they say.
            InvalidRequestError: also where it needs more tokens than there may ever be.
            UnsupportedFeatureError, QueueFullError, CompileQueueFullError, EngineUnavailableError:
                the engine's refusals.
        """
        self.check_free(submission.account, submission.request_id)
        request, make_text = submission.request, submission.make_text
        log = RequestLog(
            account=submission.account,
            request_id=submission.request_id,
            engine_id=request.request_id,
            options=submission.options,
            text_streams=[make_text() if make_text is not None else None for _ in range(request.n)],
            ending_ids=request.stop.ending_token_ids,
            prompt=request.prompt,
            now=time.monotonic(),
            on_stop=self._on_stop,
            flow=self.flow.of(submission.options, request.n, is_kept=durable),
        )
        log.priority = request.priority
        log.reserved_tokens = submission.reserved_tokens
        log.time_limit_s = request.time_limit_s
        log.durable = durable
        log.keep = durable or (stream is not None and stream.lease_s > 0)
        log.holding = holding
        self._admission.reserve(log.account, log.reserved_tokens)
        holding.take_over()
        self._add(log)
        admitting = self._admit(log, submission, stream, command_id)
        if log.keep:
            key = log.identity, log.request_id
            self._admitting[key] = task = self._engine.spawn(admitting)
            task.add_done_callback(lambda done: self._settle(key, done))
            await asyncio.shield(task)
        else:
            await admitting
        return log

    async def _admit(
        self, log: RequestLog, submission: Submission, stream: ResultStream | None, command_id: int
    ) -> None:
        request = submission.request
        try:
            admission = await self._client.submit(request)
        except asyncio.CancelledError:
            # Whether the engine has it is not known: end it there, and here once that is certain.
            log.keep = log.durable = False
            log.abandoned = True
            self._engine.spawn(self._abandon(log))
            raise
        except BaseException:
            self._forget(log)
            raise
        log.accept(
            Accepted(
                sampling=request.sampling,
                stop=request.stop,
                stop_strings=submission.stop_strings,
                include_stop=submission.include_stop,
                prompt_tokens=len(request.prompt),
                queue_position=admission.queue_position,
                command_id=command_id,
                accepted_at=time.time(),
                n=request.n,
            ),
            admission.arrival,
        )
        if stream is not None:
            stream.attach(log, 1)
        if log.cancel_wanted:
            self._engine.cancel(log.engine_id)
        if log.untaken >= log.flow.bound:
            self.flow.pushed(log)
        log.notify()

    def _settle(self, key: tuple[str, str], task: asyncio.Task[None]) -> None:
        if self._admitting.get(key) is task:  # else it was refused, and tried again at once
            del self._admitting[key]

    async def settled(self, identity: str, request_id: str) -> None:
        """Wait while it is open whether the engine takes a request of this name in, where that
        does not depend on its caller any more: until then it is neither there nor refused.
        """
        task = self._admitting.get((identity, request_id))
        if task is not None:
            await asyncio.wait([task])

    def _add(self, log: RequestLog) -> None:
        log.serial = next(self._serials)
        self._logs[log.identity, log.request_id] = log
        self._by_engine[log.engine_id] = log
        self._live += 1
        self._admission.take_place(log.account)
        self._idle.clear()

    def _forget(self, log: RequestLog) -> None:
        """The request is gone: its name is free."""
        if self._logs.get((log.identity, log.request_id)) is log:
            del self._logs[log.identity, log.request_id]
        if log.timer is not None:
            log.timer.cancel()
            log.timer = None
        self._kept.discard(log)
        self.flow.over(log)
        if self._by_engine.pop(log.engine_id, None) is not None:
            self._count_end(log)

    def _count_end(self, log: RequestLog) -> None:
        """It does not run any more."""
        self._live -= 1
        served = log.accepted is not None
        self._admission.free(log.account, log.reserved_tokens, served=served)
        if log.holding is not None:
            log.holding.release(served=served)
        if log.stream is None:
            self._admission.leave_place(log.account, served=served)
        self._check_idle()

    def _check_idle(self) -> None:
        if self._live == 0 and self._arriving == 0:
            self._idle.set()

    # Results

    def on_step(self, step: StepOutputs) -> None:
        """The engine's sink: take one step's outputs and wake the streams concerned."""
        logs = self._by_engine
        now = step.time
        for output in step.outputs:
            log = logs.get(output.request_id)
            if log is None:
                continue
            try:
                log.push(output, now)
            except Exception as error:
                self._fail(log, now, error)
            if log.untaken >= log.flow.bound:
                self.flow.pushed(log)
            self._tell(log)

    def _tell(self, log: RequestLog) -> None:
        """Something of a request has come: wake who waits for it."""
        stream = log.stream
        if stream is not None and log.is_takeable:
            stream.mark(log)
        if log.watchers:
            log.notify()
        if log.ended:
            self._on_end(log)

    def _end_unread(self, log: RequestLog) -> None:
        """Nobody reads the request's output: it alone ends."""
        options = self.flow.options
        waited_s = options.max_pause_s if log.flow.is_held else None
        error = OutputNotReadError(log.untaken, waited_s)
        log.flush()
        failure = RequestFailure(str(error), secrets.token_hex(8))
        log.fail(failure, time.monotonic(), error)
        self._engine.cancel(log.engine_id)
        self._tell(log)

    def _fail(self, log: RequestLog, now: float, error: Exception) -> None:
        """The front end could not go on with this request: it alone ends."""
        error_id = secrets.token_hex(8)
        logger.error("delivery of a request failed [error_id=%s]", error_id, exc_info=error)
        log.fail(RequestFailure("the request's output could not be delivered", error_id), now)
        self._engine.cancel(log.engine_id)

    def _on_stop(self, log: RequestLog, choice: int, num_tokens: int) -> None:
        self._engine.finish(log.engine_id, num_tokens, choice)

    def _on_end(self, log: RequestLog) -> None:
        """The last terminal event is there."""
        if self._by_engine.pop(log.engine_id, None) is None:
            return
        self._count_end(log)
        if log.timer is not None:  # a lease that was running: from now on it is the retention's
            log.timer.cancel()
            log.timer = None
        self.flow.over(log)
        if log.stream is not None:
            log.stream.expect_reader(log, self.unread_s)
        if log.keep:
            self._retain(log)
        elif log.stream is None and (log.accepted is not None or log.abandoned):
            # Nobody will take it. (One that is not accepted yet is about to get its stream.)
            self._forget(log)

    def _retain(self, log: RequestLog) -> None:
        loop = asyncio.get_running_loop()
        log.timer = loop.call_later(self._retention.retention_s, self._keep_no_more, log)
        self._kept.add(log, log.held_size)
        while (surplus := self._kept.surplus()) is not None:
            self._keep_no_more(surplus)

    def _keep_no_more(self, log: RequestLog) -> None:
        """Its results need not be kept. A stream that still sends them has the request, and its
        name, until they are delivered.
        """
        if log.stream is None:
            self._forget(log)
            return
        self._kept.discard(log)
        if log.timer is not None:
            log.timer.cancel()
            log.timer = None
        log.keep = False
        log.drop_taken()

    # Streams

    def on_attached(self, log: RequestLog) -> None:
        """A stream has the log."""
        self.attached += 1
        if log.engine_id not in self._by_engine:
            self._admission.take_place(log.account)

    def on_detached(self, log: RequestLog) -> None:
        """It has it no more."""
        self.attached -= 1
        if log.engine_id not in self._by_engine:
            self._admission.leave_place(log.account)

    def on_delivered(self, log: RequestLog) -> None:
        """A stream took the log's last event."""
        if not log.keep:
            self._forget(log)

    def on_given_up(self, log: RequestLog) -> None:
        """A stream's client does not read the log's last events."""
        if not log.keep:
            self._forget(log)

    def on_lost(self, stream: ResultStream, logs: Iterable[RequestLog]) -> None:
        """A stream was lost with these requests on it."""
        loop = asyncio.get_running_loop()
        for log in logs:
            log.stream = log.credit = None
            self.flow.moved(log)
            if log.ended:
                if not log.keep:
                    self._forget(log)
            elif log.durable:
                continue
            elif stream.lease_s > 0:
                log.timer = loop.call_later(stream.lease_s, self._on_lease_end, log)
                log.notify()  # a GetResult that waits is its reader now
            else:
                log.keep = False
                self.cancel_log(log)

    def _on_lease_end(self, log: RequestLog) -> None:
        log.timer = None
        if log.stream is None and not log.ended:
            self.cancel_log(log)

    def attach(self, identity: str, request_id: str, from_seq: int, stream: ResultStream) -> None:
        """Move a request's results to a stream.

        Raises:
            RequestNotFoundError: no request of that name is kept for this identity.
            ResultGoneError: the events from `from_seq` on are not all there.
        """
        log = self.find(identity, request_id)
        log.check_from(from_seq)
        if log.timer is not None and not log.ended:
            log.timer.cancel()
            log.timer = None
        stream.attach(log, from_seq)
        if not log.ended:
            keep = log.durable or stream.lease_s > 0
            if log.keep and not keep:
                log.drop_taken()
            log.keep = keep

    def grant(self, identity: str, request_id: str, tokens: int, stream: ResultStream) -> None:
        """Let so many more tokens of a request be sent on its stream. Harmless for one that is not
        there (any more).
        """
        log = self._logs.get((identity, request_id))
        if log is not None and log.stream is stream and log.credit is not None:
            log.credit += tokens
            if log.is_takeable:
                stream.mark(log)
            self.flow.moved(log)

    def find(self, identity: str, request_id: str) -> RequestLog:
        """The log of an accepted request.

        Raises:
            RequestNotFoundError: no request of that name is here for this identity.
        """
        log = self._logs.get((identity, request_id))
        if log is None or log.accepted is None:
            raise RequestNotFoundError(request_id)
        return log

    async def read(
        self, identity: str, request_id: str, from_seq: int, *, until_done: bool, wait_s: float
    ) -> ReadResult:
        """A request's events from a number on, as many as fit one message. Where there are none, or
        (`until_done`) it has not ended, so many seconds are waited; the answer is then what there
        is. Nothing is consumed.

        Raises:
            RequestNotFoundError: no request of that name is here for this identity.
            ResultGoneError: the events from `from_seq` on are not all there (any more).
        """
        await self.settled(identity, request_id)
        log = self.find(identity, request_id)
        log.check_from(from_seq)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while not (log.ended or (not until_done and log.has(from_seq)) or wait_s == 0):
                    if until_done and log.flow.is_held and log.stream is None:
                        # It waits for a reader, which is this one. What is read is kept.
                        log.take_from(log.next_seq)
                        self._read_to(log, log.next_seq)
                    await log.changed()
        log.check_from(from_seq)  # it may have been let go meanwhile
        events = at_most(log.take_from(from_seq), MAX_BATCH_BYTES)
        next_seq = events[-1].seq + 1 if events else from_seq
        self._read_to(log, next_seq)
        return ReadResult(events, next_seq, log.ended and next_seq == log.next_seq)

    def _read_to(self, log: RequestLog, seq: int) -> None:
        """A reader has all before this event: where a request has no stream, that counts."""
        if log.stream is None and log.cursor < seq:
            log.move_to(seq)
            self.flow.taken(log)

    # Ending

    def cancel(self, identity: str, request_id: str) -> str:
        """End a request by its name; returns CANCELLED, ALREADY_FINISHED or NOT_FOUND. Does not
        wait.
        """
        log = self._logs.get((identity, request_id))
        if log is None:
            return NOT_FOUND
        if log.ended:
            return ALREADY_FINISHED
        self.cancel_log(log)
        return CANCELLED

    def cancel_log(self, log: RequestLog) -> None:
        """End a request: its terminal event follows within one step."""
        log.cancel_wanted = True
        if log.accepted is not None:  # else `start` does it
            self._engine.cancel(log.engine_id)

    def cancel_all(self) -> None:
        """End all requests."""
        for log in list(self._by_engine.values()):
            self.cancel_log(log)

    async def wait_idle(self) -> None:
        """Wait until no request is live, or about to be."""
        await self._idle.wait()

    async def close(self) -> None:
        """Forget everything and wait for what is under way."""
        for log in list(self._logs.values()):
            self._forget(log)
        for task in self._admitting.values():
            task.cancel()
        await self._engine.settle()

    async def _abandon(self, log: RequestLog) -> None:
        live = False
        try:
            live = await self._client.cancel(log.engine_id)
        except Exception:
            logger.exception("cancelling %s in the engine failed", log.engine_id)
        if not live:
            self._forget(log)
