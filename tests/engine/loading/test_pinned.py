"""Pinned memory in allocations that torch does not round up."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.loading import pinned
from engine.loading.pinned import pinned_zeros, plan_chunks

MIB = 1 << 20


@given(st.lists(st.integers(0, 64 * MIB), max_size=80))
def test_every_tensor_has_a_place_of_its_own_in_a_power_of_two(sizes: list[int]) -> None:
    chunks = plan_chunks(sizes)
    placed = sorted(number for chunk in chunks for number, _ in chunk.places)
    assert placed == list(range(len(sizes)))
    for chunk in chunks:
        assert chunk.num_bytes.bit_count() == 1
        end = 0
        for number, begin in sorted(chunk.places, key=lambda place: place[1]):
            assert begin >= end
            end = begin + sizes[number]
        assert end <= chunk.num_bytes
    assert len(chunks) <= 2 * len(sizes)


@given(st.integers(MIB, 1 << 34), st.integers(32, 256))
def test_layers_take_hardly_more_than_they_need(size: int, count: int) -> None:
    total = sum(chunk.num_bytes for chunk in plan_chunks([size] * count))
    assert total <= 1.125 * size * count, "one allocation each: up to twice as much"


def test_tensors_are_views_of_few_allocations(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def zeros(size: int, *, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        assert pin_memory
        asked.append(size)
        return torch.empty(size, dtype=dtype).zero_()  # without a device nothing can be pinned

    monkeypatch.setattr(pinned.torch, "zeros", zeros)
    shapes = [(48, 2, 8), (48, 2, 4)] * 20
    made = pinned_zeros(shapes, torch.bfloat16)
    assert [tuple(one.shape) for one in made] == shapes
    assert len(asked) < 6
    for number, one in enumerate(made):
        assert one.is_contiguous()
        assert not one.any()
        one.fill_(number)
    assert all(bool((one == number).all()) for number, one in enumerate(made))
