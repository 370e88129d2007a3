"""A well-behaved caller in a separate process that reports what it sees while something is tried.

    test or campaign ──"begin", "report"──▶ the witness's process ──────▶ server
                     ◀─────reports────────   streams greedy tokens, tokenizes, asks health

It needs only the `headrace` package.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any, Self

from tests.campaign.witness.probes import Plan, observing
from tests.campaign.witness.report import Report, WitnessError

PATIENCE_S = 120.0
"""The time limit for an answer of the witness; after that it counts as stuck. The witness answers
even while the server is stalled.
"""
END_S = 10.0


class Witness:
    """A witness that runs beside whatever is tried.

        with Witness(target, {"front_end": 123, "engine": 124}) as witness:
            ...
            witness.begin()
            ...
            report = witness.report()

    The methods block. If they are called from the thread that runs the server, the server stalls,
    and the report shows that stall.
    """

    def __init__(self, target: str, pids: Mapping[str, int], **more: Any) -> None:
        """Store the settings without starting anything. `more`: as of a `Plan`."""
        processes = multiprocessing.get_context("spawn")
        self._pipe, self._theirs = processes.Pipe()
        plan = Plan(target=target, pids=pids, **more)
        self._process = processes.Process(target=_watch, args=(plan, self._theirs), daemon=True)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the process. Returns once the undisturbed runs are over and the witness is
        watching. Raises WitnessError.
        """
        self._process.start()
        self._theirs.close()  # so that its end is the end of the pipe
        try:
            self._answer()
        except BaseException:
            self.close()
            raise

    def begin(self) -> None:
        """Begin a new window and discard what was seen so far."""
        self._ask("begin")

    def report(self) -> Report:
        """Return the report of the current window. Raises WitnessError if the witness has ended."""
        found: Report = self._ask("report")
        return found

    def close(self) -> None:
        self._pipe.close()
        self._process.join(END_S)
        self._process.kill()
        self._process.join()

    def _ask(self, order: str) -> Any:
        with contextlib.suppress(OSError):  # it has ended, which its answer tells
            self._pipe.send(order)
        return self._answer()

    def _answer(self) -> Any:
        try:
            if not self._pipe.poll(PATIENCE_S):
                raise WitnessError(f"the witness gave no answer for {PATIENCE_S:.0f} s")
            answer = self._pipe.recv()
        except (EOFError, OSError):
            raise WitnessError("the witness was not started, or has ended") from None
        if isinstance(answer, WitnessError):
            raise answer
        return answer


def _watch(plan: Plan, pipe: Connection) -> None:
    os.setsid()  # Ctrl-C is for whoever started it to handle
    try:
        asyncio.run(_obey(plan, pipe))
    except WitnessError as error:
        pipe.send(error)


async def _obey(plan: Plan, pipe: Connection) -> None:
    """Watch, and answer orders, which are methods of the observer, until the pipe ends."""
    async with observing(plan) as observer:
        pipe.send("ready")
        with contextlib.suppress(EOFError):
            while order := await asyncio.to_thread(pipe.recv):
                pipe.send(getattr(observer, order)())
