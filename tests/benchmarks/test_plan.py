"""Plans against reality: what the table says of a record."""

from __future__ import annotations

from typing import Any

from benchmarks.records import FORMAT
from benchmarks.report import render


def _record() -> dict[str, Any]:
    planned = {"memory_bytes": 2**30, "decode_1_s": 0.01, "decode_16_s": 0.02, "prompt_s": 1.5}
    taken = {"memory_bytes": 2**30 * 1.2, "decode_1_s": 0.01, "decode_16_s": 0.025, "prompt_s": 1.0}
    return {
        "format": FORMAT,
        "kind": "plan",
        "date": "2026-11-23T10:00:00",
        "commit": "abc",
        "machine": {"cpus": 2, "cpu": "a CPU", "memory_bytes": 2**34},
        "requests": 16,
        "prompt": 256,
        "output": 64,
        "rows": [{"name": "demo", "planned": planned, "taken": taken, "load_average": 1.0}],
    }


def test_what_is_off_is_marked() -> None:
    text = render(_record(), "results/plan.json")
    row = text.splitlines()[-1]
    assert row.strip("| ").split(" | ") == [
        "demo",
        "**1,024, 1,229 (-17%)**",
        "10, 10 (+0%)",
        "20, 25 (-20%)",
        "**1,500, 1,000 (+50%)**",
    ]
