"""StreamResult: many requests on one stream, commands and their answers, half-close and loss."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from headrace.v1 import generation_pb2 as pb
from headrace.v1 import generation_service_pb2 as rpc
from headrace.v1.model_service_pb2 import GetModelRequest

from engine.contract.errors import QueueFullError
from service.delivery.events import MAX_DELTA_BYTES, detail_bytes
from service.delivery.session import MAX_BATCH_BYTES
from service.servicers import commands
from tests.service.fake_engine import FakeEngine, default_script, says
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
    text_of,
    until,
)


async def test_64_requests_interleave_in_one_message_a_step() -> None:
    async with serving(FakeEngine(auto=False)) as h:
        session = h.session()
        for i in range(64):
            await session.add(spec(f"p{i}", request_id=f"r{i}", stop={"max_tokens": 10}), i + 1)
        await until(lambda: h.engine.num_live == 64)
        await session.read_until(lambda _: len(session.events()) == 64)
        before = len(session.messages)
        for step in range(10):
            h.engine.step()
            message = await session.read()
            deltas = [e for e in message.events if e.WhichOneof("event") == "delta"]
            assert len(deltas) == 64, step
        assert len(session.messages) - before == 10
        await session.end()
    assert len(session.messages) - before == 10
    for i in range(64):
        events = session.events()[f"r{i}"]
        check_course(events)
        assert events[0].accepted.command_id == i + 1
        prompt = tuple(f"p{i}".encode())
        request = next(r for r in h.engine.submitted if r.prompt == prompt)
        assert ids_of(events) == list(default_script(request))[:10]


async def test_half_close_finishes_what_was_sent() -> None:
    async with serving(FakeEngine(script=says("done"), auto=False)) as h:
        session = h.session()
        await session.add(spec(request_id="a"))
        await session.call.done_writing()
        await until(lambda: h.engine.num_live == 1)
        h.engine.run()
        await session.rest()
    check_course(session.events()["a"])
    assert text_of(session.events()["a"]) == "done"


async def test_commands_of_other_requests_do_not_wait_for_a_slow_add() -> None:
    async with serving(FakeEngine(script=says("x" * 50), auto=False)) as h:
        session = h.session()
        for name in ("b", "c"):
            await session.add(spec(request_id=name))
        await session.read_until(lambda _: len(session.events()) == 2)
        await h.generation.AddRequest(rpc.AddRequestRequest(spec=spec(request_id="d")))
        h.engine.submit_gate = gate = asyncio.Event()
        await session.add(spec(request_id="slow"), 1)
        await session.send(2, cancel=rpc.CancelCommand(request_id="slow"))
        await session.add(spec(request_id="slow"), 3)
        await session.send(4, cancel=rpc.CancelCommand(request_id="b"))
        await session.send(5, attach=rpc.AttachCommand(request_id="d"))
        await session.add(spec(request_id="e", sampling={"top_p": 2.0}), 6)
        await session.add(spec(request_id="c"), 7)  # is live

        def answers() -> list[int]:
            return [
                answer.command_id
                for m in session.messages
                for answer in (*m.cancelled, *m.attached, *m.rejections)
            ]

        await session.read_until(lambda _: len(answers()) == 4)
        assert sorted(answers()) == [4, 5, 6, 7]
        assert [str(name).split("#")[0] for name in h.engine.cancelled] == ["anonymous/b"]
        gate.set()
        # Of one request: in order. The add, its cancel, and the second add, which is a duplicate.
        await session.read_until(lambda _: len(answers()) == 6)
        assert answers()[4:] == [2, 3]
        await until(lambda: len(h.engine.cancelled) == 2)
        h.engine.run()
        await session.end()
    events = session.events()
    assert events["slow"][0].accepted.command_id == 1
    assert finished_of(events["slow"]).reason == pb.FINISH_REASON_CANCELLED
    assert [text_of(events[name]) for name in ("b", "c", "d")] == ["", "x" * 50, "x" * 50]


@pytest.mark.parametrize(
    ("bound", "value", "most"),
    [("MAX_WAITING", 64, 64), ("MAX_WAITING", 3, 3), ("MAX_WAITING_BYTES", 1, 1)],
)
async def test_a_session_reads_no_more_while_many_commands_wait(
    monkeypatch: pytest.MonkeyPatch, bound: str, value: int, most: int
) -> None:
    monkeypatch.setattr(commands, bound, value)
    async with serving(FakeEngine(script=says("x"), auto=False)) as h:
        h.engine.submit_gate = gate = asyncio.Event()
        session = h.session()
        for _ in range(most + 6):
            await session.add(spec())
        await session.send(7, cancel=rpc.CancelCommand(request_id="nobody"))
        await until(lambda: h.registry.live == most)
        for _ in range(20):
            await h.models.GetModel(GetModelRequest())
        assert h.registry.live == most
        assert not session.messages
        gate.set()
        await session.read_until(lambda _: len(session.events()) == most + 6)
        h.engine.run()
        await session.end()
        assert h.registry.live == 0


async def test_a_lost_session_takes_its_waiting_commands_with_it() -> None:
    async with serving(FakeEngine(auto=False)) as h:
        h.engine.submit_gate = asyncio.Event()
        session = h.session()
        for i in range(3):
            await session.add(spec(request_id=f"r{i}"))
            await session.send(cancel=rpc.CancelCommand(request_id=f"r{i}"))
        await until(lambda: h.registry.live == 3)
        session.call.cancel()
        await until(lambda: not h.registry.requests)
        assert not h.engine.submitted
        assert h.registry.admission.is_empty
        assert not h.registry.streams


async def test_an_empty_session_ends_at_half_close() -> None:
    async with serving() as h:
        session = h.session()
        assert await session.end() == []


async def test_rejections_disturb_nothing_else() -> None:
    async with serving(FakeEngine(script=says("ok"), auto=False)) as h:
        session = h.session()
        await session.add(spec(request_id="a"), 1)
        await session.add(spec(request_id="a"), 2)  # duplicate
        await session.add(spec(request_id="b", adapter="lora"), 3)
        await session.add(spec(request_id="c", sampling={"top_p": 2.0}), 4)
        await session.send(5, credit=rpc.CreditCommand(request_id="a", tokens=1))
        await session.send(6)
        await session.send(7, open=rpc.OpenCommand())
        await session.send(8, add=rpc.AddCommand())
        await session.send(9, attach=rpc.AttachCommand(request_id="nobody"))
        await session.send(10, attach=rpc.AttachCommand(request_id="not a name"))
        await until(lambda: h.engine.submitted)  # the refusal is not for the first one
        h.engine.refuse_next.append(QueueFullError(5, 0.2))
        await session.add(spec(request_id="q"), 11)
        await session.call.done_writing()
        await session.read_until(lambda _: sum(len(m.rejections) for m in session.messages) == 10)
        h.engine.run()
        await session.rest()
    rejections = {r.command_id: r for m in session.messages for r in m.rejections}
    found = {
        number: (grpc_code(r.status.code), details(r.status)["ErrorInfo"].reason)
        for number, r in rejections.items()
    }
    code = grpc.StatusCode
    assert found == {
        2: (code.ALREADY_EXISTS, "DUPLICATE_REQUEST_ID"),
        3: (code.UNIMPLEMENTED, "UNSUPPORTED_FIELD"),
        4: (code.INVALID_ARGUMENT, "INVALID_FIELD"),
        5: (code.FAILED_PRECONDITION, "FAILED_PRECONDITION"),
        6: (code.INVALID_ARGUMENT, "INVALID_FIELD"),
        7: (code.FAILED_PRECONDITION, "FAILED_PRECONDITION"),
        8: (code.INVALID_ARGUMENT, "INVALID_FIELD"),
        9: (code.NOT_FOUND, "REQUEST_NOT_FOUND"),
        10: (code.INVALID_ARGUMENT, "INVALID_FIELD"),
        11: (code.RESOURCE_EXHAUSTED, "QUEUE_FULL"),
    }
    violation = details(rejections[4].status)["BadRequest"].field_violations[0]
    assert violation.field == "add.spec.sampling.top_p"
    assert details(rejections[3].status)["ErrorInfo"].metadata["field"] == "add.spec.adapter"
    assert rejections[2].request_id == "a"
    assert details(rejections[11].status)["RetryInfo"].retry_delay.ToMilliseconds() == 200
    assert list(session.events()) == ["a"]
    check_course(session.events()["a"])


def grpc_code(number: int) -> grpc.StatusCode:
    return next(code for code in grpc.StatusCode if code.value[0] == number)


@pytest.mark.parametrize("how", ["cancel", "close"])
async def test_a_lost_stream_cancels_its_requests(how: str) -> None:
    async with serving(FakeEngine(auto=False)) as h:
        async with grpc.aio.insecure_channel(h.server.addresses[0]) as channel:
            session = Harness(h.server, h.engine, channel).session()
            for name in ("a", "b"):
                await session.add(spec(request_id=name))
            await session.read_until(lambda _: len(session.events()) == 2)
            if how == "cancel":
                session.call.cancel()
                await until(lambda: len(h.engine.cancelled) == 2)
        await until(lambda: len(h.engine.cancelled) == 2)
        h.engine.step()
        await until(lambda: h.registry.live == 0)
        assert h.engine.num_live == 0
        # The names are free again.
        again = h.session()
        await again.add(spec(request_id="a", stop={"max_tokens": 1}))
        await again.read()
        h.engine.run()
        await again.end()
        check_course(again.events()["a"])


async def test_a_stream_lost_while_a_request_is_on_its_way_leaves_nothing() -> None:
    gate = asyncio.Event()
    async with serving(FakeEngine(auto=False, submit_gate=gate)) as h:
        session = h.session()
        await session.add(spec(request_id="a"))
        await until(lambda: h.registry.live == 1)
        session.call.cancel()
        await until(lambda: h.engine.cancelled)
        gate.set()
        await until(lambda: h.registry.live == 0)
        h.engine.run()
        assert h.engine.num_live == 0


async def test_a_lease_begins_though_the_stream_was_lost_while_a_request_was_on_its_way() -> None:
    gate = asyncio.Event()
    async with serving(FakeEngine(auto=False, submit_gate=gate)) as h:
        session = h.session()
        await session.send(1, open=rpc.OpenCommand(lease={"nanos": 20_000_000}))
        await session.add(spec(request_id="a"))
        await until(lambda: h.registry.live == 1)
        session.call.cancel()
        await until(lambda: not h.registry.streams)
        gate.set()
        await until(lambda: h.engine.cancelled)  # nobody has attached
        h.engine.run()
        assert h.registry.live == h.engine.num_live == 0


async def test_cancel_before_the_first_token_midway_and_unknown() -> None:
    async with serving(FakeEngine(auto=False)) as h:
        session = h.session()
        await session.add(spec(request_id="early"), 1)
        await session.send(2, cancel=rpc.CancelCommand(request_id="early"))
        await session.add(spec(request_id="late"), 3)
        await session.read_until(lambda _: len(session.events()) == 2)
        await until(lambda: h.engine.cancelled)
        h.engine.step()
        h.engine.step()
        await session.send(4, cancel=rpc.CancelCommand(request_id="late"))
        await session.send(5, cancel=rpc.CancelCommand(request_id="nobody"))
        await session.send(6, cancel=rpc.CancelCommand(request_id="early"))
        await until(lambda: len(h.engine.cancelled) == 2)
        h.engine.step()
        await session.end()
    answers = {r.command_id: r.status for m in session.messages for r in m.cancelled}
    assert answers == {
        2: rpc.CANCEL_STATUS_CANCELLED,
        4: rpc.CANCEL_STATUS_CANCELLED,
        5: rpc.CANCEL_STATUS_NOT_FOUND,
        6: rpc.CANCEL_STATUS_NOT_FOUND,  # its end was delivered, and nothing of it is kept
    }
    early, late = session.events()["early"], session.events()["late"]
    assert kinds(early) == ["accepted", "finished"]
    for events in (early, late):
        check_course(events)
        assert events[-1].finished.reason == pb.FINISH_REASON_CANCELLED
    assert late[-1].finished.usage.completion_tokens == len(ids_of(late)) == 2


async def test_cancel_while_the_engine_has_not_answered_yet() -> None:
    gate = asyncio.Event()
    async with serving(FakeEngine(auto=False, submit_gate=gate)) as h:
        call = h.generation.GenerateStream(
            rpc.GenerateStreamRequest(spec=spec(request_id="a")), timeout=10
        )
        await until(lambda: h.registry.live == 1)
        answer = await h.generation.Cancel(rpc.CancelRequest(request_ids=["a"]))
        assert answer.results[0].status == rpc.CANCEL_STATUS_CANCELLED
        gate.set()
        await until(lambda: h.engine.cancelled)
        h.engine.step()
        events = [event for message in [m async for m in call] for event in message.events]
    check_course(events)
    assert events[-1].finished.reason == pb.FINISH_REASON_CANCELLED


async def test_lease_survives_a_loss_and_attach_resumes() -> None:
    async with serving(FakeEngine(script=says("abcdef"), auto=False), max_lease_s=20) as h:
        first = h.session()
        await first.send(1, open=rpc.OpenCommand(lease={"seconds": 3600}))
        opened = (await first.read()).opened
        assert (opened.command_id, opened.lease.seconds) == (1, 20)
        await first.add(spec(request_id="a"))
        await first.read_until(lambda m: m.events)
        for _ in range(3):
            h.engine.step()
            await first.read()
        received = first.events()["a"]
        first.call.cancel()
        await until(lambda: not h.registry.streams)
        h.engine.step()
        assert not h.engine.cancelled
        second = h.session()
        await second.send(1, open=rpc.OpenCommand(lease={"seconds": 5}))
        await second.send(9, attach=rpc.AttachCommand(request_id="a", from_seq=len(received)))
        message = await second.read_until(lambda m: m.attached)
        assert (message.attached[0].command_id, message.attached[0].from_seq) == (9, len(received))
        assert not h.registry.leases.is_running(h.registry.find("anonymous", "a"))
        h.engine.run()
        await second.end()
    resumed = second.events()["a"]
    assert resumed[0] == received[-1]  # asked for once more: the same number, the same event
    events = received + resumed[1:]
    check_course(events)
    assert text_of(events) == "abcdef"


async def test_an_attach_waits_for_a_request_that_is_on_its_way() -> None:
    """As of a client that has lost its session before it heard of its request."""
    gate = asyncio.Event()
    async with serving(FakeEngine(script=says("abc"), submit_gate=gate)) as h:
        first, second = h.session(), h.session()
        await first.send(open=rpc.OpenCommand(lease={"seconds": 60}))
        await first.add(spec(request_id="a"))
        await until(lambda: h.registry.live == 1)
        first.call.cancel()
        await second.send(1, attach=rpc.AttachCommand(request_id="a"))
        await second.send(2, cancel=rpc.CancelCommand(request_id="nobody"))
        answer = await second.read_until(lambda m: m.cancelled or m.rejections or m.attached)
        assert [one.command_id for one in answer.cancelled] == [2]  # the attach was heard, too
        assert not answer.rejections
        assert not answer.attached
        gate.set()
        await second.end()
    assert not any(message.rejections for message in second.messages)
    check_course(second.events()["a"])
    assert text_of(second.events()["a"]) == "abc"


async def test_what_the_engine_has_not_accepted_is_not_found_by_others() -> None:
    gate = asyncio.Event()
    async with serving(FakeEngine(script=says("abc"), submit_gate=gate)) as h:
        streaming = asyncio.ensure_future(h.stream(spec(request_id="a")))
        await until(lambda: h.registry.live == 1)
        session = h.session()
        await session.send(1, attach=rpc.AttachCommand(request_id="a"))
        [rejection] = (await session.read()).rejections
        assert details(rejection.status)["ErrorInfo"].reason == "REQUEST_NOT_FOUND"
        error = await refused(h.generation.GetResult(rpc.GetResultRequest(request_id="a")))
        assert error.reason == "REQUEST_NOT_FOUND"
        gate.set()
        check_course([event for message in await streaming for event in message.events])
        await session.end()


async def test_a_session_is_told_that_another_one_has_its_request() -> None:
    async with serving(FakeEngine(script=says("abcdef"), auto=False)) as h:
        first, second = h.session(), h.session()
        await first.add(spec(request_id="a"))
        await first.add(spec(request_id="b"))
        await first.read_until(lambda _: len(first.events()) == 2)
        await second.send(3, attach=rpc.AttachCommand(request_id="a", from_seq=2))
        await second.read_until(lambda m: m.attached)
        message = await first.read_until(lambda m: m.detached)
        assert [one.request_id for one in message.detached] == ["a"]
        had = len(first.events()["a"])
        h.engine.run()
        for session in (first, second):
            await session.end()
        assert len(first.events()["a"]) == had
        assert text_of(first.events()["b"]) == "abcdef"
        assert not any(message.detached for message in second.messages)
        check_course(second.events()["a"], first=2)
        assert text_of(second.events()["a"]) == "abcdef"


async def test_an_expired_lease_cancels() -> None:
    async with serving(FakeEngine(auto=False)) as h:
        session = h.session()
        await session.send(1, open=rpc.OpenCommand(lease={"nanos": 20_000_000}))
        await session.add(spec(request_id="a"))
        await session.read_until(lambda m: m.events)
        session.call.cancel()
        await until(lambda: h.engine.cancelled)
        h.engine.step()
        result = await h.generation.GetResult(rpc.GetResultRequest(request_id="a"))
    assert result.done
    assert result.events[-1].finished.reason == pb.FINISH_REASON_CANCELLED


async def test_open_is_checked() -> None:
    async with serving() as h:
        for command, reason in (
            (rpc.OpenCommand(lease={"seconds": -1}), "INVALID_FIELD"),
            (rpc.OpenCommand(lease={"seconds": 1, "nanos": -1}), "INVALID_FIELD"),
        ):
            session = h.session()
            await session.send(1, open=command)
            message = await session.read()
            info = details(message.rejections[0].status)["ErrorInfo"]
            assert info.reason == reason
            await session.end()
            assert info.metadata["field"].startswith("open.")


async def test_a_moved_request_ends_its_old_stream() -> None:
    async with serving(FakeEngine(script=says("abc"), auto=False)) as h:
        old = h.generation.GenerateStream(rpc.GenerateStreamRequest(spec=spec(request_id="a")))
        await old.read()
        session = h.session()
        await session.send(1, attach=rpc.AttachCommand(request_id="a", from_seq=2))
        await session.read()
        error = await refused(old.read())
        assert (error.code, error.reason) == (grpc.StatusCode.ABORTED, "REQUEST_MOVED")
        assert not h.engine.cancelled
        h.engine.run()
        await session.end()
    check_course(session.events()["a"], first=2)
    assert text_of(session.events()["a"]) == "abc"


async def test_attach_to_a_request_without_lease_before_what_is_kept() -> None:
    async with serving(FakeEngine(auto=False)) as h:
        old = h.generation.GenerateStream(rpc.GenerateStreamRequest(spec=spec(request_id="a")))
        await old.read()
        h.engine.step()
        await old.read()
        session = h.session()
        await session.send(1, attach=rpc.AttachCommand(request_id="a", from_seq=0))
        status = (await session.read()).rejections[0].status
        info = details(status)["ErrorInfo"]
        assert (status.code, info.reason) == (11, "RESULT_OUT_OF_RANGE")
        assert info.metadata["earliest_seq"] == "4"
        old.cancel()
        await session.end()


async def test_a_client_that_does_not_read_costs_merged_deltas() -> None:
    """While the session's writer cannot send, tokens merge; once it can, they come as few
    events.
    """
    async with serving(FakeEngine(auto=False)) as h:
        session = h.session()
        await session.add(spec(request_id="a", stop={"max_tokens": 1500}))
        await session.read()
        # All steps in one pass of the event loop: the writer cannot run in between.
        for _ in range(1500):
            h.engine.step()
        messages = await session.end()
    assert len(messages) == 2
    check_course(session.events()["a"])
    assert kinds(session.events()["a"]) == ["accepted", "prompt", "delta", "finished"]
    assert len(ids_of(session.events()["a"])) == 1500


async def test_what_many_requests_have_is_divided_into_messages_that_are_not_too_large() -> None:
    output = {"logprobs": 128, "omit_text": True}
    async with serving(FakeEngine(auto=False, tokens_per_step=100)) as h:
        session = h.session()
        for name in ("a", "b"):
            await session.add(spec(request_id=name, stop={"max_tokens": 300}, output=output))
        await session.read_until(lambda _: len(session.events()) == 2)
        h.engine.run()  # about 1.8 MB of each, in one pass of the event loop
        await session.end()
    for message in session.messages:
        described = sum(len(event.delta.tokens) for event in message.events)
        assert described * detail_bytes(128) <= MAX_BATCH_BYTES + MAX_DELTA_BYTES
    for events in session.events().values():
        check_course(events)
        assert len(ids_of(events)) == 300


async def test_a_stream_is_lost_while_its_writer_is_blocked() -> None:
    """Nobody reads 10 MB: the writer hangs in a send. The RPC's end still ends the request."""
    big = spec(output={"logprobs": 128}, stop={"max_tokens": 1900})
    async with serving(FakeEngine(auto=False, tokens_per_step=100)) as h:
        for kind in ("GenerateStream", "StreamResult"):
            cancelled = len(h.engine.cancelled)
            if kind == "GenerateStream":
                call = h.generation.GenerateStream(rpc.GenerateStreamRequest(spec=big))
            else:
                session = h.session()
                await session.add(big)
                call = session.call
            await call.read()
            for _ in range(14):
                h.engine.step()
                await asyncio.sleep(0)
            stream = next(iter(h.registry.streams))
            await until(lambda stream=stream: stream.requests)
            call.cancel()
            await until(lambda cancelled=cancelled: len(h.engine.cancelled) > cancelled)
            h.engine.step()
            await until(lambda: not h.registry.requests)
            assert h.registry.stats().streamed_requests == h.registry.live == 0


