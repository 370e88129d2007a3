"""Systems that take turns on one model, here without processes: each answers at once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from benchmarks.processes import System, SystemFailure
from benchmarks.rig.bench import Bench, Case, Found, OutOfTime, TimeLimit, limits_of
from benchmarks.workloads import Lengths, Load

CASE = Case(name="it", lengths=[Lengths(2000, 20), Lengths(10, 4)])


class Answering:
    """A system whose tokens come one a second. Keeps its orders; fails from a given one on."""

    def __init__(self, fails_from: int = 99) -> None:
        self.orders: list[Mapping[str, Any]] = []
        self._fails_from = fails_from

    def run(self, order: Mapping[str, Any], timeout: float) -> list[dict[str, Any]]:
        self.orders.append(order)
        if len(self.orders) > self._fails_from:
            raise SystemFailure("no more\nof it")
        counts = [request["max_tokens"] for request in order["requests"]]
        return [
            {"arrived": 0.0, "times": [1.0 + n for n in range(count)], "tokens": [7] * count}
            for count in counts
        ]

    def end(self, patience_s: float) -> None:
        """Do nothing."""


def bench(time: TimeLimit | None = None, **systems: Answering) -> Bench:
    return Bench(
        machine=cast(System, SimpleNamespace(run=lambda order, seconds: {"bandwidth": 1.0})),
        logs=Path(),
        running=cast(dict[str, System], dict(systems)),
        about={},
        vocab_size=100,
        say=lambda line: None,
        time=time or TimeLimit(),
    )


def sizes(order: Mapping[str, Any]) -> list[tuple[int, int]]:
    return [(len(request["prompt"]), request["max_tokens"]) for request in order["requests"]]


def test_turn_0_is_short_and_all_systems_get_the_same_prompts() -> None:
    one, other = Answering(), Answering()
    seen: list[dict[str, int]] = []
    found = Found.of(CASE, ["one", "other"])
    bench(one=one, other=other).measure(
        found, 2, lambda now: seen.append({name: len(turns) for name, turns in now.turns.items()})
    )
    assert one.orders == other.orders
    assert [sizes(order) for order in one.orders] == [
        [(1024, 8), (10, 4)], [(2000, 20), (10, 4)], [(2000, 20), (10, 4)],
    ]  # fmt: skip
    assert one.orders[1] != one.orders[2]
    assert seen == [{"one": 1, "other": 1}, {"one": 2, "other": 2}]
    assert found.turns["one"][0]["output_rate"] == pytest.approx(24 / 20)
    assert found.turns["one"][0]["decode_rate"] == pytest.approx(2.0)
    assert [set(rates) for rates in found.machine] == [{"bandwidth", "load_average"}]


def test_prompts_may_be_the_same_in_every_turn() -> None:
    one = Answering()
    case = Case(name="it", lengths=[Lengths(10, 4)], is_repeated=True)
    bench(one=one).measure(Found.of(case, ["one"]), 2)
    assert one.orders[0] == one.orders[1] == one.orders[2]


def test_requests_that_come_by_and_by_all_come_at_once_to_warm_up() -> None:
    one = Answering()
    case = Case(name="it", lengths=[Lengths(10, 4)] * 3, load=Load(rate=1.0))
    found = Found.of(case, ["one"])
    bench(one=one).measure(found, 1, rates_each_turn=True)
    warming, counting = ([request["at"] for request in order["requests"]] for order in one.orders)
    assert warming == [0.0] * 3
    assert counting == sorted(counting) != [0.0] * 3
    assert "decode_rate" not in found.turns["one"][0]


def test_a_system_that_fails_is_left_out_or_ends_the_case() -> None:
    found = Found.of(CASE, ["one", "bad"])
    systems = bench(one=Answering(), bad=Answering(fails_from=1))
    systems.measure(found, 2, leaves_out=True)
    assert list(found.turns) == ["one"]
    assert len(found.turns["one"]) == 2
    assert found.failures == {"bad": "no more"}
    assert list(systems.running) == ["one"]
    with pytest.raises(SystemFailure, match="no more"):
        bench(bad=Answering(fails_from=1)).measure(Found.of(CASE, ["bad"]), 2)


def test_no_turn_begins_without_time() -> None:
    one = Answering()
    with pytest.raises(OutOfTime, match="it"):
        bench(TimeLimit(10.0, least_s=20.0), one=one).measure(Found.of(CASE, ["one"]), 1)
    assert not one.orders


def test_a_system_has_room_for_the_largest_requests_that_run_at_once() -> None:
    many = Case(name="many", lengths=[Lengths(10, 5), Lengths(30, 5), Lengths(20, 5)], at_once=2)
    few = Case(name="few", lengths=[Lengths(40, 1)])
    assert limits_of([many, few], room=2.0) == {
        "kv_tokens": 2 * (35 + 25),
        "max_requests": 2,
        "max_request_tokens": 41,
        "max_prompt_tokens": 40,
    }
