"""The manager against a model that knows the content of every block: see `simulation`."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tests.engine.kv_cache.machine import SEEN, SharingMachine, drive


def test_every_position_that_is_read_holds_what_it_should() -> None:
    SEEN.clear()
    run_state_machine_as_test(
        SharingMachine,
        settings=settings(
            max_examples=100, stateful_step_count=40, deadline=None, derandomize=True, database=None
        ),
    )
    assert set(SEEN) == {"hits", "forks", "offloads", "restores", "lost"}
    assert all(SEEN.values()), f"the machine leaves something out: {SEEN}"


def test_and_so_it_is_in_long_runs() -> None:
    seen: Counter[str] = Counter()
    for seed in range(1000, 1040):
        seen.update(drive(seed, 200))
    assert min(seen.values()) >= 50, f"the runs hardly ever do something: {seen}"
