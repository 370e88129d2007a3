"""The implementation of `AsyncClient.batch`: the window of `_batch` over an `AsyncSession`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable

from headrace._batch import BatchInput, BatchItem, BatchProgress, BatchWindow, Item
from headrace.async_session import AsyncRequestHandle, AsyncSession
from headrace.errors import AlreadyExistsError, HeadraceError
from headrace.options import GenerationOptions


def run_batch(
    open_session: Callable[[], AsyncSession],
    requests: Iterable[BatchInput],
    *,
    max_in_flight: int,
    ordered: bool,
    progress: bool,
    options: GenerationOptions,
    timeout: float | None = None,
) -> AsyncIterator[BatchItem]:
    """Implements `AsyncClient.batch`."""
    window = BatchWindow(requests, options, max_in_flight=max_in_flight, ordered=ordered)
    return _run(open_session, window, progress, timeout)


async def _run(
    open_session: Callable[[], AsyncSession],
    window: BatchWindow,
    progress: bool,
    timeout: float | None,  # noqa: ASYNC109 - of each request
) -> AsyncIterator[BatchItem]:
    ended: asyncio.Queue[tuple[Item, AsyncRequestHandle]] = asyncio.Queue()
    lost: HeadraceError | None = None
    async with open_session() as session:
        with BatchProgress(progress, window.total) as bar:
            while True:
                while lost is None and (item := window.next(time.monotonic())) is not None:
                    try:
                        _send(session, window, item, ended, timeout)
                    except HeadraceError as error:
                        lost = error
                        window.ended(item, error, refused=False, now=0.0)
                        window.stop(error)
                    for done in window.ready():
                        bar.advance(done[1])
                        yield done
                for done in window.ready():
                    bar.advance(done[1])
                    yield done
                if window.finished:
                    break
                await _take_ended(window, ended)
    if lost is not None:
        raise lost


async def _take_ended(
    window: BatchWindow, ended: asyncio.Queue[tuple[Item, AsyncRequestHandle]]
) -> None:
    """Waits until a request ends or a refused one may be sent again."""
    try:
        async with asyncio.timeout(window.wait_seconds(time.monotonic())):
            item, handle = await ended.get()
    except TimeoutError:
        return
    fold, refused = handle._record.fold, handle._record.refused
    window.ended(item, fold.error or fold.partial(), refused=refused, now=time.monotonic())


def _send(
    session: AsyncSession,
    window: BatchWindow,
    item: Item,
    ended: asyncio.Queue[tuple[Item, AsyncRequestHandle]],
    timeout: float | None,
) -> None:
    """Submits a request and arranges for its outcome to be queued.

    Raises only if the session has ended.
    """
    error = item.error
    if error is None:
        try:
            session._submit(item.spec, lambda handle: ended.put_nowait((item, handle)), timeout)
            return
        except AlreadyExistsError as exists:
            error = exists
    window.ended(item, error, refused=False, now=0.0)
