"""The kernels of draws give the tokens that torch's operations give."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from engine.sampling import plain
from engine.sampling.plain import PlainKind
from engine.sampling.selection import least_bound
from engine.sampling.triton_drawing import TritonDraws
from tests.gpu.conftest import INTERPRETED

pytestmark = pytest.mark.gpu

ROWS = 24
DRAWS = (PlainKind.DRAWN, PlainKind.FILTERED)


@pytest.fixture
def exponential(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter has numpy's, which torch's differs from in the last bit."""
    if INTERPRETED:
        monkeypatch.setattr(torch, "exp", lambda given: torch.from_numpy(np.exp(given.numpy())))


def some_logits(chance: random.Random, size: int) -> torch.Tensor:
    """Of all that a row may be."""
    source = torch.Generator().manual_seed(chance.getrandbits(40))
    logits = torch.randn((ROWS, size), generator=source) * chance.choice([0.5, 3.0, 8.0])
    logits[::2] = (logits[::2] * 4).round() / 4  # ties
    logits[1, ::3] = float("-inf")
    logits[2] = 1.25
    logits[3], logits[4, -1], logits[5, 3] = float("-inf"), float("nan"), float("inf")
    logits[6] = torch.where(torch.rand(size, generator=source) < 0.5, -0.0, 0.0)
    logits[7] -= 200.0
    logits[8] *= 1e-4
    logits[9], logits[9, size // 2] = -3.0, 2.0
    logits[10] = logits[10].sign()
    return logits


def some_numbers(chance: random.Random, size: int) -> torch.Tensor:
    """Options of rows, greedy ones among them; see `plain_choice`."""
    rows = [
        (
            chance.choice([-1.0, 0.0, 1.0 - 2.0**-53, *(chance.random() for _ in range(9))]),
            chance.choice([1.2e-38, 0.3, 0.6, 1.0, 4.0, 100.0]),
            min(size, chance.choice([1, 7, 20, 63, 64, 65, 300, size - 1, size])),
            chance.choice([1e-9, 0.5, 0.95, 0.999, 1.5]),
            chance.choice([0.0, 0.0, 0.05, 1.0]),
        )
        for _ in range(ROWS)
    ]
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.usefixtures("exponential")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [5, 4096, 9001] if INTERPRETED else [5, 4096, 9001, 151936])
def test_tokens_are_torchs(size: int, dtype: torch.dtype, device: torch.device) -> None:
    draws = TritonDraws(ROWS, device, interpreted=INTERPRETED)
    changed = 0
    for seed in range(3 if INTERPRETED else 20):
        chance = random.Random(size + seed)
        logits = some_logits(chance, size).to(device, dtype)
        likeliest = torch.zeros(ROWS, dtype=torch.int64, device=device)
        plain.choose_most_likely(logits, likeliest)
        for kind in DRAWS:
            numbers = some_numbers(chance, size).to(device)
            expected, found = likeliest.clone(), likeliest.clone()
            plain.draw_tokens(least_bound, kind, logits, numbers, expected)
            draws(kind is PlainKind.FILTERED, logits, numbers, found)
            assert found.tolist() == expected.tolist(), (seed, kind)
            assert not draws._counts.any()
            changed += not torch.equal(found, likeliest)
    assert changed


@pytest.mark.usefixtures("exponential")
def test_a_row_depends_on_no_other(device: torch.device) -> None:
    chance = random.Random(7)
    logits = some_logits(chance, 5000).to(device, torch.bfloat16)
    numbers = some_numbers(chance, 5000).to(device)
    together = torch.zeros(ROWS, dtype=torch.int64, device=device)
    plain.choose_most_likely(logits, together)
    alone = together.clone()
    draws = TritonDraws(ROWS, device, interpreted=INTERPRETED)
    draws(True, logits, numbers, together)
    for row in range(ROWS):
        piece = slice(row, row + 1)
        draws(True, logits[piece], numbers[piece], alone[piece])
    assert alone.tolist() == together.tolist()


def test_a_row_of_almost_one_value(device: torch.device) -> None:
    """What occurs most in a cut is counted once, together."""
    row = torch.full((1, 9000), -3.0, dtype=torch.bfloat16, device=device)
    row[0, 17] = 2.0
    numbers = torch.tensor([[0.5, 1.0, 9000.0, 0.9, 0.0]], dtype=torch.float64, device=device)
    tokens = torch.tensor([17], device=device)
    expected = tokens.clone()
    plain.draw_tokens(least_bound, PlainKind.FILTERED, row, numbers, expected)
    TritonDraws(1, device, interpreted=INTERPRETED)(True, row, numbers, tokens)
    assert tokens.tolist() == expected.tolist()
