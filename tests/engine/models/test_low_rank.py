"""What adapters add, by our kernels: against float64, and the same bits among any neighbours."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from engine.contract.adapters import Adapter, AdapterRows
from engine.models.formats.native import why_missing
from engine.models.low_rank import AdapterWeights, LowRankPart, Matrix, add_to, pack_a, pack_b

pytestmark = pytest.mark.skipif(why_missing() is not None, reason="there are no kernels here")
PATH = "a.b"


def adapter(rank: int, inputs: int, outputs: int, dtype: torch.dtype, seed: int) -> Adapter:
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn((rank, n), generator=generator).to(dtype) for n in (inputs, outputs))
    weights = AdapterWeights({PATH: LowRankPart(packed(a, pack_a), packed(b, pack_b), 0.75)}, {}, 0)
    weights.tensors = a, b  # type: ignore[attr-defined]
    return Adapter(f"a{seed}", bytes([seed]) * 32, rank, 0, 1, "", weights)


def packed(one: torch.Tensor, pack: Callable[[Matrix, Matrix], None]) -> torch.Tensor:
    to = torch.full_like(one, torch.nan)
    bits = torch.int16 if one.dtype is torch.bfloat16 else torch.int32
    pack(one.view(bits).numpy(), to.view(bits).numpy())
    return to


def rows_of(adapters: list[Adapter | None]) -> AdapterRows | None:
    return AdapterRows.of(adapters, np.ones(len(adapters), dtype=np.int64))


@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 192), (37, 101), (5, 3), (512, 260)])
def test_products(held: torch.dtype, dtype: torch.dtype, inputs: int, outputs: int) -> None:
    adapters = [adapter(rank, inputs, outputs, held, seed) for seed, rank in enumerate((1, 8, 67))]
    choice = [0, None, 1, 2, 1, 1, 1, 1, 0, None, 2]
    of_rows = [None if one is None else adapters[one] for one in choice]
    x = torch.randn((len(choice), inputs)).to(dtype)
    before = torch.randn((len(choice), outputs)).to(dtype)
    y, rows = before.clone(), rows_of(of_rows)
    assert rows is not None
    add_to(rows, PATH, x, y)
    for row, one in enumerate(of_rows):
        if one is None:
            assert torch.equal(y[row], before[row])
            continue
        a, b = one.weights.tensors  # type: ignore[attr-defined]
        added = 0.75 * ((x[row].double() @ a.double().t()) @ b.double())
        expected = (before[row].double() + added).to(dtype)
        limit = 1e-4 if dtype is torch.float32 else 1e-2
        assert (y[row] - expected).abs().max() <= limit * added.abs().max().clamp(min=1.0)
        alone, single = before[row : row + 1].clone(), rows_of([one])
        assert single is not None
        add_to(single, PATH, x[row : row + 1], alone)
        assert torch.equal(alone[0], y[row]), "its bits depend on its neighbours"


@pytest.mark.parametrize("count", [1, 3, 4, 6, 64, 65, 200])
@pytest.mark.parametrize("threads", [1, 2])
def test_bits_depend_neither_on_rows_nor_on_threads(count: int, threads: int) -> None:
    one = adapter(16, 300, 700, torch.bfloat16, 1)
    x = torch.randn((count, 300)).bfloat16()
    before = torch.randn((count, 700)).bfloat16()
    y, rows = before.clone(), rows_of([one] * count)
    assert rows is not None
    own = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        add_to(rows, PATH, x, y)
    finally:
        torch.set_num_threads(own)
    single = rows_of([one])
    assert single is not None
    for row in {0, count // 2, count - 1}:
        alone = before[row : row + 1].clone()
        add_to(single, PATH, x[row : row + 1], alone)
        assert torch.equal(alone[0], y[row])


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_share_groups_of_any_size(threads: int) -> None:
    sizes, ranks = (150, 1, 1, 7, 66), (1, 8, 67, 16, 5)
    adapters = [adapter(rank, 96, 321, torch.bfloat16, seed) for seed, rank in enumerate(ranks)]
    of_rows = [one for one, size in zip(adapters, sizes, strict=True) for _ in range(size)]
    x = torch.randn((len(of_rows), 96)).bfloat16()
    before = torch.randn((len(of_rows), 321)).bfloat16()
    y, rows = before.clone(), rows_of([*of_rows])
    assert rows is not None
    own = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        add_to(rows, PATH, x, y)
    finally:
        torch.set_num_threads(own)
    for row, one in enumerate(of_rows):
        alone, single = before[row : row + 1].clone(), rows_of([one])
        assert single is not None
        add_to(single, PATH, x[row : row + 1], alone)
        assert torch.equal(alone[0], y[row])


def test_rows_are_grouped_in_order() -> None:
    one, other = (adapter(1, 4, 4, torch.float32, seed) for seed in (1, 2))
    found = AdapterRows.of([other, None, one, other], np.array([2, 3, 1, 2]))
    assert found is not None
    assert found.adapters == (other, one)
    assert (found.rows.tolist(), found.ends.tolist()) == ([0, 1, 6, 7, 5], [4, 5])
    assert AdapterRows.of([None, None], np.array([1, 5])) is None
