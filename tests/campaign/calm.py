"""A server with the demo model and a witness, used for the calm baseline and during attacks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.models import DEMO
from tests.campaign.hostile.server import WITNESS, Server
from tests.campaign.witness.process import Witness
from tests.campaign.witness.report import Report


@contextmanager
def witnessed(
    *more: str,
    model: Path = DEMO,
    tls: bool = False,
    program: Sequence[str] | None = None,
    tokens: int = 500,
) -> Iterator[tuple[Server, Witness]]:
    """Yield a ready server and its witness.

    Args:
        more: further options of the server.
        model: the model's directory.
        tls: whether the server uses TLS on a TCP address.
        program: the program to run instead of `headrace-server`.
        tokens: the number of tokens of each of the witness's requests.
    """
    with (
        TemporaryDirectory(prefix="headrace-") as name,
        closing(Server(model, Path(name), tls=tls, more=more, program=program)) as server,
        Witness(
            server.target,
            server.pids,
            health_target=server.health_target,
            token_file=server.token_file(WITNESS),
            tokens=tokens,
        ) as witness,
    ):
        yield server, witness


def look(witness: Witness, seconds: float) -> Report:
    """Return what the witness sees in the next `seconds` seconds."""
    witness.begin()
    time.sleep(seconds)
    return witness.report()


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
