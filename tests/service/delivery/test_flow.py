"""Flow control: requests that are not read are held or ended, and credits."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest
from headrace.v1 import generation_pb2 as pb
from headrace.v1 import generation_service_pb2 as rpc
from headrace.v1 import model_service_pb2

from service.delivery.log import EventLog
from service.delivery.served_request import ServedRequest
from service.server import server
from tests.service.connections import SMALL_WINDOW, connection
from tests.service.delivery.results import LEASE
from tests.service.fake_engine import FakeEngine, default_script, model_info, says
from tests.service.helpers import (
    DEADLINE_S,
    Harness,
    Session,
    check_course,
    details,
    finished_of,
    ids_of,
    kinds,
    refused,
    serving,
    spec,
    step,
    text_of,
    until,
)

pytestmark = pytest.mark.asyncio

LONG = 100_000
"""No test waits for it: a max_hold, in seconds."""


def request_of(h: Harness, name: str) -> ServedRequest:
    [request] = [one for (_, request_id), one in h.registry.requests.items() if request_id == name]
    assert isinstance(request, ServedRequest)
    return request


def log_of(h: Harness, name: str) -> EventLog:
    return request_of(h, name).log


def oracle(h: Harness, name: str, count: int, choice: int = 0) -> list[int]:
    """What the engine generates for a request."""
    [request] = [
        one for one in h.engine.submitted if one.request_id.split("/", 1)[1].startswith(f"{name}#")
    ]
    return list(default_script(request, choice))[:count]


async def blocked(h: Harness, name: str, session: Session, **output: Any) -> Session:
    """A request of 1,500 tokens whose stream is out of credit, after its first message."""
    await session.send(open=rpc.OpenCommand(initial_credit=4))
    await session.add(spec(request_id=name, stop={"max_tokens": 1500}, **output))
    await session.read_until(lambda m: m.events)
    return session


# ---- the bound ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "per_step"), [(1, 1), (3, 1), (1, 7), (3, 7)])
async def test_a_request_that_is_not_read_is_held_and_goes_on_when_it_is(
    n: int, per_step: int
) -> None:
    """Also in the middle of what a step gave."""
    engine = FakeEngine(auto=False, tokens_per_step=per_step)
    async with serving(engine, max_unread_tokens=60, max_hold_s=LONG / 10) as h:
        session = await blocked(h, "a", h.session(), n=n)
        await step(h, 200)
        log = log_of(h, "a")
        assert h.engine.held
        assert request_of(h, "a").is_held
        assert log.output_tokens <= 60 + 4 + 2 * n * per_step
        generated = log.output_tokens
        await step(h, 50)
        assert log.output_tokens == generated
        # Half of the bound is what it waits for.
        granted = generated - 4 - 31
        await session.send(credit=rpc.CreditCommand(request_id="a", tokens=granted))
        await until(lambda: log.untaken == 31)
        assert h.engine.held
        await session.send(credit=rpc.CreditCommand(request_id="a", tokens=n))
        await until(lambda: not h.engine.held)
        await session.send(credit=rpc.CreditCommand(request_id="a", tokens=2000 * n))
        while h.engine.num_live:
            await step(h)
        await session.end()
        events = session.events()["a"]
        check_course(events, n=n)
        for choice in range(n):
            assert ids_of(events, choice) == oracle(h, "a", 1500, choice)
            assert text_of(events, choice) == bytes(ids_of(events, choice)).decode()
        assert h.engine.num_holds >= 1
        assert not h.registry.requests


async def test_a_request_that_is_not_read_in_time_ends_with_the_reason() -> None:
    async with serving(FakeEngine(auto=False), max_unread_tokens=20, max_hold_s=0.2) as h:
        session = await blocked(h, "a", h.session())
        await session.add(spec(request_id="b", stop={"max_tokens": 4}))
        await until(lambda: h.engine.num_live == 2)
        await step(h, 100)
        assert h.engine.num_holds == 1
        await session.read_until(lambda m: any(e.HasField("failed") for e in m.events))
        events = session.events()["a"]
        check_course(events)
        assert kinds(events)[-1] == "failed"
        failed = events[-1].failed
        tokens = ids_of(events)
        assert tokens == oracle(h, "a", len(tokens))
        assert 20 <= len(tokens) <= 30  # what there was comes with the end
        assert failed.usage.completion_tokens == len(tokens)
        assert failed.timings.first_token_duration.ToNanoseconds() > 0
        assert failed.timings.last_token_duration.ToNanoseconds() > 0
        assert failed.timings.finished_duration.ToNanoseconds() >= 0.2e9
        info = details(failed.status)["ErrorInfo"]
        assert (failed.status.code, info.reason) == (8, "RESULTS_NOT_READ")
        assert info.metadata["max_hold_s"] == "0.2"
        # A message that was under way when it was held may have gone out since.
        assert 10 <= int(info.metadata["unread_tokens"]) <= 30
        await until(lambda: len(h.engine.cancelled) == 1)
        await step(h)
        assert h.engine.num_live == 0  # the engine is told; the neighbour finished
        await session.end()
        assert finished_of(session.events()["b"]).reason == pb.FINISH_REASON_LENGTH


async def test_where_the_policy_is_to_end_it_ends_at_the_bound() -> None:
    async with serving(FakeEngine(auto=False), max_unread_tokens=20, slow_reader="end") as h:
        session = await blocked(h, "a", h.session())
        await step(h, 100)
        assert h.engine.num_holds == 0
        await until(lambda: h.engine.cancelled)
        await session.end()
        events = session.events()["a"]
        check_course(events)
        info = details(events[-1].failed.status)["ErrorInfo"]
        assert info.reason == "RESULTS_NOT_READ"
        assert "max_hold_s" not in info.metadata
        assert ids_of(events) == oracle(h, "a", len(ids_of(events)))
        assert len(ids_of(events)) >= 20
        card = await h.models.GetModel(model_service_pb2.GetModelRequest())
        assert not card.model.limits.HasField("max_hold")


async def test_generatestream_ends_with_the_status_too() -> None:
    """Its writer is blocked by gRPC: the tokens are described at length."""
    async with (
        serving(FakeEngine(auto=False), max_unread_bytes=64 << 10, max_hold_s=0.2) as h,
        connection(h.server.addresses[0], SMALL_WINDOW) as stub,
    ):
        call = stub.GenerateStream(
            rpc.GenerateStreamRequest(
                spec=spec(request_id="a", output={"logprobs": 100}, stop={"max_tokens": 2000})
            )
        )
        events = list((await call.read()).events)
        log = log_of(h, "a")
        while not log.ended:
            await step(h)
            await asyncio.sleep(0.001)
        assert log.failure is not None

        async def rest() -> None:
            while (message := await call.read()) is not grpc.aio.EOF:
                events.extend(message.events)

        error = await refused(rest())
        assert (error.code, error.reason) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "RESULTS_NOT_READ",
        )
        check_course(events)
        assert ids_of(events) == oracle(h, "a", len(ids_of(events)))
        assert kinds(events)[-1] == "failed"


async def test_described_tokens_count_by_their_bytes() -> None:
    async with serving(FakeEngine(auto=False), max_unread_bytes=4 << 10) as h:
        session = await blocked(h, "a", h.session(), output={"logprobs": 3})
        assert request_of(h, "a").bound == 4096 // (48 * 4)
        session.call.cancel()


async def test_candidates_that_are_asked_for_by_id_count_as_the_others() -> None:
    async with serving(FakeEngine(auto=False), max_unread_bytes=64 << 10) as h:
        session = h.session()
        for name, output in (
            ("named", {"logprobs": 3, "logprob_token_ids": range(20, 60)}),
            ("named alone", {"logprob_token_ids": range(20, 63)}),
            ("likely", {"logprobs": 43}),
        ):
            await session.add(spec(request_id=name.replace(" ", "-"), output=output))
        await until(lambda: h.engine.num_live == 3)
        bounds = {request_of(h, name).bound for name in ("named", "named-alone", "likely")}
        assert len(bounds) == 1
        session.call.cancel()


async def test_what_the_client_asked_to_hold_back_is_not_unread() -> None:
    async with serving(FakeEngine(auto=False), max_unread_tokens=10) as h:
        session = h.session()
        await session.add(
            spec(
                request_id="a", n=2, stop={"max_tokens": 300}, output={"min_tokens_per_delta": 100}
            )
        )
        await session.add(
            spec(
                request_id="final",
                stop={"max_tokens": 300},
                output={"delivery": pb.DELIVERY_FINAL},
            )
        )
        await session.read_until(lambda _: len(session.events()) == 2)
        answer = asyncio.ensure_future(h.generate(spec(request_id="g", stop={"max_tokens": 300})))
        await until(lambda: len(h.engine.submitted) == 3)
        while h.engine.num_live:
            await step(h)
            await asyncio.sleep(0.001)  # the reader is there
        assert (await answer).choices[0].finished.reason == pb.FINISH_REASON_LENGTH
        await session.end()
        for events in session.events().values():
            check_course(events, n=1 + max(event.choice_index for event in events))
            assert "failed" not in kinds(events)


# ---- held requests end, and move ----------------------------------------------------------------


async def test_a_held_request_can_be_cancelled_and_reaches_its_time_limit() -> None:
    async with serving(FakeEngine(auto=False), max_unread_tokens=20) as h:
        session = await blocked(h, "a", h.session())
        await session.add(spec(request_id="b", stop={"max_tokens": 1500}))
        await session.read_until(lambda _: "b" in session.events())
        await step(h, 60)
        assert len(h.engine.held) == 2
        await session.send(cancel=rpc.CancelCommand(request_id="a"))
        await until(lambda: h.engine.cancelled)
        [other] = [name for name in h.engine.held if "/b#" in name]
        h.engine.time_out(other)  # type: ignore[arg-type]
        await step(h)
        assert h.engine.num_live == 0
        for name in ("a", "b"):
            await session.send(credit=rpc.CreditCommand(request_id=name, tokens=5000))
        await session.end()
        events = session.events()
        assert finished_of(events["a"]).reason == pb.FINISH_REASON_CANCELLED
        assert finished_of(events["b"]).reason == pb.FINISH_REASON_TIME_LIMIT


async def test_the_engine_dies_while_requests_are_held() -> None:
    async with serving(FakeEngine(auto=False), max_unread_tokens=20, max_hold_s=0.3) as h:
        session = await blocked(h, "a", h.session())
        await step(h, 60)
        h.engine.die(RuntimeError("dead"))
        await session.read_until(lambda m: any(e.HasField("failed") for e in m.events))
        assert session.events()["a"][-1].failed.status.code == 14  # its own end, without credit


async def test_a_drain_ends_what_stays_held(monkeypatch: pytest.MonkeyPatch) -> None:
    # The call of a client that reads nothing goes on for as long as it may, and its connection.
    monkeypatch.setattr(server, "_CALLS_GRACE_S", 0.1)
    monkeypatch.setattr(server, "_CONNECTIONS_GRACE_S", 0.1)
    async with serving(FakeEngine(), max_unread_tokens=20) as h:
        await blocked(h, "a", h.session())
        await until(lambda: h.engine.held)
        await asyncio.wait_for(h.server.drain(0.1), 30)
        assert h.engine.num_live == 0


async def test_a_held_request_moves_to_another_session_and_goes_on() -> None:
    async with serving(FakeEngine(auto=False), max_unread_tokens=20, max_hold_s=0.3) as h:
        old = h.session()
        await old.send(open=rpc.OpenCommand(lease=LEASE, initial_credit=4))
        await old.add(spec(request_id="a", stop={"max_tokens": 100}))
        await old.read_until(lambda m: m.events)
        await step(h, 60)
        assert h.engine.held
        request, log = request_of(h, "a"), log_of(h, "a")
        old.call.cancel()
        await until(lambda: request.stream is None)
        await asyncio.sleep(0.5)  # longer than the hold: the lease is what counts now
        assert not log.ended
        assert h.engine.held
        session = h.session()
        await session.send(attach=rpc.AttachCommand(request_id="a"))
        await until(lambda: not h.engine.held)
        while h.engine.num_live:
            await step(h)
            await asyncio.sleep(0.001)
        await session.end()
        check_course(session.events()["a"])
        assert ids_of(session.events()["a"]) == oracle(h, "a", 100)


async def test_on_a_lease_getresult_reads_in_the_streams_place() -> None:
    async with serving(FakeEngine(auto=False), max_unread_tokens=20) as h:
        old = h.session()
        await old.send(open=rpc.OpenCommand(lease=LEASE))
        await old.add(spec(request_id="a", stop={"max_tokens": 100}))
        await old.read_until(lambda m: m.events)
        request, log = request_of(h, "a"), log_of(h, "a")
        old.call.cancel()
        await until(lambda: request.stream is None)
        await step(h, 60)
        assert h.engine.held
        assert log.output_tokens <= 24
        events: list[pb.ResultEvent] = []
        done = False
        while not done:
            answer = await h.generation.GetResult(
                rpc.GetResultRequest(request_id="a", from_seq=len(events) + 1)
            )
            events += answer.events
            done = answer.done
            await asyncio.sleep(0)
            await step(h, 30)
        check_course(events)
        assert ids_of(events) == oracle(h, "a", 100)
        assert h.engine.num_holds >= 2


async def test_addrequest_is_not_held() -> None:
    """Its results are kept whoever reads, so its own length bounds them; on a stream too."""
    async with serving(FakeEngine(auto=False), max_unread_tokens=20, max_hold_s=0.2) as h:
        await h.generation.AddRequest(
            rpc.AddRequestRequest(spec=spec(request_id="a", stop={"max_tokens": 300}))
        )
        session = h.session()
        await session.send(open=rpc.OpenCommand(initial_credit=4))
        await session.send(attach=rpc.AttachCommand(request_id="a"))
        await session.read_until(lambda m: m.events)
        h.engine.run()
        assert h.engine.num_holds == 0
        answer = await h.generation.GetResult(rpc.GetResultRequest(request_id="a"))
        assert answer.done
        assert ids_of(answer.events) == oracle(h, "a", 300)
        # Its stream got no credit in time, and gets the rest without.
        await session.end()
        assert ids_of(session.events()["a"]) == oracle(h, "a", 300)
        assert finished_of(session.events()["a"]).reason == pb.FINISH_REASON_LENGTH


async def test_getresult_until_done_is_the_reader_of_what_has_no_stream() -> None:
    """Also of what was held before its stream was lost."""
    async with serving(FakeEngine(), max_unread_tokens=20) as h:
        old = h.session()
        await old.send(open=rpc.OpenCommand(lease=LEASE, initial_credit=4))
        await old.add(spec(request_id="a", stop={"max_tokens": 200}))
        await until(lambda: h.engine.held)
        [request] = h.registry.requests.values()
        reading = asyncio.ensure_future(
            h.generation.GetResult(
                rpc.GetResultRequest(request_id="a", until_done=True, wait={"seconds": 60}),
                timeout=DEADLINE_S,
            )
        )
        await until(lambda: request.readers)
        old.call.cancel()
        answer = await reading
        assert answer.done
        check_course(list(answer.events))
        assert ids_of(answer.events) == oracle(h, "a", 200)
        assert h.engine.num_holds >= 2


async def test_what_is_given_up_has_the_text_that_was_held_back() -> None:
    """Here the beginning of a stop string."""
    engine = FakeEngine(script=says("abcXYZ" * 9, eos=False))
    async with serving(engine, max_unread_tokens=5, slow_reader="end") as h:
        session = h.session()
        await session.send(open=rpc.OpenCommand(initial_credit=1))
        await session.add(spec(request_id="a", stop={"max_tokens": 500, "stop_strings": ["cXYZb"]}))
        await session.read_until(lambda m: any(e.HasField("failed") for e in m.events))
        events = session.events()["a"]
        assert text_of(events).encode() == bytes(ids_of(events))
        await session.end()


# ---- credits -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("credit", "per_step"), [(5, 1), (1, 6)])
async def test_no_more_tokens_come_than_were_allowed(credit: int, per_step: int) -> None:
    async with serving(FakeEngine(tokens_per_step=per_step)) as h:
        session = h.session()
        await session.send(open=rpc.OpenCommand(initial_credit=credit))
        await session.add(spec(request_id="a", n=2, stop={"max_tokens": 40}))
        allowed, grants = credit, itertools.cycle((1, 7, 3))
        events: list[pb.ResultEvent] = []
        while sum(event.HasField("finished") for event in events) < 2:
            had = sum(len(event.delta.token_ids) for event in events)
            assert had <= allowed
            if had == allowed:
                grant = next(grants)
                allowed += grant
                await session.send(credit=rpc.CreditCommand(request_id="a", tokens=grant))
            await session.read()
            events = session.events().get("a", [])
        await session.end()
        check_course(events, n=2)
        for choice in range(2):
            ids = ids_of(events, choice)
            assert ids == oracle(h, "a", 40, choice)
            assert text_of(events, choice) == bytes(ids).decode()
            # Text comes with its step's last token, also where a delta was cut.
            deltas = [event.delta for event in events if event.choice_index == choice]
            behind = itertools.accumulate(len(one.token_ids) - len(one.text) for one in deltas)
            assert all(0 <= count < per_step for count in behind)


async def test_ends_need_no_credit() -> None:
    async with serving(FakeEngine()) as h:
        session = h.session()
        await session.send(open=rpc.OpenCommand(initial_credit=3))
        for name, count in (("exact", 3), ("none", 0)):
            await session.add(spec(request_id=name, stop={"max_tokens": count}))
        await session.add(spec(request_id="cut", stop={"max_tokens": 9}))
        await session.read_until(lambda _: len(ids_of(session.events().get("cut", []))) == 3)
        await session.send(credit=rpc.CreditCommand(request_id="cut", tokens=6))
        await session.end()
        for name, count in (("exact", 3), ("none", 0), ("cut", 9)):
            check_course(session.events()[name])
            assert ids_of(session.events()[name]) == oracle(h, name, count)


async def test_an_ended_request_without_credit_does_not_stay_for_ever() -> None:
    async with serving(FakeEngine(), max_hold_s=0.2) as h:
        session = h.session()
        await session.send(open=rpc.OpenCommand(initial_credit=3))
        await session.add(spec(request_id="a", stop={"max_tokens": 30}))
        await session.end()
        check_course(session.events()["a"])
        assert ids_of(session.events()["a"]) == oracle(h, "a", 30)
        assert finished_of(session.events()["a"]).reason == pb.FINISH_REASON_LENGTH
        assert h.registry.stats().streamed_requests == 0


async def test_an_event_that_has_its_number_is_not_cut() -> None:
    async with serving(FakeEngine(auto=False)) as h:
        await h.generation.AddRequest(
            rpc.AddRequestRequest(spec=spec(request_id="a", stop={"max_tokens": 30}))
        )
        for _ in range(10):
            h.engine.step()
        read = await h.generation.GetResult(rpc.GetResultRequest(request_id="a"))
        assert len(ids_of(read.events)) == 10
        session = h.session()
        await session.send(open=rpc.OpenCommand(initial_credit=4))
        await session.send(attach=rpc.AttachCommand(request_id="a"))
        await session.read_until(lambda _: len(ids_of(session.events().get("a", []))) == 10)
        h.engine.run()
        await session.send(credit=rpc.CreditCommand(request_id="a", tokens=7))
        await session.read_until(lambda _: len(ids_of(session.events()["a"])) == 11)
        await session.send(credit=rpc.CreditCommand(request_id="a", tokens=19))
        await session.end()
        check_course(session.events()["a"])
        assert ids_of(session.events()["a"]) == oracle(h, "a", 30)


@pytest.mark.parametrize(("before", "after"), [(4, 0), (4, 2), (500, 3), (0, 3)])
async def test_a_live_session_s_credit_does_not_go_to_the_one_that_takes_over(
    before: int, after: int
) -> None:
    """Nor does what the old one is granted then. 0: the session has no credits."""
    async with serving(FakeEngine(auto=False)) as h:
        sessions = [h.session(), h.session()]
        old, new = sessions
        for session, credit in zip(sessions, (before, after), strict=True):
            await session.send(open=rpc.OpenCommand(initial_credit=credit, lease=LEASE))
            await session.read()
        await old.add(spec(request_id="a", stop={"max_tokens": 40}))
        await old.read_until(lambda m: m.events)
        await step(h, 2)
        await old.read_until(lambda _: ids_of(old.events()["a"]))
        await new.send(attach=rpc.AttachCommand(request_id="a"))
        await new.read_until(lambda m: m.attached)
        await old.read_until(lambda m: m.detached)
        if before:
            await old.send(credit=rpc.CreditCommand(request_id="a", tokens=7))
            await old.send(9, cancel=rpc.CancelCommand(request_id="nobody"))
            await old.read_until(lambda m: m.cancelled)  # so the credit was heard
        h.engine.run()
        log = log_of(h, "a")
        if after:
            await until(lambda: not log.is_takeable)
            await new.send(9, cancel=rpc.CancelCommand(request_id="nobody"))
            await new.read_until(lambda m: m.cancelled)
            assert len(ids_of(new.events()["a"])) == after
            await new.send(credit=rpc.CreditCommand(request_id="a", tokens=40))
        for session in sessions:
            await session.end()
        check_course(new.events()["a"])
        assert ids_of(new.events()["a"]) == oracle(h, "a", 40)


async def test_credit_commands_are_checked() -> None:
    async with serving(FakeEngine(auto=False)) as h:
        session = h.session()
        await session.send(1, open=rpc.OpenCommand(initial_credit=3))
        await session.send(2, credit=rpc.CreditCommand(request_id="nobody", tokens=1))
        await session.send(3, credit=rpc.CreditCommand(request_id="a"))
        await session.send(4, credit=rpc.CreditCommand(request_id="no name", tokens=1))
        await session.read_until(lambda _: sum(len(m.rejections) for m in session.messages) == 2)
        await session.end()
        found = {
            r.command_id: details(r.status)["ErrorInfo"].metadata["field"]
            for m in session.messages
            for r in m.rejections
        }
        assert found == {3: "credit.tokens", 4: "credit.request_id"}


# ---- many --------------------------------------------------------------------------------------


async def test_100_stalled_readers_beside_live_ones() -> None:
    """Nobody reads from them after the first message. They are held, and cost no more than the
    bound; the live ones are served meanwhile; and once they are read, nothing is lost.
    """
    stalled, live, bound, count = 100, 8, 64, 600
    engine = FakeEngine(auto=False, info=model_info(max_running_requests=16))
    async with (
        serving(engine, max_unread_tokens=bound, max_hold_s=LONG / 10) as h,
        AsyncExitStack() as stack,
    ):
        target = h.server.addresses[0]
        stuck = []
        for index in range(stalled):
            stub = await stack.enter_async_context(connection(target, SMALL_WINDOW))
            session = Session(stub.StreamResult())
            # Described at length, so that gRPC blocks the writer before the end.
            await session.add(
                spec(request_id=f"s{index}", stop={"max_tokens": count}, output={"logprobs": 20})
            )
            await session.read()
            stuck.append(session)
        # Held ones leave their places to the next: all of them come to their bounds.
        quiet = generated = 0
        while quiet < 50:
            await step(h)
            await asyncio.sleep(0.001)
            quiet = quiet + 1 if engine.generated == generated else 0
            generated = engine.generated
        assert len(engine.held) == stalled
        logs = [log_of(h, f"s{index}") for index in range(stalled)]
        assert all(request_of(h, f"s{index}").is_held for index in range(stalled))
        assert max(log.untaken for log in logs) <= bound + 3
        pending = sum(log.held_size for log in logs)
        assert pending <= stalled * (bound + 3) * (48 + 160 + 120 * 20 + 100)
        readers = asyncio.gather(
            *(
                h.stream(spec(f"{i}", request_id=f"l{i}", stop={"max_tokens": count}))
                for i in range(live)
            )
        )
        while not readers.done():
            await step(h)
        assert len(engine.held) == stalled
        assert sum(log.held_size for log in logs) == pending
        for index, messages in enumerate(await readers):
            events = [event for message in messages for event in message.events]
            check_course(events)
            assert ids_of(events) == oracle(h, f"l{index}", count)
        reading = asyncio.gather(*(session.end() for session in stuck))
        while not reading.done():
            await step(h)
        await reading
        for index, session in enumerate(stuck):
            [events] = session.events().values()
            check_course(events)
            assert ids_of(events) == oracle(h, f"s{index}", count)
            assert finished_of(events).reason == pb.FINISH_REASON_LENGTH
        assert not h.registry.requests
        assert engine.num_live == 0
