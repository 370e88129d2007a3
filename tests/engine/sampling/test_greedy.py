"""The most likely token: the kernel chooses what torch does, whatever the bits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.native import library
from engine.native.library import NativeUnavailableError, load_library
from engine.sampling import greedy
from engine.sampling.greedy import GreedyInLibrary, choose_greedy, in_torch
from engine.scheduler.runner_protocol import INVALID_TOKEN

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def kernel() -> GreedyInLibrary:
    try:
        return GreedyInLibrary(load_library())
    except NativeUnavailableError as error:
        pytest.skip(str(error))


def _rows(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows).bfloat16()


@given(
    rows=st.integers(0, 5),
    width=st.integers(1, 9000),
    seed=st.integers(0, 2**32 - 1),
    kinds=st.sampled_from([2, 5, 200, 2**16]),
)
@settings(max_examples=200, deadline=None)
def test_any_bits(kernel: GreedyInLibrary, rows: int, width: int, seed: int, kinds: int) -> None:
    """Few kinds of numbers: many ties. All of them: NaNs and infinities of both signs."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(-(2**15), 2**15, (kinds,), generator=generator).to(torch.int16)
    chosen = torch.randint(0, kinds, (rows, width), generator=generator)
    logits = numbers[chosen].view(torch.bfloat16)
    assert torch.equal(kernel(logits), in_torch(logits))


@given(width=st.integers(1, 9000), seed=st.integers(0, 2**32 - 1), largest=st.booleans())
@settings(max_examples=100, deadline=None)
def test_one_odd_number(kernel: GreedyInLibrary, width: int, seed: int, largest: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, width, generator=generator).bfloat16()
    at = int(torch.randint(0, width, (), generator=generator))
    logits[1, at] = 100.0 if largest else float("nan")
    tokens = kernel(logits)
    assert tokens[1] == (at if largest else INVALID_TOKEN)
    assert torch.equal(tokens, in_torch(logits))


def test_ties_zeros_and_what_is_not_finite(kernel: GreedyInLibrary) -> None:
    infinity, nan = float("inf"), float("nan")
    logits = _rows(
        [-1.0, -0.0, 0.0, -2.0],
        [0.0, -0.0, 0.0, 0.0],
        [3.0, 7.0, 7.0, 7.0],
        [-3e38, -infinity, -infinity, -infinity],
        [infinity, 1.0, 2.0, 3.0],
        [-infinity] * 4,
        [1.0, 2.0, nan, 3.0],
        [1.0, -nan, 2.0, infinity],
    )
    logits.view(torch.int16)[7, 1] = -1  # a NaN whose sign is set
    expected = [1, 0, 1, 0, INVALID_TOKEN, INVALID_TOKEN, INVALID_TOKEN, INVALID_TOKEN]
    assert kernel(logits).tolist() == in_torch(logits).tolist() == expected


def test_rows_may_lie_apart(kernel: GreedyInLibrary) -> None:
    logits = torch.randn(8, 3000).bfloat16()
    for part in (logits[::3], logits[:, 5:2900], logits[2:5], logits[:, ::2], logits[:0]):
        assert torch.equal(kernel(part), in_torch(part))
    across = torch.randn(500, 7).bfloat16().T
    assert torch.equal(kernel(across), in_torch(across))


def test_other_types_go_to_torch(kernel: GreedyInLibrary) -> None:
    for dtype in (torch.float32, torch.float16):
        logits = torch.randn(4, 100).to(dtype)
        assert torch.equal(kernel(logits), in_torch(logits))


def test_a_cpu_has_the_kernel(kernel: GreedyInLibrary) -> None:
    assert isinstance(choose_greedy(CPU), GreedyInLibrary)


def test_choosing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_greedy(torch.device("meta")) is in_torch
    monkeypatch.setattr(greedy, "load_library", _unavailable)
    assert choose_greedy(CPU) is in_torch


def _unavailable() -> library.NativeLibrary:
    raise NativeUnavailableError("they were not built")
