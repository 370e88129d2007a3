"""How much of a hostile input a neighbour may feel, and whether it felt more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.hostile.inputs import Input
from benchmarks.hostile.sending import UNEXPECTED
from benchmarks.witness.report import Report, Waits

WORST_S = 0.25
"""The longest wait beside a hostile input, where the calm time was calm."""
MORE_S = 0.2
"""How much longer than the calm time's worst it may be elsewhere."""
GROWTH_BYTES = 256_000_000
"""Of either process, beyond the KV cache's announced size."""
STRANGERS_BYTES = 64_000_000
"""Of both processes together, for all strangers; connections count beside it."""
CONNECTION_BYTES = 64 << 10
MAX_CONNECTIONS = 1024
"""What a connection may take, and of how many: the server's default bound."""
FRONT_END, ENGINE = "front_end", "engine"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One attempt with an input.

    Attributes:
        calm, seen: what the witness saw in the calm time, and beside the input.
        first: the memory of the server's processes before anything was tried on it, bytes by name.
        highest: the most that they took beside earlier inputs on that server: those are to blame
            for it, not this one.
        cache_bytes: the KV cache's announced size.
        answers: what the attacker was told, and how often.
        connections: how many it opened.
        secrets: the callers whose tokens stand in what the server said meanwhile.
        died: what ended meanwhile: "the server", "the engine", or nothing.
        recovered_s: how long after it the server was as before; None: it was not in time.
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
        """Of a process, beyond what it had when the server was new; bytes."""
        memory = self.seen.memory.get(name)
        return 0 if memory is None else memory.peak - self.first.get(name, memory.start)


def allowed_s(calm: Waits) -> float:
    """The longest wait, given the calm time's. What the witness itself was late then does not
    excuse the server.
    """
    return max(WORST_S, calm.worst_s - calm.late_s + MORE_S)


def waits_too_long(run: Run) -> list[tuple[str, Waits, float]]:
    """The witness' waits that are too long: what for, how long, and how long they may be."""
    pairs = (
        ("gap between tokens", run.seen.gaps, allowed_s(run.calm.gaps)),
        ("health's answer", run.seen.health, allowed_s(run.calm.health)),
    )
    return [(name, found, most) for name, found, most in pairs if found.worst_s > most]


def why_discarded(run: Run) -> str | None:
    """Why a run says nothing: what was too long is so for the witness' own lag; None: it counts."""
    for name, found, most in waits_too_long(run):
        if found.worst_s - found.late_s <= most:
            return (
                f"the witness itself was {found.late_s:.3f} s late within the worst {name} "
                f"({found.worst_s:.3f} s), which was not too long without that"
            )
    return None


def faults(one: Input, run: Run, *, waits: bool = True) -> list[str]:
    """What is wrong; empty: the criterion is met. `waits`: whether they are judged."""
    seen = run.seen
    found = [
        f"{name} {wait.worst_s:.3f} s, above {most:.3f}"
        for name, wait, most in (waits_too_long(run) if waits else [])
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
    if one.answers and not any(run.answers.get(answer) for answer in one.answers):
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
