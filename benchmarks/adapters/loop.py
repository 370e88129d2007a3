"""The common part of all adapters: lines of JSON over pipes, and the bookkeeping of a turn.

    harness ──{"load": …}──▶ adapter ──{"ready": …}──▶ harness
            ──{"run": …}───▶         ──{"done": …}───▶            once a turn
            ──(end of file)▶                                      the adapter ends

A turn's requests arrive at their own times, with a bound on how many are in the system at once.
Only the standard library is imported, because this file also runs in the interpreters of peers.
Times are seconds of `time.perf_counter`, which on Linux is the clock of `time.monotonic` too.
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
    """One system."""

    def load(self, order: dict[str, Any]) -> dict[str, Any]:
        """Bring the model into memory.

        Args:
            order: model (a directory), dtype, threads, limits (kv_tokens, max_requests,
                max_request_tokens, max_prompt_tokens), cache (a directory for what is made of the
                model), options, instructions (a set that its process is limited to, or null).

        Returns:
            settings, versions; pid, the root of the processes whose memory counts, if it is not the
            adapter; start_s, if it is not the time until this answer; or prepared_s, how much of
            that time is spent once for a model (an export).
        """

    def run(self, turn: Turn) -> object:
        """Run one turn to its end.

        Returns:
            What the harness is told, as JSON can say it; None: what became of the turn's requests.
        """


class Turn:
    """The requests of one turn, and their results.

    Attributes:
        requests: "prompt" (token ids), "max_tokens" and "at" (seconds from the turn's start); of a
            system whose requests can sample, "sampling" (options, or null).
        concurrency: most requests that are in the system at once; None: any number.
        profile_steps: how many decode steps to profile instead, in systems that can; 0: none.
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
        """The requests to submit now; each is given once.

        A request counts from its own time where it has one, even if it is submitted later: a
        system that is busy is not excused. One that waited for another's end counts from now.
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
        """Seconds until the next request is due; None: there is none, or another must end first."""
        if self._next == len(self.requests):
            return None
        if self.concurrency is not None and self._live >= self.concurrency:
            return None
        at: float = self.requests[self._next]["at"]
        return max(0.0, at - (time.perf_counter() - self.started))

    def add(self, index: int, tokens: Iterable[int], times: Iterable[float] | None = None) -> None:
        """New tokens of a request. times: of each token; None: now."""
        before = len(self._tokens[index])
        self._tokens[index].extend(tokens)
        count = len(self._tokens[index]) - before
        if times is None:
            self._times[index].extend([time.perf_counter() - self.started] * count)
        else:
            self._times[index].extend(moment - self.started for moment in times)

    def finish(self, index: int) -> bool:
        """A request has ended. Returns whether it was the last one.

        Raises:
            RuntimeError: it does not have as many tokens, each with its time, as it was to have.
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
        """How many requests were given and have not ended."""
        return self._live

    @property
    def is_over(self) -> bool:
        """Whether all requests have ended."""
        return self._finished == len(self.requests)

    def reply(self) -> list[dict[str, Any]]:
        """The results of each request, for the harness."""
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
    """The versions of packages; a package that runs from its sources has none."""
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "from its sources"
    return found


class StepEngine(Protocol):
    """A system that computes one step at a time, when it is told to."""

    def submit(self, index: int, prompt: list[int], max_tokens: int) -> None:
        """Accept a request."""

    def step(self) -> Iterable[tuple[int, list[int], bool]]:
        """Compute a step. Yields each request, its new tokens, and whether it has ended."""


def drive(engine: StepEngine, turn: Turn) -> None:
    """Run a turn on such a system: requests join between two steps."""
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
