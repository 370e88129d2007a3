"""Generate and GenerateStream: whole journeys through real gRPC, with answers worked out by
hand.
"""

from __future__ import annotations

import asyncio

import grpc
import pytest
from headrace.v1 import generation_pb2 as pb
from headrace.v1 import generation_service_pb2 as rpc

from engine.contract.engine_client import Admission
from engine.contract.outputs import RequestFailure
from engine.contract.request import GenerationRequest
from tests.service.fake_engine import EOS, FakeEngine, byte_tokenizer, default_script, says
from tests.service.helpers import (
    check_course,
    ids_of,
    kinds,
    refused,
    serving,
    spec,
    text_of,
    until,
)


async def test_generate_returns_the_whole_result() -> None:
    async with serving(FakeEngine(script=says("Hello wörld"))) as h:
        result = await h.generate(spec("hi", request_id="mine", sampling={"seed": 7}))
    assert result.request_id == "mine"
    choice = result.choices[0]
    assert choice.text == "Hello wörld"
    assert list(choice.token_ids) == [*"Hello wörld".encode(), EOS]
    assert choice.finished.reason == pb.FINISH_REASON_STOP
    assert choice.finished.stop_token_id == EOS
    assert result.usage.prompt_tokens == 2
    assert result.usage.completion_tokens == 13
    assert result.accepted.sampling.seed == 7
    assert result.accepted.sampling.temperature == pytest.approx(0.7)
    assert result.accepted.sampling.typical_p == 1
    assert result.accepted.stop.max_tokens == 256
    assert list(result.accepted.stop.eos_token_ids) == [EOS]
    assert result.accepted.request_id == "mine"
    assert result.accepted.accept_time.seconds > 1_700_000_000
    assert result.prompt.prompt_tokens == 2
    assert choice.finished.timings.HasField("first_token_duration")


async def test_generate_stream_sends_one_message_a_step() -> None:
    async with serving(FakeEngine(script=says("abc"), auto=False)) as h:
        call = h.generation.GenerateStream(rpc.GenerateStreamRequest(spec=spec()))
        shapes = [kinds((await call.read()).events)]
        for _ in range(4):
            h.engine.step()
            shapes.append(kinds((await call.read()).events))
        assert await call.read() is grpc.aio.EOF
    assert shapes == [
        ["accepted"],
        ["prompt", "delta"],
        ["delta"],
        ["delta"],
        ["delta", "finished"],
    ]


async def test_stream_events_obey_the_laws() -> None:
    async with serving(FakeEngine(script=says("a longer text, in steps"), tokens_per_step=3)) as h:
        events = [event for message in await h.stream(spec()) for event in message.events]
    check_course(events)
    assert text_of(events) == "a longer text, in steps"
    assert ids_of(events) == [*b"a longer text, in steps", EOS]


@pytest.mark.parametrize(
    ("stop", "text", "reason", "tokens"),
    [
        ({"max_tokens": 3}, "Hel", pb.FINISH_REASON_LENGTH, 3),
        ({"max_tokens": 0}, "", pb.FINISH_REASON_LENGTH, 0),
        ({"stop_strings": ["lo wo"]}, "Hel", pb.FINISH_REASON_STOP, 8),
        ({"stop_strings": ["lo wo"], "include_stop": True}, "Hello wo", pb.FINISH_REASON_STOP, 8),
        ({"stop_strings": ["zzz", "rld!"]}, "Hello world", pb.FINISH_REASON_STOP, 12),
        ({"stop_strings": ["l"], "min_tokens": 6}, "Hello wor", pb.FINISH_REASON_STOP, 10),
        ({"stop_token_ids": [ord("o")]}, "Hell", pb.FINISH_REASON_STOP, 5),
        ({"stop_token_ids": [ord("o")], "include_stop": True}, "Hello", pb.FINISH_REASON_STOP, 5),
        ({"eos_token_ids": [ord(" ")]}, "Hello", pb.FINISH_REASON_STOP, 6),
        ({"ignore_eos": True, "max_tokens": 13}, "Hello worldH", pb.FINISH_REASON_LENGTH, 13),
    ],
)
@pytest.mark.parametrize("per_step", [1, 5])
async def test_how_a_request_stops(
    stop: dict[str, object], text: str, reason: int, tokens: int, per_step: int
) -> None:
    async with serving(FakeEngine(script=says("Hello world"), tokens_per_step=per_step)) as h:
        result = await h.generate(spec(stop=stop))
        events = [event for message in await h.stream(spec(stop=stop)) for event in message.events]
    choice = result.choices[0]
    assert choice.text == text
    assert choice.finished.reason == reason
    assert len(choice.token_ids) == tokens
    assert result.usage.completion_tokens == tokens
    assert text_of(events) == text
    assert len(ids_of(events)) == tokens
    check_course(events)


