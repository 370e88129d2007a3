"""The offline API's consumer of step outputs: queues, iterators and handlers of cumulative results.

    engine thread ──StepOutputs──▶ ResultRouter ──▶ get_result, iteration      (any thread)
                                               └──▶ handlers                   (their event loops)

The engine speaks in deltas; cumulative outputs, as the seeds' API has them, are made here and only
when they are read: an unread streaming result is a number. A reader that never comes back costs at
    most `max_unread` results.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.errors import DuplicateRequestError, RequestNotFoundError
from engine.outputs import Finish, FinishReason, RequestOutput, StepOutputs
from engine.request import RequestStatus
from engine.types import RequestId, TokenId

logger = logging.getLogger(__name__)

MAX_UNREAD_RESULTS = 65536

_STATUS = {
    FinishReason.CANCELLED: RequestStatus.CANCELLED,
    FinishReason.TIME_LIMIT: RequestStatus.CANCELLED,
    FinishReason.ERROR: RequestStatus.FAILED,
}


@dataclass(slots=True)
class GenerationOutput:
    """What was generated for a request so far; cumulative.

    Attributes:
        request_id: the request.
        prompt_ids: its prompt.
        generated_tokens: its output so far.
        logprobs: a log-probability for each generated token, where return_logprobs is on; else
            empty.
        error: why it failed, if it did.
        status: where it is; `is_finished()` tells whether this is the last output.
        finish_reason: why it ended; None while it lives.
        created_time: monotonic seconds at which it was added.
        lifespan: monotonic seconds of its first scheduling and of its end; -1 for what did not
            happen.
        timestamps: monotonic seconds at which each token came, where record_timestamps was asked
            for; else None.
    """

    request_id: str
    prompt_ids: list[int]
    generated_tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    error: str | None = None
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    created_time: float = 0.0
    lifespan: tuple[float, float] = (-1.0, -1.0)
    timestamps: list[float] | None = None

    def is_finished(self) -> bool:
        """Whether the request has ended and this is its last output."""
        return self.status.is_terminal


ResultHandler = Callable[[GenerationOutput], None]
"""Takes one result on the event loop on which it was registered."""

StopFinder = Callable[[tuple[TokenId, ...]], int | None]
"""Fed a request's new tokens, tells how many of all its tokens to keep once a stop string is
complete.
"""


@dataclass(slots=True)
class _Record:
    """A request whose results are not all read."""

    prompt: tuple[TokenId, ...]
    streaming: bool
    created: float
    timestamps: list[float] | None
    find_stop: StopFinder | None
    tokens: list[TokenId] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stopped_at: int | None = None
    finish: Finish | None = None
    handler: tuple[ResultHandler, asyncio.AbstractEventLoop] | None = None
    unread: deque[int] = field(default_factory=deque)


class ResultRouter:
    """Keeps what was generated until it is read, in the order in which it came."""

    def __init__(
        self,
        finish_request: Callable[[RequestId, int], object],
        max_unread: int = MAX_UNREAD_RESULTS,
    ) -> None:
        self._finish_request = finish_request
        self._max_unread = max_unread
        self._changed = threading.Condition()
        self._records: dict[RequestId, _Record] = {}
        self._unread: OrderedDict[int, tuple[RequestId, int, bool]] = OrderedDict()
        self._next = 0
        self._closed = True

    def expect(
        self,
        request_id: RequestId,
        prompt: tuple[TokenId, ...],
        *,
        streaming: bool,
        record_timestamps: bool,
        find_stop: StopFinder | None,
    ) -> None:
        """Prepare for a request that is about to be submitted.

        Raises:
            DuplicateRequestError: a request of that id is live or has results that were not read.
        """
        with self._changed:
            if request_id in self._records:
                raise DuplicateRequestError(request_id)
            self._records[request_id] = _Record(
                prompt=prompt,
                streaming=streaming,
                created=time.monotonic(),
                timestamps=[] if record_timestamps else None,
                find_stop=find_stop,
            )

    def forget(self, request_id: RequestId) -> None:
        """Undo `expect` for a request that was refused."""
        with self._changed:
            self._records.pop(request_id, None)

    def reopen(self) -> None:
        """The engine's thread was started: readers may wait again."""
        with self._changed:
            self._closed = False

    def close(self) -> None:
        """The engine's thread has ended: nobody waits for results any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def accept(self, step: StepOutputs) -> None:
        """Take one step's outputs. Called on the engine's thread."""
        with self._changed:
            for output in step.outputs:
                record = self._records.get(output.request_id)
                if record is not None:
                    self._take(output, record, step.time)
            self._changed.notify_all()

    def _take(self, output: RequestOutput, record: _Record, now: float) -> None:
        if record.stopped_at is None:
            record.tokens.extend(output.token_ids)
            if output.logprobs is not None:
                record.logprobs.extend(entry.logprob for entry in output.logprobs)
            if record.timestamps is not None:
                record.timestamps.extend([now] * len(output.token_ids))
            if record.find_stop is not None and output.token_ids:
                record.stopped_at = record.find_stop(output.token_ids)
                if record.stopped_at is not None:
                    del record.tokens[record.stopped_at :]
                    if output.finish is None:
                        self._finish_request(output.request_id, record.stopped_at)
        record.finish = output.finish
        if output.finish is not None or (record.streaming and output.token_ids):
            self._publish(output.request_id, record)

    def _publish(self, request_id: RequestId, record: _Record) -> None:
        terminal = record.finish is not None
        if record.handler is not None:
            if terminal:
                del self._records[request_id]
            self._call(
                record.handler, self._output(request_id, record, len(record.tokens), terminal)
            )
            return
        record.unread.append(self._next)
        self._unread[self._next] = (request_id, len(record.tokens), terminal)
        self._next += 1
        while len(self._unread) > self._max_unread:
            oldest = next(iter(self._unread))
            lost = self._pop(oldest)
            logger.warning("result of %s dropped: %d are unread", lost.request_id, self._max_unread)

    def _call(
        self,
        handler: tuple[ResultHandler, asyncio.AbstractEventLoop],
        output: GenerationOutput,
    ) -> None:
        """Hand a result to a handler's event loop; a loop that is gone loses its results alone."""
        callback, loop = handler
        try:
            loop.call_soon_threadsafe(callback, output)
        except RuntimeError:
            logger.warning(
                "result of %s dropped: its handler's event loop is closed", output.request_id
            )

    def register(self, request_id: RequestId, callback: ResultHandler) -> None:
        """Send a request's results to a callback on the running event loop; unread ones at once.

        Raises:
            RequestNotFoundError: the request is not live and has no unread results.
        """
        loop = asyncio.get_running_loop()
        with self._changed:
            record = self._records.get(request_id)
            if record is None:
                raise RequestNotFoundError(request_id)
            while record.unread:
                self._call((callback, loop), self._pop(record.unread[0]))
            record.handler = (callback, loop)

    def get(self, request_id: RequestId | None, timeout: float | None) -> GenerationOutput | None:
        """The oldest unread result (of one request, if named), waiting for it. None: timeout, or
        the engine ended.

        Raises:
            RequestNotFoundError: the named request is not live and has no unread results.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while True:
                number = self._first_unread(request_id)
                if number is not None:
                    return self._pop(number)
                remaining = None if deadline is None else deadline - time.monotonic()
                if self._closed or (remaining is not None and remaining <= 0):
                    return None
                self._changed.wait(remaining)

    def _first_unread(self, request_id: RequestId | None) -> int | None:
        if request_id is None:
            return next(iter(self._unread), None)
        record = self._records.get(request_id)
        if record is None:
            raise RequestNotFoundError(request_id)
        return record.unread[0] if record.unread else None

    def _pop(self, number: int) -> GenerationOutput:
        request_id, length, terminal = self._unread.pop(number)
        record = self._records[request_id]
        record.unread.remove(number)
        if terminal:
            del self._records[request_id]
        return self._output(request_id, record, length, terminal)

    def _output(
        self, request_id: RequestId, record: _Record, length: int, terminal: bool
    ) -> GenerationOutput:
        output = GenerationOutput(
            request_id=request_id,
            prompt_ids=list(record.prompt),
            generated_tokens=list(record.tokens[:length]),
            logprobs=record.logprobs[:length],
            status=RequestStatus.DECODING,
            created_time=record.created,
            timestamps=None if record.timestamps is None else record.timestamps[:length],
        )
        finish = record.finish
        if terminal and finish is not None:
            stopped = record.stopped_at is not None
            reason = FinishReason.STOP if stopped else finish.reason
            output.finish_reason = reason
            output.status = _STATUS.get(reason, RequestStatus.FINISHED)
            first = finish.timings.first_scheduled
            output.lifespan = (-1.0 if first is None else first, finish.timings.finished)
            output.error = finish.failure.message if finish.failure is not None else None
        return output
