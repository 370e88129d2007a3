"""The filters keep what the warpers of transformers keep, and a draw is its row's own."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from engine.contract.request import Request
from engine.sampling import filters, ops
from engine.sampling import sampler as sampler_module
from engine.sampling.filters import Filters, filtered_weights
from engine.sampling.sampler import Sampler
from tests.engine.sampling.helpers import CPU, make


def _column(value: float | None, rows: int) -> torch.Tensor | None:
    return None if value is None else torch.full((rows, 1), value, dtype=torch.float64)


def _kept(
    logits: torch.Tensor,
    temperature: float,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    typical_p: float | None = None,
) -> torch.Tensor:
    rows, size = logits.shape
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / temperature
    k = min(top_k or size, size)
    chosen = Filters(
        top_k=torch.full((rows, 1), k) if top_k else None,
        max_top_k=k,
        top_p=_column(top_p, rows),
        min_p=None if min_p is None else torch.full((rows, 1), min_p),
        typical_p=_column(typical_p, rows),
    )
    return filtered_weights(scaled, chosen) > 0


def _right(logits: torch.Tensor, temperature: float, **options: float | None) -> torch.Tensor:
    makers: dict[str, Any] = {
        "top_k": TopKLogitsWarper,
        "top_p": TopPLogitsWarper,
        "min_p": MinPLogitsWarper,
        "typical_p": TypicalLogitsWarper,
    }
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    for name, maker in makers.items():
        if options.get(name) is not None:
            warpers.append(maker(options[name]))
    return warpers(torch.zeros(len(logits), 1, dtype=torch.int64), logits.clone()).isfinite()


OPTIONS: list[dict[str, Any]] = [
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 300},
    {"top_k": 100_000},
    {"top_p": 0.03},
    {"top_p": 0.5},
    {"top_p": 0.999},
    {"min_p": 0.3},
    {"min_p": 1.0},
    {"typical_p": 0.05},
    {"typical_p": 0.5},
    {"typical_p": 0.95},
    {"top_k": 20, "top_p": 0.8},
    {"top_k": 400, "top_p": 0.9},
    {"top_p": 0.9, "typical_p": 0.8},
    {"top_k": 30, "top_p": 0.9, "min_p": 0.02, "typical_p": 0.7},
]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("size", [5, 60, 1500])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_each_filter_keeps_what_transformers_keeps(
    options: dict[str, Any], size: int, temperature: float
) -> None:
    logits = torch.randn(12, size, generator=torch.Generator().manual_seed(size)) * 2
    logits[0, ::2] = float("-inf")
    logits[1] = 0.0
    logits[2, 1:] = float("-inf")
    kept, right = _kept(logits, temperature, **options), _right(logits, temperature, **options)
    # transformers cuts among equally likely tokens somewhere; here all of them are kept.
    if "top_p" in options:
        assert kept[1].all()
        right[1] = True
    # Tokens that can never be drawn are not told apart: their weight is 0.
    possible = (logits - logits.amax(dim=-1, keepdim=True)) / temperature > -26
    assert torch.equal(kept & possible, right & possible)


@given(
    st.lists(st.integers(-8, 8), min_size=2, max_size=40),
    st.integers(1, 45),
    st.floats(0.01, 1.0),
    st.integers(0, 2**31),
)
@settings(max_examples=150, deadline=None)
def test_ties_are_kept_together_by_either_way(
    values: list[int], top_k: int, top_p: float, seed: int
) -> None:
    """Logits of half precision have many equal entries: their order must not matter."""
    row = torch.tensor([values], dtype=torch.float32) / 2
    order = torch.randperm(len(values), generator=torch.Generator().manual_seed(seed))
    kept = _kept(row, 1.0, top_k=top_k, top_p=top_p)[0]
    assert torch.equal(_kept(row[:, order], 1.0, top_k=top_k, top_p=top_p)[0], kept[order])
    least = row[0][kept].min()
    assert torch.equal(kept, row[0] >= least), "kept is what reaches a threshold"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(filters, "TOPK_LIMIT", 0)  # everything is sorted
        assert torch.equal(_kept(row, 1.0, top_k=top_k, top_p=top_p)[0], kept)


@pytest.mark.parametrize("count", [1, 5, 16])
@pytest.mark.parametrize("size", [1, 16, 127, 128, 5000])
def test_the_top_is_topks(size: int, count: int) -> None:
    values = torch.randn(3, size, generator=torch.Generator().manual_seed(size))
    count = min(count, size)
    found, ids = ops.top_values(values, count)
    right = torch.topk(values, count, dim=-1)
    assert torch.equal(found, right.values)
    assert torch.equal(ids, right.indices)


@pytest.mark.parametrize("number", [0.0, 0.5, 1.0 - 2.0**-53])
def test_a_draw_never_finds_weight_zero(number: float) -> None:
    for size in (7, 512, 513, 2000):
        weights = torch.zeros(1, size, dtype=torch.int64)
        weights[0, 2], weights[0, size - 2] = 1 << 40, 1 << 40
        token = ops.draw(weights, torch.tensor([[number]], dtype=torch.float64)).item()
        assert token == (2 if number < 0.5 else size - 2)


def test_a_draw_inverts_the_cumulated_weights() -> None:
    size = 1300
    weights = torch.randint(0, 1 << 40, (1, size), generator=torch.Generator().manual_seed(1))
    ends = torch.cumsum(weights[0], dim=0).tolist()
    for number in torch.rand(200, generator=torch.Generator().manual_seed(2)).double().tolist():
        token = int(ops.draw(weights, torch.tensor([[number]], dtype=torch.float64)))
        target = int(number * ends[-1])
        assert ends[token] > target
        assert token == 0 or ends[token - 1] <= target


def _tokens(logits: torch.Tensor, requests: list[Request]) -> list[int]:
    return list(Sampler(logits.shape[-1], CPU).sample(logits, requests)[0])


SAME: dict[str, list[dict[str, Any]]] = {
    "nothing": [
        {},
        {"top_k": 0},
        {"top_k": 700},
        {"top_k": 10**6},
        {"min_p": 0.0, "typical_p": 1.0},
        {"top_k": 10**6, "top_p": 1.0},
    ],
    "top_k": [{"top_k": 9}, {"top_k": 9, "top_p": 1.0}, {"top_k": 9, "min_p": 1e-30}],
    "top_p": [{"top_p": 0.7}, {"top_p": 0.7, "top_k": 700}, {"top_p": 0.7, "top_k": 699}],
    "one": [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}],
}


@pytest.mark.parametrize("name", SAME)
def test_what_means_the_same_draws_the_same(name: str) -> None:
    for seed in range(40):
        logits = torch.randn(1, 700, generator=torch.Generator().manual_seed(seed)) * 2
        drawn = {
            _tokens(logits, [make(temperature=0.9, seed=seed, **options)])[0]
            for options in SAME[name]
        }
        assert len(drawn) == 1


def test_a_row_is_its_own_among_neighbours_of_any_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with many threads, and however a batch is cut."""
    size = 20_000
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 1.1},
        {"temperature": 0.8, "top_k": 5},
        {"temperature": 0.8, "top_k": 3000},
        {"temperature": 0.9, "top_p": 0.8},
        {"temperature": 0.9, "top_k": 50, "top_p": 0.8},
        {"temperature": 1.3, "min_p": 0.01},
        {"temperature": 1.3, "typical_p": 0.6},
        {"temperature": 1.0, "repetition_penalty": 1.3},
        {"temperature": 1.0, "no_repeat_ngram_size": 1},
        {"temperature": 1.0, "banned_token_ids": (7, 8)},
    ]
    many = [make(seed=i, **options) for i, options in zip(range(32), itertools.cycle(kinds))]
    logits = torch.randn(32, size, generator=torch.Generator().manual_seed(4)) * 2
    # Rounded, so that there are ties.
    logits = logits.bfloat16().float()
    together = _tokens(logits, many)
    for row, request in enumerate(many):
        assert _tokens(logits[row : row + 1], [request]) == [together[row]]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        assert _tokens(logits, many) == together
        monkeypatch.setattr(sampler_module, "_CHUNK_ON_CPU", 1)
        assert _tokens(logits, many) == together
        assert _tokens(logits[31:], many[31:]) == together[31:]
    finally:
        torch.set_num_threads(threads)
    monkeypatch.setattr(sampler_module, "_CHUNK_ON_CPU", 1 << 30)
    assert _tokens(logits, many) == together


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e-3, 100.0])
def test_extreme_temperatures(temperature: float) -> None:
    logits = torch.tensor([[-1e30, 5.0, 5.5, 1e30]])
    for top_p in (1.0, 0.5):
        (token,) = _tokens(logits, [make(temperature=temperature, top_p=top_p, seed=3)])
        assert token == 3


def test_one_token_left() -> None:
    logits = torch.full((1, 50), float("-inf"))
    logits[0, 30] = -1e38
    for options in ({}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.5}, {"typical_p": 0.5}):
        assert _tokens(logits, [make(temperature=1.0, seed=1, **options)]) == [30]


def test_ties_behind_the_kth_count_in_top_p() -> None:
    """Five tokens are left by top_k; half of their probability is more than the first one's."""
    row = torch.tensor([[0.0, 1.0, 0.0, 0.0, 0.0, -9.0]])
    kept = [True] * 5 + [False]
    assert _kept(row, 1.0, top_k=2, top_p=0.5).tolist() == [kept]
    assert _kept(row, 1.0, top_k=2, top_p=0.4).tolist() == [[False, True] + [False] * 4]