async def test_a_stop_string_ends_the_request_in_the_engine() -> None:
    async with serving(FakeEngine(script=says("one two three"), auto=False)) as h:
        call = asyncio.ensure_future(
            h.generate(spec(request_id="r", stop={"stop_strings": ["tw"]}))
        )
        await until(lambda: h.engine.num_live == 1)
        for _ in range(6):
            h.engine.step()
        await until(lambda: h.engine.finished)
        assert h.engine.finished[0][1] == 6
        h.engine.step()
        result = await call
        assert h.engine.num_live == 0
    assert result.choices[0].text == "one "
    assert result.choices[0].finished.stop_string == "tw"
    assert result.usage.completion_tokens == 6


async def test_tokens_behind_a_stop_string_are_dropped_and_the_reason_is_stop() -> None:
    """The engine reaches max_tokens before it hears of the stop string."""
    engine = FakeEngine(script=says("one two three"), tokens_per_step=8)
    async with serving(engine) as h:
        result = await h.generate(spec(stop={"stop_strings": ["e t"], "max_tokens": 8}))
    choice = result.choices[0]
    assert (choice.text, choice.finished.reason) == ("on", pb.FINISH_REASON_STOP)
    assert choice.finished.stop_string == "e t"
    assert list(choice.token_ids) == list(b"one t")
    assert result.usage.completion_tokens == 5


async def test_held_back_text_comes_with_the_end() -> None:
    async with serving(FakeEngine(script=says("say st"), auto=False)) as h:
        call = h.generation.GenerateStream(
            rpc.GenerateStreamRequest(spec=spec(stop={"stop_strings": ["stop"], "max_tokens": 6}))
        )
        await call.read()
        events = []
        for _ in range(6):
            h.engine.step()
            message = await call.read()
            events += message.events
        assert await call.read() is grpc.aio.EOF
    assert kinds(message.events) == ["delta", "finished"]
    assert text_of(events) == "say st"


async def test_characters_are_never_split() -> None:
    text = "aé€😀ß"
    async with serving(FakeEngine(script=says(text))) as h:
        messages = await h.stream(spec())
    deltas = [event.delta.text for m in messages for event in m.events]
    assert "".join(deltas) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in part for part in deltas)


async def test_an_unfinished_character_shows_at_the_end() -> None:
    async with serving(FakeEngine(script=says("a€".encode()[:3], eos=False))) as h:
        result = await h.generate(spec(stop={"max_tokens": 3}))
    assert result.choices[0].text == "a\N{REPLACEMENT CHARACTER}"


async def test_logprobs_and_details() -> None:
    async with serving(FakeEngine(script=says("ab"))) as h:
        result = await h.generate(spec(output={"logprobs": 2, "record_timestamps": True}))
        plain = await h.generate(spec(output={"token_details": True}))
        own = await h.generate(spec(output={"logprobs": 0}))
    tokens = result.choices[0].tokens
    assert [(t.id, t.text, t.bytes) for t in tokens[:2]] == [(97, "a", b"a"), (98, "b", b"b")]
    assert (tokens[2].text, tokens[2].bytes) == ("<eos>", b"<eos>")
    assert [(t.logprob, t.rank) for t in tokens] == [(-0.5, 1), (-1.0, 2), (-1.5, 3)]
    assert [(c.id, c.text, c.logprob) for c in tokens[0].candidates] == [
        (97, "a", -1.0),
        (98, "b", -2.0),
    ]
    assert all(t.HasField("elapsed_duration") for t in tokens)
    assert list(result.choices[0].token_ids) == [97, 98, EOS]
    token = plain.choices[0].tokens[0]
    assert not any(token.HasField(name) for name in ("logprob", "rank", "elapsed_duration"))
    assert own.choices[0].tokens[0].logprob == -0.5
    assert not own.choices[0].tokens[0].candidates


