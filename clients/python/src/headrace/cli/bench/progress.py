"""The progress bar of a load."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from types import TracebackType
from typing import Self

from headrace.cli.bench.load import Load
from headrace.cli.bench.measures import Tally
from headrace.cli.bench.report import told

_LOOK_SECONDS = 0.2


class Bar:
    """A progress bar on stderr within its block, shown if requested and stderr is a terminal."""

    def __init__(self, wanted: bool, load: Load, tally: Tally) -> None:
        self._wanted = wanted and sys.stderr.isatty()
        self._load = load
        self._tally = tally
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        if self._wanted:
            self._task = asyncio.create_task(self._show())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _show(self) -> None:
        from rich import progress
        from rich.console import Console

        columns = (
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.TaskProgressColumn(),
            progress.TextColumn("{task.fields[note]}"),
            progress.TimeElapsedColumn(),
        )
        began = time.monotonic()
        with progress.Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task("load", total=1.0, note="")
            while True:
                await asyncio.sleep(_LOOK_SECONDS)
                seconds = time.monotonic() - began
                bar.update(task, completed=self._share(seconds), note=self._note(seconds))

    def _share(self, seconds: float) -> float:
        """The completed share of the requests or of the time, whichever is larger."""
        load, shares = self._load, [0.0]
        if load.requests is not None:
            shares.append(self._tally.ended / load.requests)
        if load.duration is not None:
            shares.append(seconds / load.duration)
        return min(max(shares), 1.0)

    def _note(self, seconds: float) -> str:
        tally = self._tally
        bad = tally.refused.total() + tally.failed.total()
        words = [
            f"{tally.ended:,} ended, {tally.started - tally.ended:,} going",
            f"{tally.output_tokens / seconds:,.0f} tokens/s",
            f"first token p50 {told(tally.ttft.percentile(50))}",
        ]
        return " · ".join(words + ([f"{bad:,} bad"] if bad else []))
