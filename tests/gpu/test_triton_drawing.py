"""The kernels of choices give the tokens that torch's operations give."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from engine.sampling import plain
from engine.sampling.drawing_bins import CUT
from engine.sampling.drawing_kernels import LISTED
from engine.sampling.plain import GREEDY_ROW, PlainKind, draw_bytes
from engine.sampling.selection import least_bound
from engine.sampling.triton_drawing import TritonDraws, TritonMostLikely
from tests.gpu.conftest import INTERPRETED

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("exponential"),
    # The interpreter's, which is numpy, of tiny temperatures and of rows that are not used.
    pytest.mark.filterwarnings("ignore:.* encountered in :RuntimeWarning"),
]

ROWS = 28
DRAWN, FILTERED = PlainKind.DRAWN, PlainKind.FILTERED
TYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture(autouse=True, scope="module")
def exponential() -> Any:
    """The interpreter has numpy's, which torch's differs from in the last bit."""
    with pytest.MonkeyPatch.context() as patch:
        if INTERPRETED:
            patch.setattr(torch, "exp", lambda given: torch.from_numpy(np.exp(given.numpy())))
        yield


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
    # All but one in one bin, and more of them than are listed; their distances differ.
    logits[11] = torch.randn(size, generator=source) * 1e-3
    logits[11, size // 3] = 4.0
    logits[12] = torch.arange(size) % 7 * 1e-3
    logits[13] = logits[11] * 1e-7
    return logits


def some_numbers(chance: random.Random, size: int) -> torch.Tensor:
    """Options of rows, greedy ones among them; see `plain_choice`."""
    rows = [
        (
            chance.choice([-1.0, 0.0, 1.0 - 2.0**-53, *(chance.random() for _ in range(9))]),
            chance.choice([1.2e-38, 0.3, 0.6, 1.0, 4.0, 100.0]),
            min(size, chance.choice([1, 7, 20, 63, 64, 65, 300, size - 1, size, size])),
            chance.choice([1e-9, 0.5, 0.95, 0.999, 1.0 - 2.0**-53, 1.5, 1.5]),
            chance.choice([0.0, 0.0, 0.05, 1.0]),
        )
        for _ in range(ROWS)
    ]
    return torch.tensor(rows, dtype=torch.float64)


def most_likely(logits: torch.Tensor) -> torch.Tensor:
    tokens = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    plain.write_most_likely(logits, tokens)
    return tokens


def drawn(kind: PlainKind, logits: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """By torch's operations."""
    tokens = most_likely(logits)
    plain.draw_tokens(least_bound, kind, logits, numbers, tokens)
    return tokens


def check_cleared(draws: TritonDraws) -> None:
    for counted in (draws._counts, draws._masses, draws._arrived, draws._lengths):
        assert not counted.any()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", [5, 4096, 9001] if INTERPRETED else [5, 4096, 9001, 151936])
def test_tokens_are_torchs(size: int, dtype: torch.dtype, device: torch.device) -> None:
    changed = 0
    shape = torch.empty((ROWS, size), dtype=dtype, device=device)
    draws, likeliest = TritonDraws(shape, interpreted=INTERPRETED), TritonMostLikely(shape)
    for seed in range(2 if INTERPRETED else 20):
        chance = random.Random(size + seed)
        logits = some_logits(chance, size).to(device, dtype)
        tokens = torch.zeros(ROWS, dtype=torch.int64, device=device)
        likeliest(logits, tokens)
        assert tokens.tolist() == most_likely(logits).tolist()
        assert not likeliest._arrived.any()
        for kind in (DRAWN, FILTERED):
            numbers = some_numbers(chance, size).to(device)
            found = tokens.clone()
            draws(kind is FILTERED, logits, numbers, found)
            assert found.tolist() == drawn(kind, logits, numbers).tolist(), (seed, kind)
            check_cleared(draws)
            changed += not torch.equal(found, tokens)
    assert changed


NUMBERS = st.tuples(
    st.floats(0.0, 1.0, exclude_max=True),
    st.floats(2.0**-7, 100.0, width=32),
    st.integers(1, 600),
    st.one_of(st.just(1.5), st.floats(1e-6, 1.0, exclude_max=True)),
    st.one_of(st.just(0.0), st.floats(0.0, 1.0)),
)


@given(
    options=st.lists(st.one_of(NUMBERS, st.just(GREEDY_ROW)), min_size=1, max_size=4),
    size=st.integers(1, 600),
    steps=st.sampled_from([1.0, 4.0, 64.0, 1e6]),
    scale=st.sampled_from([1e-6, 0.3, 2.0, 12.0]),
    seed=st.integers(0, 1 << 32),
)
@settings(
    max_examples=60 if INTERPRETED else 500,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],
)
def test_any_options_of_any_rows(
    options: list[tuple[float, ...]],
    size: int,
    steps: float,
    scale: float,
    seed: int,
    device: torch.device,
) -> None:
    """In float32, with as many ties as the steps give."""
    source = torch.Generator().manual_seed(seed)
    logits = (torch.randn((len(options), size), generator=source) * steps).round() / steps * scale
    logits = logits.to(device)
    numbers = torch.tensor(options, dtype=torch.float64, device=device)
    numbers[:, 2].clamp_(max=size)
    tokens = most_likely(logits)
    TritonDraws(logits, interpreted=INTERPRETED)(True, logits, numbers, tokens)
    assert tokens.tolist() == drawn(FILTERED, logits, numbers).tolist()


