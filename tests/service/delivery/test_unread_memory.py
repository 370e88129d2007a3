"""The memory that results take: all of it is charged as it comes, bounded while it grows, and free
again once it was read; what cannot have room is refused before anything is computed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from google.protobuf import duration_pb2
from headrace.v1 import generation_pb2 as pb
from headrace.v1 import generation_service_pb2 as rpc

from engine.fairness.drain_rate import MARGIN, UNKNOWN_DELAY_S
from service.admission.accounts import Account, account_of
from service.admission.admission_control import AdmissionBounds, AdmissionControl
from service.delivery.charges import UNIT, in_units
from service.delivery.events import HELD_EVENT_BYTES, DeliveryOptions
from service.delivery.flow import EVENTS_BYTES, WholeLimits
from service.delivery.kept import LONG, KeptResults
from service.delivery.submission import LivesBy
from service.errors.call_errors import LimitReachedError
from tests.engine.crowd import Clock
from tests.service.delivery.results import LEASE, add, get, keep, named
from tests.service.fake_engine import FakeEngine, default_script, model_info
from tests.service.helpers import (
    Harness,
    check_course,
    details,
    finished_of,
    ids_of,
    kinds,
    refused,
    serving,
    spec,
    step,
    until,
)

MIB = 1 << 20
WIDE = {"logprobs": 16}
"""Each token takes about 0.8 kB."""
EACH = DeliveryOptions(token_details=True, candidates=16).unread_per_token
CODE = grpc.StatusCode


def engine(**info: Any) -> FakeEngine:
    return FakeEngine(auto=False, info=model_info(max_context_tokens=1 << 20, **info))


def limit_of(call: Callable[[], object]) -> LimitReachedError:
    with pytest.raises(LimitReachedError) as caught:
        call()
    return caught.value


# ---- the limit, and each caller's share of it ---------------------------------------------------


def control_of(clock: Clock) -> AdmissionControl:
    limits = AdmissionBounds(max_open=9, max_undelivered_bytes=1000)
    return AdmissionControl(limits, clock, lambda: 0.0)


def test_beyond_the_limit_who_is_within_its_share_finds_the_reserve_and_nobody_else() -> None:
    control = control_of(Clock())
    heavy, light, new = account_of("heavy"), account_of("light"), account_of("new")
    gateway = [account_of("gateway", name, 2.0) for name in ("x", "y")]

    control.charge_unread(heavy, 1000)
    assert control.has_room(heavy)  # alone, it may have all
    control.charge_unread(heavy, 10)
    assert not control.has_room(heavy)
    assert control.has_room(light)
    control.charge_unread(light, 100)
    assert not control.has_room(heavy)
    assert control.has_room(light)
    error = limit_of(lambda: control.check_unread(heavy))
    assert (error.reason, error.limit, error.present) == ("TOO_MANY_UNDELIVERED_BYTES", 1000, 1110)
    assert (error.held, error.share) == (1010, 500)
    control.charge_unread(light, 16)  # the reserve is 125, and there it ends
    assert not control.has_room(light)
    control.check_unread(light)  # what it adds is let in all the same: it is not to blame
    control.charge_unread(heavy, -700)
    assert control.has_room(heavy)
    # Half is due to both that the gateway names together.
    control.charge_unread(gateway[0], 300)
    control.charge_unread(gateway[1], 350)
    assert not control.has_room(gateway[0])
    assert control.has_room(new)
    for account, size in ((heavy, 310), (light, 116), (gateway[0], 300), (gateway[1], 350)):
        control.charge_unread(account, -size)
    assert control.is_empty


def test_when_to_come_again_follows_from_how_fast_results_are_read() -> None:
    clock = Clock()
    control, account = control_of(clock), account_of("a")

    def advice() -> float:
        return limit_of(lambda: control.check_unread(account)).retry_after_s

    control.charge_unread(account, 1500)
    assert advice() == UNKNOWN_DELAY_S  # nobody has read anything
    for _ in range(20):
        clock.now += 0.5
        control.charge_unread(account, 125)
        control.charge_unread(account, -125)
    assert advice() == pytest.approx(2.0 * (1 + MARGIN), abs=0.2)  # 500 at 250 a second


def test_without_a_limit_nobody_is_refused() -> None:
    control = AdmissionControl(AdmissionBounds(max_open=9))
    control.charge_unread(account_of("a"), 1 << 40)
    control.check_unread(account_of("a"))
    assert control.unread_bytes == 1 << 40


# ---- results that grow -------------------------------------------------------------------------


async def test_who_reads_nothing_is_held_while_others_have_all_the_room_and_goes_on() -> None:
    async with serving(engine(), max_undelivered_bytes=MIB, max_hold_s=1000) as h:
        session, admission = h.session(), h.registry.admission
        await session.send(open=rpc.OpenCommand(initial_credit=4))
        for name in ("a", "b"):
            await session.add(spec(request_id=name, output=WIDE, stop={"max_tokens": 3000}))
        await until(lambda: h.engine.num_live == 2)
        await step(h, 1400)
        assert h.engine.num_holds == 2  # long before either reached its own bound
        assert MIB < admission.unread_bytes < MIB + 8 * EACH
        error = await refused(add(h, "late"))
        assert error.reason == "TOO_MANY_UNDELIVERED_BYTES"
        assert "read results as they come" in error.message
        await session.send(credit=rpc.CreditCommand(request_id="a", tokens=4000))
        await session.send(credit=rpc.CreditCommand(request_id="b", tokens=4000))
        while h.engine.num_live:
            await step(h)
        await session.end()
        for name, events in session.events().items():
            check_course(events)
            [asked] = [one for one in h.engine.submitted if f"/{name}#" in one.request_id]
            assert ids_of(events) == list(default_script(asked))[:3000]
        await until(lambda: admission.is_empty)


@pytest.mark.parametrize("final", [False, True])
async def test_what_must_be_whole_ends_alone_if_others_have_all_the_room(final: bool) -> None:
    async with serving(engine(), max_undelivered_bytes=MIB, max_hold_s=1000) as h:
        admission = h.registry.admission
        session = h.session()
        if final:
            wide = {**WIDE, "delivery": pb.DELIVERY_FINAL}
            for name in ("a", "b", "c"):
                await session.add(spec(request_id=name, output=wide, stop={"max_tokens": 600}))
        else:
            for name in ("a", "b", "c"):
                await add(h, name, output=WIDE, stop={"max_tokens": 600})
        await until(lambda: h.engine.num_live == 3)
        reading = asyncio.ensure_future(session.end())
        while h.registry.live:
            await step(h)
            assert admission.unread_bytes < MIB + MIB // 8 + 8 * EACH
            if admission.unread_bytes > MIB:  # one of them has ended: its results are on their way
                await until(lambda: admission.unread_bytes <= MIB)
        await reading
        events = session.events()
        if not final:
            events = {name: list((await get(h, name)).events) for name in ("a", "b", "c")}
        ends = [kinds(each)[-1] for each in events.values()]
        assert sorted(ends) == ["failed", "finished", "finished"]
        [failed] = [each for each in events.values() if kinds(each)[-1] == "failed"]
        check_course(failed)
        tokens = ids_of(failed)
        assert len(tokens) > 330  # what there was can be read
        assert failed[-1].failed.usage.completion_tokens == len(tokens)
        status = failed[-1].failed.status
        assert (status.code, details(status)["ErrorInfo"].reason) == (
            CODE.RESOURCE_EXHAUSTED.value[0],
            "TOO_MANY_UNDELIVERED_BYTES",
        )
        assert status.message.startswith(f"the request was ended after {len(tokens)} tokens: ")
        await until(lambda: admission.is_empty)


async def test_a_generate_that_finds_no_room_fails_and_leaves_nothing() -> None:
    async with serving(engine(), max_undelivered_bytes=MIB, max_hold_s=1000) as h:
        calls = [
            asyncio.ensure_future(h.generate(spec(output=WIDE, stop={"max_tokens": 600})))
            for _ in range(3)
        ]
        await until(lambda: h.engine.num_live == 3)
        while h.registry.live:
            await step(h)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        errors = [error for error in answers if isinstance(error, grpc.aio.AioRpcError)]
        assert [error.code() for error in errors] == [CODE.RESOURCE_EXHAUSTED]
        assert "the request was ended after" in (errors[0].details() or "")
        await until(lambda: h.registry.admission.is_empty)


async def test_a_message_that_is_not_read_stays_charged_while_it_is_sent() -> None:
    async with serving(engine()) as h:
        session, admission = h.session(), h.registry.admission
        await session.add(spec(request_id="a", output=WIDE, stop={"max_tokens": 1000}))
        await until(lambda: h.engine.num_live)
        sent = 0
        while not (admission.unread_bytes and not h.registry.find("anonymous", "a").log.untaken):
            await step(h)  # the client reads nothing: gRPC's window is full at last
            sent += 1
            assert sent < 1000
        h.registry.cancel("anonymous", "a")
        await until(lambda: h.engine.cancelled)
        h.engine.step()
        await session.end()
        await until(lambda: admission.is_empty)


# ---- refused at the door, with the number that would do ----------------------------------------


def test_the_limit_of_what_must_be_whole_is_that_of_its_kind() -> None:
    limits = WholeLimits(
        max_undelivered_bytes=96 * MIB, max_kept_bytes=48 * MIB, max_send_bytes=16 * MIB
    )
    wide = DeliveryOptions(token_details=True, candidates=128)
    kept = limits.limit(wide, LivesBy.ITSELF)
    assert kept is not None
    assert (kept.option, kept.tokens) == (
        "max_kept_bytes",
        (48 * MIB - EVENTS_BYTES) // wide.unread_per_token,
    )
    sent = limits.limit(wide, LivesBy.CALLS)
    assert sent is not None
    assert (sent.option, sent.tokens) == (
        "max_send_bytes",
        (16 * MIB - EVENTS_BYTES) // wide.sent_per_token,
    )
    assert limits.limit(wide, LivesBy.STREAM) is None
    piece = limits.limit(DeliveryOptions(final=True), LivesBy.STREAM)
    assert piece is not None
    assert piece.option == "max_undelivered_bytes"
    unbounded = WholeLimits(max_undelivered_bytes=None, max_kept_bytes=1, max_send_bytes=1)
    assert unbounded.limit(DeliveryOptions(final=True), LivesBy.STREAM) is None


@pytest.mark.parametrize("kind", ["AddRequest", "Generate", "GenerateStream", "add"])
async def test_what_cannot_have_room_is_refused_and_what_is_advised_is_not(kind: str) -> None:
    limits = {
        "AddRequest": {"max_kept_bytes": MIB},
        "Generate": {"max_undelivered_bytes": MIB},
        "GenerateStream": {"max_undelivered_bytes": MIB},
        "add": {"max_undelivered_bytes": MIB},
    }[kind]
    fit = (MIB - EVENTS_BYTES) // EACH // 2  # for each of two choices
    output = {**WIDE, "delivery": pb.DELIVERY_FINAL if kind in ("GenerateStream", "add") else 0}

    async def ask(h: Harness, name: str, stop: dict[str, int]) -> pb.Accepted:
        """Ask, and run it to its end."""
        asked = spec(request_id=name, n=2, output=output, stop=stop)
        if kind == "AddRequest":
            accepted = (await add(h, name, n=2, output=output, stop=stop)).accepted
            h.engine.run()
            read = await get(h, name, until_done=True)
            events = list(read.events)
            while not read.done:
                read = await get(h, name, from_seq=read.next_seq)
                events += read.events
            check_course(events, n=2)
            return accepted
        if kind == "Generate":
            call = asyncio.ensure_future(h.generate(asked))
            await until(lambda: h.engine.num_live or call.done())
            h.engine.run()
            return (await call).accepted
        if kind == "GenerateStream":
            stream = asyncio.ensure_future(h.stream(asked))
            await until(lambda: h.engine.num_live or stream.done())
            h.engine.run()
            return (await stream)[0].events[0].accepted
        session = h.session()
        await session.add(asked)
        message = await session.read_until(lambda m: m.events or m.rejections)
        if message.rejections:
            raise Rejection(message.rejections[0].status)
        h.engine.run()
        await session.end()
        check_course(session.events()[name], n=2)
        return message.events[0].accepted

    async with serving(engine(), default_max_tokens=100_000, **limits) as h:
        try:
            await ask(h, "a", {"max_tokens": fit + 1})
        except grpc.aio.AioRpcError as error:
            code, message = error.code().value[0], error.details() or ""
        except Rejection as error:
            code, message = error.status.code, error.status.message
        assert code == CODE.INVALID_ARGUMENT.value[0]
        assert "stop.max_tokens" in message
        assert f"enough for {fit}: ask for that many" in message
        assert not h.engine.submitted  # nothing was computed
        assert (await ask(h, "b", {"max_tokens": fit})).stop.max_tokens == fit
        # Who asks for no number gets what fits, and is told.
        assert (await ask(h, "c", {})).stop.max_tokens == fit
        # A stream of deltas has no such limit.
        if kind == "GenerateStream":
            output = WIDE
            accepted = await ask(h, "d", {"max_tokens": fit + 1})
            assert accepted.stop.max_tokens == fit + 1


class Rejection(Exception):
    """An `add` was refused."""

    def __init__(self, status: Any) -> None:
        super().__init__(status.message)
        self.status = status


async def test_where_nothing_is_kept_add_request_says_so() -> None:
    async with serving(engine(), max_kept_bytes=0) as h:
        error = await refused(add(h, "a"))
        assert error.code is CODE.INVALID_ARGUMENT
        assert "(max_kept_bytes), enough for 0" in error.message
        assert "GenerateStream" in error.message


# ---- results that were read --------------------------------------------------------------------


async def test_a_leased_session_that_reads_everything_has_nothing_unread() -> None:
    """What is kept for `attach` has a bound of its own, and nobody is refused for it."""
    async with serving(engine(), max_undelivered_bytes=MIB, max_kept_bytes=2 * MIB) as h:
        session, admission = h.session(), h.registry.admission
        await session.send(open=rpc.OpenCommand(lease=duration_pb2.Duration(**LEASE)))
        await session.read_until(lambda m: m.HasField("opened"))
        names = [f"r{index}" for index in range(4)]
        for name in names:
            await session.add(spec(request_id=name, output=WIDE, stop={"max_tokens": 2000}))
            await session.read_until(lambda m: m.events)
        seen = dict.fromkeys(names, 0)

        async def read_step() -> None:
            await step(h)
            while min(seen.values()) < h.engine.steps:
                message = await session.read()
                numbers = {index + 1: name for index, name in enumerate(names)}
                for event in message.events:
                    seen[numbers[event.request_number]] += len(event.delta.tokens)

        for _ in range(1000):
            await read_step()
        assert admission.unread_bytes == 0
        # With what each delta takes by itself, all of it would be twice what may be kept.
        assert 4 * 1000 * (EACH + HELD_EVENT_BYTES) > 2 * (2 * MIB)
        kept = h.registry.stats()
        assert MIB < kept.kept_result_bytes <= 2 * MIB
        assert kept.kept_results == 0
        await session.add(spec(request_id="more", output=WIDE, stop={"max_tokens": 1}))  # welcome
        await session.read_until(lambda m: any(e.HasField("accepted") for e in m.events))
        # The last that was sent is there, the first is not, and the answer says what is.
        other = h.session()
        log = h.registry.find("anonymous", "r0").log
        await other.send(1, attach=rpc.AttachCommand(request_id="r0", from_seq=1))
        [rejection] = (await other.read_until(lambda m: m.rejections)).rejections
        assert details(rejection.status)["ErrorInfo"].reason == "RESULT_OUT_OF_RANGE"
        await other.send(2, attach=rpc.AttachCommand(request_id="r0", from_seq=log.next_seq - 20))
        await other.read_until(lambda m: m.attached)
        other.call.cancel()
        session.call.cancel()


def test_of_what_is_kept_much_that_was_read_goes_first_and_little_goes_last() -> None:
    kept = KeptResults(max_results=10, max_bytes=4 * LONG)
    much, little, other = named("a", "much"), named("a", "little"), named("b", "other")
    ended = [named("a", f"ended{index}") for index in range(2)]
    kept.add_read(little, LONG)
    kept.add_read(other, LONG // 2)
    for each in ended:
        assert keep(kept, (each, LONG // 2)) == []
    kept.add_read(much, LONG + UNIT)
    assert kept.surplus() is None
    kept.add_read(much, 2 * LONG)
    assert kept.surplus() is much  # of the caller that keeps most
    kept.add_read(much, LONG // 2)
    assert kept.surplus() is None
    kept.add_read(other, 2 * LONG + UNIT)
    assert kept.size > 4 * LONG
    assert kept.surplus() is ended[0]
    kept.discard(ended[0])
    kept.add_read(other, 2 * LONG - UNIT)
    kept.add(ended[0], 2 * LONG)
    assert kept.surplus() is ended[1]  # the oldest
    kept.discard(ended[1])
    kept.discard(ended[0])
    assert (kept.count, kept.surplus()) == (0, None)
    kept.add_read(little, LONG)
    kept.add_read(much, LONG)
    for each in (other, little, much):
        kept.add_read(each, 0)
    assert (kept.count, kept.size, kept.groups) == (0, 0, {})


async def test_a_dropped_result_is_said_to_have_been_one() -> None:
    async with serving(FakeEngine(), max_kept_results=1, result_retention_s=1000) as h:
        for name in ("a", "b"):
            await add(h, name, stop={"max_tokens": 3})
            await until(lambda: not h.registry.live)
        error = await refused(get(h, "a"))
        assert error.code is CODE.NOT_FOUND
        assert "has ended, and its result is no longer kept, because" in error.message
        assert "max_kept_results" in error.message
        error = await refused(get(h, "never"))
        assert error.code is CODE.NOT_FOUND
        assert "none with this id was accepted" in error.message
        await add(h, "a", stop={"max_tokens": 3})  # the id is free
        await until(lambda: not h.registry.live)
        assert (await get(h, "a")).done
        assert "max_kept_results" in (await refused(get(h, "b"))).message


# ---- answers that are one message --------------------------------------------------------------


class Call:
    """What an answer asks of its RPC."""

    def __init__(self) -> None:
        self.done: list[Callable[[object], None]] = []

    def add_done_callback(self, callback: Callable[[object], None]) -> None:
        """Call it at the end."""
        self.done.append(callback)

    def end(self) -> None:
        """The RPC is over."""
        for callback in self.done:
            callback(self)


async def test_answers_are_charged_until_their_calls_are_over() -> None:
    async with serving(FakeEngine(), max_undelivered_bytes=MIB) as h:
        admission = h.registry.admission
        calls = [Call() for _ in range(4)]

        def answer(call: Call, account: Account, **options: Any) -> None:
            h.registry.answers.add(account, 700 << 10, call, **options)

        reader, other = account_of("reader"), account_of("other")
        answer(calls[0], reader)
        answer(calls[1], reader)
        assert admission.unread_bytes == 2 * in_units(700 << 10)
        with pytest.raises(LimitReachedError, match="max_undelivered_bytes"):
            answer(calls[2], reader)
        answer(calls[3], reader, may_wait=False)  # it could not be asked for again
        answer(calls[2], other)  # its only one
        for call in calls:
            call.end()
        assert admission.is_empty
        admission.charge_unread(reader, 2 * MIB)
        answer(calls[0], reader)  # so it can read what is too much


async def test_get_result_and_generate_charge_what_they_send() -> None:
    async with serving(FakeEngine()) as h:
        charged: list[int] = []
        charge = h.registry.answers.add

        def noted(account: Account, size: int, context: Any, **options: Any) -> None:
            charged.append(size)
            charge(account, size, context, **options)

        h.registry.answers.add = noted
        await add(h, "a", output=WIDE, stop={"max_tokens": 100})
        read = await get(h, "a", until_done=True, wait={"seconds": 30})
        await h.generate(spec(output=WIDE, stop={"max_tokens": 100}))
        assert finished_of(read.events).reason == pb.FINISH_REASON_LENGTH
        assert len(charged) == 2
        assert all(size > 90 * EACH for size in charged)
        await until(lambda: h.registry.admission.is_empty)
