"""The counter-based uniform numbers: pure, in range, and uniform in each word of the key."""

from __future__ import annotations

import itertools

import pytest

from engine.sampling.random import uniform


def test_it_is_a_function_of_its_arguments() -> None:
    assert uniform(1, 2, 3) == uniform(1, 2, 3)
    numbers = {uniform(s, c, p) for s, c, p in itertools.product(range(12), range(12), range(12))}
    assert len(numbers) == 12**3


@pytest.mark.parametrize("seed", [0, 1, 2**63, 2**64 - 1])
def test_it_is_within_zero_and_one(seed: int) -> None:
    assert all(0.0 <= uniform(seed, 0, position) < 1.0 for position in range(2000))


@pytest.mark.parametrize("axis", ["seed", "choice", "position"])
def test_it_is_uniform_along_each_axis(axis: str) -> None:
    count, bins = 20_000, 50
    for base in (0, 12345):
        keys = [
            {"seed": (i + base, 0, 0), "choice": (base, i, 0), "position": (base, 0, i)}[axis]
            for i in range(count)
        ]
        numbers = [uniform(*key) for key in keys]
        found = [0] * bins
        for number in numbers:
            found[int(number * bins)] += 1
        expected = count / bins
        chi_square = sum((value - expected) ** 2 / expected for value in found)
        assert chi_square < 95  # 49 degrees of freedom: 0.01 % lie above
        pairs = sum(a * b for a, b in itertools.pairwise(numbers)) / (count - 1)
        assert pairs == pytest.approx(0.25, abs=0.01), "neighbours are independent"