async def test_final_delivery_is_one_delta_before_the_end() -> None:
    async with serving(FakeEngine(script=says("abc"))) as h:
        messages = await h.stream(spec(output={"delivery": pb.DELIVERY_FINAL}))
    assert [kinds(m.events) for m in messages] == [["accepted"], ["prompt", "delta", "finished"]]
    assert messages[1].events[1].delta.text == "abc"


async def test_min_tokens_per_delta() -> None:
    async with serving(FakeEngine(script=says("abcdefgh"))) as h:
        messages = await h.stream(spec(output={"min_tokens_per_delta": 4}))
    events = [event for message in messages for event in message.events]
    sizes = [len(e.delta.token_ids) for e in events if e.WhichOneof("event") == "delta"]
    assert all(size >= 4 for size in sizes[:-1])
    assert sum(sizes) == 9
    check_course(events)


async def test_echo_omit_text_and_special_tokens() -> None:
    async with serving(FakeEngine(script=says("abc"))) as h:
        echo = await h.generate(spec("Pré ", output={"echo": True}))
        omitted = await h.generate(spec(output={"omit_text": True}))
        special = await h.generate(
            spec(output={"skip_special_tokens": False}, stop={"include_stop": True})
        )
    assert echo.choices[0].text == "Pré abc"
    assert (omitted.choices[0].text, len(omitted.choices[0].token_ids)) == ("", 4)
    assert special.choices[0].text == "abc<eos>"


class EagerEngine(FakeEngine):
    """Its outputs, the end among them, reach the sink before `submit` returns."""

    async def submit(self, request: GenerationRequest) -> Admission:
        admission = await super().submit(request)
        self.run()
        return admission


async def test_outputs_may_come_before_the_admission() -> None:
    async with serving(EagerEngine(script=says("abc"), auto=False)) as h:
        events = [event for message in await h.stream(spec()) for event in message.events]
        session = h.session()
        await session.add(spec(request_id="a"))
        await session.end()
        added = rpc.AddRequestRequest(spec=spec(request_id="b"))
        await h.generation.AddRequest(added)
        kept = await h.generation.GetResult(rpc.GetResultRequest(request_id="b"))
        assert list(h.registry.requests) == [("anonymous", "b")]
        assert h.registry.live == h.registry.stats().streamed_requests == 0
    for run in (events, session.events()["a"], list(kept.events)):
        check_course(run)
        assert text_of(run) == "abc"


async def test_very_large_results_come_in_pieces() -> None:
    """2,000 tokens with 128 candidates each: some 15 MB, beyond what clients receive at once."""
    output = {"logprobs": 128, "delivery": pb.DELIVERY_FINAL}
    wanted = spec(request_id="a", output=output, stop={"max_tokens": 2000})
    async with serving(FakeEngine(script=says("x", eos=False), tokens_per_step=500)) as h:
        await h.generation.AddRequest(rpc.AddRequestRequest(spec=wanted))
        events: list[pb.ResultEvent] = []
        done = False
        while not done:
            part = await h.generation.GetResult(
                rpc.GetResultRequest(
                    request_id="a",
                    from_seq=len(events) + 1,
                    until_done=True,
                    wait={"seconds": 10},
                )
            )
            assert part.ByteSize() < 4 << 20
            events += part.events
            assert part.next_seq == len(events) + 1
            done = part.done
        session = h.session()
        await session.send(attach=rpc.AttachCommand(request_id="a"))
        messages = await session.end()
    assert all(message.ByteSize() < 4 << 20 for message in messages)
    assert session.events()["a"] == events
    check_course(events)
    assert len(ids_of(events)) == 2000


