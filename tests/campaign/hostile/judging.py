"""The criterion for a hostile input: how much a well-behaved caller may notice of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tests.campaign.calm import too_long
from tests.campaign.hostile.inputs import Input
from tests.campaign.hostile.sending import UNEXPECTED, fits
from tests.campaign.witness.report import Report

GROWTH_BYTES = 256_000_000
"""Allowed memory growth of either process, in addition to the KV cache's announced size."""
STRANGERS_BYTES = 64_000_000
"""Allowed memory growth of both processes together for all strangers, not counting connections."""
CONNECTION_BYTES = 64 << 10
MAX_CONNECTIONS = 1024
"""The memory allowed per connection, and the server's default connection limit."""
FRONT_END, ENGINE = "front_end", "engine"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of an input.

    Attributes:
        calm, seen: the witness's reports of the calm period and of the run.
        first: the memory of the server's processes before any input, in bytes by process name.
        highest: their highest memory during earlier inputs on this server. Growth up to that level
            is not attributed to this input.
        cache_bytes: the KV cache's announced size.
        secrets: the callers whose tokens appeared in the server's log during the run.
        died: what ended during the run: "the server", "the engine", or an empty string.
        recovered_s: how long the server took to recover after the input; None if it did not recover
            in time.
    """

    calm: Report
    seen: Report
    first: Mapping[str, int]
    highest: Mapping[str, int]
    cache_bytes: int
    answers: Mapping[str, int]
    connections: int
    secrets: tuple[str, ...]
    died: str
    recovered_s: float | None

    def growth(self, name: str) -> int:
        """Return a process's peak memory growth in bytes since the server was new."""
        memory = self.seen.memory.get(name)
        return 0 if memory is None else memory.peak - self.first.get(name, memory.start)


def why_discarded(run: Run) -> str | None:
    """Return why a run is inconclusive, or None if it counts.

    A run is inconclusive if a wait exceeds its limit only because of the witness's own lag.
    """
    for name, found, most in too_long(run.calm, run.seen):
        if found.worst_s - found.late_s <= most:
            return (
                f"the witness itself was {found.late_s:.3f} s late within the worst {name} "
                f"({found.worst_s:.3f} s), which was not too long without that"
            )
    return None


def faults(one: Input, run: Run, *, waits: bool = True) -> list[str]:
    """Return what is wrong; empty if the run meets the criterion. `waits`: whether waits are
    judged.
    """
    seen = run.seen
    found = [
        f"{name} {wait.worst_s:.3f} s, above {most:.3f}"
        for name, wait, most in (too_long(run.calm, run.seen) if waits else [])
    ]
    for number, what in (
        (seen.wrong_tokens, "wrong tokens"),
        (seen.lost_tokens, "lost tokens"),
        (seen.wrong_texts, "wrong answers of Tokenize"),
        (seen.not_serving, "health checks that were not SERVING"),
    ):
        if number:
            found.append(f"{number} {what}")
    found += _grown(one, run)
    if run.died:
        found.append(f"{run.died} ended")
    if run.secrets:
        found.append(f"the log shows the token of {', '.join(run.secrets)}")
    if run.recovered_s is None:
        found.append("the server was not as before in time")
    found += [
        f"{number} {answer}"
        for answer, number in run.answers.items()
        if answer.startswith(UNEXPECTED)
    ]
    if one.answers and not any(
        number and any(fits(answer, wanted) for wanted in one.answers)
        for answer, number in run.answers.items()
    ):
        found.append("it did not reach what it is for: no answer was as it should be")
    if one.judge is not None and (wrong := one.judge(run.answers)) is not None:
        found.append(wrong)
    return found


def _grown(one: Input, run: Run) -> list[str]:
    found = []
    for name, most in (
        (FRONT_END, GROWTH_BYTES),
        (ENGINE, GROWTH_BYTES + run.cache_bytes),
    ):
        growth = run.growth(name)
        memory = run.seen.memory.get(name)
        if memory is not None and growth > most and memory.peak > run.highest.get(name, 0):
            words = name.replace("_", " ")
            found.append(f"the {words} grew by {growth / 1e6:.0f} MB, above {most / 1e6:.0f}")
    if one.stranger:
        growth = sum(memory.growth for memory in run.seen.memory.values())
        room = min(run.connections, MAX_CONNECTIONS) * CONNECTION_BYTES
        if growth > STRANGERS_BYTES + room:
            found.append(
                f"strangers took {growth / 1e6:.0f} MB, above {(STRANGERS_BYTES + room) / 1e6:.0f}"
            )
    return found
