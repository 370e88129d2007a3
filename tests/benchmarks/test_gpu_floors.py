"""What a GPU cannot be faster than: against values worked out by hand, for true shapes."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.floors import Rates, prompts_s, read_shape, shape_of, step_s
from benchmarks.models import SHAPES, make_model
from benchmarks.workloads import Lengths

RATES = Rates(bandwidth=4.3e12, matrix=790e12)
LARGE, SMALL = shape_of(SHAPES["qwen3-8b"]), shape_of(SHAPES["qwen3-4b"])


def test_bytes_of_true_shapes() -> None:
    # layers * (projections + gated layer) + head + norms, two bytes each
    parameters = 36 * (4096 * 128 * 80 + 3 * 4096 * 12288) + 151936 * 4096
    norms = 36 * (2 * 4096 + 2 * 128) + 4096
    assert LARGE.weight_bytes("bfloat16") == 2 * (parameters + norms)
    assert LARGE.weight_bytes("bfloat16") / 1e9 == pytest.approx(15.14, abs=0.01)
    assert SMALL.weight_bytes("bfloat16") / 1e9 == pytest.approx(8.04, abs=0.01)
    assert LARGE.kv_bytes("bfloat16") == SMALL.kv_bytes("bfloat16") == 144 << 10


@pytest.mark.parametrize(
    ("batch", "small_ms", "large_ms"),
    [
        (1, 1.91, 3.56),
        (8, 2.15, 3.80),
        (32, 2.99, 4.64),
        (64, 4.12, 5.77),
        (128, 6.37, 8.01),
        (256, 11.6, 13.9),  # here the products take longer than reading their weights
    ],
)
def test_a_step_of_decode_at_1k(batch: int, small_ms: float, large_ms: float) -> None:
    for shape, expected in ((SMALL, small_ms), (LARGE, large_ms)):
        found = step_s(shape, "bfloat16", batch, 1024, RATES) * 1e3
        assert found == pytest.approx(expected, rel=3e-3)


def test_weights_or_their_products_whichever_is_longer() -> None:
    weights, kv = LARGE.weight_bytes("bfloat16"), LARGE.kv_bytes("bfloat16")
    slow_memory = step_s(LARGE, "bfloat16", 2, 10.5, Rates(1e9, 1e30))
    assert slow_memory == pytest.approx((weights + 2 * 10.5 * kv) / 1e9)
    slow_matrices = step_s(LARGE, "bfloat16", 2, 10.5, Rates(1e30, 1e9))
    parameters = LARGE.linear_parameters + LARGE.head_parameters
    assert slow_matrices == pytest.approx(2 * 2 * parameters / 1e9)


def test_prefill_at_1k() -> None:
    for shape, expected in ((SMALL, 104e3), (LARGE, 56e3)):
        found = 4 * 1024 / prompts_s(shape, [Lengths(1024, 1)] * 4, RATES)
        assert found == pytest.approx(expected, rel=1e-2)


def test_a_shape_by_its_numbers_is_that_of_its_checkpoint(tmp_path: Path) -> None:
    make_model("tiny", tmp_path / "tiny")
    assert shape_of(SHAPES["tiny"]) == read_shape(tmp_path / "tiny")
