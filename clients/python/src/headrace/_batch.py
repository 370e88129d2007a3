"""Runs many requests through a bounded window on one session. Decides when each request is sent and
in which order outcomes are returned.

1. `BatchWindow.next` returns the next request to send while the window has room.
2. The flavour (threads or asyncio) submits it, and reports its end to the window.
3. If the server had no room for a request, it is queued again, and nothing is sent until the
   server's `retry_after` has passed.
4. `BatchWindow.ready` yields the outcomes that can be returned to the caller.
5. Requests that arrive slowly, for example from a pipe, come through a `BatchFeed`.
"""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeAlias

from headrace.errors import (
    AlreadyExistsError,
    HeadraceError,
    ResourceExhaustedError,
    UnavailableError,
    invalid_argument,
)
from headrace.messages import Prompt
from headrace.options import OPTION_NAMES, GenerationOptions, Request, build_spec, check_names
from headrace.results import Result
from headrace.v1.generation_pb2 import GenerationSpec

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from headrace.session import RequestHandle, Session

BatchInput: TypeAlias = Prompt | Request | HeadraceError
"""A prompt, a prompt with its own options, or an error to return as the outcome (for example, for
an invalid input line).
"""

_MAX_ATTEMPTS = 12
_FIRST_DELAY = 0.05  # seconds
_MAX_DELAY = 5.0  # seconds
# A signal that comes to another thread, or just before a wait, does not end the wait; and Python
# calls its handler only after it.
_LOOK_SECONDS = 0.2
_ORDERED_AHEAD = 16  # with ordered: how many windows of outcomes may wait for an earlier one


BatchItem: TypeAlias = tuple[int, Result | HeadraceError]
"""A request's index in the batch, from 0, and its outcome."""


class Item:
    """One request in progress."""

    __slots__ = ("attempts", "error", "index", "spec")

    def __init__(self, index: int, spec: GenerationSpec, error: HeadraceError | None) -> None:
        self.index = index
        self.spec = spec
        self.error = error
        self.attempts = 0


class BatchFeed:
    """Requests read by a separate thread, so that no outcome waits for the next request to arrive.

    It also lets other code interrupt a batch. As an iterator, it yields None if no request has
    arrived; `wake` is called when one does.
    """

    def __init__(self, requests: Iterable[BatchInput], *, ahead: int) -> None:
        """Initializes the feed. At most `ahead` requests are read before they are needed."""
        self.wake: Callable[[], None] = lambda: None
        self.interrupted = False
        self._requests = requests
        self._arrived: deque[BatchInput] = deque()
        self._room = threading.Semaphore(ahead)
        self._failure: BaseException | None = None
        self._ended = False
        self._closed = False
        # A daemon: a read of a pipe that stays quiet cannot be broken off.
        self._thread = threading.Thread(target=self._read, name="headrace-feed", daemon=True)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> BatchInput | None:
        ended = self._ended  # looked at first: all that has arrived before it is given
        if self._arrived:
            self._room.release()
            return self._arrived.popleft()
        if not ended:
            return None
        if self._failure is not None:
            raise self._failure
        raise StopIteration

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._closed = True
        self._room.release()

    def interrupt(self) -> None:
        """Ends the batch. Can be called from a signal handler.

        Outcomes that are ready are returned first. Then KeyboardInterrupt is raised and running
        requests are cancelled.
        """
        self.interrupted = True
        self.wake()

    def _read(self) -> None:
        try:
            for request in self._requests:
                self._room.acquire()
                if self._closed:
                    return
                self._arrived.append(request)
                self.wake()
        except BaseException as failure:  # told where the outcomes are read, not in this thread
            self._failure = failure
        finally:
            self._ended = True
            self.wake()


