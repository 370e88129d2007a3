"""Requests of several choices: each has its own text, stop strings and end, on one numbered
course.
"""

from __future__ import annotations

import asyncio
from functools import partial

import grpc
import pytest
from headrace.v1 import generation_pb2 as pb
from headrace.v1 import generation_service_pb2 as rpc

from engine.contract.outputs import (
    Finish,
    FinishReason,
    RequestFailure,
    RequestOutput,
    StepOutputs,
    Timings,
    Usage,
)
from tests.service.fake_engine import EOS, FakeEngine, says
from tests.service.helpers import (
    DEADLINE_S,
    check_course,
    finished_of,
    ids_of,
    kinds,
    refused,
    serving,
    spec,
    text_of,
    until,
)

THREE = says("one", "second", "three!!")


async def test_generate_has_all_choices_and_the_prompt_counts_once() -> None:
    async with serving(FakeEngine(script=THREE)) as h:
        result = await h.generate(spec("hi", n=3))
    assert result.accepted.n == 3
    assert [choice.index for choice in result.choices] == [0, 1, 2]
    assert [choice.text for choice in result.choices] == ["one", "second", "three!!"]
    assert list(result.choices[1].token_ids) == [*b"second", EOS]
    assert [c.finished.usage.completion_tokens for c in result.choices] == [4, 7, 8]
    assert [c.finished.usage.prompt_tokens for c in result.choices] == [2, 2, 2]
    assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (2, 19)


async def test_one_message_a_step_carries_all_choices() -> None:
    async with serving(FakeEngine(script=THREE, auto=False)) as h:
        call = h.generation.GenerateStream(rpc.GenerateStreamRequest(spec=spec(n=3)))
        messages = [await call.read()]
        while h.engine.step():
            messages.append(await call.read())
        assert await call.read() is grpc.aio.EOF
    shapes = [[(e.WhichOneof("event"), e.choice_index) for e in m.events] for m in messages]
    deltas = [("delta", 0), ("delta", 1), ("delta", 2)]
    assert shapes[:4] == [[("accepted", 0)], [("prompt", 0), *deltas], deltas, deltas]
    assert shapes[4] == [("delta", 0), ("finished", 0), ("delta", 1), ("delta", 2)]
    assert shapes[-1] == [("delta", 2), ("finished", 2)]
    events = [event for message in messages for event in message.events]
    check_course(events, n=3)
    assert [text_of(events, i) for i in range(3)] == ["one", "second", "three!!"]


@pytest.mark.parametrize("per_step", [1, 4])
async def test_a_stop_string_ends_its_choice_alone(per_step: int) -> None:
    engine = FakeEngine(script=says("abcdef", "xx--yy", "abcdef"), tokens_per_step=per_step)
    async with serving(engine) as h:
        session = h.session()
        await session.add(spec(request_id="a", n=3, stop={"stop_strings": ["--"]}))
        await session.end()
    events = session.events()["a"]
    check_course(events, n=3)
    assert [text_of(events, i) for i in range(3)] == ["abcdef", "xx", "abcdef"]
    assert ids_of(events, 1) == list(b"xx--")
    stopped = finished_of(events, 1)
    assert (stopped.stop_string, stopped.usage.completion_tokens) == ("--", 4)
    assert finished_of(events, 0).stop_token_id == EOS
    assert [(tokens, choice) for _, tokens, choice in engine.finished] == [(4, 1)]


async def test_final_delivery_of_several_choices() -> None:
    async with serving(FakeEngine(script=THREE)) as h:
        [first, *rest] = await h.stream(spec(n=3, output={"delivery": pb.DELIVERY_FINAL}))
    assert kinds(first.events) == ["accepted"]
    events = [event for message in rest for event in message.events]
    assert kinds(events) == ["prompt", *["delta", "finished"] * 3]
    check_course([*first.events, *events], n=3)
    assert [text_of(events, i) for i in range(3)] == ["one", "second", "three!!"]


