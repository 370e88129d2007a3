"""The benchmark of telemetry: what it says of what it found, and that it runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.telemetry import MEASUREMENT, ratios, table


def turn(tokens: float, cost: float) -> dict[str, float]:
    return {"tokens_per_s": tokens, "cpu_us_per_token": cost}


def test_turns_are_compared_one_by_one() -> None:
    found = ratios(
        {
            "off": [turn(100, 20), turn(200, 20), turn(400, 20)],
            "on": [turn(98, 22), turn(198, 21), turn(420, 20)],
            "again": [turn(100, 20)] * 3,
        }
    )
    assert found["on_tokens_per_s"]["ratios"] == [0.98, 0.99, 1.05]
    assert found["on_tokens_per_s"]["median"] == 0.99
    assert found["on_cpu_us_per_token"]["median"] == 1.05
    said = table({"options": {"turns": 3, "requests": 64}, **found})
    assert "everything on / off | ≥ 0.98 | 0.990 (0.980–1.050) |" in said


def test_the_defaults_measure_what_is_to_be_shown() -> None:
    arguments = MEASUREMENT.parse([])
    assert arguments.requests == 64
    assert arguments.turns >= 5


@pytest.mark.slow
def test_it_runs(tmp_path: Path) -> None:
    output = tmp_path / "found" / "telemetry.json"
    MEASUREMENT.run(["--quick", "--output", str(output)])
    record = json.loads(output.read_text())
    assert set(record["turns"]) == {"off", "on", "again"}
    assert all(found["tokens_per_s"] > 0 for [found] in record["turns"].values())
    assert min(record["received_bytes"].values()) > 1000  # it was on
