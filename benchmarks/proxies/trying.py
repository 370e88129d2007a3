"""What proxies between a client and a server do to its calls: nginx, HAProxy and Envoy at their
defaults, and with the configurations of `deploy/`.

    python -m benchmarks proxies            # under five minutes; needs nginx, haproxy and envoy
    python -m benchmarks proxies --long     # about six: with what Envoy cuts after five minutes

The proxies are the real programs on loopback, each in front of the same server. This is the real
service, as a process, around an engine that computes nothing and stays silent for as long as a
prompt says (`benchmarks.scripted_engine`). Each call is tried in each situation (`calls`), through
each proxy and directly. All run concurrently, so that waiting for the proxies' timeouts takes no
longer than the longest of them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.markdown import cpus, link, table
from benchmarks.processes import SystemFailure
from benchmarks.proxies.calls import CALLS, LONG, SITUATIONS, Situation, Tried, Way, tried
from benchmarks.proxies.running import NGINX, PROGRAMS, proxy
from benchmarks.records import Record
from benchmarks.rig.measurement import Measurement, option
from benchmarks.rig.serving import Process, scripted

STRAIGHT = "straight"
PINGS_S = 60.0
"""The server's default ping interval."""
OFTEN_S = 30.0
_NAMES = [one.name for one in PROGRAMS]
DEFAULTS, RECIPE = "defaults", "deploy"
"""The suffixes of a way's name for the two configurations of a proxy."""
PINGED = "nginx, defaults, pings"
"""The way through nginx to a server that pings more often."""
_HEADINGS = {
    "waits": "A request waits 80 s in the queue, then comes its output",
    "runs": "A request's output comes for 80 s, a token a second",
    "idle": "A session has a request, nothing for 80 s, then another one",
    "idle long": "The same with nothing for 310 s",
    "large": "A prompt of 1.2 MB; on a session and in a batch 160 prompts of 9 kB",
}


def measure(options: argparse.Namespace, record: Record) -> None:
    """Try all calls. Raises SystemFailure if a program is not installed, or a result is not as
    expected.
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
        calm = stack.enter_context(server(PINGS_S))
        ways = [Way(STRAIGHT, calm.port, calm.address)]
        for program in programs:
            for kind, config in ((DEFAULTS, program.defaults), (RECIPE, program.recipe)):
                ways.append(stack.enter_context(way(f"{program.name}, {kind}", calm, config)))
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


def server(pings_s: float) -> AbstractContextManager[Process]:
    """Run the server behind the proxies. pings_s: after how many seconds it pings a silent
    connection.
    """
    return scripted("paced", pings_s, on_socket=False)


@contextmanager
def way(
    name: str, server: Process, config: Path, changes: Mapping[str, str] | None = None
) -> Iterator[Way]:
    """Run a proxy in front of a server. name: the way's, which begins with the program's. changes:
    see `proxy`.
    """
    [program] = [one for one in PROGRAMS if one.name == name.partition(",")[0]]
    with (
        tempfile.TemporaryDirectory(prefix="headrace-proxy-") as folder,
        proxy(program, Path(folder), server.port, config, changes) as started,
    ):
        yield Way(name, started.port, server.address)


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


# ---- the tables ----------------------------------------------------------------------------------


def render(record: Mapping[str, Any], name: str) -> str:
    versions = record["versions"]
    programs = [one for one in PROGRAMS if one.name in versions]
    told = ", ".join(f"{one.title} {versions[one.name]}" for one in programs)
    parts = [
        f"{told}; {record['date'][:10]}, commit {record['commit']}, {cpus(record)}, "
        f"{record['machine']['system']}, grpcio {versions['grpcio']}: {record['seconds']} s. "
        f"{link(name)}"
    ]
    rows = record["rows"]
    for situation, heading in _HEADINGS.items():
        found = [row for row in rows if row["situation"] == situation]
        if not found:
            continue
        calls = [
            [call, *(_cell(_row(found, call, f"{one.name}, {DEFAULTS}")) for one in programs)]
            for call in dict.fromkeys(row["call"] for row in found)
        ]
        lines = table(["", *(one.title for one in programs)], calls)
        parts.append("\n".join([f"**{heading}**", "", *lines]))
    right = [
        f"{sum(row['whole'] for row in of)} of {len(of)} by [{one.recipe.name}]"
        f"(../deploy/{one.recipe.name})"
        for one in programs
        if (of := [row for row in rows if row["way"] == f"{one.name}, {RECIPE}"])
    ]
    parts.append(
        f"**With the configurations of deploy/** the same calls are whole: {', '.join(right)}."
    )
    if pinged := [row for row in rows if row["way"] == PINGED]:
        left = [f"{row['situation']}: {row['call']}" for row in pinged if not row["whole"]]
        parts.append(
            "**nginx at its defaults, before a server with `--keepalive-interval 30`**: "
            f"{len(pinged) - len(left)} of {len(pinged)} are whole; not {'; '.join(left)}."
        )
    return "\n\n".join(parts) + "\n"


def _row(rows: Sequence[Mapping[str, Any]], call: str, way: str) -> Mapping[str, Any]:
    return next(row for row in rows if row["call"] == call and row["way"] == way)


def _cell(row: Mapping[str, Any]) -> str:
    if row["whole"]:
        return "whole" if row["tries"] == 1 else f"whole, begun {row['tries']} times"
    if row["tries"] == 0:
        return "**refused**"
    if row["of_requests"] > 1:
        kept = f"{row['requests']} of {row['of_requests']} requests"
    else:
        kept = f"{row['tokens']} of {row['of_tokens']} tokens"
    words = f"**cut** after {row['seconds']:.0f} s, {kept}"
    if row["tries"] > 1:
        words += f", begun {row['tries']} times"
    if row["goes_on"]:
        words += "; the request goes on"
    return words


MEASUREMENT = Measurement(
    name="proxies",
    measure=measure,
    render=render,
    options=(
        option("proxy", _NAMES, "only these", nargs="+", choices=_NAMES),
        option("long", False, "also what takes longer: six minutes"),
    ),
)