async def test_min_tokens_per_delta_counts_by_choice() -> None:
    async with serving(FakeEngine(script=says("a" * 7, "b" * 9, eos=True))) as h:
        messages = await h.stream(spec(n=2, output={"min_tokens_per_delta": 4}))
    events = [event for message in messages for event in message.events]
    check_course(events, n=2)
    for choice, length in enumerate((8, 10)):
        sizes = [
            len(event.delta.token_ids)
            for event in events
            if event.HasField("delta") and event.choice_index == choice
        ]
        assert sum(sizes) == length
        assert all(size >= 4 for size in sizes[:-1])


async def test_cancel_ends_the_choices_that_go_on() -> None:
    async with serving(FakeEngine(script=says("ab", "x" * 100), auto=False)) as h:
        session = h.session()
        await session.add(spec(request_id="a", n=3))
        await session.read()
        for _ in range(5):
            h.engine.step()
        await session.send(cancel=rpc.CancelCommand(request_id="a"))
        await until(lambda: h.engine.cancelled)
        h.engine.run()
        await session.end()
        assert h.registry.live == 0
    events = session.events()["a"]
    check_course(events, n=3)
    reasons = [finished_of(events, i).reason for i in range(3)]
    assert reasons == [
        pb.FINISH_REASON_STOP,
        pb.FINISH_REASON_CANCELLED,
        pb.FINISH_REASON_CANCELLED,
    ]
    assert [len(ids_of(events, i)) for i in range(3)] == [3, 5, 5]


async def test_a_failure_ends_the_whole_request_and_what_was_sent_stays() -> None:
    async with serving(FakeEngine(script=says("a", "longer"), auto=False)) as h:
        session = h.session()
        await session.add(spec(request_id="a", n=3, output={"min_tokens_per_delta": 3}))
        await session.read()
        for _ in range(4):
            h.engine.step()
        [request] = h.engine.submitted
        h.engine.fail(request.request_id, RequestFailure("it broke", "id-1"))
        h.engine.run()
        await session.end()
        failing = asyncio.ensure_future(h.generate(spec(request_id="b", n=2)))
        await until(lambda: h.engine.num_live)
        h.engine.fail(h.engine.submitted[1].request_id, RequestFailure("it broke", "id-2"))
        h.engine.run()
        error = await refused(failing)
    events = session.events()["a"]
    check_course(events, n=3)
    assert events[-1].failed.status.message == "it broke"
    assert kinds(events).count("finished") == 1  # of choice 0, before
    usages = (finished_of(events, 0).usage, events[-1].failed.usage)
    assert [(usage.prompt_tokens, usage.completion_tokens) for usage in usages] == [(2, 2), (2, 8)]
    assert [text_of(events, i) for i in range(3)] == ["a", "long", "long"]
    assert error.code is grpc.StatusCode.INTERNAL


async def test_choices_that_found_their_stop_strings_had_ended_before_a_failure() -> None:
    async with serving(FakeEngine(script=says("a!b", "c!d"), auto=False)) as h:
        call = asyncio.ensure_future(h.generate(spec(n=2, stop={"stop_strings": ["!"]})))
        await until(lambda: h.engine.num_live)
        h.engine.step()
        h.engine.step()
        h.engine.fail(h.engine.submitted[0].request_id, RequestFailure("it broke", "id"))
        h.engine.run()
        result = await call
    assert [choice.text for choice in result.choices] == ["a", "c"]
    assert {choice.finished.stop_string for choice in result.choices} == {"!"}
    assert result.usage.completion_tokens == 4


