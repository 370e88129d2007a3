"""When to come again: from what left within a sliding window, by a clock of the test's own."""

from __future__ import annotations

from engine.drain_rate import (
    MAX_DELAY_S,
    MIN_DELAY_S,
    SLICE_S,
    UNKNOWN_DELAY_S,
    WINDOW_S,
    DrainRate,
)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def steady(clock: Clock, rate: DrainRate, *, every: float, count: int, amount: float = 1) -> None:
    for _ in range(count):
        clock.now += every
        rate.left(amount)


def test_the_delay_is_the_amount_over_the_rate() -> None:
    clock = Clock()
    rate = DrainRate(clock)
    steady(clock, rate, every=0.25, count=40)  # four a second
    assert rate.seconds_until(1) == 0.25
    assert rate.seconds_until(8) == 2.0
    tokens = DrainRate(clock)
    steady(clock, tokens, every=0.5, count=10, amount=100)
    assert tokens.seconds_until(300) == 1.5


def test_what_left_long_ago_does_not_count() -> None:
    clock = Clock()
    rate = DrainRate(clock)
    steady(clock, rate, every=0.01, count=1000)  # a hundred a second, for ten seconds
    steady(clock, rate, every=1.0, count=int(WINDOW_S) + 1)
    assert abs(rate.seconds_until(1) - 1.0) <= SLICE_S / WINDOW_S * 2


def test_a_rate_is_of_the_time_since_there_was_something() -> None:
    clock = Clock()
    rate = DrainRate(clock)
    clock.now += 3600  # nothing was there
    rate.begin()
    steady(clock, rate, every=0.25, count=4)
    assert rate.seconds_until(1) == 0.25


def test_a_time_of_much_says_nothing_of_the_next() -> None:
    clock = Clock()
    rate = DrainRate(clock)
    steady(clock, rate, every=0.001, count=1000)
    rate.begin()
    assert rate.seconds_until(1) == UNKNOWN_DELAY_S


def test_where_nothing_leaves_the_advice_grows_to_its_bound() -> None:
    clock = Clock()
    rate = DrainRate(clock)
    assert rate.seconds_until(5) == UNKNOWN_DELAY_S
    clock.now += 4
    assert rate.seconds_until(5) == 4
    clock.now += 3600
    assert rate.seconds_until(5) == MAX_DELAY_S
    rate.left()
    clock.now += WINDOW_S + 2
    assert rate.seconds_until(1) == WINDOW_S + 2  # it left the window: unknown again


def test_the_bounds() -> None:
    clock = Clock()
    rate = DrainRate(clock)
    steady(clock, rate, every=0.001, count=5000)
    assert rate.seconds_until(1) == MIN_DELAY_S
    assert rate.seconds_until(1e9) == MAX_DELAY_S


def test_it_keeps_no_more_than_its_window() -> None:
    clock = Clock()
    rate = DrainRate(clock)
    steady(clock, rate, every=0.01, count=10_000)
    assert len(rate._slices) <= WINDOW_S / SLICE_S + 1
