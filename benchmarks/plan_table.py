"""The table of a record of `make bench-plan`: what was planned, and what the run then took.

It is apart from what makes the record, since reports are also written where there is no gRPC.
"""

from __future__ import annotations

from typing import Any

KIND = "plan"
MEMORY_BOUND, TIME_BOUND = 0.10, 0.30
"""How far a plan may be off, relative to the run."""


def ratio(row: dict[str, Any], name: str) -> float:
    """Planned, relative to taken."""
    found: float = row["planned"][name] / row["taken"][name]
    return found


def render(record: dict[str, Any], name: str) -> str:
    """The record as text for a document."""
    machine = record["machine"]
    lines = [
        f"{record['date'][:10]}, {machine['cpus']} CPUs ({machine['cpu']}), "
        f"{machine['memory_bytes'] / 2**30:.0f} GiB; load average "
        f"{min(row['load_average'] for row in record['rows']):.1f} to "
        f"{max(row['load_average'] for row in record['rows']):.1f}. "
        f"{record['requests']} requests of {record['prompt']} + {record['output']} tokens. Commit "
        f"{record['commit']}. Record: [`{name}`](../{name}).",
        "",
        "| model | memory MiB | step of 1 request ms | step of 16 requests ms | prompt alone ms |",
        "|---|---|---|---|---|",
    ]
    for row in record["rows"]:
        cells = [row["name"], _cell(row, "memory_bytes", 2**-20, MEMORY_BOUND)]
        cells += [
            _cell(row, name, 1e3, TIME_BOUND) for name in ("decode_1_s", "decode_16_s", "prompt_s")
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(row: dict[str, Any], name: str, unit: float, bound: float) -> str:
    planned, taken = row["planned"][name] * unit, row["taken"][name] * unit
    off = ratio(row, name) - 1
    text = f"{planned:,.3g}, {taken:,.3g} ({off:+.0%})"
    if planned >= 1000 or taken >= 1000:
        text = f"{planned:,.0f}, {taken:,.0f} ({off:+.0%})"
    return text if abs(off) <= bound else f"**{text}**"
