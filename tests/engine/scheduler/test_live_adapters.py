"""Requests and tokens are counted by adapter, under few names, none of which loses its counts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.contract.adapters import MAX_NAMED, Adapter
from engine.contract.request import GenerationRequest, TokenMatcher
from engine.contract.stats import AdapterStats
from engine.contract.types import RequestId
from engine.scheduler.live_adapters import AdapterFigures, LiveAdapters
from tests.engine.core_machine import POLICIES
from tests.engine.fake_runner import make_request
from tests.engine.scheduler.watched import Watched


def adapter(name: str, content: int = 0) -> Adapter:
    return Adapter(name, bytes([content]) * 32, 8, 1, 1, "", None)


def add(watched: Watched, spec: GenerationRequest, one: Adapter | None) -> None:
    watched.ledger.add(spec)
    watched.core.add(spec, watched.clock(), adapter=one)


def rows(watched: Watched) -> dict[str, AdapterStats]:
    return {one.name: one for one in watched.core.stats().by_adapter}


@pytest.mark.parametrize("policy", POLICIES)
def test_tokens_are_those_of_all_requests_by_adapter(policy: str) -> None:
    watched = Watched(policy=policy, max_batch_tokens=8)
    a, b = adapter("a"), adapter("b")
    add(watched, make_request("1", range(20), 5), a)
    add(watched, make_request("2", range(3), 2, n=2), b)
    add(watched, make_request("3", range(3), 0), a)
    add(watched, make_request("4", range(9), 3), None)
    assert rows(watched) == {"a": AdapterStats("a", 0, 2, 0, 0), "b": AdapterStats("b", 0, 1, 0, 0)}
    watched.drain()
    found, stats = rows(watched), watched.core.stats()
    assert found["a"] == AdapterStats("a", 0, 0, 20 + 3, 5)
    assert found["b"].generated_tokens == 2 * 2
    assert stats.other_adapters is None
    assert stats.generated_tokens == 5 + 2 * 2 + 3
    assert stats.prompt_tokens - 9 == found["a"].prompt_tokens + found["b"].prompt_tokens


def test_what_runs_waits_and_is_held() -> None:
    watched = Watched(max_requests=2, num_blocks=64)
    one = adapter("a")
    for index in range(5):
        add(watched, make_request(f"r{index}", [1, 2], 9), one)
    watched.step()
    assert (rows(watched)["a"].running, rows(watched)["a"].waiting) == (2, 3)
    watched.core.hold(RequestId("r0"))
    watched.core.hold(RequestId("r4"))
    assert (rows(watched)["a"].running, rows(watched)["a"].waiting) == (1, 2)
    watched.core.cancel(RequestId("r1"))
    watched.core.unhold(RequestId("r0"))
    watched.core.unhold(RequestId("r4"))
    watched.drain()
    assert (rows(watched)["a"].running, rows(watched)["a"].waiting) == (0, 0)


def test_a_name_goes_on_with_another_content_and_when_it_comes_back() -> None:
    watched = Watched()
    for content in range(3):
        add(watched, make_request(f"r{content}", [1, 2, content], 4), adapter("a", content))
        watched.drain()
    assert rows(watched) == {"a": AdapterStats("a", 0, 0, 9, 12)}


def test_later_names_are_one_and_no_count_is_lost() -> None:
    watched = Watched(max_requests=4, num_blocks=64)
    count = MAX_NAMED + 36
    for index in range(count):
        add(watched, make_request(f"r{index}", [1, 2], 1), adapter(f"n{index}"))
    others = watched.core.stats().other_adapters
    assert others is not None
    assert (others.name, others.waiting) == ("", 36)
    watched.drain()
    stats = watched.core.stats()
    assert [one.name for one in stats.by_adapter] == [f"n{index}" for index in range(MAX_NAMED)]
    assert stats.other_adapters == AdapterStats("", 0, 0, 36 * 2, 36)
    assert sum(one.generated_tokens for one in stats.by_adapter) == MAX_NAMED


def test_a_name_beyond_the_bound_takes_no_memory() -> None:
    figures = LiveAdapters()
    for index in range(MAX_NAMED):
        figures.of(adapter(f"n{index}"))
    first = figures.of(adapter("another"))
    assert isinstance(first, AdapterFigures)
    assert all(figures.of(adapter(f"more {index}")) is first for index in range(1000))
    assert figures.of(adapter("n3")) is not first
    assert len(figures._named) == MAX_NAMED


@pytest.mark.parametrize(("name", "told"), [("", "r: "), ("team/a", "r (adapter team/a): ")])
def test_the_log_names_the_adapter_of_a_request_that_fails(
    name: str, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    watched = Watched()

    def make_matcher() -> TokenMatcher:
        raise ValueError("no")

    spec = replace(make_request("r", [1, 2], 3), adapter=name)
    watched.core.add(spec, 0.0, make_matcher, adapter(name) if name else None)
    assert f": {told}the grammar could not be begun" in caplog.text