async def test_too_many_open_requests_are_refused() -> None:
    async with serving(FakeEngine(auto=False), max_open_requests=2) as h:
        session = h.session()
        for name in ("a", "b", "c"):
            await session.add(spec(request_id=name))
        message = await session.read_until(lambda m: m.rejections)
        info = details(message.rejections[0].status)["ErrorInfo"]
        assert info.reason == "TOO_MANY_OPEN_REQUESTS"
        session.call.cancel()


async def test_bytes_that_are_no_message() -> None:
    async with serving(FakeEngine(auto=False)) as h:
        service = "/headrace.v1.GenerationService"
        error = await refused(h.channel.unary_unary(f"{service}/Generate")(b"\xff\xff"))
        assert (error.code, error.reason) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "MALFORMED_MESSAGE",
        )
        call = h.channel.stream_stream(f"{service}/StreamResult")()
        await call.write(b"\xff\xff")
        assert (await refused(call.read())).reason == "MALFORMED_MESSAGE"
        assert not h.registry.streams


async def test_unknown_fields_in_commands_are_ignored_and_counted() -> None:
    async with serving() as h:
        session = h.session()
        raw = rpc.StreamResultRequest(command_id=3, add=rpc.AddCommand(spec=spec(request_id="a")))
        command = rpc.StreamResultRequest.FromString(raw.SerializeToString() + b"\xf8\x07\x01")
        await session.call.write(command)
        messages = await session.end()
        assert h.server.state.incoming.unknown == 1
    assert not any(message.rejections for message in messages)
    check_course(session.events()["a"])
