"""What is kept without sorting a row is exactly what sorting it keeps."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling import filters as filters_module
from engine.sampling import ops
from engine.sampling.filters import Filters, filtered_weights
from engine.sampling.selection import least_bound
from tests.engine.runner.fake_graphs import RecordingBackend
from tests.engine.sampling import sorted_filters

BELOW_ONE = 1.0 - 2.0**-53


@given(
    st.lists(
        st.tuples(
            st.one_of(
                st.sampled_from([0.0, -0.0, 1e-45, 1.0, 2.0**-126, 3e38, math.inf]),
                st.floats(0, width=32, allow_nan=False),
                st.integers(0, 4).map(float),
            ),
            st.integers(0, 1 << 41),
        ),
        min_size=1,
        max_size=30,
    ),
    st.floats(0, 1.2),
)
@settings(max_examples=300, deadline=None)
def test_the_least_bound_is_that_of_the_definition(
    entries: list[tuple[float, int]], share: float
) -> None:
    values = torch.tensor([[abs(value) for value, _ in entries]])
    masses = torch.tensor([[mass for _, mass in entries]])
    target = max(1, int(share * int(masses.sum())))
    pairs = list(zip(values[0].tolist(), masses[0].tolist(), strict=True))
    found = least_bound(values, masses, torch.tensor([[target]])).item()
    right = [
        bound
        for bound, _ in sorted(pairs)
        if sum(mass for value, mass in pairs if value <= bound) >= target
    ]
    assert found == (right[0] if right else math.inf)


def _rows(chance: random.Random, rows: int, size: int) -> torch.Tensor:
    """Logits of all kinds: spread, tied, nearly all impossible, huge, flat."""
    generator = torch.Generator().manual_seed(chance.randrange(2**31))
    logits = torch.randn(rows, size, generator=generator) * 3
    for row in logits:
        kind = chance.randrange(8)
        if kind == 0:
            row.copy_(row.bfloat16().float())
        elif kind == 1:
            row.copy_(row.round())
        elif kind == 2:
            few = row[chance.randrange(size)].clone()
            row.fill_(float("-inf"))
            row[chance.randrange(size)] = few
        elif kind == 3:
            row.mul_(1e36)
        elif kind == 4:
            row.fill_(chance.choice([0.0, -1e-40, 7.5]))
        elif kind == 5:
            row.mul_(1e-42)
        elif kind == 6:
            row[torch.rand(size, generator=generator) < 0.5] = float("-inf")
            row[chance.randrange(size)] = 1.0
    return logits


def _filters(chance: random.Random, rows: int, size: int) -> Filters:
    """Options mixed by row, each filter there for all rows or for none."""

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor([chance.choice(values) for _ in range(rows)], dtype=torch.float64)[
            :, None
        ]

    few = chance.random() < 0.3
    ks = [1, 2, 7, 50] if few else [1, 2, 7, 50, 300, size // 2, size - 1, size, size]
    top_k = column([float(max(1, min(k, size))) for k in ks]).to(torch.int64)
    return Filters(
        top_k=top_k if chance.random() < 0.6 else None,
        max_top_k=int(top_k.max()),
        top_p=column([1e-300, 1e-9, 0.03, 0.5, 0.9, 0.999, BELOW_ONE, 1.0])
        if chance.random() < 0.6
        else None,
        min_p=column([0.0, 1e-30, 0.01, 0.5, 1.0]).float() if chance.random() < 0.4 else None,
        typical_p=column([1e-9, 0.2, 0.95, 1.0]) if chance.random() < 0.3 else None,
    )


@pytest.mark.parametrize(
    ("seed", "size", "rounds", "most_rows"),
    [
        (1, 7, 60, 70),
        (2, 60, 60, 70),
        (3, 257, 40, 70),
        (4, 3000, 20, 40),
        (5, 32_000, 6, 8),
        (6, 151_936, 6, 3),
    ],
)
def test_weights_and_draws_are_those_of_the_sorted_way(
    seed: int, size: int, rounds: int, most_rows: int
) -> None:
    chance = random.Random(seed)
    for _ in range(rounds):
        rows = chance.randint(1, most_rows)
        logits = _rows(chance, rows, size)
        temperatures = torch.tensor([chance.choice([0.01, 0.7, 1.0, 100.0]) for _ in range(rows)])
        scaled = (logits - logits.amax(dim=-1, keepdim=True)) / temperatures[:, None]
        chosen = _filters(chance, rows, size)
        ours = filtered_weights(scaled, chosen)
        right = sorted_filters.filtered_weights(scaled, chosen)
        assert torch.equal(ours, right)
        numbers = torch.tensor(
            [chance.choice([0.0, chance.random(), BELOW_ONE]) for _ in range(rows)],
            dtype=torch.float64,
        )
        assert torch.equal(ops.draw(ours, numbers[:, None]), ops.draw(right, numbers[:, None]))


@given(
    st.lists(st.integers(-8, 8), min_size=2, max_size=40),
    st.integers(1, 40),
    st.one_of(st.floats(0.01, 1.0), st.just(1.0)),
)
@settings(max_examples=200, deadline=None)
def test_ties_are_cut_where_the_sorted_way_cuts_them(
    values: list[int], top_k: int, top_p: float
) -> None:
    row = torch.tensor([values], dtype=torch.float32) / 2
    k = min(top_k, len(values))
    chosen = Filters(
        top_k=torch.tensor([[k]]),
        max_top_k=k,
        top_p=torch.tensor([[top_p]], dtype=torch.float64),
    )
    scaled = row - row.amax()
    right = sorted_filters.filtered_weights(scaled, chosen)
    assert torch.equal(filtered_weights(scaled, chosen), right)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(filters_module, "TOPK_LIMIT", 0)  # also where the top would do
        assert torch.equal(filtered_weights(scaled, chosen), right)


def test_a_row_without_finite_logits_leaves_the_others_alone() -> None:
    """Its own weights may be anything; nothing raises, and no index is out of bounds."""
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(3))
    column = torch.full((5, 1), 0.8, dtype=torch.float64)
    chosen = Filters(torch.full((5, 1), 280), 280, column, None, column)
    scaled = logits - logits.amax(dim=-1, keepdim=True)
    right = filtered_weights(scaled, chosen)
    scaled[1], scaled[2, 7], scaled[3] = float("nan"), float("nan"), -float("nan")
    found = filtered_weights(scaled, chosen)
    assert torch.equal(found[[0, 4]], right[[0, 4]])
    assert ops.draw(found, torch.full((5, 1), 0.5, dtype=torch.float64)).max() < 300


def test_it_can_be_captured() -> None:
    """With the options as inputs: a replay filters and draws by what they are then. The stand-in
    refuses whatever waits for the device, or has a shape that depends on a value.
    """
    rows, size = 6, 5000
    chance = random.Random(4)

    def inputs() -> tuple[torch.Tensor, ...]:
        logits = _rows(chance, rows, size)
        numbers = torch.tensor(
            [
                (
                    chance.random(),
                    chance.choice([0.3, 1.0, 2.0]),
                    chance.choice([1, 400, size]),
                    chance.choice([0.2, 0.9, 1.0]),
                    chance.choice([0.0, 0.1]),
                    0.9,
                )
                for _ in range(rows)
            ],
            dtype=torch.float64,
        )
        return logits, numbers

    logits, numbers = inputs()

    def run() -> torch.Tensor:
        uniforms, temperature, top_k, top_p, min_p, typical_p = torch.split(numbers, 1, dim=-1)
        scaled = (logits - logits.amax(dim=-1, keepdim=True)) / temperature.float()
        chosen = Filters(top_k.to(torch.int64), size, top_p, min_p.float(), typical_p)
        return ops.draw(filtered_weights(scaled, chosen), uniforms)

    graph = RecordingBackend().capture(run)
    for _ in range(5):
        for place, value in zip((logits, numbers), inputs(), strict=True):
            place.copy_(value)
        assert graph.replay().tolist() == run().tolist()
