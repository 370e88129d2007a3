"""Turns step outputs into cumulative results for the Python API: mailboxes, iterators and handlers.

    engine thread ──StepOutputs──▶ ResultRouter ──▶ get_result, iteration      (any thread)
                                               └──▶ handlers                   (their event loops)

The engine delivers deltas for each choice. This module turns them into cumulative outputs with one
name per choice, but only when they are read: an unread streaming result is stored as a length. If a
stream has more than `max_unread_results` unread results, the oldest are dropped. The next one then
includes their tokens and says how many results were merged into it. A choice's last result is
always kept. The number of unread last results is bounded by `max_unread_requests`: once it is
reached, no more requests are accepted.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.contract.errors import (
    DuplicateRequestError,
    RequestNotFoundError,
    TooManyHandlersError,
    UnreadResultsError,
)
from engine.contract.outputs import Finish, FinishReason, RequestOutput, StepOutputs, TokenLogprobs
from engine.contract.request import GenerationRequest, RequestStatus
from engine.contract.sampling_params import MAX_CHOICES
from engine.contract.types import RequestId, TokenId
from engine.core.endings import STATUS_OF, new_error_id

logger = logging.getLogger(__name__)

MAX_UNREAD_RESULTS = 4096
MAX_UNREAD_REQUESTS = 65536
MAX_WAITING_HANDLERS = 4096
"""The maximum number of result handlers that may wait for requests not added yet."""


def choice_name(request_id: str, choice: int) -> str:
    """Return the name of a choice's results.

    The first choice has the request's own id. The others are "<request_id>__child#0", "…#1", …, as
    in transformers.
    """
    return request_id if choice == 0 else f"{request_id}__child#{choice - 1}"


@dataclass(slots=True)
class GenerationOutput:
    """What was generated so far for one choice of a request.

    Attributes:
        request_id: the choice's name, which is the request's own for the first choice; see
            `choice_name`.
        prompt_ids: the prompt.
        generated_tokens: the output so far.
        logprobs: a log-probability for each generated token if they were requested; otherwise
            empty.
        error: why the choice failed, if it did.
        status: the choice's state; `is_finished()` tells whether this is the last output.
        created_time: monotonic seconds at which the request was added.
        lifespan: monotonic seconds of the first scheduling and of the end; -1 for one that did not
            happen.
        timestamps: monotonic seconds at which each token came, if record_timestamps was set;
            otherwise None.
        finish_reason: why the choice ended; None while it is live.
        choice: the index of the choice in the request.
        cached_tokens: how many prompt tokens came from the prefix cache.
        token_logprobs: `logprobs` with ranks and candidates.
        prompt_logprobs: the same for the prompt's tokens from the second on if they were requested;
            otherwise None.
        merged_results: how many earlier results of the choice were merged into this one because
            they were not read in time (max_unread_results).
    """

    request_id: str
    prompt_ids: list[int]
    generated_tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    error: str | None = None
    status: RequestStatus = RequestStatus.WAITING
    created_time: float = 0.0
    lifespan: tuple[float, float] = (-1.0, -1.0)
    timestamps: list[float] | None = None
    finish_reason: FinishReason | None = None
    choice: int = 0
    cached_tokens: int = 0
    token_logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] | None = None
    merged_results: int = 0

    def is_finished(self) -> bool:
        """Whether the choice has ended and this is its last output."""
        return self.status.is_terminal


ResultHandler = Callable[[GenerationOutput], object]
"""Receives one result, on the event loop where it was registered."""
_Handler = tuple[ResultHandler, asyncio.AbstractEventLoop]

StopFinder = Callable[[tuple[TokenId, ...]], int | None]
"""Called with a choice's new tokens. Once a stop string is complete, returns how many of all the
choice's tokens to keep.
"""


class Mailbox:
    """Unread results, in the order in which they arrived. Guarded by the router's lock."""

    def __init__(self, max_ended: int | None = None) -> None:
        """Create an empty mailbox.

        Args:
            max_ended: how many last results may wait in the mailbox before further requests are
                refused. None means no limit.
        """
        self.max_ended = max_ended
        self.ended = 0
        self.unread: OrderedDict[int, tuple[_Choice, int, bool]] = OrderedDict()