class BatchWindow:
    """Tracks which requests of a batch are in flight. Times are in seconds from
    `time.monotonic`.
    """

    def __init__(
        self,
        requests: Iterable[BatchInput | None],
        options: GenerationOptions,
        *,
        max_in_flight: int,
        ordered: bool,
    ) -> None:
        if max_in_flight < 1:
            raise ValueError(f"max_in_flight is {max_in_flight}; at least 1 is needed")
        if "request_id" in options:
            raise ValueError("a batch's requests cannot share one request_id; use Request(…)")
        check_names(options, OPTION_NAMES, "generation option")
        self.total = len(requests) if isinstance(requests, Sized) else None
        self._source = iter(requests)
        self._taken = 0
        self._starved = False
        self._options = options
        self._max_in_flight = max_in_flight
        self._ordered = ordered
        self._in_flight = 0
        self._again: deque[Item] = deque()
        self._not_before = 0.0
        self._exhausted = False
        self._stopped = False
        self._outcomes: dict[int, BatchItem] = {}
        self._next_index = 0

    @property
    def finished(self) -> bool:
        """Whether all outcomes have been returned."""
        idle = not self._in_flight and not self._again and not self._outcomes
        return self._exhausted and idle

    @property
    def in_flight(self) -> int:
        """The number of requests that the server has."""
        return self._in_flight

    def stop(self, error: HeadraceError) -> None:
        """Stops sending. Requests waiting to be sent again end with `error`."""
        self._stopped = self._exhausted = True
        for item in self._again:
            self._outcomes[item.index] = (item.index, error)
        self._again.clear()

    def next(self, now: float) -> Item | None:
        """Returns the next request to send, counted as in flight, or None if there is none now."""
        if self._in_flight >= self._max_in_flight or now < self._not_before:
            return None
        item = self._again.popleft() if self._again else self._take()
        if item is not None:
            self._in_flight += 1
        return item

    def wait_seconds(self, now: float) -> float | None:
        """How long to wait for an outcome or a new request before calling `next` again.

        None means no limit.
        """
        waits = self._not_before > now and (self._again or not self._exhausted)
        idle = not self._in_flight and not self._starved
        return max(self._not_before - now, 0.0) if waits or idle else None

    def ended(
        self, item: Item, outcome: Result | HeadraceError, *, refused: bool, now: float
    ) -> None:
        """Records that a request in flight has ended.

        `refused` is whether it ended before the server accepted it.
        """
        self._in_flight -= 1
        can_wait = isinstance(outcome, (ResourceExhaustedError, UnavailableError)) and refused
        if can_wait and item.attempts + 1 < _MAX_ATTEMPTS and not self._stopped:
            delay = min(_FIRST_DELAY * 2**item.attempts, _MAX_DELAY)
            hint = outcome.retry_after if isinstance(outcome, HeadraceError) else None
            item.attempts += 1
            self._not_before = max(self._not_before, now + (hint if hint is not None else delay))
            self._again.append(item)
            return
        self._outcomes[item.index] = (item.index, outcome)

    def ready(self) -> Iterator[BatchItem]:
        """Yields the outcomes that can be returned now, each once."""
        if not self._ordered:
            while self._outcomes:
                yield self._outcomes.pop(next(iter(self._outcomes)))
        while self._next_index in self._outcomes:
            self._next_index += 1
            yield self._outcomes.pop(self._next_index - 1)

    def rest(self) -> Iterator[BatchItem]:
        """Yields all remaining outcomes in the order of their requests.

        With `ordered`, this includes outcomes that are waiting for an earlier one.
        """
        for index in sorted(self._outcomes):
            yield self._outcomes.pop(index)

    def _take(self) -> Item | None:
        far = self._ordered and len(self._outcomes) >= _ORDERED_AHEAD * self._max_in_flight
        if self._exhausted or far:
            return None
        try:
            given = next(self._source)
        except StopIteration:
            self._exhausted = True
            self._starved = False
            return None
        self._starved = given is None
        if given is None:
            return None
        index = self._taken
        self._taken += 1
        if isinstance(given, HeadraceError):
            return Item(index, GenerationSpec(), given)
        prompt, own = (given.prompt, given.options) if isinstance(given, Request) else (given, {})
        options: GenerationOptions = {**self._options, **own}
        try:
            spec = build_spec(prompt, options)
            return Item(index, spec, None)
        except HeadraceError as error:
            return Item(index, GenerationSpec(), error)
        except (TypeError, RecursionError) as error:
            return Item(index, GenerationSpec(), invalid_argument("request", str(error)))


