"""What steps should take on a GPU: against values worked out by hand, and what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.floors import Rates, ideal, shape_of
from benchmarks.gpu import command, predict
from benchmarks.gpu.sizes import GPU_SIZES
from benchmarks.gpu.tables import predictions
from benchmarks.models import SHAPES
from benchmarks.workloads import Lengths

LARGE, MIXTURE = "qwen3-8b", "qwen3-moe-13b"


def test_launches_are_those_of_the_trace() -> None:
    layer, rest = predict.read_counts("decode", "qwen3")
    prefill = predict.read_counts("prefill", "qwen3")
    assert layer <= 11
    assert prefill[0] <= 11
    assert 0 < rest < 40
    assert predict.decode(LARGE, 1, 1000).launches == 36 * layer + rest


def test_a_decode_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predict, "read_counts", lambda *given: (10, 8))
    rates = Rates(bandwidth=1e12, matrix=1e15)
    found = predict.decode(LARGE, 4, 1000, rates)
    base = 15.136e-3 / 0.83 + 4 * 1000 * 147456e-12 / 0.7
    assert found.launches == 368
    assert found.least_s == pytest.approx(base + 368 * 1.5e-6, rel=1e-3)
    assert found.most_s == pytest.approx(base + 368 * 2.9e-6, rel=1e-3)
    drawn = predict.decode(LARGE, 4, 1000, rates, draws=True)
    assert drawn.least_s - found.least_s == pytest.approx(43.4e-6)


def test_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predict, "read_counts", lambda *given: (9, 8))
    elements = 8 * 4096 + 2 * (32 + 16) * 128 + 3 * 12288
    assert predict.small_bytes(SHAPES[LARGE]) == 36 * 2 * elements
    found = predict.prompt(LARGE, 1024, Rates(1e12, 1e15))
    flops = shape_of(SHAPES[LARGE]).prompt_flops(0, 1024)
    base = flops / 0.85e15 + 1024 * 72 * elements / 1e12
    assert found.least_s == pytest.approx(base + 332 * 1.5e-6 / 8, rel=1e-6)


def test_a_mixture(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step reads the experts that its tokens choose; a token is multiplied by eight of them."""
    families = []

    def counts(kind: str, family: str) -> tuple[int, int]:
        families.append(family)
        return 14, 11

    monkeypatch.setattr(predict, "read_counts", counts)
    shape, rates = shape_of(SHAPES[MIXTURE]), Rates(bandwidth=1e12, matrix=1e15)
    expert = 3 * 2048 * 768
    assert shape.expert_parameters == 20 * 128 * expert
    dense = 20 * (2048 * 128 * 72 + 2048 * 128) + 151936 * 2048
    assert shape.used_parameters + shape.head_parameters == dense + 20 * 8 * expert
    assert shape.weight_bytes("bfloat16") == pytest.approx(2 * (dense + 160 * expert), rel=1e-3)
    experts = 128 * (1 - (15 / 16) ** 32)
    assert shape.weight_bytes("bfloat16", 32) == pytest.approx(
        2 * (dense + 20 * experts * expert), rel=1e-3
    )
    found = predict.decode(MIXTURE, 32, 1000, rates)
    base = 2 * dense * 1e-12 / 0.83 + 2 * 20 * experts * expert * 1e-12 / 0.7
    base += 32 * 1000 * 20 * 2 * 4 * 128 * 2 * 1e-12 / 0.7
    assert found.launches == 291
    assert found.least_s == pytest.approx(base + 291 * 1.5e-6, rel=1e-3)
    assert families == ["qwen3_moe"]
    assert predict.small_bytes(SHAPES[MIXTURE]) == 40 * (
        8 * 2048 + 2 * 40 * 128 + 8 * 3 * 768 + 9 * 2048
    )
    assert predict.prompt(MIXTURE, 1024, rates).least_s > (shape.prompt_flops(0, 1024) / 1e15)


def test_the_ideal_schedule_of_a_mixture() -> None:
    """A step of many requests reads more experts than a step of one."""
    shape = shape_of(SHAPES[MIXTURE])
    for count in (1, 32):
        found = ideal([Lengths(1, 2)] * count, None, shape, "bfloat16", Rates(1.0, 1e30))
        read = shape.weight_bytes("bfloat16", count) + count * shape.kv_bytes("bfloat16")
        assert (found.steps, found.decode_s) == (1, read)


@pytest.mark.parametrize(
    ("model", "batch", "greedy_ms", "sampled_ms"),
    [
        (LARGE, 1, 4.53, 4.58),
        (LARGE, 32, 6.64, 6.70),
        (LARGE, 128, 11.15, 11.30),
        ("qwen3-0.6b", 1, 0.99, 1.04),
    ],
)
def test_what_an_h200_took_is_within_the_estimate(
    model: str, batch: int, greedy_ms: float, sampled_ms: float
) -> None:
    for draws, took in ((False, greedy_ms), (True, sampled_ms)):
        found = predict.decode(model, batch, 1104, draws=draws)
        assert found.least_s * 1e3 <= took <= found.most_s * 1e3


def test_the_table_has_the_floor_and_what_was_measured() -> None:
    lines = predictions(GPU_SIZES, predict.H200, {LARGE: {32: 0.0065}})
    assert lines[0].startswith("Estimates: ")
    assert len(lines) == 4 + 4 * (2 * len(GPU_SIZES.batches) + 1)
    [row] = [line for line in lines if line.startswith("| qwen3-8b | decode of 32 |")]  # greedy
    assert row.endswith("| 6.5 (73%) |")
    [row] = [line for line in lines if line.startswith("| qwen3-4b | decode of 1 |")]
    assert row.endswith("|  |")


def test_the_command_prints_it_without_a_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--predict", "--output", str(tmp_path)]
    command.MEASUREMENT.run(words)
    assert "4.3 TB/s and 790 TFLOP/s" in capsys.readouterr().out
    parts = {
        "floors": {"rows": [{"key": "rates", "median": {"bandwidth": 4e12, "matrix": 7e14}}]},
        "decode-8b": {
            "model": LARGE,
            "rows": [{"key": "decode at 32", "requests": 32, "median": {"step_s": 0.0081}}],
        },
    }
    record = {"format": 1, "device": {"type": "cuda", "name": "NVIDIA H200"}, "parts": parts}
    (tmp_path / "gpu-nvidia-h200.json").write_text(json.dumps(record))
    command.MEASUREMENT.run(words)
    told = capsys.readouterr().out
    assert told.startswith("NVIDIA H200\n\nEstimates: 4 TB/s and 700 TFLOP/s")
    assert "8.1 (" in told
