"""The tables in docs/proxies.md, written from the record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.markdown import cpus, link, table
from benchmarks.proxies.running import PROGRAMS

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


def render(record: Mapping[str, Any], name: str) -> str:
    """Return the block's text."""
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
