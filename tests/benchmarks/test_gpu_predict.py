"""What steps should take on a GPU: against values worked out by hand, and against the one figure of
another engine that the constants were checked with.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from benchmarks.floors import Rates, shape_of, step_s
from benchmarks.gpu import command, predict
from benchmarks.gpu.session import GPU_SIZES
from benchmarks.gpu.tables import predictions
from benchmarks.models import SHAPES

LARGE = "qwen3-8b"


def test_launches_are_those_of_the_trace() -> None:
    decode, prefill = predict.read_counts("decode"), predict.read_counts("prefill")
    assert decode.layer <= 11
    assert prefill.layer <= 11
    assert decode.of(36) == 36 * decode.layer + decode.rest
    assert 0 < decode.rest < 40


def test_a_decode_step(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = predict.Counts(layer=10, rest=8)
    monkeypatch.setattr(predict, "read_counts", lambda kind: counts)
    rates = Rates(bandwidth=1e12, matrix=1e15)
    found = predict.decode(LARGE, 4, 1000, rates)
    base = 15.136e-3 / 0.85 + 4 * 1000 * 147456e-12 / 0.8
    assert found.launches == 368
    assert found.least_s == pytest.approx(base + 368 * 1.9e-6, rel=1e-3)
    assert found.most_s == pytest.approx(base + 368 * 2.6e-6, rel=1e-3)


def test_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predict, "read_counts", lambda kind: predict.Counts(layer=9, rest=8))
    elements = 8 * 4096 + 2 * (32 + 16) * 128 + 3 * 12288
    assert predict.small_bytes(SHAPES[LARGE]) == 36 * 2 * elements
    found = predict.prompt(LARGE, 1024, Rates(1e12, 1e15))
    flops = shape_of(SHAPES[LARGE]).prompt_flops(0, 1024)
    base = flops / 0.85e15 + 1024 * 72 * elements / 1e12
    assert found.least_s == pytest.approx(base + 332 * 1.9e-6 / 8, rel=1e-6)


def test_another_engines_figure_is_within_the_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen3-8B at one request on an H100: 143 tok/s, 73 % of the floor, at 11 kernels a layer."""
    monkeypatch.setattr(predict, "read_counts", lambda kind: predict.Counts(layer=11, rest=10))
    rates = Rates(bandwidth=2.97e12, matrix=700e12)
    found = predict.decode(LARGE, 1, 100, rates)
    assert 1 / found.most_s <= 143 <= 1 / found.least_s
    assert step_s(shape_of(SHAPES[LARGE]), "bfloat16", 1, 100, rates) * 143 == pytest.approx(
        0.73, abs=0.01
    )


def test_the_table_has_the_floor_and_what_was_measured() -> None:
    lines = predictions(GPU_SIZES, predict.H200, {LARGE: {32: 0.0065}})
    assert lines[0].startswith("Estimates: ")
    assert len(lines) == 4 + 2 * (len(GPU_SIZES.batches) + 1)
    [row] = [line for line in lines if line.startswith("| qwen3-8b | decode of 32 |")]
    assert row.endswith("| 6.5 (73%) |")
    [row] = [line for line in lines if line.startswith("| qwen3-4b | decode of 1 |")]
    assert row.endswith("|  |")


def test_the_command_prints_it_without_a_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser, tmp_path)
    words = ["--predict", "--output", str(tmp_path)]
    command.run(parser.parse_args(words))
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
    command.run(parser.parse_args(words))
    told = capsys.readouterr().out
    assert told.startswith("NVIDIA H200\n\nEstimates: 4 TB/s and 700 TFLOP/s")
    assert "8.1 (" in told
