"""Finds all requests that run or have kept results, by identity and request id.

Each request changes its own state (`served_request`, by the table of `states`). This module has the
tables to find requests, their counts and limits, and the timers. All methods run on one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from engine.contract.engine_client import EngineClient
from engine.contract.errors import (
    DuplicateRequestError,
    EngineUnavailableError,
    RequestNotFoundError,
)
from engine.contract.outputs import StepOutputs
from engine.contract.types import RequestId
from service.admission.accounts import Account
from service.admission.admission_control import AdmissionControl, Holding
from service.delivery.charges import AnswerCharges, StreamCharge
from service.delivery.engine_calls import EngineCalls
from service.delivery.events import ALREADY_FINISHED, CANCELLED, NOT_FOUND, Accepted, ReadResult
from service.delivery.flow import FlowOptions
from service.delivery.joining import join
from service.delivery.kept import KeptResults, Retention
from service.delivery.served_request import ServedRequest
from service.delivery.session import ResultStream
from service.delivery.states import State
from service.delivery.submission import Submission
from service.delivery.timers import Timer
from service.errors.result_errors import OtherContentError, ResultDroppedError

logger = logging.getLogger(__name__)

UNREAD_S = 300.0
"""The seconds that a stream may keep ended requests while its client reads nothing. If twice
`max_hold` is longer, that applies, because a stream without credit takes nothing for that long.
"""
MAX_DROPPED = 4096
"""The number of dropped results whose reason for being dropped is remembered."""
_EXPIRED = "the time for which it is kept (result_retention) has passed"
_CROWDED = "later ones needed the room (max_kept_results, max_kept_bytes)"


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryStats:
    """The registry's counts at one moment, by the names of FrontEndStatistics.

    Attributes:
        live_requests: requests that have not ended.
        open_streams: open streams.
        streamed_requests: requests on these streams, including ended ones with unread results.
        kept_results: ended requests whose results are kept.
        kept_result_bytes: the approximate size of kept results, including the read output that is
            kept of live requests.
    """

    live_requests: int
    open_streams: int
    streamed_requests: int
    kept_results: int
    kept_result_bytes: int


class Registry:
    """The requests of this process.

    Attributes:
        requests: all requests, by identity and request id.
        streams: the open streams.
        kept: the ended requests whose results are kept.
        unread_s: how long a stream may keep ended requests while its client reads nothing.
        clock: returns monotonic seconds.
        answers: the charges for answers of one message.
        flow, engine, admission, leases, retentions, holds: used by the requests.
    """

    def __init__(
        self,
        client: EngineClient,
        retention: Retention,
        admission: AdmissionControl,
        flow: FlowOptions,
    ) -> None:
        self._client = client
        self._retention = retention
        self.admission = admission
        self.answers = AnswerCharges(admission)
        self.flow = flow
        self.engine = EngineCalls(client)
        self.leases = Timer(ServedRequest.lease_over)
        self.retentions = Timer(partial(self._drop_kept, why=_EXPIRED))
        self.holds = Timer(ServedRequest.hold_over)
        self._unread = Timer(self.check_reader)
        self.requests: dict[tuple[str, str], ServedRequest] = {}
        self._live: dict[RequestId, ServedRequest] = {}
        self._dropped: dict[tuple[str, str], str] = {}  # why a result is no longer kept
        self.kept = KeptResults[ServedRequest](retention.max_results, retention.max_bytes)
        self._numbers = itertools.count(1)
        self._serials = itertools.count(1)
        self._admitting: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._arriving = 0
        self.unread_s = max(UNREAD_S, 2 * flow.max_hold_s)
        self.clock = time.monotonic
        self.streams: set[ResultStream] = set()

    # Starting

    @property
    def live(self) -> int:
        """The number of requests that have not ended."""
        return len(self._live)

    @property
    def under_way(self) -> int:
        """The number of calls to the engine that are not answered yet."""
        return self.engine.num_open + len(self._admitting)

    def stats(self) -> RegistryStats:
        """Return the current counts."""
        return RegistryStats(
            live_requests=self.live,
            open_streams=len(self.streams),
            streamed_requests=sum(len(stream.requests) for stream in self.streams),
            kept_results=self.kept.count,
            kept_result_bytes=self.kept.size,
        )

    def live_requests(self, identity: str | None = None) -> list[ServedRequest]:
        """Return the requests that have not ended, of one identity or of all, sorted by serial."""
        live = self._live.values()
        return [request for request in live if identity is None or request.identity == identity]

    def new_name(self, identity: str, request_id: str) -> RequestId:
        """Make a request's name in the engine. It contains the identity and is never used twice.

        Raises:
            DuplicateRequestError: a request with this id exists.
        """
        if (identity, request_id) in self.requests:
            raise DuplicateRequestError(request_id)
        return RequestId(f"{identity}/{request_id}#{next(self._numbers)}")

    @contextlib.contextmanager
    def arriving(self) -> Iterator[None]:
        """Return a context manager for the preparation and `start` of a request. `wait_idle` waits
        for it to exit.
        """
        self._arriving += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._arriving -= 1
            self._check_idle()

    async def retried(self, identity: str, request_id: str, digest: bytes) -> ServedRequest | None:
        """Return the request that an earlier, identical call started, or None if no request has
        this id. If a request with this id is being abandoned, wait for its end, so that there are
        never two with one id. `digest`: the hash of the call's content.

        Raises:
            OtherContentError: the id belongs to a request of a different call.
            TooManyWaitError: too many calls already wait.
        """
        key = identity, request_id
        while (request := self.requests.get(key)) is not None:
            if request.state is State.ABANDONED:
                with request.joined():
                    await request.another_state()
            elif request.digest == digest:
                return request
            elif key in self._admitting:
                await self.settled(identity, request_id)
            else:
                raise OtherContentError(request_id)
        return None

    async def start(
        self,
        submission: Submission,
        holding: Holding,
        stream: ResultStream | None,
        *,
        command_id: int = 0,
    ) -> ServedRequest:
        """Submit a request to the engine, with its results going to `stream`. Without a stream, the
        calling RPC counts as waiting for the request until it calls `ServedRequest.left`.
        `holding`: what the request takes from the limits, released at its end.

        If the caller is cancelled meanwhile, the request ends too, unless another call waits for it
        or its results are kept (AddRequest, or a lease). In that case the request continues,
        because the client may come back.

        Raises:
            DuplicateRequestError: a request with this id exists.
            InvalidRequestError, UnsupportedFeatureError, QueueFullError, CompileQueueFullError,
                EngineUnavailableError: the engine refused the request.
        """
        key = submission.account.identity, submission.request_id
        if key in self.requests:  # it was started meanwhile
            raise DuplicateRequestError(submission.request_id)
        request = ServedRequest(
            self,
            submission,
            holding,
            serial=next(self._serials),
            keep=stream is None or stream.lease_s > 0,
        )
        holding.is_taken_over = True
        self.requests[key] = request
        self._dropped.pop(key, None)
        self._live[request.engine_id] = request
        self._idle.clear()
        admitting = self._admit(request, submission, stream, command_id)
        if not request.log.keep:
            await admitting
            return request
        self._admitting[key] = task = self.engine.spawn(admitting)
        task.add_done_callback(lambda done: self._settle(key, done))
        if stream is not None:
            await join(task)
            return request
        request.waiting = 1
        try:
            await join(task)
        except BaseException:
            request.left()
            raise
        return request

    def stop_admitting(self, request: ServedRequest) -> None:
        """Cancel the admission of this request, because no call waits for the engine's answer any
        more.
        """
        self._admitting[request.identity, request.request_id].cancel()

    async def _admit(
        self,
        request: ServedRequest,
        submission: Submission,
        stream: ResultStream | None,
        command_id: int,
    ) -> None:
        asked = submission.request
        try:
            admission = await self._client.submit(asked)
        except asyncio.CancelledError:
            # The engine may or may not have the request: end it there, and here once that is
            # certain.
            request.abandon()
            self.engine.spawn(self._abandon(request))
            raise
        except BaseException:
            request.forget()
            raise
        accepted = Accepted(
            request_id=request.request_id,
            sampling=asked.sampling,
            stop=asked.stop,
            stop_strings=submission.stop_strings,
            include_stop=submission.include_stop,
            max_reasoning_tokens=submission.max_reasoning_tokens,
            prompt_tokens=len(asked.prompt),
            queue_position=admission.queue_position,
            command_id=command_id,
            accepted_at=time.time(),
            n=asked.n,
            notes=admission.notes,
            adapter_digest=admission.adapter_digest,
        )
        request.accept(accepted, admission.arrival, stream)

    def _settle(self, key: tuple[str, str], task: asyncio.Task[None]) -> None:
        if self._admitting.get(key) is task:  # else it was refused, and tried again at once
            del self._admitting[key]

    async def settled(self, identity: str, request_id: str) -> None:
        """Wait for the engine's answer about a request with this id whose caller no longer waits
        for it. Until then the request is neither accepted nor refused.
        """
        task = self._admitting.get((identity, request_id))
        if task is not None:
            await asyncio.wait([task])

    # What a request tells of itself

    def has_ended(self, request: ServedRequest) -> None:
        """Record that a request has ended."""
        del self._live[request.engine_id]
        served = request.log.accepted is not None
        request.holding.release(served=served, keeps_place=request.stream is not None)
        self._check_idle()

    def keep(self, request: ServedRequest) -> None:
        """Keep a request's results. If there is no room, the oldest results are dropped."""
        self.retentions.start(request, self._retention.retention_s)
        self.kept.add(request, request.log.held_size + len(request.digest))
        self._drop_surplus()

    def keep_read(self, request: ServedRequest, size: int) -> None:
        """Record that `size` bytes of a live request's read output are kept. If there is no room,
        the oldest results are dropped.
        """
        self.kept.add_read(request, size)
        self._drop_surplus()

    def _drop_surplus(self) -> None:
        while (surplus := self.kept.surplus()) is not None:
            if surplus.state is State.KEPT:
                self._drop_kept(surplus, _CROWDED)
            else:
                left = surplus.drop_read()
                self.kept.discard(surplus)  # the next time it is another's turn
                self.kept.add_read(surplus, left)

    def _drop_kept(self, request: ServedRequest, why: str) -> None:
        """Drop a request's kept results. Later readers are told why."""
        request.keep_no_more()
        if request.state is State.GONE:
            self._dropped[request.identity, request.request_id] = why
            if len(self._dropped) > MAX_DROPPED:
                del self._dropped[next(iter(self._dropped))]

    def unkeep(self, request: ServedRequest) -> None:
        """Stop keeping a request's results."""
        self.retentions.stop(request)
        before = self.kept.size
        self.kept.discard(request)
        self.admission.freed(before - self.kept.size)

    def forget(self, request: ServedRequest) -> None:
        """Free a request's id."""
        key = request.identity, request.request_id
        if self.requests.get(key) is request:
            del self.requests[key]

    def _check_idle(self) -> None:
        if not self._live and self._arriving == 0:
            self._idle.set()

    # Results

    def on_step(self, step: StepOutputs) -> None:
        """Deliver one step's outputs, and wake the streams concerned. The engine calls this."""
        live = self._live
        now = step.time
        for output in step.outputs:
            request = live.get(output.request_id)
            if request is not None:
                request.push(output, now)

    def find(self, identity: str, request_id: str) -> ServedRequest:
        """Return an accepted request.

        Raises:
            RequestNotFoundError: this identity has no request with this id.
        """
        request = self.requests.get((identity, request_id))
        if request is None and (why := self._dropped.get((identity, request_id))) is not None:
            raise ResultDroppedError(request_id, why)
        if request is None or request.log.accepted is None:
            raise RequestNotFoundError(request_id)
        return request

    def grant(self, identity: str, request_id: str, tokens: int, stream: ResultStream) -> None:
        """Allow `tokens` more tokens of a request to be sent on its stream. Has no effect if the
        request does not exist (any more).
        """
        request = self.requests.get((identity, request_id))
        if request is not None:
            request.grant(tokens, stream)

    async def read(
        self, identity: str, request_id: str, from_seq: int, *, until_done: bool, wait_s: float
    ) -> ReadResult:
        """Return a request's events from a number on; see `ServedRequest.read`.

        Raises:
            RequestNotFoundError: this identity has no request with this id.
            ResultGoneError: not all events from `from_seq` on are available.
        """
        await self.settled(identity, request_id)
        request = self.find(identity, request_id)
        return await request.read(from_seq, until_done=until_done, wait_s=wait_s)

    # Streams

    def open_stream(self, account: Account, *, is_session: bool = False) -> ResultStream:
        """Open a stream for a session, or for an RPC with one request and no commands. `account`:
        the owner of the stream.
        """
        sending = StreamCharge(self.admission, account)
        stream = ResultStream(sending, is_session=is_session)
        self.streams.add(stream)
        return stream

    def complete(self, stream: ResultStream) -> None:
        """Record that a stream's RPC ended normally."""
        stream.end()
        self._unread.stop(stream)
        self.streams.discard(stream)

    def lost(self, stream: ResultStream) -> None:
        """Record that a stream's RPC is over. If it did not end normally, its requests continue for
        the lease, or are cancelled.
        """
        if not stream.is_over:
            self.complete(stream)
            for request in list(stream.requests):
                request.lost(stream.lease_s)

    def expect_reader(self, stream: ResultStream, request: ServedRequest) -> None:
        """Start to watch a stream's reader, because one of its requests has ended. If nothing is
        taken within `unread_s` while ended requests wait, the client counts as not reading.
        """
        stream.ended_at[request] = self.clock()
        if not self._unread.is_running(stream):
            self._unread.start(stream, self.unread_s)

    def check_reader(self, stream: ResultStream) -> None:
        """Drop a stream's ended requests if its time is over. Otherwise wait longer."""
        ended = stream.ended_at
        if not ended or stream.is_over:
            return
        left_s = max(stream.last_taken, min(ended.values())) + self.unread_s - self.clock()
        if left_s > 0:
            self._unread.start(stream, left_s)
            return
        for request in list(ended):
            request.leave()
        stream.give_up()

    # Ending

    def cancel(self, identity: str, request_id: str) -> str:
        """End a request by its id, without waiting. Return CANCELLED, ALREADY_FINISHED or
        NOT_FOUND.
        """
        request = self.requests.get((identity, request_id))
        if request is None:
            return NOT_FOUND
        if request.log.ended:
            return ALREADY_FINISHED
        request.cancel()
        return CANCELLED

    def cancel_all(self) -> None:
        """End all requests."""
        for request in list(self._live.values()):
            request.cancel()

    async def wait_idle(self) -> None:
        """Wait until no request is live or about to start."""
        await self._idle.wait()

    async def close(self) -> None:
        """Drop everything and wait for the calls in progress."""
        for request in list(self.requests.values()):
            request.forget()
        for task in self._admitting.values():
            task.cancel()
        await self.engine.settle()

    async def _abandon(self, request: ServedRequest) -> None:
        live = False
        try:
            live = await self._client.cancel(request.engine_id)
        except EngineUnavailableError:
            pass  # it has died, and the request with it
        except Exception:
            logger.exception("cancelling %s in the engine failed", request.engine_id)
        if not live:
            request.forget()