class BatchProgress:
    """A progress bar on stderr, shown if requested and stderr is a terminal."""

    def __init__(self, wanted: bool, total: int | None) -> None:
        self._bar: Progress | None = None
        self._errors = 0
        self._tokens = 0
        if wanted and sys.stderr.isatty():
            from rich import progress
            from rich.console import Console

            self._bar = progress.Progress(
                progress.TextColumn("{task.description}"),
                progress.BarColumn(),
                progress.MofNCompleteColumn(),
                progress.TextColumn("{task.fields[note]}"),
                progress.TimeElapsedColumn(),
                progress.TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self._task: TaskID = self._bar.add_task("requests", total=total, note="")
            self._begun = time.monotonic()

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, outcome: Result | HeadraceError) -> None:
        """Counts one more finished request."""
        if self._bar is None:
            return
        if isinstance(outcome, Result):
            self._tokens += outcome.usage.completion_tokens
        else:
            self._errors += 1
        seconds = max(time.monotonic() - self._begun, 1e-6)
        note = f"{self._tokens / seconds:,.0f} tokens/s"
        if self._errors:
            note += f", {self._errors} failed"
        self._bar.update(self._task, advance=1, note=note)


_Ended: TypeAlias = "tuple[Item, RequestHandle] | None"
"""A request that has ended, or None to wake the loop."""


def run_batch(
    open_session: Callable[[], Session],
    requests: Iterable[BatchInput] | BatchFeed,
    *,
    max_in_flight: int,
    ordered: bool,
    progress: bool,
    options: GenerationOptions,
    timeout: float | None = None,
) -> Iterator[BatchItem]:
    """Implements `Client.batch` and, with a `BatchFeed`, the batch command."""
    window = BatchWindow(requests, options, max_in_flight=max_in_flight, ordered=ordered)
    feed = requests if isinstance(requests, BatchFeed) else None
    return _run(open_session, window, progress, feed, timeout)


def _run(
    open_session: Callable[[], Session],
    window: BatchWindow,
    progress: bool,
    feed: BatchFeed | None,
    timeout: float | None,
) -> Iterator[BatchItem]:
    ended: queue.SimpleQueue[_Ended] = queue.SimpleQueue()
    if feed is not None:
        feed.wake = lambda: ended.put(None)
    lost: HeadraceError | None = None
    with (
        feed or contextlib.nullcontext(),
        open_session() as session,
        BatchProgress(progress, window.total) as bar,
    ):
        while feed is None or not feed.interrupted:
            item = window.next(time.monotonic()) if lost is None else None
            if item is not None:
                try:
                    _send(session, window, item, ended, timeout)
                except HeadraceError as error:
                    lost = error
                    window.ended(item, error, refused=False, now=0.0)
                    window.stop(error)
            for done in window.ready():
                bar.advance(done[1])
                yield done
            if item is not None:
                continue
            if window.finished:
                break
            seconds = window.wait_seconds(time.monotonic())
            if feed is not None:
                seconds = _LOOK_SECONDS if seconds is None else min(seconds, _LOOK_SECONDS)
            _wait(window, ended, seconds)
        else:
            while not ended.empty():
                _wait(window, ended, 0.0)
            yield from window.rest()
            raise KeyboardInterrupt
    if lost is not None:
        raise lost


def _wait(window: BatchWindow, ended: queue.SimpleQueue[_Ended], seconds: float | None) -> None:
    """Waits up to `seconds` for a request to end or for a wake-up."""
    try:
        found = ended.get(timeout=seconds)
    except queue.Empty:
        return
    if found is not None:
        item, handle = found
        fold, refused = handle._record.fold, handle._record.refused
        window.ended(item, fold.error or fold.partial(), refused=refused, now=time.monotonic())


def _send(
    session: Session,
    window: BatchWindow,
    item: Item,
    ended: queue.SimpleQueue[_Ended],
    timeout: float | None,
) -> None:
    """Submits a request and arranges for its outcome to be queued.

    Raises only if the session has ended.
    """
    error = item.error
    if error is None:
        try:
            session._submit(item.spec, lambda handle: ended.put((item, handle)), timeout)
            return
        except AlreadyExistsError as exists:
            error = exists
    window.ended(item, error, refused=False, now=0.0)