def test_a_row_depends_on_no_other(device: torch.device) -> None:
    chance = random.Random(7)
    logits = some_logits(chance, 5000).to(device, torch.bfloat16)
    numbers = some_numbers(chance, 5000).to(device)
    together = most_likely(logits)
    alone = together.clone()
    draws = TritonDraws(logits, interpreted=INTERPRETED)
    draws(True, logits, numbers, together)
    for row in range(ROWS):
        piece = slice(row, row + 1)
        draws(True, logits[piece], numbers[piece], alone[piece])
    assert alone.tolist() == together.tolist()


def test_rows_whose_numbers_are_zero_harm_nothing(device: torch.device) -> None:
    """Before a step has been filled in."""
    logits = torch.zeros((3, 5000), device=device)
    logits[1, 9] = 1.0
    draws = TritonDraws(logits, interpreted=INTERPRETED)
    for filters in (False, True):
        tokens = most_likely(logits)
        numbers = torch.zeros((3, 5), dtype=torch.float64, device=device)
        draws(filters, logits, numbers, tokens)
        assert ((tokens >= 0) & (tokens < 5000)).all()
        check_cleared(draws)


def test_memory_is_as_planned(device: torch.device) -> None:
    """As it was told before the start, apart from some bytes for each cut."""
    logits = torch.empty((4, 50_000), device=device)
    kept = vars(TritonDraws(logits)).values()
    held = sum(one.nbytes for one in kept if isinstance(one, torch.Tensor))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plain, "_has_kernels", lambda *_: True)
        told = draw_bytes(4, 50_000, torch.float32)
    assert told <= held <= told * 1.01


# ---- what the kernels read and add ---------------------------------------------------------------


class Account:
    """What interpreted kernels read of a tensor, and to which addresses they add."""

    def __init__(self, tensor: torch.Tensor, patch: pytest.MonkeyPatch) -> None:
        from triton.runtime.interpreter import InterpreterBuilder

        first, size = tensor.data_ptr(), tensor.numel() * tensor.itemsize
        self.read = 0
        self.added: Counter[int] = Counter()
        load, add = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_atomic_rmw

        def loads(builder: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
            address = np.asarray(ptrs.data)[np.asarray(mask.data)].astype(np.int64)
            self.read += int(((address >= first) & (address < first + size)).sum())
            return load(builder, ptrs, mask, *rest)

        def adds(builder: Any, op: Any, ptr: Any, val: Any, mask: Any, *rest: Any) -> Any:
            self.added.update(np.asarray(ptr.data)[np.asarray(mask.data)].ravel().tolist())
            return add(builder, op, ptr, val, mask, *rest)

        patch.setattr(InterpreterBuilder, "create_masked_load", loads)
        patch.setattr(InterpreterBuilder, "create_atomic_rmw", adds)


OPTIONS = {
    "temperature": (DRAWN, (0.4, 1.0, 0.0, 1.5, 0.0)),
    "top_k": (FILTERED, (0.4, 1.0, 20.0, 1.5, 0.0)),
    "large top_k": (FILTERED, (0.4, 1.0, 5000.0, 1.5, 0.0)),
    "top_p": (FILTERED, (0.4, 1.0, 0.0, 0.95, 0.0)),
    "min_p": (FILTERED, (0.4, 1.0, 0.0, 1.5, 0.1)),
    "all": (FILTERED, (0.4, 1.0, 100.0, 0.95, 0.1)),
}
"""Options of a row; a top_k of 0 is the whole row."""


def of_rows(kind: str, size: int) -> torch.Tensor:
    """Rows that could be counted in one place, or in few."""
    source = torch.Generator().manual_seed(3)
    row = torch.randn(size, generator=source) * 3
    if kind == "equal":
        row[:] = 1.0
    elif kind == "equal but one of each cut":
        row[:] = -3.0
        row[:: CUT.value] = 2.0
    elif kind == "unequal in a bin":
        row = torch.randn(size, generator=source) * 1e-4
        row[17] = 5.1
    return row.unsqueeze(0)


@pytest.mark.skipif(not INTERPRETED, reason="needs the interpreter")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("kind", ["usual", "equal", "equal but one of each cut"])
def test_a_choice_reads_a_row_thrice_and_adds_in_many_places(
    kind: str, name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one cut of it once more. No more than half of a row is added to one address."""
    size = 5 * CUT.value
    logits = of_rows(kind, size).to(dtype)
    what, options = OPTIONS[name]
    numbers = torch.tensor([options], dtype=torch.float64)
    numbers[numbers[:, 2] == 0, 2] = size
    tokens = torch.zeros(1, dtype=torch.int64)
    likeliest, draws = TritonMostLikely(logits), TritonDraws(logits, interpreted=True)
    account = Account(logits, monkeypatch)
    likeliest(logits, tokens)
    assert account.read == size
    draws(what is FILTERED, logits, numbers, tokens)
    reads = 3 if what is FILTERED and name != "min_p" else 2
    few = 2 * 5 + 2  # the largest entry, by every program
    assert account.read <= reads * size + CUT.value + few
    assert max(account.added.values()) <= size // 2 + 5
    monkeypatch.undo()
    assert tokens.tolist() == drawn(what, logits, numbers).tolist()


@pytest.mark.skipif(not INTERPRETED, reason="needs the interpreter")
def test_what_no_list_can_hold_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row nearly all of whose entries have almost the same distance: it takes longer, and no
    address is added to more often.
    """
    size = LISTED.value + CUT.value
    logits = of_rows("unequal in a bin", size)
    numbers = torch.tensor([[0.9999, 1.0, size / 2, 1.5, 0.0]], dtype=torch.float64)
    tokens = most_likely(logits)
    account = Account(logits, monkeypatch)
    TritonDraws(logits, interpreted=True)(True, logits, numbers, tokens)
    assert 3 * size < account.read < 40 * size
    assert max(account.added.values()) <= size // 2
    monkeypatch.undo()
    assert tokens.tolist() == drawn(FILTERED, logits, numbers).tolist()
