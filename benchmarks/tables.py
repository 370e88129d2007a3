"""The tables of records that do not compare systems: plans against reality, and first tries.

They are separate from the code that makes the records, because reports are also written without
gRPC.
"""

from __future__ import annotations

import statistics
from typing import Any

FIRST_TRY = "first-try"
FIRST_TRY_PARTS = ("environment", "resolve", "fetch", "link", "start", "first token")
"""The parts of `make run` in a fresh clone, in order."""
PLAN = "plan"
MEMORY_BOUND, TIME_BOUND = 0.10, 0.30
"""The largest error of a plan, relative to the run."""


def ratio(row: dict[str, Any], name: str) -> float:
    """Return the planned value divided by the measured one."""
    found: float = row["planned"][name] / row["taken"][name]
    return found


def plan(record: dict[str, Any], name: str) -> str:
    """Return a record of `make bench-plan` as text for a document."""
    lines = [
        f"{_where(record)}; load average "
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


def first_try(record: dict[str, Any], name: str) -> str:
    """Return a record of `make bench-first-try` as text for a document."""
    runs = record["runs"]
    made = [run["environment_mb"] for run in runs]
    lines = [
        f"{_where(record)}. The environment takes {statistics.median(made):,.0f} MiB on disk. "
        f"Commit {record['commit']}. Record: [`{name}`](../{name}).",
        "",
        "| seconds | " + " | ".join(f"run {number}" for number in range(1, len(runs) + 1)) + " |",
        "|---|" + "---|" * len(runs),
    ]
    for part in FIRST_TRY_PARTS:
        cells = [f"{run['parts_s'][part]:.1f}" for run in runs]
        lines.append(f"| {part} | {' | '.join(cells)} |")
    told = [f"**{run['seconds']:.1f}**" for run in runs]
    lines.append(f"| to the first token | {' | '.join(told)} |")
    again = [f"{statistics.median(run['again_ready_s']):.1f}" for run in runs]
    lines.append(f"| `make run` again, until ready (median) | {' | '.join(again)} |")
    came = [f"{run['downloaded_mb']:,.0f} ({run['mb_per_s']:.0f} a second)" for run in runs]
    lines.append(f"| MiB that came | {' | '.join(came)} |")
    return "\n".join(lines) + "\n"


def _where(record: dict[str, Any]) -> str:
    machine = record["machine"]
    return (
        f"{record['date'][:10]}, {machine['cpus']} CPUs ({machine['cpu']}), "
        f"{machine['memory_bytes'] / 2**30:.0f} GiB"
    )


def _cell(row: dict[str, Any], name: str, unit: float, bound: float) -> str:
    planned, taken = row["planned"][name] * unit, row["taken"][name] * unit
    off = ratio(row, name) - 1
    text = f"{planned:,.3g}, {taken:,.3g} ({off:+.0%})"
    if planned >= 1000 or taken >= 1000:
        text = f"{planned:,.0f}, {taken:,.0f} ({off:+.0%})"
    return text if abs(off) <= bound else f"**{text}**"
