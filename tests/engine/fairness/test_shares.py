"""Each caller's share of a bound: what is promised holds whatever callers do; and checks that let a
planted bug pass would be none.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.fairness.shares import GRACE_S, MAX_WANT_S, MAX_WANTING, RESERVE_PART, Refusal, Shares
from tests.engine.crowd import Clock


@dataclass(frozen=True)
class Who:
    """A caller."""

    key: str
    group: str
    weight: float = 1.0


def one(name: str, weight: float = 1.0) -> Who:
    return Who(name, name, weight)


def shares_of(limit: int | None, clock: Clock | None = None) -> Shares:
    return Shares(limit, clock or Clock(), lambda: 0.0)


def take(shares: Shares, who: Who, amount: int = 1) -> bool:
    """Ask, and take it if it fits."""
    fits = shares.ask(who, amount) is None
    if fits:
        shares.add(who, amount)
    return fits


def fill(shares: Shares, who: Who, amount: int = 1) -> int:
    """Take as often as it fits; how often."""
    number = 0
    while take(shares, who, amount):
        number += 1
    return number


# ---- one by one --------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 2, 3, 8, 100, 1000])
def test_one_caller_alone_has_all_and_a_newcomer_finds_room_beyond(limit: int) -> None:
    shares = shares_of(limit)
    assert fill(shares, one("heavy")) == limit
    assert take(shares, one("new"))
    refused = shares.ask(one("heavy"), 1)
    assert refused is not None
    assert refused.is_above_share
    assert (refused.limit, refused.present, refused.held) == (limit, limit + 1, limit)
    assert refused.share == limit // 2


def test_who_comes_new_leaves_half_of_the_reserve_to_others_who_do() -> None:
    shares = shares_of(800)
    fill(shares, one("heavy"))
    assert fill(shares, one("b")) == 50
    assert shares.present == 850
    assert [take(shares, one(f"new-{i}")) for i in range(51)] == [True] * 50 + [False]


def test_what_comes_in_parts_is_new_as_a_whole() -> None:
    shares = shares_of(800)
    fill(shares, one("heavy"))
    for number in range(10):  # each is one thing in parts of 5
        who = one(f"b{number}")
        for part in range(2):
            assert shares.ask(who, 5, has=5 * part) is None
            shares.add(who, 5)
    assert shares.present == 900
    assert shares.ask(one("c"), 5) is not None


def test_nothing_is_no_amount() -> None:
    shares = shares_of(8)
    for amount in (0, 0, 3, 0):
        shares.add(one("a"), amount)
    for amount in (0, 3, 0, 0):
        shares.remove(one("a"), amount, served=True)
    assert (shares.present, shares.callers) == (0, 0)


def test_no_limit_refuses_nobody() -> None:
    shares = shares_of(None)
    shares.add(one("a"), 1 << 60)
    assert shares.ask(one("a"), 1 << 60) is None


def test_what_leaves_is_for_those_who_are_below_their_shares() -> None:
    clock = Clock()
    shares = shares_of(80, clock)
    fill(shares, one("heavy"))
    fill(shares, one("b"))  # and is refused in the end
    held = shares.held_by(one("b"))
    for _ in range(200):
        clock.now += 0.01
        shares.remove(one("heavy"), 1, served=True)
        for _ in range(10):  # who asks most
            take(shares, one("heavy"))
        take(shares, one("b"))
        if shares.held_by(one("heavy")) <= 40:
            break
    assert held == 5
    assert shares.held_by(one("b")) >= 40


def test_what_is_owed_is_forgotten_when_nobody_comes_for_it() -> None:
    clock = Clock()
    shares = shares_of(80, clock)
    fill(shares, one("heavy"))
    fill(shares, one("b"))
    for _ in range(30):
        assert shares.ask(one("b"), 1) is not None
    shares.remove(one("heavy"), 30, served=True)
    assert not take(shares, one("heavy"))
    clock.now += MAX_WANT_S + GRACE_S
    assert take(shares, one("heavy"), 20)


def test_who_got_in_is_owed_nothing_any_more() -> None:
    shares = shares_of(80)
    fill(shares, one("heavy"))
    fill(shares, one("b"))  # and is refused in the end
    shares.remove(one("heavy"), 30, served=True)
    assert not take(shares, one("heavy"), 25)  # all that there is, and one of it is b's
    assert take(shares, one("b"))
    assert take(shares, one("heavy"), 24)


def test_who_is_refused_again_and_again_is_owed_no_more_than_the_share() -> None:
    shares = shares_of(80)
    fill(shares, one("heavy"))
    shares.add(one("c"), 5)
    shares.add(one("b"), 5)
    for _ in range(100):
        assert shares.ask(one("b"), 1) is not None
    shares.remove(one("heavy"), 50, served=True)
    # Of the 40 that there are, 21 are b's, whose share is 26.
    assert not take(shares, one("heavy"), 20)
    assert take(shares, one("heavy"), 19)


def test_who_is_refused_again_is_owed_it_until_the_later_time() -> None:
    clock = Clock()
    shares = shares_of(80, clock)
    fill(shares, one("heavy"))
    fill(shares, one("b"))
    refused = shares.ask(one("b"), 10)
    assert refused is not None
    first = clock.now + refused.retry_after_s + GRACE_S
    clock.now = first - 0.1
    assert shares.ask(one("b"), 10) is not None
    shares.remove(one("heavy"), 20, served=True)  # there are 15, and what b wants is owed
    clock.now = first + 0.1
    assert not take(shares, one("heavy"), 10)
    assert take(shares, one("b"), 10)


def test_a_group_shares_one_weight() -> None:
    shares = shares_of(1200)
    gateway = [Who(f"gateway/{i}", "gateway", 2.0) for i in range(100)]
    # To name one more finds a quarter of the reserve, and no more however many come.
    assert sum(fill(shares, who) for who in gateway) == 1200 + 150 // 4
    assert not any(take(shares, Who(f"gateway/x{i}", "gateway", 2.0)) for i in range(100))
    assert take(shares, one("other"))
    refused = shares.ask(gateway[0], 1)
    assert refused is not None
    assert refused.is_above_share
    # Two thirds are theirs, and another caller's is a third.
    names = shares.callers - 1
    assert refused.share == 1200 * 2 // 3 // names
    assert shares.part_of(gateway[0]) == pytest.approx(1 / names)
    assert take(shares, one("new"))


def test_a_caller_is_not_told_to_stand_behind_a_thousand_calls_of_another() -> None:
    clock = Clock()
    shares = shares_of(100, clock)
    heavy = one("heavy")
    fill(shares, heavy)
    for _ in range(40):  # ten a second leave, and come again
        clock.now += 0.1
        shares.remove(heavy, 1, served=True)
        shares.add(heavy, 1)
    for _ in range(500):
        assert shares.ask(heavy, 1) is not None
    late = shares.ask(heavy, 1)
    assert late is not None
    assert late.retry_after_s > 40
    for index in range(12):
        shares.add(one(f"b{index}"), 1)  # nothing of the reserve is left
    told = [shares.ask(one(f"new-{index}"), 1) for index in range(3)]
    for refusal in told:
        assert refusal is not None
        assert refusal.retry_after_s < 5  # their turns come; not 50 s later
    again = shares.ask(heavy, 1)
    assert again is not None
    assert again.retry_after_s > 30


def test_nothing_is_kept_of_who_holds_and_wants_nothing() -> None:
    clock = Clock()
    shares = shares_of(8, clock)
    fill(shares, one("heavy"))
    for index in range(3 * MAX_WANTING):
        shares.ask(one(f"c{index}"), 1)
        shares.ask(one(f"c{index}"), 9)
    assert shares.callers <= MAX_WANTING + 1
    assert len(shares._ends) <= MAX_WANTING
    clock.now += MAX_WANT_S + GRACE_S
    shares.ask(one("heavy"), 1)
    assert shares.callers == 1
    shares.remove(one("heavy"), 8, served=True)
    assert (shares.callers, shares._weights, shares._owed, shares._owed_due) == (0, 0, 0, 0)
    assert not shares._groups


# ---- whatever callers do -----------------------------------------------------------------------

CALLERS = [
    one("a"),
    one("b"),
    one("c", 2.0),
    one("d", 0.5),
    Who("g/1", "g", 2.0),
    Who("g/2", "g", 2.0),
    Who("g/3", "g", 2.0),
]
Step = tuple[str, int, int]  # what, who, how much
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["take", "take", "take", "fill", "leave", "empty", "wait"]),
        st.integers(0, len(CALLERS) - 1),
        st.integers(1, 12),
    ),
    max_size=120,
)


class _Model:
    """What must hold, from a count of its own. `owed`: to those who were refused within their
    shares: how much they asked for last, until when they are expected, and whether their group was
    within its share. `claims`: the most that they can be owed, and until when.
    """

    def __init__(self, shares: Shares, clock: Clock, limit: int) -> None:
        self.shares, self.clock, self.limit = shares, clock, limit
        self.reserve = max(1, limit // RESERVE_PART)
        self.held: dict[str, list[int]] = {}
        self.owed: dict[str, tuple[int, float, bool]] = {}
        self.claims: dict[str, tuple[float, float]] = {}

    def holds(self, key: str) -> int:
        return sum(self.held.get(key, ()))

    @property
    def present(self) -> int:
        return sum(map(sum, self.held.values()))

    def claimed(self, who: Who) -> tuple[float, float]:
        """The most that a caller can be owed now, and until when."""
        most, until = self.claims.get(who.key, (0.0, 0.0))
        return (most, until) if until > self.clock.now else (0.0, 0.0)

    def share(self, who: Who) -> tuple[float, float]:
        """What the caller and its group are due."""
        members = [c for c in CALLERS if c.key in self.shares._callers or c == who]
        weights = sum({c.group: c.weight for c in members}.values())
        share = self.limit * who.weight / weights
        return share / sum(c.group == who.group for c in members), share

    def due(self, who: Who, amount: int) -> tuple[bool, bool]:
        """Whether the caller and its group stay within their shares."""
        members = [c for c in CALLERS if c.key in self.shares._callers or c == who]
        assert {key for key in self.held if self.holds(key)} <= {c.key for c in members}
        of_group = sum(self.holds(c.key) for c in members if c.group == who.group)
        own, share = self.share(who)
        held = self.holds(who.key)
        return (
            held == 0 or held + amount <= own + 1e-6,
            of_group == 0 or of_group + amount <= share + 1e-6,
        )

    def take(self, who: Who, amount: int) -> bool:
        now, before, held = self.clock.now, self.present, self.holds(who.key)
        after = before + amount
        refused = self.shares.ask(who, amount)
        is_within, is_of_due_group = self.due(who, amount)
        is_alone = set(self.shares._callers) <= {who.key}
        if refused is None:
            self.shares.add(who, amount)
            self.held.setdefault(who.key, []).append(amount)
            self.owed.pop(who.key, None)
            most, until = self.claimed(who)
            self.claims[who.key] = max(most - amount, 0), until
            self._check_admitted(after, is_new=held == 0, within=(is_within, is_of_due_group))
            return True
        assert refused.present == before
        assert refused.retry_after_s > 0
        assert not (is_alone and after <= self.limit), "one alone has all"
        if is_within and is_of_due_group and not is_alone:
            reserve = self.reserve if held == 0 else self.reserve // 2
            assert after > self.limit + reserve, "who is within the share finds room"
        others = sum(self.claimed(other)[0] for other in CALLERS if other != who)
        assert after + others > self.limit, "nothing is kept for those to whom it is not owed"
        if is_within:
            until = now + min(refused.retry_after_s, MAX_WANT_S)
            self.owed[who.key] = (amount, until, is_of_due_group)
            claimed, expires = self.claimed(who)
            most = min(claimed + amount, max(amount, self.share(who)[0] - held))
            self.claims[who.key] = most, max(until + GRACE_S, expires)
        return False

    def _check_admitted(self, after: int, *, is_new: bool, within: tuple[bool, bool]) -> None:
        """`after`: what there is then."""
        assert after <= self.limit + self.reserve
        expected = [
            (owed, due) for owed, until, due in self.owed.values() if until > self.clock.now
        ]
        match within:
            case (True, True):
                pass
            case (True, False) if is_new:
                assert after <= self.limit + self.reserve // 4
                for owed, due in expected:
                    assert not due or after + owed <= self.limit + self.reserve // 4
            case _:  # who is expected finds what they asked for
                assert after <= self.limit
                for owed, _ in expected:
                    assert after + owed <= self.limit

    def leave(self, who: Who) -> None:
        if held := self.held.get(who.key):
            self.shares.remove(who, held.pop(0), served=True)


def check_course(make: Callable[[int, Clock], Shares], limit: int, steps: list[Step]) -> None:
    clock = Clock()
    shares = make(limit, clock)
    model = _Model(shares, clock, limit)
    for what, number, amount in steps:
        who = CALLERS[number]
        amount = min(amount, limit)
        match what:
            case "take":
                model.take(who, amount)
            case "fill":
                for _ in range(2 * limit):
                    if not model.take(who, amount):
                        break
            case "leave":
                model.leave(who)
            case "empty":
                for caller in CALLERS:
                    model.leave(caller)
            case "wait":
                clock.now += amount / 4
        assert shares.present == model.present
    for caller in CALLERS:
        while model.held.get(caller.key):
            model.leave(caller)
    clock.now += MAX_WANT_S + GRACE_S
    shares.ask(CALLERS[0], 1)
    assert (shares.callers, shares.present, shares._weights, shares._owed) == (0, 0, 0, 0)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([1, 3, 8, 24, 40, 100]), STEPS)
def test_what_is_promised_holds_whatever_callers_do(limit: int, steps: list[Step]) -> None:
    check_course(lambda most, clock: Shares(most, clock, lambda: 0.0), limit, steps)


def check_saturation(make: Callable[[int, Clock], Shares], seed: int) -> None:
    """All want more than there is, all the time; one asks far more often, and was there first.
    After a while each holds its share, give or take a tenth of the bound's reserve.
    """
    source = random.Random(seed)
    clock = Clock()
    limit = 400
    shares = make(limit, clock)
    crowd = [one("heavy"), one("b"), one("c", 2.0), one("d", 4.0)]
    held = {who.key: fill(shares, who) for who in crowd}
    for _ in range(6000):
        clock.now += 0.01
        left = source.choices(crowd, [held[who.key] for who in crowd])[0]
        shares.remove(left, 1, served=True)
        held[left.key] -= 1
        for who in (crowd[0], crowd[0], crowd[0], *source.sample(crowd, 4), crowd[0]):
            held[who.key] += take(shares, who)
    for who in crowd:
        share = limit * who.weight / 8
        assert held[who.key] >= 0.85 * share, held
    assert held["heavy"] <= 1.3 * limit / 8, held


@pytest.mark.parametrize("seed", range(3))
def test_when_all_want_more_each_gets_its_share(seed: int) -> None:
    check_saturation(lambda most, clock: Shares(most, clock, lambda: 0.0), seed)


class NoShares(Shares):
    """Planted: everybody is within their share."""

    def _due(self, who, caller, amount, limit, has):  # type: ignore[no-untyped-def]
        due = super()._due(who, caller, amount, limit, has)
        return replace(due, is_within=True, is_of_due_group=True)


class NothingOwed(Shares):
    """Planted: what leaves is whose who asks first."""

    def _set_owed(self, caller, owed, *, is_due):  # type: ignore[no-untyped-def]
        pass


class StillOwed(Shares):
    """Planted: who got in is owed the same as before."""

    def add(self, who, amount):  # type: ignore[no-untyped-def]
        caller = self._callers.get(who.key)
        owed = 0 if caller is None else caller.owed
        super().add(who, amount)
        if caller is not None:
            self._set_owed(caller, owed, is_due=caller.is_due)


class OwedEverMore(Shares):
    """Planted: who is refused again and again is owed more than the share."""

    def _owe(self, caller, amount, most, due, until):  # type: ignore[no-untyped-def]
        super()._owe(caller, amount, 1 << 60, due, until)


class ReserveForAll(Shares):
    """Planted: who is above the share may have the reserve too."""

    def _room_beyond(self, caller, due):  # type: ignore[no-untyped-def]
        return self.reserve


class NoWeights(Shares):
    """Planted: all weigh the same."""

    def _weigh(self, group, who):  # type: ignore[no-untyped-def]
        super()._weigh(group, one(who.key))

    def _due(self, who, caller, amount, limit, has):  # type: ignore[no-untyped-def]
        return super()._due(Who(who.key, who.group), caller, amount, limit, has)


@pytest.mark.parametrize("planted", [NoShares, NoWeights])
def test_a_share_or_a_weight_that_is_ignored_is_found(planted: type[Shares]) -> None:
    with pytest.raises(AssertionError):
        check_saturation(lambda most, clock: planted(most, clock, lambda: 0.0), 0)


@pytest.mark.parametrize(
    ("planted", "steps"),
    [
        (NoShares, [("fill", 0, 1), ("take", 1, 1), ("take", 0, 1)]),
        (ReserveForAll, [("fill", 0, 1), ("take", 1, 1)]),
        (
            NothingOwed,
            [("fill", 0, 1), ("take", 1, 12), *[("leave", 0, 1)] * 4, ("take", 0, 1)],
        ),
        (
            StillOwed,
            [
                ("fill", 0, 1),
                ("fill", 1, 1),
                *[("leave", 0, 1)] * 10,
                ("take", 1, 1),
                ("take", 0, 7),
            ],
        ),
        (
            OwedEverMore,
            [
                ("fill", 0, 1),
                ("take", 2, 1),
                *[("take", 1, 1)] * 60,
                *[("leave", 0, 1)] * 25,
                ("take", 0, 10),
            ],
        ),
    ],
)
def test_a_reserve_or_a_debt_that_anybody_may_eat_is_found(
    planted: type[Shares], steps: list[Step]
) -> None:
    check_course(lambda most, clock: Shares(most, clock, lambda: 0.0), 40, steps)
    with pytest.raises(AssertionError):
        check_course(lambda most, clock: planted(most, clock, lambda: 0.0), 40, steps)


def test_a_refusal_says_what_is_the_case() -> None:
    shares = shares_of(10)
    shares.add(one("a"), 10)
    assert shares.ask(one("a"), 1) == Refusal(
        limit=10, present=10, held=10, share=10, is_above_share=False, retry_after_s=0.25
    )