@pytest.mark.parametrize("n", [1, 8])
async def test_a_large_result_of_generate_is_taken_in_parts(n: int) -> None:
    """It is larger than what a stream takes at once, and smaller than what clients receive."""
    wanted = spec(n=n, output={"logprobs": 48 // n}, stop={"max_tokens": 2000})
    async with serving(FakeEngine(tokens_per_step=500)) as h:
        answer = await h.generate(wanted)
        [request] = h.engine.submitted
        assert 1 << 20 < answer.ByteSize() < 4 << 20
        for index, choice in enumerate(answer.choices):
            oracle = list(default_script(request, index))[:2000]
            assert [token.id for token in choice.tokens] == oracle
            assert choice.finished.reason == pb.FINISH_REASON_LENGTH


async def test_inputs() -> None:
    chat = {
        "messages": [
            {"role": pb.CHAT_ROLE_SYSTEM, "content": "be"},
            {"role": pb.CHAT_ROLE_USER, "content": "hi"},
        ]
    }
    async with serving(FakeEngine(script=says("x"))) as h:
        await h.generate(spec(tokens={"ids": [1, 2, 3]}))
        await h.generate(spec(chat=chat))
        await h.generate(spec("0123456789", truncation={"max_prompt_tokens": 4}))
        right = {"max_prompt_tokens": 4, "side": pb.TRUNCATION_SIDE_RIGHT}
        await h.generate(spec("0123456789", truncation=right))
        long = "x" * 9000
        await h.generate(spec(long, truncation={"max_prompt_tokens": 2000}))
        prompts = [bytes(request.prompt) for request in h.engine.submitted]
    assert prompts[:4] == [b"\x01\x02\x03", b"[system]be[user]hi[assistant]", b"6789", b"0123"]
    assert len(prompts[4]) == 2000


async def test_no_chat_template() -> None:
    async with serving(tokenizer=byte_tokenizer(chat_template=None)) as h:
        chat = {"messages": [{"role": pb.CHAT_ROLE_USER, "content": "hi"}]}
        error = await refused(h.generate(spec(chat=chat)))
    assert (error.code, error.reason) == (
        grpc.StatusCode.FAILED_PRECONDITION,
        "NO_CHAT_TEMPLATE",
    )


async def test_context_and_default_max_tokens() -> None:
    async with serving(FakeEngine(script=says("x", eos=False)), default_max_tokens=10) as h:
        assert (await h.generate(spec())).usage.completion_tokens == 10
        near = await h.generate(spec("p" * 2043))
        assert near.accepted.stop.max_tokens == 5
        full = await h.generate(spec("p" * 2043, stop={"max_tokens": 100}))
    assert full.usage.completion_tokens == 5
    assert full.choices[0].finished.reason == pb.FINISH_REASON_CONTEXT


async def test_absent_seeds_differ_and_time_limits_pass() -> None:
    async with serving(FakeEngine(script=says("x")), default_time_limit_s=5) as h:
        for limit in ({}, {"scheduling": {"time_limit": {"seconds": 1, "nanos": 500_000_000}}}):
            await h.generate(spec(**limit))
        first, second = h.engine.submitted
    assert first.sampling.seed != second.sampling.seed
    assert (first.time_limit_s, second.time_limit_s) == (5, 1.5)


async def test_cancelling_the_rpc_cancels_the_request() -> None:
    async with serving(FakeEngine(auto=False)) as h:
        for start in (
            lambda: h.generation.Generate(rpc.GenerateRequest(spec=spec(request_id="a"))),
            lambda: h.generation.GenerateStream(
                rpc.GenerateStreamRequest(spec=spec(request_id="a"))
            ),
        ):
            call = start()
            reading = asyncio.ensure_future(call.read() if hasattr(call, "read") else call)
            await until(lambda: h.engine.num_live == 1)
            count = len(h.engine.cancelled)
            call.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            await until(lambda count=count: len(h.engine.cancelled) > count)
            h.engine.step()
            await until(lambda: h.engine.num_live == 0 and h.registry.live == 0)


async def test_a_deadline_cancels_the_request() -> None:
    async with serving(FakeEngine(auto=False)) as h:
        call = h.generation.Generate(rpc.GenerateRequest(spec=spec()), timeout=1.0)
        error = await refused(call)
        assert error.code is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: h.engine.cancelled)


async def test_a_failure_is_an_event_and_the_status() -> None:
    for retryable, code in (
        (False, grpc.StatusCode.INTERNAL),
        (True, grpc.StatusCode.UNAVAILABLE),
    ):
        async with serving(FakeEngine(script=says("abc"), auto=False)) as h:
            call = h.generation.GenerateStream(rpc.GenerateStreamRequest(spec=spec()))
            await call.read()
            h.engine.step()
            await call.read()
            failure = RequestFailure("it broke", "e-1", retryable)
            h.engine.fail(h.engine.submitted[0].request_id, failure)
            h.engine.step()
            events = (await call.read()).events
            assert kinds(events) == ["failed"]
            assert events[0].failed.status.code == code.value[0]
            error = await refused(call.read())
            assert error.code is code
            assert error.details["ErrorInfo"].metadata["error_id"] == "e-1"

            whole = asyncio.ensure_future(h.generate(spec()))
            await until(lambda: h.engine.num_live == 1)
            h.engine.fail(h.engine.submitted[1].request_id, failure)
            h.engine.step()
            assert (await refused(whole)).code is code


async def test_a_form_that_fails_late_is_the_callers_to_change() -> None:
    async with serving(FakeEngine(script=says("abc"), auto=False)) as h:
        call = h.generation.GenerateStream(rpc.GenerateStreamRequest(spec=spec()))
        await call.read()
        what = "takes too long to follow"
        failure = RequestFailure(f"grammar.grammar: {what}", "e-1", field="grammar.grammar")
        h.engine.fail(h.engine.submitted[0].request_id, failure)
        h.engine.step()
        events = (await call.read()).events
        assert kinds(events) == ["failed"]
        error = await refused(call.read())
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
    assert error.details["ErrorInfo"].metadata["field"] == "structured_output.grammar"
    assert error.details["ErrorInfo"].metadata["error_id"] == "e-1"
    assert error.details["BadRequest"].field_violations[0].field == "structured_output.grammar"
    assert error.details["BadRequest"].field_violations[0].description == what
    assert error.message == f"structured_output.grammar: {what}"


async def test_an_unexpected_error_is_told_by_its_id_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving() as h:
        h.engine.refuse_next.append(RuntimeError("the secret inside"))
        error = await refused(h.generate(spec()))
        assert (await h.generate(spec(stop={"max_tokens": 1}))).usage.completion_tokens == 1
    assert (error.code, error.reason) == (grpc.StatusCode.INTERNAL, "INTERNAL")
    assert "secret" not in str(error.status)
    assert error.details["ErrorInfo"].metadata["error_id"] in caplog.text
    assert "the secret inside" in caplog.text


async def test_a_full_queue_of_forms_is_want_of_room() -> None:
    from engine.contract.errors import CompileQueueFullError

    async with serving() as h:
        h.engine.refuse_next.append(CompileQueueFullError(64, 0.25, 63))
        error = await refused(h.generate(spec()))
    assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "COMPILE_QUEUE_FULL")
    assert dict(error.details["ErrorInfo"].metadata) == {
        "limit": "max_waiting_forms",
        "max_waiting_forms": "64",
        "present": "63",
    }
    assert error.details["RetryInfo"].retry_delay.ToMilliseconds() == 250
    assert error.trailers["grpc-retry-pushback-ms"] == "250"


async def test_queue_full_tells_when_to_retry() -> None:
    from engine.contract.errors import QueueFullError

    async with serving() as h:
        h.engine.refuse_next.append(QueueFullError(3, 0.25))
        error = await refused(h.generate(spec()))
    assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
    assert error.details["RetryInfo"].retry_delay.ToMilliseconds() == 250
    assert error.trailers["grpc-retry-pushback-ms"] == "250"
