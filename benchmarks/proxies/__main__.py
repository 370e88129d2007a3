"""The command; see the package."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path

import benchmarks.proxies
from benchmarks.processes import SystemFailure
from benchmarks.proxies.calls import CALLS, LONG, SITUATIONS, Situation, Tried, Way, tried
from benchmarks.proxies.document import DEFAULTS, PINGED, RECIPE
from benchmarks.proxies.running import NGINX, PROGRAMS, proxy
from benchmarks.records import Record
from benchmarks.rig.measurement import Measurement, option
from benchmarks.rig.serving import scripted

STRAIGHT = "straight"
PINGS_S = 60.0
"""The server's default ping interval."""
OFTEN_S = 30.0
_NAMES = [one.name for one in PROGRAMS]


def measure(options: argparse.Namespace, record: Record) -> None:
    """Try all calls.

    Raises:
        SystemFailure: a program is not installed, or a result is not as expected.
    """
    programs = [one for one in PROGRAMS if one.name in options.proxy]
    if absent := [one.missing for one in programs if one.path is None]:
        here = " ".join(one.name for one in programs if one.path is not None)
        raise SystemFailure(
            "; ".join([*absent, *([f"or leave it out: --proxy {here}"] if here else [])])
        )
    situations = (*SITUATIONS, LONG) if options.long else SITUATIONS
    began = time.monotonic()
    with ExitStack() as stack:
        address = stack.enter_context(server(PINGS_S))
        ways = [Way(STRAIGHT, int(address.rpartition(":")[2]), address)]
        for program in programs:
            for kind, config in ((DEFAULTS, program.defaults), (RECIPE, program.recipe)):
                ways.append(stack.enter_context(way(f"{program.name}, {kind}", address, config)))
        if NGINX in programs:
            often = stack.enter_context(server(OFTEN_S))
            ways.append(stack.enter_context(way(PINGED, often, NGINX.defaults)))
        rows = asyncio.run(everything(ways, situations))
    record.data["versions"] |= {one.name: one.version() for one in programs}
    record.data["seconds"] = round(time.monotonic() - began)
    record.put([asdict(row) for row in rows], "rows")
    wrong = [
        f"{row.way}, {row.situation}, {row.call}: {row.error}"
        for row in rows
        if row.way.endswith((STRAIGHT, RECIPE)) and not row.whole
    ]
    if wrong:
        raise SystemFailure("\n".join(["not whole:", *wrong]))


@contextmanager
def server(pings_s: float) -> Iterator[str]:
    """Run the server behind the proxies and yield its address.

    Args:
        pings_s: after how many seconds it pings a silent connection.
    """
    with scripted("paced", pings_s, on_socket=False) as started:
        yield started.address


@contextmanager
def way(
    name: str, address: str, config: Path, changes: Mapping[str, str] | None = None
) -> Iterator[Way]:
    """Run a proxy in front of a server.

    Args:
        name: the way's name, which begins with the program's.
        address: the server's address.
        config: the proxy's configuration.
        changes: see `proxy`.
    """
    [program] = [one for one in PROGRAMS if one.name == name.partition(",")[0]]
    upstream = int(address.rpartition(":")[2])
    with (
        tempfile.TemporaryDirectory(prefix="headrace-proxy-") as folder,
        proxy(program, Path(folder), upstream, config, changes) as started,
    ):
        yield Way(name, started.port, address)


async def everything(ways: Sequence[Way], situations: Sequence[Situation]) -> list[Tried]:
    """Try each call in each situation in each way, all concurrently. Large calls run one after the
    other, because the server bounds what it holds for all callers.
    """
    one_at_a_time = asyncio.Semaphore()

    async def attempt(by: Way, situation: Situation, call: str) -> Tried:
        async with one_at_a_time if situation.size else contextlib.nullcontext():
            row = await tried(by, situation, call)
        _say(row)
        return row

    return await asyncio.gather(
        *(
            attempt(by, situation, call)
            for situation in situations
            for call in situation.calls or CALLS
            for by in ways
        )
    )


def _say(row: Tried) -> None:
    told = "whole" if row.whole else row.error
    print(
        f"{row.seconds:6.1f} s  {row.way:18} {row.situation:6} {row.call:22} "
        f"{row.requests} of {row.of_requests}, begun {row.tries} times: {told[:90]}",
        flush=True,
    )


MEASUREMENT = Measurement(
    name="proxies",
    about=benchmarks.proxies.__doc__ or "",
    measure=measure,
    options=(
        option("proxy", _NAMES, "only these", nargs="+", choices=_NAMES),
        option("long", False, "also what takes longer: six minutes"),
    ),
    is_kept=False,
)

if __name__ == "__main__":
    MEASUREMENT.run()
