"""Sends the requests of a load and measures their times.

A closed loop keeps a fixed number of requests in flight: a new one is sent whenever one has ended.
An open loop sends requests when they are due, whether or not earlier ones have ended. All its times
count from when a request was due. A stalled server therefore slows every request due during the
stall, not only those already sent (no coordinated omission).

Each request is a task that reads its handle, as an application would. A request that the server has
no room for is resent after the delay that the server advises.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from headrace.async_session import AsyncSession
from headrace.cli.bench.measures import Progress, Tally, count, reason
from headrace.cli.bench.prompts import Prompts
from headrace.errors import HeadraceError, ResourceExhaustedError
from headrace.v1.generation_pb2 import GenerationSpec

_PAUSE = 0.1
"""The minimum pause in seconds before a closed loop replaces a request that failed."""


@dataclass(frozen=True, slots=True)
class Load:
    """How requests are sent.

    Attributes:
        requests: the number of requests; None to send until `duration` has passed.
        duration: the number of seconds after which no more requests are sent; None if only
            `requests` limits the load.
        concurrency: the maximum number of requests in flight.
        rate: an open loop's rate in requests per second; None for a closed loop.
        arrivals: whether an open loop's requests arrive at random times or at equal intervals.
        room_timeout: how many seconds a request is resent while the server has no room for it.
        seed: the random seed of the arrivals.
    """

    requests: int | None
    duration: float | None
    concurrency: int
    rate: float | None
    arrivals: Literal["poisson", "constant"]
    room_timeout: float
    seed: int

    def gaps(self, rate: float) -> Iterator[float]:
        """Yields the seconds between consecutive arrivals of an open loop, at `rate` per second."""
        chance = random.Random(f"{self.seed} arrivals")
        while True:
            yield chance.expovariate(rate) if self.arrivals == "poisson" else 1 / rate


class LoadRun:
    """One load on some sessions.

    Args:
        sessions: the sessions, which requests use in rotation.
        prompts: the requests.
        load: how the requests are sent.
        tally: collects the measurements.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        sessions: Sequence[AsyncSession],
        prompts: Prompts,
        load: Load,
        tally: Tally,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.lost: HeadraceError | None = None
        """Why a session ended before the load did."""
        self.interrupted = False
        self._sessions = sessions
        self._prompts = prompts
        self._load = load
        self._tally = tally
        self._clock = clock
        self._next = 0
        self._stopped = asyncio.Event()

    def interrupt(self) -> None:
        """Ends the load and cancels the running requests."""
        self.interrupted = True
        self._stopped.set()

    async def warm_up(self, requests: int) -> None:
        """Sends `requests` requests that are not measured, several at a time.

        Raises:
            HeadraceError: a request was refused or failed.
        """
        # None of those that are measured: the server might have their prompts in its cache.
        specs = iter([self._prompts.request(-1 - number) for number in range(requests)])
        unmeasured = Tally()

        async def place(session: AsyncSession) -> None:
            for spec in specs:
                now = self._clock()
                progress = Progress(unmeasured, now)
                await self._until_room(session, spec, progress, now + self._load.room_timeout)

        places = min(self._load.concurrency, requests)
        work = asyncio.gather(*map(place, self._some_sessions(places)))
        await self._unless_stopped(work)

    async def run(self) -> None:
        """Sends all requests and waits until they have ended or the load is interrupted."""
        tally, cpu = self._tally, time.process_time()
        tally.began = self._clock()
        await self._unless_stopped(
            asyncio.ensure_future(
                self._open(self._load.rate) if self._load.rate else self._closed()
            )
        )
        tally.seconds = self._clock() - tally.began
        tally.cpu_seconds = time.process_time() - cpu
        if self._stopped.is_set():
            await asyncio.gather(*(session.close(cancel=True) for session in self._sessions))

    async def _unless_stopped(self, work: asyncio.Future[Any]) -> None:
        """Waits for `work`, and cancels it if the load is interrupted. Raises its exception, if
        any.
        """
        stop = asyncio.create_task(self._stopped.wait())
        try:
            await asyncio.wait([work, stop], return_when=asyncio.FIRST_COMPLETED)
            work.cancel()  # without effect if it is done
            with contextlib.suppress(asyncio.CancelledError):
                await work
        finally:
            work.cancel()
            stop.cancel()

    def _some_sessions(self, places: int) -> Iterator[AsyncSession]:
        return itertools.islice(itertools.cycle(self._sessions), places)

    def _is_over(self) -> bool:
        load = self._load
        if load.requests is not None and self._next >= load.requests:
            return True
        return load.duration is not None and self._clock() >= self._tally.began + load.duration

    def _request(self) -> GenerationSpec:
        self._next += 1
        return self._prompts.request(self._next - 1)

    async def _closed(self) -> None:
        async with asyncio.TaskGroup() as places:
            for session in self._some_sessions(self._load.concurrency):
                places.create_task(self._place(session))

    async def _place(self, session: AsyncSession) -> None:
        while not self._is_over():
            spec = self._request()
            failure = await self._one(session, spec, self._clock())
            if failure is not None:
                await asyncio.sleep(max(failure.retry_after or 0.0, _PAUSE))

    async def _open(self, rate: float) -> None:
        due, room = self._tally.began, asyncio.Semaphore(self._load.concurrency)
        sessions = itertools.cycle(self._sessions)
        duration = math.inf if self._load.duration is None else self._load.duration
        async with asyncio.TaskGroup() as requests:
            for gap in self._load.gaps(rate):
                due += gap
                if self._is_over() or due >= self._tally.began + duration:
                    break
                spec = self._request()
                await asyncio.sleep(due - self._clock())
                await room.acquire()
                task = requests.create_task(self._one(next(sessions), spec, due))
                task.add_done_callback(lambda _: room.release())

    async def _one(
        self, session: AsyncSession, spec: GenerationSpec, due: float
    ) -> HeadraceError | None:
        """Runs one request, measured from when it was due. Returns the failure, if it failed."""
        tally, progress = self._tally, Progress(self._tally, due)
        progress.sent(self._clock())
        try:
            await self._until_room(session, spec, progress, due + self._load.room_timeout)
            return None
        except ResourceExhaustedError as refusal:
            count(tally.refused, reason(refusal))
            return refusal
        except HeadraceError as failure:
            count(tally.failed, reason(failure))
            return failure
        except asyncio.CancelledError:
            tally.interrupted += 1
            raise

    async def _until_room(
        self, session: AsyncSession, spec: GenerationSpec, progress: Progress, give_up: float
    ) -> None:
        while True:
            try:
                await self._attempt(session, spec, progress)
                return
            except ResourceExhaustedError as refusal:
                advice = refusal.retry_after
                if advice is None or self._clock() + advice > give_up:
                    raise
                progress.waits_for_room(refusal)
                await asyncio.sleep(advice)

    async def _attempt(
        self, session: AsyncSession, spec: GenerationSpec, progress: Progress
    ) -> None:
        try:
            handle = session.submit(spec)
        except HeadraceError as error:  # the session has ended
            self.lost = self.lost or error
            self._stopped.set()
            raise
        async for chunk in handle:
            progress.output(len(chunk.token_ids), self._clock())
        progress.finished(await handle, self._clock())
