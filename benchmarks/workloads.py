"""The named workloads, and how their requests arrive.

A workload defines lengths. New prompts are drawn for every turn of every case, so that no system
finds prompts of an earlier turn, or of another workload, in its prefix cache. Every system gets the
same prompts in the same turn.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

FIRST_TOKEN = 10
"""The first ordinary token id; lower ids are a tokenizer's special tokens."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """The lengths of one request, in tokens."""

    prompt: int
    output: int
    shared_prefix: int = 0
    """How much of the prompt's beginning all requests of the turn share."""

    @property
    def total(self) -> int:
        return self.prompt + self.output


@dataclass(frozen=True, slots=True)
class Workload:
    """A named set of requests."""

    name: str
    meaning: str
    count: int
    draw: Callable[[random.Random], Lengths]

    def lengths(self, count: int | None = None) -> list[Lengths]:
        """Return the lengths of its requests, the same in every run. count: None for the workload's
        own.
        """
        draw = random.Random(self.name)
        return [self.draw(draw) for _ in range(self.count if count is None else count)]


@dataclass(frozen=True, slots=True)
class Load:
    """How requests arrive. If both attributes are None, all arrive at the start.

    Attributes:
        concurrency: closed loop: this many at a time; the next one starts when one ends.
        rate: open loop: requests per second, with exponentially distributed gaps.
    """

    concurrency: int | None = None
    rate: float | None = None

    @property
    def name(self) -> str:
        """The name on the command line."""
        if self.concurrency is not None:
            return f"closed:{self.concurrency}"
        return "all" if self.rate is None else f"poisson:{self.rate:g}"

    def count(self, workload: Workload) -> int:
        """Return how many requests there are: at least two for every slot of a closed loop."""
        return max(workload.count, 2 * (self.concurrency or 0))

    def arrivals(self, count: int, seed: int) -> list[float]:
        """Return the arrival times, in seconds from the start of the turn."""
        if self.rate is None:
            return [0.0] * count
        draw, now, times = random.Random(seed), 0.0, []
        for _ in range(count):
            times.append(now)
            now += draw.expovariate(self.rate)
        return times


AT_ONCE = Load()
"""All requests arrive at the start."""


def parse_load(text: str) -> Load:
    """Parse `all`, `closed:N` or `poisson:RATE`. Raises ValueError."""
    kind, _, number = text.partition(":")
    if kind == "all" and not number:
        return AT_ONCE
    try:
        if kind == "closed" and 1 <= int(number) <= 4096:
            return Load(concurrency=int(number))
        if kind == "poisson" and 0 < float(number) <= 1e6:
            return Load(rate=float(number))
    except ValueError:
        pass
    raise ValueError(f"{text!r} is no load: all, closed:N (1 to 4096) or poisson:REQUESTS_A_SECOND")


def make_prompts(lengths: list[Lengths], vocab_size: int, seed: int | str) -> list[list[int]]:
    """Return random token ids, the same for the same seed."""
    draw = random.Random(seed)
    shared = [draw.randrange(FIRST_TOKEN, vocab_size) for _ in range(lengths[0].shared_prefix)]
    return [
        shared
        + [draw.randrange(FIRST_TOKEN, vocab_size) for _ in range(one.prompt - one.shared_prefix)]
        for one in lengths
    ]


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("W1", "16 requests of 128 in, 64 out", 16, lambda draw: Lengths(128, 64)),
        Workload(
            "W2",
            "32 requests of 16 to 256 in, 16 to 128 out",
            32,
            lambda draw: Lengths(draw.randint(16, 256), draw.randint(16, 128)),
        ),
        Workload("W3", "one request of 128 in, 64 out", 1, lambda draw: Lengths(128, 64)),
        Workload(
            "W4",
            "16 requests of 1,088 in, of which the first 1,024 are common to all; 64 out",
            16,
            lambda draw: Lengths(1024 + 64, 64, shared_prefix=1024),
        ),
        Workload("W5", "4 requests of 4,096 in, 64 out", 4, lambda draw: Lengths(4096, 64)),
    )
}
