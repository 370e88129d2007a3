"""The command; see the package."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path

import grpc

import benchmarks.proxies
from benchmarks.fleet.servers import ServerProcess
from benchmarks.processes import ROOT
from benchmarks.proxies.calls import CALLS, LONG, SITUATIONS, Situation, Tried, Way, tried
from benchmarks.proxies.document import DEFAULTS, DOCUMENT, KIND, PINGED, RECIPE, update
from benchmarks.proxies.running import NGINX, PROGRAMS, Program, proxy
from benchmarks.records import FORMAT, commit, machine_record, read_record, rounded
from benchmarks.stalled_readers import free_port

RECORD = ROOT / "benchmarks" / "results" / "proxies.json"
STRAIGHT = "straight"
PINGS_S = 60.0
"""The server's default ping interval."""
OFTEN_S = 30.0


def main() -> int:
    """Try all calls, or write the document. Returns the exit code: 1 if a result is not as
    expected, 2 if a program is not installed.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.proxies",
        description=(benchmarks.proxies.__doc__ or "").split("\n\n")[0],
    )
    names = [one.name for one in PROGRAMS]
    parser.add_argument("--proxy", nargs="+", choices=names, default=names, help="only these")
    parser.add_argument("--long", action="store_true", help="also what takes longer: six minutes")
    parser.add_argument("--output", type=Path, help="the record; default: not written")
    parser.add_argument("--report", action="store_true", help=f"only write {DOCUMENT.name}")
    parser.add_argument("--check", action="store_true", help="with --report: only look")
    given = parser.parse_args()
    if given.report:
        is_right = update(DOCUMENT, read_record(RECORD), check=given.check)
        return int(given.check and not is_right)
    programs = [one for one in PROGRAMS if one.name in given.proxy]
    if absent := [one for one in programs if one.path is None]:
        for one in absent:
            sys.stderr.write(f"{one.missing}\n")
        if here := " ".join(one.name for one in programs if one.path is not None):
            sys.stderr.write(f"or leave it out: --proxy {here}\n")
        return 2
    situations = (*SITUATIONS, LONG) if given.long else SITUATIONS
    return _run(programs, situations, given.output)


def _run(programs: Sequence[Program], situations: Sequence[Situation], output: Path | None) -> int:
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
    record = {
        "format": FORMAT,
        "kind": KIND,
        "date": datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine_record(),
        "versions": {
            **{one.name: one.version() for one in programs},
            "grpcio": grpc.__version__,
        },
        "seconds": round(time.monotonic() - began),
        "rows": [asdict(row) for row in rows],
    }
    if output is not None:
        output.write_text(json.dumps(rounded(record), indent=1) + "\n")
    wrong = [row for row in rows if row.way.endswith((STRAIGHT, RECIPE)) and not row.whole]
    for row in wrong:
        sys.stdout.write(f"not whole: {row.way}, {row.situation}, {row.call}: {row.error}\n")
    return int(bool(wrong))


@contextmanager
def server(pings_s: float) -> Iterator[str]:
    """Run the server behind the proxies and yield its address.

    Args:
        pings_s: after how many seconds it pings a silent connection.
    """
    address = f"127.0.0.1:{free_port()}"
    started = ServerProcess("benchmarks.proxies.server", address, "--pings", f"{pings_s:g}")
    try:
        started.wait_until_ready()
        yield started.address
    finally:
        started.kill()


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
    sys.stdout.write(
        f"{row.seconds:6.1f} s  {row.way:18} {row.situation:6} {row.call:22} "
        f"{row.requests} of {row.of_requests}, begun {row.tries} times: {told[:90]}\n"
    )
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