@dataclass(slots=True)
class _Request:
    """What the choices of a request have in common."""

    spec: GenerationRequest
    streaming: bool
    created: float
    mailbox: Mailbox
    choices: list[_Choice] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] | None = None
    cached_tokens: int = 0


@dataclass(slots=True, eq=False)
class _Choice:
    """A choice that is live or has unread results."""

    request: _Request
    index: int
    name: str
    timestamps: list[float] | None
    find_stop: StopFinder | None
    tokens: list[TokenId] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    stopped_at: int | None = None
    error: str | None = None
    finish: Finish | None = None
    handler: _Handler | None = None
    has_lost_handler: bool = False
    unread: deque[int] = field(default_factory=deque)
    merged: int = 0


class ResultRouter:
    """Keeps results, in order of arrival, until they are read."""

    def __init__(
        self,
        finish_request: Callable[[RequestId, int, int], object],
        max_unread_results: int = MAX_UNREAD_RESULTS,
        max_unread_requests: int = MAX_UNREAD_REQUESTS,
    ) -> None:
        """Create a router.

        Args:
            finish_request: ends a choice. Takes the request, the number of tokens to keep and the
                choice.
            max_unread_results, max_unread_requests: see ContinuousBatchingConfig.
        """
        self._finish_request = finish_request
        self._changed = threading.Condition()
        self._requests: dict[RequestId, _Request] = {}  # live requests
        self._choices: dict[str, _Choice] = {}  # with results still to be read
        self._waiting_handlers: dict[str, _Handler] = {}  # of choices that are not there yet
        self._max_unread = max_unread_results
        self._mailbox = Mailbox(max_unread_requests)
        self._next = 0
        self._closed = True

    # ---- requests ------------------------------------------------------------------------------

    def expect(
        self,
        spec: GenerationRequest,
        created: float,
        *,
        streaming: bool = False,
        record_timestamps: bool = False,
        make_stop_finder: Callable[[], StopFinder] | None = None,
        mailbox: Mailbox | None = None,
    ) -> None:
        """Prepare for a request that is about to be submitted.

        Args:
            spec: the request.
            created: monotonic seconds.
            streaming, record_timestamps: see `ContinuousBatchingManager.add_request`.
            make_stop_finder: called once for each choice.
            mailbox: receives the request's results instead of the shared mailbox.

        Raises:
            DuplicateRequestError: a request or choice with that name is live or has unread results.
            UnreadResultsError: too many requests have ended with unread results.
        """
        request = _Request(spec, streaming, created, mailbox or self._mailbox)
        for index in range(spec.n):
            request.choices.append(
                _Choice(
                    request=request,
                    index=index,
                    name=choice_name(spec.request_id, index),
                    timestamps=[] if record_timestamps else None,
                    find_stop=None if make_stop_finder is None else make_stop_finder(),
                )
            )
        with self._changed:
            if spec.request_id in self._requests:  # its first choice may have been read already
                raise DuplicateRequestError(spec.request_id)
            limit = request.mailbox.max_ended
            if limit is not None and request.mailbox.ended >= limit:
                raise UnreadResultsError(limit)
            for choice in request.choices:
                if choice.name in self._choices:
                    raise DuplicateRequestError(choice.name)
            self._requests[spec.request_id] = request
            for choice in request.choices:
                self._choices[choice.name] = choice
                choice.handler = self._waiting_handlers.pop(choice.name, None)

    def forget(self, request_id: RequestId) -> None:
        """Undo `expect` for a request that was refused."""
        with self._changed:
            request = self._requests.pop(request_id, None)
            for choice in () if request is None else request.choices:
                del self._choices[choice.name]

    def give_up(self, request_id: str) -> None:
        """Drop the handlers that wait for a request that will not be added. A live request keeps
        its handlers.
        """
        with self._changed:
            if self._waiting_handlers:
                for choice in range(MAX_CHOICES):
                    self._waiting_handlers.pop(choice_name(request_id, choice), None)

    def is_known(self, name: str) -> bool:
        """Whether a choice with that name is live or has unread results."""
        return name in self._choices

    def reopen(self) -> None:
        """Let readers wait again, because the engine's thread was started."""
        with self._changed:
            self._closed = False

    def close(self) -> None:
        """End all waits for results, because the engine's thread has ended."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # ---- what comes from the engine ------------------------------------------------------------

    def accept(self, step: StepOutputs) -> None:
        """Take one step's outputs. Called on the engine's thread."""
        to_finish: list[tuple[RequestId, int, int]] = []
        with self._changed:
            for output in step.outputs:
                request = self._requests.get(output.request_id)
                if request is not None:
                    self._take(output, request, step.time, to_finish)
            self._changed.notify_all()
        for request_id, num_tokens, choice in to_finish:
            self._finish_request(request_id, num_tokens, choice)

    def _take(
        self,
        output: RequestOutput,
        request: _Request,
        now: float,
        to_finish: list[tuple[RequestId, int, int]],
    ) -> None:
        choice = request.choices[output.choice]
        if output.prompt_done is not None:
            request.cached_tokens = output.prompt_done
        if output.prompt_logprobs is not None:
            request.prompt_logprobs = list(output.prompt_logprobs)
        if choice.stopped_at is None and output.token_ids:
            choice.tokens.extend(output.token_ids)
            choice.logprobs.extend(output.logprobs or ())
            if choice.timestamps is not None:
                last = None if output.finish is None else output.finish.timings.last_token
                # The last token's time is no later than the end that is reported with it.
                choice.timestamps.extend([now if last is None else last] * len(output.token_ids))
            kept = _look_for_stop(choice, output.token_ids)
            if kept is not None and output.finish is None:
                to_finish.append((output.request_id, kept, output.choice))
        if output.finish is not None:
            self._finish(choice, output.finish)
        elif request.streaming and output.token_ids:
            self._publish(choice)
        if output.ends_request:
            del self._requests[output.request_id]
            for other in request.choices:  # an error ends all choices with one output
                if other.finish is None and output.finish is not None:
                    self._finish(other, output.finish)

    def _finish(self, choice: _Choice, finish: Finish) -> None:
        choice.finish = finish
        choice.find_stop = None
        self._publish(choice)

    def _publish(self, choice: _Choice) -> None:
        terminal = choice.finish is not None
        if choice.handler is not None or choice.has_lost_handler:
            if terminal:
                del self._choices[choice.name]
            if choice.handler is not None:
                self._call(choice, _output(choice, len(choice.tokens), terminal))
            return
        mailbox = choice.request.mailbox
        if len(choice.unread) >= self._max_unread:
            if not choice.merged:
                logger.warning(
                    "%s: results are merged, %d are unread", choice.name, self._max_unread
                )
            del mailbox.unread[choice.unread.popleft()]
            choice.merged += 1
        choice.unread.append(self._next)
        mailbox.unread[self._next] = (choice, len(choice.tokens), terminal)
        mailbox.ended += terminal
        self._next += 1

    def _call(self, choice: _Choice, output: GenerationOutput) -> None:
        """Pass a result to a choice's handler.

        If the handler's event loop is closed, the choice loses the handler and all further results.
        """
        if choice.handler is None:
            return
        callback, loop = choice.handler
        try:
            loop.call_soon_threadsafe(callback, output)
        except RuntimeError:
            choice.handler, choice.has_lost_handler = None, True
            logger.warning(
                "results of %s are dropped from now on: its handler's event loop is closed",
                choice.name,
            )

    # ---- readers -------------------------------------------------------------------------------

    def register(self, name: str, callback: ResultHandler) -> None:
        """Send a choice's results to a callback on the running event loop, starting immediately
        with any unread ones.

        If the choice does not exist yet, the handler waits for it.

        Raises:
            TooManyHandlersError: MAX_WAITING_HANDLERS are waiting.
        """
        loop = asyncio.get_running_loop()
        with self._changed:
            choice = self._choices.get(name)
            if choice is None:
                self._let_wait(name, (callback, loop))
                return
            choice.handler = (callback, loop)
            while choice.unread:
                self._call(choice, self._pop(choice.request.mailbox, choice.unread[0]))

    def _let_wait(self, name: str, handler: _Handler) -> None:
        waiting = self._waiting_handlers
        if name not in waiting and len(waiting) >= MAX_WAITING_HANDLERS:
            for other in [key for key, (_, loop) in waiting.items() if loop.is_closed()]:
                del waiting[other]  # nobody would be called
            if len(waiting) >= MAX_WAITING_HANDLERS:
                raise TooManyHandlersError(MAX_WAITING_HANDLERS)
        waiting[name] = handler

    def get(
        self, name: str | None, timeout: float | None, mailbox: Mailbox | None = None
    ) -> GenerationOutput | None:
        """Return the oldest unread result, waiting for one if necessary.

        Returns None if the wait timed out or the engine ended.

        Args:
            name: a choice's name, see `choice_name`. If None, any choice in the mailbox.
            timeout: the maximum wait in seconds. If None, wait as long as the engine runs.
            mailbox: the mailbox to read; None for the shared one.

        Raises:
            RequestNotFoundError: the named choice is not live and has no unread results.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        mailbox = mailbox or self._mailbox
        with self._changed:
            while True:
                number = self._first_unread(name, mailbox)
                if number is not None:
                    return self._pop(mailbox, number)
                remaining = None if deadline is None else deadline - time.monotonic()
                if self._closed or (remaining is not None and remaining <= 0):
                    return None
                self._changed.wait(remaining)

    def _first_unread(self, name: str | None, mailbox: Mailbox) -> int | None:
        if name is None:
            return next(iter(mailbox.unread), None)
        choice = self._choices.get(name)
        if choice is None or choice.request.mailbox is not mailbox:
            raise RequestNotFoundError(name)
        return choice.unread[0] if choice.unread else None

    def _pop(self, mailbox: Mailbox, number: int) -> GenerationOutput:
        choice, length, terminal = mailbox.unread.pop(number)
        choice.unread.popleft()  # the oldest result of a mailbox is also the oldest of its choice
        if terminal:
            del self._choices[choice.name]
            mailbox.ended -= 1
        output = _output(choice, length, terminal)
        output.merged_results, choice.merged = choice.merged, 0
        return output


