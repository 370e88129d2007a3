"""What is refused because there is too much already: places and tokens, of all and of each
identity; when to come again; and that nothing is counted that is not there any more.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from headrace.v1 import generation_service_pb2 as rpc

from engine.contract.errors import QueueFullError
from engine.contract.outputs import RequestFailure
from engine.fairness.drain_rate import MARGIN, UNKNOWN_DELAY_S
from engine.fairness.shares import GRACE_S, MAX_WANT_S
from service.admission.accounts import account_of
from service.admission.admission_control import (
    PLACE,
    AdmissionBounds,
    AdmissionControl,
    Charge,
)
from service.errors.call_errors import FieldError, LimitReachedError
from tests.engine.crowd import Clock, Crowd, Served, at_random, by_the_batch, evenly
from tests.service.admission.refusals import check_advice, limit_of, no_jitter
from tests.service.door.callers_file import add_request, guarded
from tests.service.fake_engine import FakeEngine, says
from tests.service.helpers import (
    DEADLINE_S,
    Harness,
    details,
    refused,
    serving,
    spec,
    until,
)


def late(seconds: float) -> float:
    """What is advised where so long is to be waited by the rate."""
    return seconds * (1 + MARGIN)


# ---- by itself ---------------------------------------------------------------------------------


def test_tokens_are_bounded_for_all_and_for_each() -> None:
    control = AdmissionControl(
        AdmissionBounds(max_open=9, max_tokens=100, max_tokens_of_identity=60), Clock()
    )
    control.take(account_of("a"), Charge(tokens=50))
    control.take(account_of("b"), Charge(tokens=40))
    own = limit_of(lambda: control.take(account_of("a"), Charge(tokens=11)))
    assert (own.reason, own.option) == (
        "TOO_MANY_TOKENS_OF_IDENTITY",
        "max_reserved_tokens_per_identity",
    )
    assert (own.limit, own.present) == (60, 50)
    everyone = limit_of(lambda: control.take(account_of("b"), Charge(tokens=11)))
    assert (everyone.reason, everyone.limit, everyone.present) == ("TOO_MANY_TOKENS", 100, 90)
    control.take(account_of("c"), Charge(tokens=10))
    control.remove(account_of("a"), Charge(tokens=50))
    control.take(account_of("c"), Charge(tokens=50))
    assert control.reserved_tokens == 100


@pytest.mark.parametrize(
    ("limits", "option"),
    [
        ({"max_tokens": 10}, "max_reserved_tokens"),
        ({"max_tokens_of_identity": 10}, "max_reserved_tokens_per_identity"),
        ({"max_tokens": 5, "max_tokens_of_identity": 10}, "max_reserved_tokens_per_identity"),
    ],
)
def test_what_can_never_fit_is_wrong_not_early(limits: dict[str, int], option: str) -> None:
    control = AdmissionControl(AdmissionBounds(max_open=9, **limits))
    with pytest.raises(FieldError, match=rf"at most 10 .*\({option}\)") as caught:
        control.take(account_of("a"), Charge(tokens=11))
    assert caught.value.path == "stop.max_tokens"
    assert control.reserved_tokens == 0


def test_each_account_has_its_own_rate() -> None:
    clock = Clock()
    limits = AdmissionBounds(
        max_open=4, max_open_of_identity=2, max_tokens=40, max_tokens_of_identity=20
    )
    control = AdmissionControl(limits, clock, no_jitter)
    for name in ("slow", "slow", "quick", "quick"):
        control.take(account_of(name), Charge(tokens=10))
        control.add(account_of(name), PLACE)
    for turn in range(1, 21):  # for ten seconds: quick ends two a second, slow one in five seconds
        clock.now += 0.5
        for name in ("quick", "slow") if turn % 10 == 0 else ("quick",):
            control.remove(account_of(name), Charge(tokens=10))
            control.remove(account_of(name), PLACE)
            control.take(account_of(name), Charge(tokens=10))
            control.add(account_of(name), PLACE)
    assert limit_of(
        lambda: control.check(account_of("quick"), PLACE)
    ).retry_after_s == pytest.approx(late(0.5))
    assert limit_of(
        lambda: control.check(account_of("slow"), PLACE)
    ).retry_after_s == pytest.approx(late(5.0))
    control.add(account_of("third"), PLACE)  # the reserve
    # 21 of all have left after the first.
    other = limit_of(lambda: control.check(account_of("other"), PLACE))
    assert other.reason == "TOO_MANY_OPEN_REQUESTS"
    assert other.retry_after_s == pytest.approx(late(9.5 / 21))
    # 20 tokens more than there may be, at 2 a second; and of all, at 22.1.
    slow = limit_of(lambda: control.take(account_of("slow"), Charge(tokens=20)))
    assert slow.retry_after_s == pytest.approx(late(10.0))
    other = limit_of(lambda: control.take(account_of("other"), Charge(tokens=20)))
    assert other.retry_after_s == pytest.approx(late(15 / 210 * 9.5))  # 5 are the reserve


def test_what_was_taken_back_says_nothing_of_the_rate() -> None:
    clock = Clock()
    control = AdmissionControl(AdmissionBounds(max_open=1), clock, no_jitter)
    for _ in range(100):
        control.add(account_of("a"), PLACE)
        control.remove(account_of("a"), PLACE, served=False)
    control.add(account_of("a"), PLACE)
    assert limit_of(lambda: control.check(account_of("a"), PLACE)).retry_after_s == UNKNOWN_DELAY_S


class House:
    """What admission lets in: requests, or their tokens."""

    def __init__(self, control: AdmissionControl, limit: int, tokens: int) -> None:
        self.limit = limit
        self.present = 0
        self._control = control
        self._tokens = tokens

    def advise(self) -> float:
        return limit_of(self._ask).retry_after_s

    def enter(self) -> None:
        self._ask()
        self._control.add(account_of("a"), PLACE)
        self.present += 1

    def leave(self) -> None:
        self._control.remove(account_of("a"), Charge(tokens=self._tokens))
        self._control.remove(account_of("a"), PLACE)
        self.present -= 1

    def _ask(self) -> None:
        self._control.check(account_of("a"), PLACE)
        self._control.take(account_of("a"), Charge(tokens=self._tokens))


@pytest.mark.parametrize("per_second", [30, 500])
@pytest.mark.parametrize("law", [evenly, at_random, by_the_batch])
@pytest.mark.parametrize(
    "limits",
    [
        AdmissionBounds(max_open=1000),
        AdmissionBounds(max_open=5000, max_open_of_identity=1000),
        AdmissionBounds(max_open=5000, max_tokens=7000),
        AdmissionBounds(max_open=5000, max_tokens=7000, max_tokens_of_identity=7000),
    ],
    ids=["open", "open of identity", "tokens", "tokens of identity"],
)
def test_a_crowd_gets_in_when_it_was_told_to_come(
    limits: AdmissionBounds, law: Callable[[float], Served], per_second: float
) -> None:
    clock = Clock()
    control = AdmissionControl(limits, clock, random.Random(7).random)
    crowd = Crowd(clock, House(control, limit=1000, tokens=7), law(per_second), busy=800)
    crowd.come(3000)
    crowd.check_told(batch_s=64 / per_second if law is by_the_batch else 0.0)


def test_identities_without_requests_take_no_room() -> None:
    clock = Clock()
    control = AdmissionControl(AdmissionBounds(max_open=9, max_tokens=100), clock)
    rng = random.Random(7)
    held: list[tuple[str, int]] = []
    for _ in range(3000):
        clock.now += MAX_WANT_S + GRACE_S  # nothing is owed any more to who was refused
        if held and rng.random() < 0.5:
            name, tokens = held.pop(rng.randrange(len(held)))
            control.remove(account_of(name), Charge(tokens=tokens))
            control.remove(account_of(name), PLACE)
        else:
            name, tokens = f"c{rng.randrange(500)}", rng.randrange(1, 20)
            try:
                control.check(account_of(name), PLACE)
                control.take(account_of(name), Charge(tokens=tokens))
            except LimitReachedError:
                assert len(held) >= 9 or control.reserved_tokens + tokens > 100
                continue
            control.add(account_of(name), PLACE)
            held.append((name, tokens))
        assert control.reserved_tokens == sum(tokens for _, tokens in held) <= 112
        assert control.is_empty == (not held)
        assert control.places.callers <= 500


# ---- in a server -------------------------------------------------------------------------------


async def add(h: Harness, request_id: str, text: str = "hi", **fields: Any) -> Any:
    message = rpc.AddRequestRequest(spec=spec(text, request_id=request_id, **fields))
    return await h.generation.AddRequest(message, timeout=DEADLINE_S)


async def test_reserved_tokens_are_the_prompt_and_the_longest_output_of_each_choice() -> None:
    async with serving(FakeEngine(auto=False)) as h:
        control = h.registry.admission
        await add(h, "a", "four", stop={"max_tokens": 10})
        assert control.reserved_tokens == 14
        await add(h, "b", "four", stop={"max_tokens": 10}, n=3)
        assert control.reserved_tokens == 14 + 34
        await add(h, "c", "x" * 2040)  # the context has room for 8 more
        assert control.reserved_tokens == 14 + 34 + 2048
        await add(h, "d", "four")  # the default: 256
        assert control.reserved_tokens == 14 + 34 + 2048 + 260
        h.engine.run()
        await until(lambda: not h.registry.live)
        assert control.reserved_tokens == 0
        assert control.is_empty


async def test_a_refused_request_that_comes_again_with_its_id_goes_before_a_newcomer() -> None:
    clock = Clock()
    async with serving(
        FakeEngine(auto=False), clock=clock, max_open_requests=2, result_retention_s=0
    ) as h:
        for name in ("a", "b"):
            await add(h, name, stop={"max_tokens": 5})
        assert [one.ticket for one in h.engine.submitted] == ["a", "b"]  # the queue knows it too
        error = await refused(add(h, "again", stop={"max_tokens": 5}))
        clock.now += error.details["RetryInfo"].retry_delay.ToTimedelta().total_seconds()
        await h.generation.Cancel(rpc.CancelRequest(request_ids=["a"]))
        h.engine.step()
        await until(lambda: h.registry.admission.open_requests == 1)
        message = (await refused(add(h, "newcomer", stop={"max_tokens": 5}))).message
        assert "(and 1 of this caller's are due again, which go first)" in message
        await add(h, "again", stop={"max_tokens": 5})
        assert h.engine.submitted[-1].ticket == "again"


async def test_too_many_tokens_are_refused_with_advice_and_admitted_after() -> None:
    clock = Clock()
    async with serving(
        FakeEngine(script=says("xxxxx"), auto=False), clock=clock, max_reserved_tokens=300
    ) as h:
        for name in ("a", "b"):
            await add(h, name, stop={"max_tokens": 98})  # 100 tokens each
        clock.now += 2
        h.engine.run()
        await until(lambda: not h.registry.live)
        for name in ("c", "d", "e"):
            await add(h, name, stop={"max_tokens": 98})
        # It was empty in between, so the rate begins anew: nothing has left yet.
        error = await refused(add(h, "f", stop={"max_tokens": 98}))
        check_advice(error, UNKNOWN_DELAY_S)
        for index in (2, 3):
            clock.now += 2
            h.engine.time_out(h.engine.submitted[index].request_id)
            h.engine.step()
        await until(lambda: h.registry.live == 1)
        await add(h, "f", stop={"max_tokens": 148})
        # 100 left in the 2 seconds after the first, and this one is 152 too many.
        error = await refused(h.generate(spec(stop={"max_tokens": 200})))
        check_advice(error, late(152 / 50))
        assert error.reason == "TOO_MANY_TOKENS"
        metadata = error.details["ErrorInfo"].metadata
        assert dict(metadata) == {
            "limit": "max_reserved_tokens",
            "max_reserved_tokens": "300",
            "present": "250",
        }
        assert "ask for fewer, or try again in 3.3 s" in error.message
        # The same in-band; and it stands behind the one before, who was told to come for 202.
        session = h.session()
        await session.add(spec(request_id="g", stop={"max_tokens": 200}), 1)
        message = await session.read_until(lambda m: m.rejections)
        status = message.rejections[0].status
        assert (status.code, status.details[0]) == (error.status.code, error.status.details[0])
        told = details(status)["RetryInfo"].retry_delay.ToMilliseconds() / 1000
        assert told == pytest.approx((152 + 202) / 50, abs=0.002)  # its id keeps its place
        await session.end()
        # A request that could never be admitted is told so.
        error = await refused(h.generate(spec(stop={"max_tokens": 299})))
        assert (error.code, error.field) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "spec.stop.max_tokens",
        )
        assert "301 tokens" in error.message
        assert "at most 300 can be accepted here (max_reserved_tokens)" in error.message


async def test_one_identity_s_tokens_do_not_bar_another(callers: Path) -> None:
    engine = FakeEngine(auto=False)
    async with guarded(callers, engine, max_reserved_tokens_per_identity=300) as h:
        await add_request(h, "alice", request_id="a")  # 2 + 256
        error = await refused(add_request(h, "alice", request_id="b"))
        assert error.reason == "TOO_MANY_TOKENS_OF_IDENTITY"
        assert error.details["ErrorInfo"].metadata["present"] == "258"
        check_advice(error, error.details["RetryInfo"].retry_delay.ToMilliseconds() / 1000)
        await add_request(h, "bob", request_id="b")
        engine.run()
        await until(lambda: not h.registry.live)
        await add_request(h, "alice", request_id="b")


async def test_every_way_to_end_gives_everything_back() -> None:
    engine = FakeEngine(auto=False)
    async with serving(engine) as h:
        control = h.registry.admission
        # Refused by the engine.
        engine.refuse_next.append(QueueFullError(3, 0.25))
        assert (await refused(add(h, "a"))).reason == "QUEUE_FULL"
        assert (control.reserved_tokens, control.open_requests) == (0, 0)
        # Cancelled, failed, timed out.
        for name in ("a", "b", "c"):
            await add(h, name)
        h.registry.cancel("anonymous", "a")
        await until(lambda: engine.cancelled)
        engine.fail(engine.submitted[-2].request_id, RequestFailure("it broke", "an-id"))
        engine.time_out(engine.submitted[-1].request_id)
        engine.step()
        await until(lambda: not h.registry.live)
        assert (control.reserved_tokens, control.open_requests) == (0, 0)
        # A lost stream.
        session = h.session()
        await session.add(spec(request_id="d"))
        await session.read()
        session.call.cancel()
        await until(lambda: len(engine.cancelled) == 2)
        engine.step()
        await until(lambda: not h.registry.live)
        assert (control.reserved_tokens, control.open_requests) == (0, 0)
        # Ended, unread: its tokens are free, its place is taken until it is read.
        add_two = [add(h, "e"), add(h, "f")]
        await asyncio.gather(*add_two)
        session = h.session()
        await session.send(open=rpc.OpenCommand(initial_credit=1))
        await session.send(1, attach=rpc.AttachCommand(request_id="e"))
        await session.read_until(lambda m: m.attached)
        assert control.open_requests == 2
        engine.run()
        assert (control.reserved_tokens, control.open_requests) == (0, 1)
        await session.send(credit=rpc.CreditCommand(request_id="e", tokens=1000))
        await session.end()
        await until(lambda: not h.registry.live)
        assert (control.reserved_tokens, control.open_requests) == (0, 0)
        # Attached to after its end: it takes a place while it is read.
        session = h.session()
        await session.send(1, attach=rpc.AttachCommand(request_id="f"))
        await session.end()
        assert (control.open_requests, control.is_empty) == (0, True)


async def test_the_queue_s_advice_reaches_the_caller_in_band_too() -> None:
    async with serving(FakeEngine(auto=False)) as h:
        h.engine.refuse_next += [QueueFullError(3, 0.25), QueueFullError(3, 0.25)]
        error = await refused(h.generate(spec()))
        check_advice(error, 0.25)
        assert error.details["ErrorInfo"].metadata["present"] == "3"
        session = h.session()
        await session.add(spec(), 1)
        message = await session.read_until(lambda m: m.rejections)
        assert details(message.rejections[0].status)["RetryInfo"] == error.details["RetryInfo"]
        await session.end()
