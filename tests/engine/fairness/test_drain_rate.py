"""When to come again: from what left within a sliding window, and who was told to come before; by
a clock of the test's own. And whether those who come as they were told find room.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest

from engine.fairness.drain_rate import (
    JITTER,
    MARGIN,
    MAX_DELAY_S,
    MIN_DELAY_S,
    SLICE_S,
    UNKNOWN_DELAY_S,
    WINDOW_S,
    DrainRate,
)
from tests.engine.crowd import Clock, Crowd, Served, at_random, by_the_batch, evenly


def steady(clock: Clock, rate: DrainRate, *, every: float, count: int, amount: float = 1) -> None:
    for _ in range(count):
        clock.now += every
        rate.left(amount)


def rate_of(clock: Clock) -> DrainRate:
    return DrainRate(clock, lambda: 0.0)


def late(seconds: float) -> float:
    """What is advised where so long is to be waited by the rate."""
    return pytest.approx(seconds * (1 + MARGIN))  # type: ignore[no-any-return]


def test_the_delay_is_the_amount_over_the_rate() -> None:
    clock = Clock()
    rate = rate_of(clock)
    steady(clock, rate, every=0.25, count=40)  # four a second
    assert rate.advise(1, 0) == late(0.25)
    assert rate.advise(8, 0) == late(2.0)
    tokens = rate_of(clock)
    steady(clock, tokens, every=0.5, count=10, amount=100)
    assert tokens.advise(300, 0) == late(1.5)


def test_whoever_was_told_to_come_stands_before_the_next() -> None:
    clock = Clock()
    rate = rate_of(clock)
    steady(clock, rate, every=0.25, count=40)
    assert [rate.advise(1, 1) for _ in range(3)] == [late(0.25), late(0.5), late(0.75)]
    assert rate.advise(2, 4) == late((2 + 3) / 4)
    assert rate.advise(1, 1) == late((1 + 7) / 4)
    # Their time has come: they are there, or will not come.
    clock.now += 1.0
    rate.left(4)
    assert rate.advise(1, 1) == late((1 + 5) / 4.1)
    clock.now += 12.0
    rate.left(40)
    assert rate.advise(1, 1) == late(0.25)


def test_the_advice_is_spread_and_never_early() -> None:
    clock = Clock()
    jitter = itertools.cycle([0.0, 0.5, 1.0])
    rate = DrainRate(clock, lambda: next(jitter))
    assert [rate.advise(1, 1) for _ in range(3)] == [
        UNKNOWN_DELAY_S * part for part in (1.0, 1.5, 2.0)
    ]
    steady(clock, rate, every=0.25, count=40)
    assert [rate.advise(4, 0) for _ in range(3)] == [
        pytest.approx(1 + MARGIN + JITTER * part) for part in (0.0, 0.5, 1.0)
    ]


def test_what_left_long_ago_does_not_count() -> None:
    clock = Clock()
    rate = rate_of(clock)
    steady(clock, rate, every=0.01, count=1000)  # a hundred a second, for ten seconds
    steady(clock, rate, every=1.0, count=int(WINDOW_S) + 1)
    assert abs(rate.advise(1, 0) / (1 + MARGIN) - 1.0) <= SLICE_S / WINDOW_S * 2


def test_a_rate_is_of_the_time_since_there_was_something() -> None:
    clock = Clock()
    rate = rate_of(clock)
    clock.now += 3600  # nothing was there
    rate.begin()
    steady(clock, rate, every=0.25, count=4)
    assert rate.advise(1, 0) == late(0.25)


def test_what_leaves_first_says_nothing_of_how_many_follow() -> None:
    clock = Clock()
    rate = rate_of(clock)
    rate.begin()
    clock.now += 3.0
    rate.left(50)
    assert rate.advise(10, 1) == UNKNOWN_DELAY_S
    steady(clock, rate, every=SLICE_S / 10, count=9)
    assert rate.advise(10, 1) == UNKNOWN_DELAY_S  # for too short a time
    steady(clock, rate, every=SLICE_S / 10, count=2)
    assert rate.advise(10, 1) == late(SLICE_S)


def test_a_time_of_much_says_nothing_of_the_next() -> None:
    clock = Clock()
    rate = rate_of(clock)
    steady(clock, rate, every=0.001, count=1000)
    rate.begin()
    assert rate.advise(1, 0) == UNKNOWN_DELAY_S


def test_where_nothing_leaves_the_advice_grows_to_its_bound() -> None:
    clock = Clock()
    rate = rate_of(clock)
    assert rate.advise(5, 1) == UNKNOWN_DELAY_S
    clock.now += 4
    assert rate.advise(5, 1) == 4
    clock.now += 3600
    assert rate.advise(5, 1) == MAX_DELAY_S
    rate.left()
    clock.now += WINDOW_S + 2
    assert rate.advise(1, 1) == WINDOW_S + 2  # it left the window: unknown again


def test_the_bounds() -> None:
    clock = Clock()
    rate = rate_of(clock)
    steady(clock, rate, every=0.001, count=5000)
    assert rate.advise(1, 1) == MIN_DELAY_S
    assert rate.advise(1e9, 1) == MAX_DELAY_S


def test_it_keeps_no_more_than_its_window_and_what_was_advised_for() -> None:
    clock = Clock()
    rate = rate_of(clock)
    steady(clock, rate, every=0.01, count=10_000)
    assert len(rate._slices) <= WINDOW_S / SLICE_S + 1
    for _ in range(20_000):
        rate.advise(1, 1)
    assert len(rate._claims) <= 4 * MAX_DELAY_S + 1
    assert rate._claimed <= 100 * MAX_DELAY_S  # whoever would wait longer is not counted
    clock.now += MAX_DELAY_S + 1
    rate.left()
    rate.advise(1, 1)
    assert len(rate._claims) == 1


# ---- a crowd -----------------------------------------------------------------------------------


class Queue:
    """A queue as the engine's loop has it: its rate is of the time in which somebody waits."""

    def __init__(self, clock: Clock, jitter: Callable[[], float]) -> None:
        self.limit = 1024
        self.present = 0
        self._rate = DrainRate(clock, jitter)

    def advise(self) -> float:
        return self._rate.advise(self.present + 1 - self.limit, 1)

    def enter(self) -> None:
        if not self.present:
            self._rate.begin()
        self.present += 1

    def leave(self) -> None:
        self.present -= 1
        if self.present:
            self._rate.left()


@pytest.mark.parametrize("per_second", [30, 200, 3000])
@pytest.mark.parametrize("law", [evenly, at_random, by_the_batch])
def test_a_crowd_gets_in_when_it_was_told_to_come(
    law: Callable[[float], Served], per_second: float
) -> None:
    clock = Clock()
    crowd = Crowd(clock, Queue(clock, random.Random(7).random), law(per_second), busy=300)
    crowd.come(3000)
    crowd.check_told(batch_s=64 / per_second if law is by_the_batch else 0.0)


def test_a_crowd_that_comes_first_of_all_learns_the_rate_by_coming_again() -> None:
    clock = Clock()
    crowd = Crowd(clock, Queue(clock, random.Random(7).random), evenly(200), busy=0)
    crowd.come(3000)
    assert max(crowd.told) <= 2 * UNKNOWN_DELAY_S <= 0.5
    assert crowd.all_in_s <= 1.3 * len(crowd.told) / 200