def _output(choice: _Choice, length: int, terminal: bool) -> GenerationOutput:
    """Return a choice's output, cut to its first `length` tokens."""
    request = choice.request
    details = choice.logprobs[:length]
    output = GenerationOutput(
        request_id=choice.name,
        prompt_ids=list(request.spec.prompt),
        generated_tokens=list(choice.tokens[:length]),
        logprobs=[entry.logprob for entry in details],
        status=RequestStatus.DECODING,
        created_time=request.created,
        timestamps=None if choice.timestamps is None else choice.timestamps[:length],
        choice=choice.index,
        cached_tokens=request.cached_tokens,
        token_logprobs=details,
        prompt_logprobs=None if request.prompt_logprobs is None else list(request.prompt_logprobs),
    )
    finish = choice.finish
    if terminal and finish is not None:
        first = finish.timings.first_scheduled
        output.lifespan = (-1.0 if first is None else first, finish.timings.finished)
        reason = finish.reason
        if choice.error is not None:
            reason, output.error = FinishReason.ERROR, choice.error
        elif choice.stopped_at is not None:
            reason = FinishReason.STOP
        elif finish.failure is not None:
            output.error = finish.failure.message
        output.finish_reason = reason
        output.status = STATUS_OF[reason]
    return output


def _look_for_stop(choice: _Choice, new: tuple[TokenId, ...]) -> int | None:
    """Cut a choice at a stop string.

    Returns the number of tokens left, or None if no stop string was found. If the finder raises,
    only this choice fails.
    """
    if choice.find_stop is None:
        return None
    try:
        kept = choice.find_stop(new)
    except Exception:
        error_id = new_error_id()
        logger.exception(
            "error %s: looking for the stop strings of %s failed", error_id, choice.name
        )
        choice.error = f"its stop strings could not be looked for (error {error_id})"
        kept = len(choice.tokens)
    choice.stopped_at = kept
    if kept is not None:
        del choice.tokens[kept:]
        del choice.logprobs[kept:]
        if choice.timestamps is not None:
            del choice.timestamps[kept:]
    return kept
