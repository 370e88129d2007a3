"""The manager against a model that knows the content of every block: see `simulation`."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tests.engine.kv_cache.machine import SEEN, WITH_STATES, SharingMachine, drive


def test_every_position_that_is_read_holds_what_it_should() -> None:
    SEEN.clear()
    run_state_machine_as_test(
        SharingMachine,
        settings=settings(
            max_examples=100, stateful_step_count=40, deadline=None, derandomize=True, database=None
        ),
    )
    assert set(SEEN) == {"steps", "hits", "forks", "offloads", "restores", "lost"}
    assert all(SEEN.values()), f"the machine leaves something out: {SEEN}"


def test_and_so_it_is_in_long_runs() -> None:
    seen: Counter[str] = Counter()
    for seed in range(1000, 1040):
        seen.update(drive(seed, 200))
    did = {name: seen[name] for name in ("hits", "forks", "offloads", "restores", "lost")}
    assert min(did.values()) >= 50, f"the runs hardly ever do something: {seen}"


@pytest.mark.slow
def test_and_so_it_is_with_states_in_a_hundred_thousand_steps() -> None:
    seen: Counter[str] = Counter()
    seeds = itertools.count(2000)
    while seen["steps"] < 10**5:  # that compute something
        seen.update(drive(next(seeds), 200, WITH_STATES))
    names = ("hits", "forks", "offloads", "restores", "lost", "state_copies", "state_evictions")
    did = {name: seen[name] for name in (*names, "prefix_tokens_without_state")}
    assert min(did.values()) >= 1000, f"the runs hardly ever do something: {seen}"
