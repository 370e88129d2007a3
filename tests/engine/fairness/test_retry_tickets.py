"""Who comes again as advised goes before who comes for the first time."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest

from engine.contract.errors import QueueFullError
from engine.contract.request import GenerationRequest
from engine.contract.types import CallerKey
from engine.fairness import retry_tickets as lines
from engine.fairness.drain_rate import DrainRate
from engine.fairness.queue_room import QueueRoom
from engine.fairness.retry_tickets import KEPT_S, MAX_TICKETS, SOON_S, RetryTickets
from engine.fairness.shares import Shares
from tests.engine.crowd import Clock
from tests.engine.fake_runner import make_request


@dataclass(frozen=True)
class Who:
    """A caller."""

    key: str
    group: str
    weight: float = 1.0


A, B = Who("a", "a"), Who("b", "b")


# ---- the line by itself --------------------------------------------------------------------------


def test_a_place_is_kept_from_half_its_time_on_and_a_while_longer() -> None:
    line = RetryTickets()
    line.put("a", "1", 3, now=0.0, delay=10.0)
    early, late = (10.0 - SOON_S) / 2, 10.0 + KEPT_S
    assert [line.kept("a", now) for now in (0.0, early - 0.01, early, late - 0.01)] == [
        0,
        0,
        3,
        3,
    ]
    assert line.is_kept("a", "1")
    assert line.kept("b", late - 0.01) == 0  # nor behind others' lines
    assert line.kept("a", late) == 0
    assert len(line.places) == 0


def test_who_comes_before_the_time_stands_behind_those_who_are_due() -> None:
    line = RetryTickets()
    line.put("a", "due", 1, now=0.0, delay=1.0)
    line.put("a", "early", 1, now=0.0, delay=100.0)
    assert line.kept("a", 1.0) == 1
    assert (line.is_kept("a", "due"), line.is_kept("a", "early")) == (True, False)
    assert line.due_in("a", "early", 1.0) == 99.0
    assert (line.due_in("a", "due", 1.0), line.due_in("a", "unknown", 1.0)) == (0.0, 0.0)


def test_who_is_in_leaves_the_line_and_who_is_told_again_has_one_place() -> None:
    line = RetryTickets()
    line.put("a", "1", 2, now=0.0, delay=1.0)
    assert line.kept("a", 1.0) == 2
    line.put("a", "1", 2, now=1.0, delay=1.0)
    assert line.kept("a", 1.0) == 0
    assert line.kept("a", 2.0) == 2
    line.drop("a", "1")
    line.drop("a", "1")
    assert line.kept("a", 2.0) == 0
    assert len(line.places) == 0


def test_the_memory_of_a_line_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_TICKETS", 8)
    line = RetryTickets()
    for number in range(20):
        line.put("a", str(number), 1, now=0.0, delay=50.0)
    for _ in range(100):  # one that comes again and again
        line.put("a", "0", 1, now=0.0, delay=50.0)
    assert len(line.places) <= 8
    assert len(line._changes) <= 16
    assert line.kept("a", 50.0) == len(line.places)
    line.kept("a", 60.0)
    assert (len(line.places), line._changes, line._kept) == (0, [], {})
    assert MAX_TICKETS > 8


# ---- in a bound ----------------------------------------------------------------------------------


def full(limit: int = 8) -> tuple[Shares[Who], Clock]:
    clock = Clock()
    shares: Shares[Who] = Shares(limit, clock, lambda: 0.0)
    for _ in range(limit):
        shares.add(A, 1)
    return shares, clock


def test_a_newcomer_does_not_take_the_place_of_one_who_was_told_to_come() -> None:
    shares, clock = full()
    told = shares.ask(A, 1, ticket="first")
    assert told is not None
    shares.remove(A, 1, served=True)
    clock.now += told.retry_after_s
    behind = shares.ask(A, 1, ticket="newcomer")
    assert behind is not None
    assert (behind.present, behind.kept) == (7, 1)
    assert shares.ask(A, 1) is not None  # one without a ticket neither
    assert shares.ask(A, 1, ticket="first") is None
    shares.add(A, 1)
    shares.got_in(A, "first")
    shares.remove(A, 1, served=True)
    assert shares.ask(A, 1) is not None  # the newcomer's turn has come by now
    assert shares.ask(A, 1, ticket="newcomer") is None


def test_a_place_for_which_nobody_comes_is_anybodys_after_a_while() -> None:
    shares, clock = full()
    told = shares.ask(A, 1, ticket="gone")
    assert told is not None
    shares.remove(A, 1, served=True)
    clock.now += told.retry_after_s + KEPT_S
    assert shares.ask(A, 1) is None


def test_where_there_is_much_room_nobody_waits_for_the_line() -> None:
    shares, clock = full()
    told = [shares.ask(A, 1, ticket=str(number)) for number in range(8)]
    for _ in range(7):
        shares.remove(A, 1, served=True)
    clock.now += max(one.retry_after_s for one in told if one is not None)
    assert shares.ask(A, 1) is None


def test_who_comes_too_early_is_told_the_rest_of_the_time() -> None:
    shares, clock = full()
    shares.level.rate.begin()
    for _ in range(8):  # one a second
        clock.now += 1.0
        shares.remove(A, 1, served=True)
        shares.add(A, 1)
    told = shares.ask(A, 1, ticket="1")
    behind = shares.ask(A, 1, ticket="2")
    assert told is not None
    assert behind is not None
    clock.now += 0.25
    again = shares.ask(A, 1, ticket="1")
    assert again is not None
    assert again.retry_after_s == pytest.approx(told.retry_after_s - 0.25)
    # It is not counted twice: the next one is told as late as if it had not come.
    after = shares.ask(A, 1, ticket="3")
    assert after is not None
    assert after.retry_after_s < told.retry_after_s + behind.retry_after_s + 2.0


def test_no_line_of_one_caller_shuts_another_out() -> None:
    shares, clock = full(64)
    told = [shares.ask(A, 1, ticket=str(number)) for number in range(200)]
    clock.now += max(one.retry_after_s for one in told if one is not None)
    assert all(shares.ask(B, 1) is None for _ in range(8))


@pytest.mark.parametrize(("has_tickets", "share"), [(True, (0.9, 1.0)), (False, (0.0, 0.85))])
def test_while_newcomers_go_on_coming_the_refused_get_in_as_told(
    has_tickets: bool, share: tuple[float, float]
) -> None:
    """Places come free at a steady rate, and newcomers come faster."""
    rng, clock = random.Random(3), Clock()
    shares: Shares[Who] = Shares(64, clock, rng.random)
    again: list[tuple[float, str]] = []
    firsts = good = 0
    names = iter(range(10**6))

    def enter(name: str) -> float | None:
        told = shares.ask(A, 1, ticket=name if has_tickets else "")
        if told is None:
            shares.add(A, 1)
            shares.got_in(A, name)
        return told.retry_after_s if told is not None else None

    for turn in range(3000):  # 100 leave in a second, and 150 come
        clock.now += 0.01
        if shares.present:
            shares.remove(A, 1, served=True)
        for due, name in [one for one in again if one[0] <= clock.now]:
            again.remove((due, name))
            firsts += 1
            good += enter(name) is None
        for _ in range(2 if turn % 2 else 1):
            name = str(next(names))
            if (delay := enter(name)) is not None:
                again.append((clock.now + delay, name))
    assert firsts > 500
    assert share[0] <= good / firsts <= share[1]


def test_in_the_queue_a_request_is_known_by_its_ticket() -> None:
    clock = Clock()
    room = QueueRoom(4, DrainRate(clock, lambda: 0.0), clock, lambda: 0.0)

    def enter(name: str, waiting: int, ticket: str = "") -> QueueFullError | None:
        try:
            room.enter([replace(make_request(name, [1]), ticket=ticket)], waiting)
        except QueueFullError as error:
            return error
        return None

    for number in range(4):
        assert enter(f"r{number}", number) is None
    told = enter("a#1", 4, ticket="a")
    assert told is not None
    clock.now += told.retry_after_s
    behind = enter("b#1", 3, ticket="b")  # one has left
    assert behind is not None
    assert behind.kept == 1
    assert "3 requests are waiting (and 1 of this caller's are due again" in str(behind)
    assert enter("a#2", 3, ticket="a") is None
    assert enter("b#2", 3, ticket="b") is None  # nothing is kept for who is in
    assert enter("c", 3) is None


def test_callers_that_come_in_one_batch_have_the_room_of_one_batch() -> None:
    clock = Clock()
    room = QueueRoom(8, DrainRate(clock, lambda: 0.0), clock, lambda: 0.0)

    def batch(*callers: str) -> list[GenerationRequest]:
        return [
            replace(make_request(f"{caller}/{number}", [1]), caller=CallerKey(caller))
            for caller in callers
            for number in range(6)
        ]

    with pytest.raises(QueueFullError) as refused:
        room.enter(batch("a", "b"), 0)
    assert refused.value.present == 6
    room.enter(batch("a"), 0)  # of the refused ones none has a place
