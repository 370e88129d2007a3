"""AddRequest, GetResult, Cancel and attach: requests that belong to no stream."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest
from headrace.v1 import generation_pb2 as pb
from headrace.v1 import generation_service_pb2 as rpc

from service.delivery.kept import KeptResults
from tests.service.delivery.results import add, get, keep, named
from tests.service.door.callers_file import add_request, bearer, guarded
from tests.service.fake_engine import FakeEngine, says
from tests.service.helpers import (
    DEADLINE_S,
    Harness,
    check_course,
    ids_of,
    kinds,
    refused,
    serving,
    spec,
    text_of,
    until,
)


async def cancel(h: Harness, *ids: str) -> list[int]:
    answer = await h.generation.Cancel(rpc.CancelRequest(request_ids=ids), timeout=DEADLINE_S)
    assert [result.request_id for result in answer.results] == list(ids)
    return [result.status for result in answer.results]


async def test_add_then_read_everything() -> None:
    async with serving(FakeEngine(script=says("abc"))) as h:
        added = await add(h)
        result = await get(h, wait={"seconds": 10}, until_done=True)
        again = await get(h, from_seq=1)
        rest = await get(h, from_seq=result.next_seq)
    assert added.accepted.prompt_tokens == 2
    assert result.done
    assert result.events[0].accepted == added.accepted
    check_course(list(result.events))
    assert text_of(result.events) == "abc"
    assert again == result
    assert (list(rest.events), rest.next_seq, rest.done) == ([], result.next_seq, True)


async def test_what_is_too_large_for_one_answer_is_done_with_the_last_one() -> None:
    engine = FakeEngine(auto=False, tokens_per_step=100)
    async with serving(engine) as h:
        # About 3 MB.
        await add(h, stop={"max_tokens": 500}, output={"logprobs": 128, "omit_text": True})
        engine.run()
        events: list[pb.ResultEvent] = []
        dones = []
        while not any(dones):
            answer = await get(h, from_seq=len(events) + 1)
            assert answer.events
            events += answer.events
            dones.append(answer.done)
    assert len(dones) > 1
    check_course(events)
    assert len(ids_of(events)) == 500


async def test_reading_while_it_runs() -> None:
    async with serving(FakeEngine(script=says("abcd"), auto=False)) as h:
        await add(h)
        first = await get(h)
        assert (kinds(first.events), first.next_seq, first.done) == (["accepted"], 2, False)
        assert not (await get(h, from_seq=2)).events
        assert not (await get(h, from_seq=2, wait={"nanos": 1_000_000})).events
        h.engine.step()
        h.engine.step()
        second = await get(h, from_seq=2)
        assert kinds(second.events) == ["prompt", "delta"]
        waiting = asyncio.ensure_future(get(h, from_seq=second.next_seq, wait={"seconds": 10}))
        request = h.registry.find("anonymous", "a")
        await until(lambda: request.readers)
        h.engine.step()
        third = await waiting
        h.engine.run()
        last = await get(h, from_seq=third.next_seq)
        assert last.done
        events = [*first.events, *second.events, *third.events, *last.events]
        assert list((await get(h)).events) == events
    check_course(events)
    assert text_of(events) == "abcd"
    assert not request.readers


async def test_the_end_of_a_reading_rpc_does_not_touch_the_request() -> None:
    async with serving(FakeEngine(script=says("abcd"), auto=False)) as h:
        await add(h)
        message = rpc.GetResultRequest(request_id="a", from_seq=2, wait={"seconds": 30})
        call = h.generation.GetResult(message)
        request = h.registry.find("anonymous", "a")
        await until(lambda: request.readers)
        call.cancel()
        await until(lambda: not request.readers)
        h.engine.run()
        assert not h.engine.cancelled
        assert (await get(h)).done


async def test_a_reading_rpc_is_told_of_events_that_a_stream_took_meanwhile() -> None:
    """Without a lease nothing is kept that the stream has taken."""
    async with serving(FakeEngine(script=says("abcd"), auto=False)) as h:
        session = h.session()
        await session.add(spec(request_id="a"))
        await session.read_until(lambda m: m.events)
        reading = asyncio.ensure_future(
            get(h, from_seq=2, until_done=True, wait={"seconds": 30}),
        )
        request = h.registry.find("anonymous", "a")
        await until(lambda: request.readers)
        h.engine.step()
        await session.read()
        h.engine.run()
        error = await refused(reading)
        assert (error.code, error.reason) == (grpc.StatusCode.OUT_OF_RANGE, "RESULT_OUT_OF_RANGE")
        await session.end()
        check_course(session.events()["a"])


async def test_attach_from_the_first_event_and_from_later() -> None:
    async with serving(FakeEngine(script=says("abcd"), auto=False)) as h:
        await add(h)
        h.engine.step()
        seen = await get(h)
        session = h.session()
        await session.send(1, attach=rpc.AttachCommand(request_id="a"))
        message = await session.read()
        assert message.attached[0].from_seq == 1
        assert message.attached[0].request_number == 1
        assert session.events()["a"][: len(seen.events)] == list(seen.events)
        # A lost session does not end a request that came by AddRequest.
        session.call.cancel()
        await until(lambda: not h.registry.streams)
        assert not h.engine.cancelled
        h.engine.run()
        late = h.session()
        await late.send(1, attach=rpc.AttachCommand(request_id="a", from_seq=seen.next_seq))
        await late.end()
        everything = await get(h)
    events = [*seen.events, *late.events()["a"]]
    assert list(everything.events) == events
    check_course(events)


async def test_attach_to_an_ended_request_that_was_read() -> None:
    async with serving(FakeEngine(script=says("x"))) as h:
        await add(h)
        result = await get(h, until_done=True, wait={"seconds": 10})
        session = h.session()
        await session.send(1, attach=rpc.AttachCommand(request_id="a", from_seq=result.next_seq))
        messages = await session.end()
    assert [len(m.attached) for m in messages] == [1]
    assert not session.events()


async def test_out_of_range_and_not_found() -> None:
    async with serving(FakeEngine(auto=False)) as h:
        await add(h)
        error = await refused(get(h, from_seq=3))
        assert (error.code, error.reason) == (grpc.StatusCode.OUT_OF_RANGE, "RESULT_OUT_OF_RANGE")
        assert error.details["ErrorInfo"].metadata["earliest_seq"] == "1"
        assert (await refused(get(h, "b"))).code is grpc.StatusCode.NOT_FOUND
        assert (await refused(get(h, "no name"))).field == "request_id"
        assert (await refused(get(h, wait={"seconds": 61}))).field == "wait"
        assert (await refused(get(h, wait={"seconds": -1}))).field == "wait"


async def test_a_kept_name_is_taken_until_it_is_forgotten() -> None:
    async with serving(FakeEngine(script=says("x"))) as h:
        await add(h)
        await until(lambda: h.registry.live == 0)
        error = await refused(add(h, stop={"max_tokens": 3}))
        assert error.code is grpc.StatusCode.ALREADY_EXISTS
    async with serving(FakeEngine(script=says("x")), result_retention_s=0.02) as h:
        await add(h)
        await until(lambda: not h.registry.requests)
        assert (await refused(get(h))).code is grpc.StatusCode.NOT_FOUND
        await add(h)


async def test_what_is_kept_no_more_is_delivered_and_has_its_name_till_then() -> None:
    """Its stream has no credit for it: that is granted under a name that nobody else has."""
    async with serving(FakeEngine(), max_kept_results=0) as h:
        session = h.session()
        lease = {"seconds": 60}
        await session.send(open=rpc.OpenCommand(initial_credit=3, lease=lease))
        await session.add(spec(request_id="a", stop={"max_tokens": 10}))
        await session.read_until(lambda _: len(ids_of(session.events().get("a", []))) == 3)
        await until(lambda: not h.engine.num_live)
        await session.add(spec(request_id="a"), 7)
        [rejection] = (await session.read_until(lambda m: m.rejections)).rejections
        assert rejection.status.code == grpc.StatusCode.ALREADY_EXISTS.value[0]
        await session.send(credit=rpc.CreditCommand(request_id="a", tokens=2))
        await session.read_until(lambda m: m.events)
        assert len(ids_of(session.events()["a"])) == 5
        await session.send(credit=rpc.CreditCommand(request_id="a", tokens=5))
        await session.end()
        check_course(session.events()["a"])
        assert len(ids_of(session.events()["a"])) == 10
        assert not h.registry.requests


async def test_kept_results_are_bounded_in_count_and_bytes() -> None:
    for bounds in ({"max_kept_results": 3}, {"max_kept_bytes": 100_000}):
        async with serving(FakeEngine(script=says("x" * 200)), **bounds) as h:
            for i in range(10):
                await add(h, f"r{i}")
                await until(lambda: h.registry.live == 0)
            kept = [f"r{i}" for i in range(10) if ("anonymous", f"r{i}") in h.registry.requests]
            assert 1 <= len(kept) <= 5
            assert kept == [f"r{i}" for i in range(10 - len(kept), 10)]  # the newest
            assert (await refused(get(h, "r0"))).code is grpc.StatusCode.NOT_FOUND
            assert (await get(h, "r9")).done


def test_who_keeps_most_loses_the_oldest() -> None:
    kept = KeptResults(max_results=4, max_bytes=1000)
    few = [(named("few", f"{i}"), 10) for i in range(2)]
    many = [(named("many", f"{i}"), 10) for i in range(5)]
    assert keep(kept, *few, *many) == ["many/0", "many/1", "many/2"]
    assert all(log in kept for log, _ in few)
    # Bytes: of the one that has most of them, though it has the fewest results.
    large = [(named("few", "large"), 975)]
    assert keep(kept, *large) == ["few/0", "few/1"]
    assert (kept.count, kept.size) == (3, 995)
    assert keep(kept, (named("many", "last"), 10)) == ["few/large"]
    # One that is larger than all that may be kept goes, and nobody else's.
    assert keep(kept, (named("few", "giant"), 5000)) == ["few/giant"]
    assert (kept.count, kept.size) == (3, 30)
    kept.discard(large[0][0])  # harmless: it is not kept
    for log in [log for log, _ in many]:
        kept.discard(log)
    assert kept.count == 1
    assert keep(KeptResults(0, 0), (named("a", "x"), 1)) == ["a/x"]


@pytest.mark.parametrize(
    ("large", "small"), [(("a", None), ("b", None)), (("gateway", "a"), ("gateway", "b"))]
)
def test_of_each_limit_it_is_who_keeps_most_that_loses(
    large: tuple[str, str | None], small: tuple[str, str | None]
) -> None:
    """One with few large results and one with many small ones: two callers, or two of a group."""
    one = (named(large[0], "large", large[1]), 700)
    many = [(named(small[0], f"{i}", small[1]), 50) for i in range(7)]
    assert keep(KeptResults(4, 2000), one, *many[:5]) == [f"{small[0]}/0", f"{small[0]}/1"]
    assert keep(KeptResults(100, 1000), one, *many) == [f"{large[0]}/large"]


def test_whom_a_gateway_names_are_one_and_then_each_for_themselves() -> None:
    kept = KeptResults(max_results=8, max_bytes=1000)
    few = [(named("few", f"{i}"), 10) for i in range(3)]
    quiet = (named("gateway", "q", "quiet"), 10)
    many = [(named("gateway", f"{i}", "loud"), 10) for i in range(6)]
    assert keep(kept, *few, quiet, *many) == ["gateway/0", "gateway/1"]
    # Many names do not push out what another identity has kept.
    names = [(named("gateway", f"n{i}", f"name-{i}"), 10) for i in range(4)]
    assert keep(kept, *names) == ["gateway/2", "gateway/3", "gateway/4", "gateway/q"]
    assert all(log in kept for log, _ in few)
    for log, _ in (*few, *names, *many):
        kept.discard(log)
    assert (kept.count, kept.size, kept.groups) == (0, 0, {})


async def test_one_identity_does_not_push_out_another_s_results(callers: Path) -> None:
    engine = FakeEngine(script=says("x"))
    async with guarded(callers, engine, max_kept_results=6) as h:
        await add_request(h, "bob", request_id="mine")
        for i in range(20):
            await add_request(h, "alice", request_id=f"r{i}")
            await until(lambda: h.registry.live == 0)
        assert h.registry.stats().kept_results == 6
        message = rpc.GetResultRequest(request_id="mine")
        assert (await h.generation.GetResult(message, metadata=bearer("bob"))).done
        for name, code in (("r14", grpc.StatusCode.NOT_FOUND), ("r15", None)):
            call = h.generation.GetResult(
                rpc.GetResultRequest(request_id=name), metadata=bearer("alice")
            )
            if code is None:
                assert (await call).done
            else:
                assert (await refused(call)).code is code


async def test_cancel_answers_for_each_id() -> None:
    async with serving(FakeEngine(script=says("abc"), auto=False)) as h:
        await add(h, "live")
        await add(h, "over")
        h.engine.time_out(h.engine.submitted[1].request_id)
        h.engine.step()
        status = await cancel(h, "live", "over", "nobody")
        assert status == [
            rpc.CANCEL_STATUS_CANCELLED,
            rpc.CANCEL_STATUS_ALREADY_FINISHED,
            rpc.CANCEL_STATUS_NOT_FOUND,
        ]
        await until(lambda: h.engine.cancelled)
        h.engine.step()
        live, over = await get(h, "live"), await get(h, "over")
        assert (await cancel(h, "live"))[0] == rpc.CANCEL_STATUS_ALREADY_FINISHED
        for ids in ((), ("x",) * 1025):
            error = await refused(h.generation.Cancel(rpc.CancelRequest(request_ids=ids)))
            assert error.field == "request_ids"
    assert live.events[-1].finished.reason == pb.FINISH_REASON_CANCELLED
    assert over.events[-1].finished.reason == pb.FINISH_REASON_TIME_LIMIT
    assert over.events[-1].finished.usage.completion_tokens == len(ids_of(over.events))


async def test_engine_death_fails_live_requests_and_readiness() -> None:
    async with serving(FakeEngine(auto=False)) as h:
        await add(h)
        h.engine.step()
        h.engine.die(RuntimeError("the device is gone"))
        result = await get(h, until_done=True, wait={"seconds": 10})
        status = result.events[-1].failed.status
        assert status.code == grpc.StatusCode.UNAVAILABLE.value[0]
        assert "device" not in status.message
        error = await refused(add(h, "b"))
        assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "ENGINE_STOPPED")
    check_course(list(result.events))
