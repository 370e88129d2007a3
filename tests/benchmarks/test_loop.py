"""The bookkeeping of a turn, and the protocol of adapters."""

from __future__ import annotations

import time
from collections.abc import Iterable

import pytest

from benchmarks.adapters.loop import Turn, drive


def requests(*outputs: int, at: float = 0.0) -> list[dict[str, object]]:
    return [{"prompt": [1, 2], "max_tokens": output, "at": at} for output in outputs]


def test_all_requests_are_due_at_once_and_each_is_given_once() -> None:
    turn = Turn(requests(1, 1, 1))
    assert turn.due() == [0, 1, 2]
    assert turn.due() == []
    assert turn.wait_s() is None
    assert turn.live == 3


def test_a_closed_loop_gives_the_next_as_one_ends() -> None:
    turn = Turn(requests(1, 1, 1), concurrency=2)
    assert turn.due() == [0, 1]
    assert turn.due() == []
    assert turn.wait_s() is None
    turn.add(1, [9])
    assert not turn.finish(1)
    assert turn.wait_s() == 0.0
    assert turn.due() == [2]
    for index in (0, 2):
        turn.add(index, [9])
    assert not turn.finish(0)
    assert turn.finish(2)
    assert turn.is_over
    # a request that waited for a place counts from when it had one
    assert turn.reply()[2]["arrived"] > turn.reply()[0]["arrived"] >= 0.0


def test_a_request_counts_from_its_own_time_even_if_it_is_submitted_later() -> None:
    turn = Turn(requests(1, at=60.0))
    assert turn.due() == []
    assert 59.0 < (turn.wait_s() or 0.0) <= 60.0
    turn.started -= 61.0  # as if the system had been busy until then
    assert turn.wait_s() == 0.0
    assert turn.due() == [0]
    assert turn.reply()[0]["arrived"] == 60.0


def test_times_are_told_from_the_turns_start() -> None:
    turn = Turn(requests(3))
    turn.due()
    turn.add(0, [4, 5], [turn.started + 1.0, turn.started + 2.0])
    turn.started -= 100.0
    turn.add(0, [6])
    turn.finish(0)
    [reply] = turn.reply()
    assert reply["tokens"] == [4, 5, 6]
    assert reply["times"][:2] == pytest.approx([1.0, 2.0])
    assert reply["times"][2] >= 100.0


@pytest.mark.parametrize("tokens", [[], [1], [1, 2, 3]])
def test_a_request_with_other_than_the_wanted_tokens_is_an_error(tokens: list[int]) -> None:
    turn = Turn(requests(2))
    turn.due()
    turn.add(0, tokens)
    with pytest.raises(RuntimeError, match="2 were wanted"):
        turn.finish(0)


class Counting:
    """A stepped engine: each step gives each request one token."""

    def __init__(self) -> None:
        self.live: dict[int, int] = {}
        self.most = 0

    def submit(self, index: int, prompt: list[int], max_tokens: int) -> None:
        self.live[index] = max_tokens

    def step(self) -> Iterable[tuple[int, list[int], bool]]:
        self.most = max(self.most, len(self.live))
        for index in list(self.live):
            self.live[index] -= 1
            ended = self.live[index] == 0
            if ended:
                del self.live[index]
            yield index, [index], ended


def test_a_stepped_engine_gets_requests_between_steps_and_never_more_than_allowed() -> None:
    engine, turn = Counting(), Turn(requests(3, 1, 2, 4), concurrency=2)
    drive(engine, turn)
    assert turn.is_over
    assert engine.most == 2
    assert [reply["tokens"] for reply in turn.reply()] == [[0] * 3, [1], [2] * 2, [3] * 4]


def test_a_stepped_engine_without_requests_waits_for_the_next() -> None:
    turn = Turn([*requests(1), *requests(1, at=0.05)])
    began = time.perf_counter()
    drive(Counting(), turn)
    assert time.perf_counter() - began >= 0.05
    assert turn.reply()[1]["times"][0] >= 0.05
