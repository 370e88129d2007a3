"""The benchmark of fairness: what it says of what it found, and that it runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.fairness import MEASUREMENT, share_for, table


def test_callers_that_always_wait_are_compared_by_weight() -> None:
    found = share_for(0.2, (1.0, 2.0), max_requests=4)
    assert found["weights"] == [1.0, 2.0]
    assert found["steps"] > 0
    one, two = found["service"]
    assert found["apart"] == pytest.approx(max(one, two / 2) / min(one, two / 2) - 1)


def test_the_table_holds_what_was_measured_against_the_aims() -> None:
    first = {
        "samples": 200, "step_p50_s": 0.02, "ttft_p50_steps": 1.5, "ttft_p50_s": 0.03,
        "ttft_p99_steps": 4.0, "ttft_p99_s": 0.08,
    }  # fmt: skip
    paired = {"ratios": [0.97, 1.0, 1.02], "ratio": 1.0}
    shares = {"equal": {"weights": [1.0] * 16, "seconds": 60.0, "apart": 0.012}}
    said = table({"options": {"backlog": 500}, "first": first, "paired": paired, "shares": shares})
    assert "backlog of 500 × 128, median, in steps of 20.00 ms | ≤ 3 | 1.50 (30.0 ms) |" in said
    assert "its p99 of 200 | ≤ 8 | 4.00 (80.0 ms) |" in said
    assert "median of 3 turns | ≥ 0.98 | 1.000 (0.970–1.020) |" in said
    assert "16 callers, equal: most / least" in said
    assert "| ≤ 1.05 | 1.0120 |" in said
    assert table({}) == ""


def test_the_defaults_measure_what_is_to_be_shown() -> None:
    arguments = MEASUREMENT.parse([])
    assert arguments.backlog == 500
    assert arguments.samples >= 200
    assert arguments.turns >= 5
    assert arguments.seconds == 60


@pytest.mark.slow
def test_all_parts_run(tmp_path: Path) -> None:
    output = tmp_path / "found" / "fairness.json"
    MEASUREMENT.run(["--quick", "--output", str(output)])
    record = json.loads(output.read_text())
    assert record["first"]["samples"] == 5
    assert record["first"]["waiting"] > 0
    assert len(record["paired"]["ratios"]) == 1
    assert set(record["shares"]) == {"equal", "weighted"}
