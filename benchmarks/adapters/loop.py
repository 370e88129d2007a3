"""The common part of all adapters: lines of JSON over pipes, and the bookkeeping of a turn.

    harness ──{"load": …}──▶ adapter ──{"ready": …}──▶ harness
            ──{"run": …}───▶         ──{"done": …}───▶            once per turn
            ──(end of file)▶                                      the adapter ends

A turn's requests arrive at given times, with a bound on how many are in the system at the same
time. Only the standard library is imported, because this file also runs in the interpreters of
peers. Times are seconds of `time.perf_counter`, which on Linux is also the clock of
`time.monotonic`.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import time
import traceback
from collections.abc import Iterable
from typing import Any, Protocol


class Adapter(Protocol):
    """A measured system."""

    def load(self, order: dict[str, Any]) -> dict[str, Any]:
        """Load the model into memory.

        Args:
            order: model (a directory), dtype, threads, limits (kv_tokens, max_requests,
                max_request_tokens, max_prompt_tokens), cache (a directory for what is made of the
                model), options, instructions (the instruction set to which the process is limited,
                or null).

        Returns:
            settings and versions. In addition: pid, the root of the processes whose memory counts,
            if it is not the adapter; start_s, if it is not the time until this answer; and
            prepared_s, the share of that time that is spent only once per model (an export).
        """

    def run(self, turn: Turn) -> object:
        """Run one turn to its end.

        Returns:
            The answer to the harness, as JSON; None to send the results of the turn's requests.
        """


class Turn:
    """The requests of one turn, and their results.

    Attributes:
        requests: each has "prompt" (token ids), "max_tokens" and "at" (seconds from the turn's
            start). If the system can sample, it also has "sampling" (options, or null).
        concurrency: the most requests in the system at the same time; None for no limit.
        profile_steps: how many decode steps to profile instead, in systems that can; 0 for none.
    """

    def __init__(
        self,
        requests: list[dict[str, Any]],
        concurrency: int | None = None,
        profile_steps: int = 0,
    ) -> None:
        self.requests = requests
        self.concurrency = concurrency
        self.profile_steps = profile_steps
        self._next = 0
        self._live = 0
        self._arrived = [0.0] * len(requests)
        self._tokens: list[list[int]] = [[] for _ in requests]
        self._times: list[list[float]] = [[] for _ in requests]
        self._finished = 0
        self.started = time.perf_counter()

    def due(self) -> list[int]:
        """Return the requests to submit now; each is returned once.

        If requests have arrival times, a request counts from its arrival even if it is submitted
        later, so a busy system gets no credit for the delay. A request that waited for another one
        to end counts from now.
        """
        now = time.perf_counter() - self.started
        found = []
        while self._next < len(self.requests):
            at = self.requests[self._next]["at"]
            if at > now or (self.concurrency is not None and self._live >= self.concurrency):
                break
            self._arrived[self._next] = at if self.concurrency is None else now
            found.append(self._next)
            self._next += 1
            self._live += 1
        return found

    def wait_s(self) -> float | None:
        """Return the seconds until the next request is due; None if there is none or another one
        must end first.
        """
        if self._next == len(self.requests):
            return None
        if self.concurrency is not None and self._live >= self.concurrency:
            return None
        at: float = self.requests[self._next]["at"]
        return max(0.0, at - (time.perf_counter() - self.started))

    def add(self, index: int, tokens: Iterable[int], times: Iterable[float] | None = None) -> None:
        """Add new tokens of a request. times: the time of each token; None for now."""
        before = len(self._tokens[index])
        self._tokens[index].extend(tokens)
        count = len(self._tokens[index]) - before
        if times is None:
            self._times[index].extend([time.perf_counter() - self.started] * count)
        else:
            self._times[index].extend(moment - self.started for moment in times)

    def finish(self, index: int) -> bool:
        """Record that a request has ended. Returns whether it was the last one.

        Raises:
            RuntimeError: it does not have the expected number of tokens, each with its time.
        """
        wanted = self.requests[index]["max_tokens"]
        if not len(self._tokens[index]) == len(self._times[index]) == wanted:
            raise RuntimeError(
                f"request {index} has {len(self._tokens[index])} tokens and "
                f"{len(self._times[index])} times; {wanted} were wanted"
            )
        self._live -= 1
        self._finished += 1
        return self.is_over

    @property
    def live(self) -> int:
        """How many requests have been submitted and have not ended."""
        return self._live

    @property
    def is_over(self) -> bool:
        """Whether all requests have ended."""
        return self._finished == len(self.requests)

    def reply(self) -> list[dict[str, Any]]:
        """Return the results of each request, for the harness."""
        return [
            {"arrived": arrived, "tokens": tokens, "times": times}
            for arrived, tokens, times in zip(self._arrived, self._tokens, self._times, strict=True)
        ]


def main(adapter: Adapter) -> None:
    """Serve the harness until it closes the pipe."""
    began = time.perf_counter()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print goes to the log
    sys.stdout = sys.stderr
    answer: dict[str, object]
    for line in sys.stdin:
        order = json.loads(line)
        try:
            if "load" in order:
                ready = adapter.load(order["load"])
                answer = {"ready": {"pid": os.getpid(), "python": sys.version.split()[0], **ready}}
                print(f"loaded in {time.perf_counter() - began:.1f} s", file=sys.stderr)
            else:
                turn = Turn(**order["run"])
                answer = {"done": adapter.run(turn) or turn.reply()}
        except Exception as error:
            traceback.print_exc()
            answer = {"failed": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def versions(*names: str) -> dict[str, str]:
    """Return the versions of packages. A package that runs from its sources has none."""
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "from its sources"
    return found


class StepEngine(Protocol):
    """A system that computes one step at a time, on request."""

    def submit(self, index: int, prompt: list[int], max_tokens: int) -> None:
        """Accept a request."""

    def step(self) -> Iterable[tuple[int, list[int], bool]]:
        """Compute a step. Yields each request, its new tokens, and whether it has ended."""


def drive(engine: StepEngine, turn: Turn) -> None:
    """Run a turn on such a system. Requests join between two steps."""
    while not turn.is_over:
        for index in turn.due():
            request = turn.requests[index]
            engine.submit(index, request["prompt"], request["max_tokens"])
        if not turn.live:
            time.sleep(turn.wait_s() or 0.0)
            continue
        for index, tokens, ended in engine.step():
            turn.add(index, tokens)
            if ended:
                turn.finish(index)
