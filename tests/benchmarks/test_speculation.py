"""What speculation is measured on, and how its record is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from headrace.v1.generation_pb2 import GenerationSpec

from benchmarks.models import DEMO
from benchmarks.speculation import MEASUREMENT, render
from benchmarks.speculation_cases import CASES, Case, of_file


@pytest.mark.parametrize(
    ("changed", "least", "most"), [(0.0, 0, 0), (0.3, 270, 330), (1.0, 990, 1000)]
)
def test_a_share_of_a_prediction_is_exchanged_or_left_out(
    changed: float, least: int, most: int
) -> None:
    specs, outputs = [GenerationSpec(), GenerationSpec()], [list(range(1_000_000, 1_001_000))] * 2
    Case("it", "bfloat16", 1.0, list, changed=changed, every=2).predict(specs, outputs)
    found = list(specs[0].prediction.tokens.ids)
    assert least <= 1000 - sum(token >= 1_000_000 for token in found) <= most
    assert 1000 - len(found) == pytest.approx(1000 * changed / 2, abs=50)
    assert [token for token in found if token >= 1_000_000] == sorted(
        token for token in found if token >= 1_000_000
    )
    assert not specs[1].HasField("prediction")


def test_neighbours_are_told_apart() -> None:
    [those, others] = CASES["bfloat16 W1 half predicted"].parts(16)
    assert (those[0], list(those[2])) == ("those", list(range(0, 16, 2)))
    assert (others[0], others[1], list(others[2])) == ("the others", 0.97, list(range(1, 16, 2)))
    assert CASES["bfloat16 W1"].parts(2) == [("", 0.98, range(2))]


@pytest.mark.parametrize("name", ["copying", "chat"])
def test_the_prompts(name: str) -> None:
    specs = of_file(name)
    assert len({spec.chat.messages[0].content for spec in specs}) == 40
    assert {spec.sampling.temperature for spec in specs} == {0.0}


@pytest.mark.slow
@pytest.mark.skipif(not torch.cpu._is_avx2_supported(), reason="a processor without AVX2")
def test_it_measures_and_goes_on(tmp_path: Path) -> None:
    output = tmp_path / "it.json"
    words = ["--quick", "--smollm2", str(DEMO), "--threads", "1", "--output", str(output)]
    words += ["--instructions", "avx2", "--cases"]
    MEASUREMENT.run([*words, "smollm2 chat"])
    MEASUREMENT.run([*words, "smollm2 chat,smollm2 edits predicted", "--resume"])
    record = json.loads(output.read_text())
    assert list(record["cases"]) == ["smollm2 chat", "smollm2 edits predicted"]
    found = record["cases"]["smollm2 edits predicted"][""]
    assert (len(found["off"]), len(found["auto"]), found["differ"]) == (1, 1, 0)
    assert found["off"][0]["drafts"] == 0  # how many `auto` has depends on the load of the machine
    rows = render(record, "it.json").splitlines()
    assert "1 threads, avx2 instructions" in rows[0]
    assert rows[4].startswith("| smollm2 chat | ≥ 1.05 |")
    assert len(rows) == 6