async def test_drafts_of_choices_that_a_failure_ends_are_counted_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine tells those of all choices."""
    counted = partial(Usage, draft_tokens=5, accepted_draft_tokens=3)
    monkeypatch.setattr("tests.service.fake_engine.Usage", counted)
    async with serving(FakeEngine(script=says("a!b", "c!d"), auto=False)) as h:
        call = asyncio.ensure_future(h.generate(spec(n=2, stop={"stop_strings": ["!"]})))
        await until(lambda: h.engine.num_live)
        h.engine.step()
        h.engine.step()
        h.engine.fail(h.engine.submitted[0].request_id, RequestFailure("it broke", "id"))
        h.engine.run()
        usage = (await call).usage
    assert (usage.draft_tokens, usage.accepted_draft_tokens) == (5, 3)


async def test_usage_is_what_was_delivered_when_the_engine_dies() -> None:
    async with serving(FakeEngine(script=says("a", "longer"), auto=False)) as h:
        await h.generation.AddRequest(rpc.AddRequestRequest(spec=spec(request_id="a", n=3)))
        for _ in range(4):
            h.engine.step()
        h.engine.die(RuntimeError("gone"))
        result = await h.generation.GetResult(rpc.GetResultRequest(request_id="a"))
    events = list(result.events)
    check_course(events, n=3)
    assert [len(ids_of(events, i)) for i in range(3)] == [2, 4, 4]
    finished, failed = finished_of(events, 0), events[-1].failed
    assert (finished.usage.prompt_tokens, finished.usage.completion_tokens) == (2, 2)
    # Of the choices that say nothing more of themselves.
    assert (failed.usage.prompt_tokens, failed.usage.completion_tokens) == (2, 8)
    assert (
        failed.timings.first_token_duration.ToNanoseconds()
        <= failed.timings.last_token_duration.ToNanoseconds()
    )
    assert failed.timings.HasField("first_token_duration")


async def test_usage_of_choices_that_found_their_stop_strings_before_the_engine_died() -> None:
    async with serving(FakeEngine(script=says("a!b", "c!d"), auto=False)) as h:
        call = asyncio.ensure_future(h.generate(spec(n=2, stop={"stop_strings": ["!"]})))
        await until(lambda: h.engine.num_live)
        h.engine.step()
        h.engine.step()
        h.engine.die(RuntimeError("gone"))
        result = await call
    assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (2, 4)
    assert all(choice.finished.timings.HasField("last_token_duration") for choice in result.choices)


async def test_an_engine_that_forgets_a_choice_fails_the_request() -> None:
    async with serving(FakeEngine(script=says("x"), auto=False)) as h:
        await h.generation.AddRequest(rpc.AddRequestRequest(spec=spec(request_id="a", n=2)))
        name = h.engine.submitted[0].request_id
        timings = Timings(0.0, None, None, None, 0.0, 0)
        finish = Finish(FinishReason.LENGTH, Usage(2, 0, 0), timings)
        h.registry.on_step(
            StepOutputs(1.0, (RequestOutput(name, finish=finish, ends_request=True),))
        )
        result = await h.generation.GetResult(rpc.GetResultRequest(request_id="a"))
    assert result.done
    check_course(list(result.events), n=2)
    assert result.events[-1].failed.status.code == grpc.StatusCode.INTERNAL.value[0]


async def test_get_result_and_attach_with_several_choices() -> None:
    async with serving(FakeEngine(script=THREE, auto=False)) as h:
        await h.generation.AddRequest(rpc.AddRequestRequest(spec=spec(request_id="a", n=3)))
        h.engine.step()
        h.engine.step()
        seen = await h.generation.GetResult(rpc.GetResultRequest(request_id="a"))
        for _ in range(3):
            h.engine.step()
        session = h.session()
        await session.send(attach=rpc.AttachCommand(request_id="a", from_seq=seen.next_seq))
        await session.read_until(lambda message: message.events)
        session.call.cancel()  # and again from there
        await until(lambda: not h.registry.streams)
        have = [*seen.events, *session.events()["a"]]
        later = h.session()
        await later.send(attach=rpc.AttachCommand(request_id="a", from_seq=len(have) + 1))
        h.engine.run()
        await later.end()
        events = [*have, *later.events()["a"]]
        everything = await h.generation.GetResult(
            rpc.GetResultRequest(request_id="a", until_done=True), timeout=DEADLINE_S
        )
    assert list(everything.events) == events
    assert everything.done
    check_course(events, n=3)
    assert [text_of(events, i) for i in range(3)] == ["one", "second", "three!!"]
