"""The tables in docs/clients.md, written from the record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.languages.rows import ROWS, Row
from benchmarks.markdown import cpus, link, table
from benchmarks.measures import figure


def render(record: Mapping[str, Any], name: str) -> str:
    """Return the block's text."""
    cases = {case["name"]: case for case in record["cases"]}
    parts = [
        f"{record['date'][:10]}, commit {record['commit']}, {cpus(record)}, load average "
        f"{record['load_average'][0]:.1f} before. {link(name)}",
        *(_throughput(cases[key]) for key in ("one", "eight") if key in cases),
        *([_paced(cases["paced"])] if "paced" in cases else []),
        *([_throughput(cases["demo"], aims=False)] if "demo" in cases else []),
    ]
    return "\n\n".join(parts) + "\n"


def _throughput(case: Mapping[str, Any], *, aims: bool = True) -> str:
    rows = []
    for row, found in _found(case):
        share = f"{found['of_fastest']:.2f}"
        if aims:
            share += f" (aim {row.aim:g}{'' if found['of_fastest'] >= row.aim else ', missed'})"
        rows.append([row.title, figure(found["tokens_per_s"]), share, *_costs(case, found)])
    title = f"{_heading(case)}, as fast as they come" if aims else _heading(case)
    return _table(title, ["tokens/s", "of the fastest", *_COSTS], rows)


def _paced(case: Mapping[str, Any]) -> str:
    rows = [[row.title, *_costs(case, found)] for row, found in _found(case)]
    return _table(_heading(case), list(_COSTS), rows)


_COSTS = ("client, µs CPU a token", "server, µs CPU a token", "client's peak memory")


def _costs(case: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    return [
        figure(found["client_us_per_token"]),
        figure(found["server_us_per_token"]),
        f"{found['peak_bytes'] / 2**20:.0f} MiB",
    ]


def _heading(case: Mapping[str, Any]) -> str:
    return f"{case['meaning'][0].upper()}{case['meaning'][1:]}"


def _found(case: Mapping[str, Any]) -> list[tuple[Row, Mapping[str, Any]]]:
    """Return the rows of a case, the fastest first."""
    rows = [(row, case["languages"][row.name]) for row in ROWS if row.name in case["languages"]]
    return sorted(rows, key=lambda pair: -pair[1]["tokens_per_s"])


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join([f"**{title}**", "", *table(["", *columns], rows)])
