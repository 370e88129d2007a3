"""A server with the demo model and a witness, used for the calm baseline and during attacks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from benchmarks.models import DEMO
from tests.campaign.hostile.server import WITNESS, Server
from tests.campaign.witness.process import Witness
from tests.campaign.witness.report import Report, Waits

T = TypeVar("T")
WORST_S = 0.25
"""The longest wait that is always allowed beside an attack."""
MORE_S = 0.2
"""How much longer a wait may be than the worst wait of the calm period."""


@contextmanager
def witnessed(
    *more: str,
    model: Path = DEMO,
    tls: bool = False,
    program: Sequence[str] | None = None,
    tokens: int = 500,
) -> Iterator[tuple[Server, Witness]]:
    """Yield a ready server and its witness. `more`, `model`, `tls`, `program`: as of a Server;
    `tokens`: of each of the witness's requests.
    """
    with (
        TemporaryDirectory(prefix="headrace-") as name,
        closing(Server(model, Path(name), tls=tls, more=more, program=program)) as server,
        Witness(
            server.target,
            server.pids,
            health_target=server.health_target,
            token=server.token(WITNESS),
            tokens=tokens,
        ) as witness,
    ):
        yield server, witness


def look(witness: Witness, seconds: float) -> Report:
    """Return what the witness sees in the next `seconds` seconds."""
    witness.begin()
    time.sleep(seconds)
    return witness.report()


@dataclass(slots=True)
class Beside:
    """A server that is attacked, and its witness. Made by `beside`.

    Attributes:
        calm: what the witness saw while nobody else used the server.
        seen: what it saw of the last attack.
    """

    server: Server
    witness: Witness
    calm: Report
    seen: Report

    def during(self, attack: Callable[[], T]) -> T:
        """Run an attack, and keep what the witness sees meanwhile."""
        self.witness.begin()
        found = attack()
        self.seen = self.witness.report()
        return found

    def faults(self) -> list[str]:
        """Return what must never be, whatever the attack: of the server, and for the witness."""
        return self.server.faults() + self.seen.losses

    def slow(self) -> list[str]:
        """Return what took too long, and not by the witness's own lag."""
        return [
            f"{name} {found.worst_s:.3f} s, above {most:.3f}"
            for name, found, most in too_long(self.calm, self.seen)
            if found.worst_s - found.late_s > most
        ]

    @property
    def gap(self) -> str:
        return f"gap {told_ms(self.seen.gaps, self.calm.gaps)}"

    @property
    def health(self) -> str:
        return f"health {told_ms(self.seen.health, self.calm.health)}"


@contextmanager
def beside(calm_s: float, **options: Any) -> Iterator[Beside]:
    """Yield a server to attack, once its witness has watched it for `calm_s` seconds. `options`: as
    of `witnessed`.
    """
    with witnessed(**options) as (server, witness):
        calm = look(witness, calm_s)
        yield Beside(server, witness, calm, calm)


def allowed_s(calm: Waits) -> float:
    """Return the longest allowed wait, given the waits of the calm period.

    The calm period's worst wait excludes the witness's own lag, so that the lag does not raise
    the limit for the server.
    """
    return max(WORST_S, calm.worst_s - calm.late_s + MORE_S)


def too_long(calm: Report, seen: Report) -> list[tuple[str, Waits, float]]:
    """Return the witness's waits that exceed their limits, as (what, waits, limit in seconds)."""
    pairs = (
        ("gap between tokens", seen.gaps, allowed_s(calm.gaps)),
        ("health's answer", seen.health, allowed_s(calm.health)),
    )
    return [(name, found, most) for name, found, most in pairs if found.worst_s > most]


def told_ms(seen: Waits, calm: Waits) -> str:
    return f"{seen.worst_s * 1e3:.0f} ms (calm {calm.worst_s * 1e3:.0f})"


def told(seen: Report) -> dict[str, Any]:
    """Convert a report to the format of the record."""
    return {
        "seconds": seen.seconds,
        "gap_s": seen.gaps.worst_s,
        "health_s": seen.health.worst_s,
        "tokenize_s": seen.tokenize.worst_s,
        "lag_s": seen.lag.worst_s,
    }


def calm_minute(seconds: float) -> dict[str, Any]:
    """Return what a witness sees of a server that nobody else uses."""
    with witnessed() as (_, witness):
        return told(look(witness, seconds))
