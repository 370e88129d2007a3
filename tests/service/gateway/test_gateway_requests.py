"""`vllm.grpc.engine.VllmEngine/Generate` and Abort, as gateways call them: over real gRPC, with
answers worked out by hand.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import grpc
import pytest
from google.protobuf.message import DecodeError

from engine.contract.outputs import RequestFailure
from engine.contract.sampling_params import GrammarKind, LogprobParams, SamplingParams
from service.gateway.generate_request import generation
from tests.service.fake_engine import EOS, FakeEngine, model_info, says
from tests.service.gateway_stub import (
    NAME,
    answers,
    asks,
    chunks_of,
    common,
    completes,
    failed,
    gateway,
    pb,
)
from tests.service.helpers import refused, until


async def test_a_stream_has_chunks_and_a_complete() -> None:
    async with gateway(FakeEngine(script=says("abcd"), auto=False, tokens_per_step=2)) as (h, stub):
        call = stub.Generate(asks("prompt", stream=True))
        await until(lambda: h.engine.num_live)
        found = []
        while h.engine.step():
            found.append(await call.read())
        found.append(await call.read())
        assert await call.read() is grpc.aio.EOF
    chunks = chunks_of(found)
    assert [list(chunk.token_ids) for chunk in chunks] == [[*b"ab"], [*b"cd"], [EOS]]
    assert [chunk.completion_tokens for chunk in chunks] == [2, 2, 1]  # of each chunk
    assert {chunk.prompt_tokens for chunk in chunks} == {6}
    [complete] = completes(found)
    assert found[-1].complete == complete
    assert list(complete.output_ids) == [*b"abcd", EOS]
    assert complete.finish_reason == "stop"
    assert complete.WhichOneof("matched_stop") is None  # an end of sequence is no stop of theirs
    assert (complete.prompt_tokens, complete.completion_tokens) == (6, 5)
    assert not chunks[0].HasField("output_logprobs")


async def test_a_whole_answer_is_one_complete() -> None:
    async with gateway(FakeEngine(script=says("abcd"))) as (h, stub):
        await answers(stub, asks("prompt and more of it"))
        [found] = await answers(stub, asks("prompt and more of it"))
        assert h.registry.live == 0
    assert list(found.complete.output_ids) == [*b"abcd", EOS]
    assert (found.complete.prompt_tokens, found.complete.completion_tokens) == (21, 5)
    assert found.complete.cached_tokens == 20


async def test_choices_are_told_apart() -> None:
    async with gateway(FakeEngine(script=says("one", "three", "2"))) as (_, stub):
        streamed = await answers(stub, asks(stream=True, sampling={"n": 3}))
        whole = await answers(stub, asks(sampling={"n": 3}))
    texts = ["one", "three", "2"]
    for index, text in enumerate(texts):
        ids = [token for chunk in chunks_of(streamed, index) for token in chunk.token_ids]
        assert ids == [*text.encode(), EOS]
    for found in (streamed, whole):
        told = [(one.index, bytes(one.output_ids[:-1]).decode()) for one in completes(found)]
        assert sorted(told) == list(enumerate(texts))


async def test_every_parameter_reaches_the_engine() -> None:
    async with gateway() as (h, stub):
        await answers(
            stub,
            asks(
                "abcdef",
                request_id="chatcmpl-1",
                sampling={
                    "temperature": 0.5,
                    "top_p": 0.75,
                    "top_k": 7,
                    "min_p": 0.125,
                    "frequency_penalty": 0.5,
                    "presence_penalty": -0.5,
                    "repetition_penalty": 1.5,
                    "max_tokens": 9,
                    "min_tokens": 2,
                    "stop": ["zzzz"],
                    "stop_token_ids": [1, 2],
                    "ignore_eos": True,
                    "n": 2,
                    "logprobs": 3,
                    "prompt_logprobs": 4,
                    "seed": -2,
                    "logit_bias": {5: 2.5},
                    "truncate_prompt_tokens": 4,
                    "json_schema": "{}",
                },
            ),
        )
    [request] = h.engine.submitted
    assert "chatcmpl-1" in request.request_id
    assert bytes(request.prompt) == b"cdef"  # the last ones
    assert request.n == 2
    assert request.sampling == SamplingParams(
        temperature=0.5,
        top_p=0.75,
        top_k=7,
        min_p=0.125,
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        repetition_penalty=1.5,
        seed=2**32 - 2,
        logit_bias=((5, 2.5),),  # type: ignore[arg-type]
    )
    stop = request.stop
    assert (stop.max_tokens, stop.min_tokens, stop.ignore_eos) == (9, 2, True)
    assert list(stop.stop_token_ids) == [1, 2]
    assert request.logprobs == LogprobParams(top_n=3)
    assert request.prompt_logprobs == 4
    assert request.grammar is not None
    assert (request.grammar.kind, request.grammar.text) == (GrammarKind.JSON_SCHEMA, "{}")


async def test_what_is_left_out_is_the_models_own() -> None:
    default = SamplingParams(temperature=0.75, top_p=0.5, top_k=3, repetition_penalty=1.25)
    async with gateway(FakeEngine(info=model_info(default_sampling=default))) as (h, stub):
        await answers(stub, asks(sampling={"top_p": 0, "repetition_penalty": 0}))
        await answers(stub, pb.GenerateRequest(tokenized={"input_ids": b"hi"}))
        info = await stub.GetModelInfo(pb.GetModelInfoRequest())
    first, second = (request.sampling for request in h.engine.submitted)
    assert (first.temperature, first.top_p, first.repetition_penalty) == (0.75, 0.5, 1.25)
    assert (first.top_k, second.top_k) == (0, 3)  # 0 is a value: all tokens
    assert h.engine.submitted[0].stop.max_tokens == 256
    told = json.loads(info.default_sampling_params_json)
    assert told == {
        "temperature": 0.75,
        "top_p": 0.5,
        "top_k": 3,
        "min_p": 0.0,
        "repetition_penalty": 1.25,
    }


@pytest.mark.parametrize(
    ("constraint", "kind", "text"),
    [
        ({"json_schema": '{"type": "object"}'}, GrammarKind.JSON_SCHEMA, '{"type": "object"}'),
        ({"regex": "a+"}, GrammarKind.REGEX, "a+"),
        ({"grammar": 'start: "a"'}, GrammarKind.LARK, 'start: "a"'),
        ({"json_object": True}, GrammarKind.JSON_OBJECT, ""),
        ({"choice": {"choices": ["a", "b"]}}, GrammarKind.CHOICE, ""),
    ],
)
async def test_constraints(constraint: dict[str, Any], kind: GrammarKind, text: str) -> None:
    async with gateway() as (h, stub):
        sampling = {"max_tokens": 1, "grammar_from_first_token": True, **constraint}
        await answers(stub, asks(sampling=sampling))
    grammar = h.engine.submitted[0].grammar
    assert grammar is not None
    assert (grammar.kind, grammar.text) == (kind, text)
    assert grammar.choices == (("a", "b") if kind is GrammarKind.CHOICE else ())


async def test_text_becomes_tokens_here() -> None:
    async with gateway() as (h, stub):
        await answers(stub, asks(text="héllo", sampling={"max_tokens": 1}))
        sampling = {"max_tokens": 1, "truncate_prompt_tokens": 2}
        await answers(stub, asks(text="abc", sampling=sampling))
        sampling["truncate_prompt_tokens"] = -1
        await answers(stub, asks("x" * 5000, sampling=sampling))
    prompts = [bytes(request.prompt) for request in h.engine.submitted]
    assert prompts == ["héllo".encode(), b"bc", b"x" * 2047]


async def test_log_probabilities() -> None:
    async with gateway(FakeEngine(script=says("ab", eos=False))) as (_, stub):
        sampling = {"max_tokens": 2, "logprobs": 2, "prompt_logprobs": 1}
        streamed = await answers(stub, asks("xyz", stream=True, sampling=sampling))
        [whole] = await answers(stub, asks("xyz", sampling=sampling))
        [alone] = await answers(stub, asks("xyz", sampling={"max_tokens": 2, "logprobs": 0}))
    first, second = chunks_of(streamed)
    assert list(first.output_logprobs.token_ids) == [ord("a")]
    assert list(first.output_logprobs.token_logprobs) == [-0.5]
    assert list(first.output_logprobs.top_logprobs[0].token_ids) == [97, 98]
    assert list(first.output_logprobs.top_logprobs[0].values) == [-1.0, -2.0]
    assert list(second.output_logprobs.token_logprobs) == [-1.0]
    inputs = first.input_logprobs
    assert list(inputs.token_ids) == [*b"xyz"]
    assert [one.HasField("value") for one in inputs.token_logprobs] == [False, True, True]
    assert [len(one.token_ids) for one in inputs.top_logprobs] == [0, 1, 1]
    assert not second.HasField("input_logprobs")
    [complete] = completes(streamed)
    assert not complete.HasField("output_logprobs")  # they came with the chunks
    assert not complete.HasField("input_logprobs")
    logprobs = whole.complete.output_logprobs
    assert list(logprobs.token_ids) == [*b"ab"]
    assert list(logprobs.token_logprobs) == [-0.5, -1.0]
    assert len(logprobs.top_logprobs) == 2
    assert whole.complete.input_logprobs == inputs
    assert list(alone.complete.output_logprobs.token_logprobs) == [-0.5, -1.0]
    assert not alone.complete.output_logprobs.top_logprobs


@pytest.mark.parametrize(
    ("sampling", "ids", "reason", "matched"),
    [
        ({"max_tokens": 3}, b"Hel", "length", None),
        ({"stop": ["lo", "x"]}, b"Hello", "stop", ("matched_stop_str", "lo")),
        (
            {"stop": ["lo"], "include_stop_str_in_output": True},
            b"Hello",
            "stop",
            ("matched_stop_str", "lo"),
        ),
        ({"stop_token_ids": [ord("l")]}, b"Hel", "stop", ("matched_token_id", ord("l"))),
    ],
)
async def test_ends(sampling: dict[str, Any], ids: bytes, reason: str, matched: Any) -> None:
    async with gateway(FakeEngine(script=says("Hello world"))) as (_, stub):
        for stream in (True, False):
            [complete] = completes(await answers(stub, asks(stream=stream, sampling=sampling)))
            assert bytes(complete.output_ids) == ids
            assert complete.completion_tokens == len(ids)
            assert complete.finish_reason == reason
            kind = complete.WhichOneof("matched_stop")
            assert (kind and (kind, getattr(complete, kind))) == matched


def test_no_text_is_made_unless_it_is_searched() -> None:
    assert generation(asks(), 2048).spec.output.omit_text
    searched = generation(asks(sampling={"stop": ["!"], "skip_special_tokens": True}), 2048).spec
    assert not searched.output.omit_text
    assert searched.output.skip_special_tokens


@pytest.mark.parametrize(
    ("fields", "path", "code"),
    [
        ({"sampling": {"top_p": 2}}, "sampling_params.top_p", "INVALID_ARGUMENT"),
        ({"sampling": {"temperature": -1}}, "sampling_params.temperature", "INVALID_ARGUMENT"),
        ({"sampling": {"n": 17}}, "sampling_params.n", "INVALID_ARGUMENT"),
        ({"sampling": {"logprobs": -1}}, "sampling_params.logprobs", "INVALID_ARGUMENT"),
        ({"sampling": {"logprobs": 129}}, "sampling_params.logprobs", "INVALID_ARGUMENT"),
        (
            {"sampling": {"prompt_logprobs": -1}},
            "sampling_params.prompt_logprobs",
            "INVALID_ARGUMENT",
        ),
        (
            {"sampling": {"prompt_logprobs": 500}},
            "sampling_params.prompt_logprobs",
            "INVALID_ARGUMENT",
        ),
        ({"sampling": {"stop": ["x" * 500]}}, "sampling_params.stop[0]", "INVALID_ARGUMENT"),
        ({"sampling": {"stop": ["x"] * 17}}, "sampling_params.stop", "INVALID_ARGUMENT"),
        (
            {"sampling": {"stop_token_ids": [1] * 257}},
            "sampling_params.stop_token_ids",
            "INVALID_ARGUMENT",
        ),
        (
            {"sampling": {"stop_token_ids": [1, 5000]}},
            "sampling_params.stop_token_ids[1]",
            "INVALID_ARGUMENT",
        ),
        (
            {"sampling": {"logit_bias": {-1: 1.0}}},
            "sampling_params.logit_bias[-1]",
            "INVALID_ARGUMENT",
        ),
        (
            {"sampling": {"logit_bias": {5000: 1.0}}},
            "sampling_params.logit_bias[5000]",
            "INVALID_ARGUMENT",
        ),
        (
            {"sampling": {"min_tokens": 5, "max_tokens": 1}},
            "sampling_params.min_tokens",
            "INVALID_ARGUMENT",
        ),
        (
            {"sampling": {"truncate_prompt_tokens": -2}},
            "sampling_params.truncate_prompt_tokens",
            "INVALID_ARGUMENT",
        ),
        ({"sampling": {"json_schema": "{"}}, "sampling_params.json_schema", "INVALID_ARGUMENT"),
        ({"sampling": {"json_object": False}}, "sampling_params.json_object", "INVALID_ARGUMENT"),
        ({"sampling": {"choice": {}}}, "sampling_params.choice", "INVALID_ARGUMENT"),
        ({"tokenized": {"input_ids": []}}, "tokenized.input_ids", "INVALID_ARGUMENT"),
        ({"tokenized": {"input_ids": [1] * 2048}}, "tokenized.input_ids", "INVALID_ARGUMENT"),
        ({"tokenized": {"input_ids": [1] * 9999}}, "tokenized.input_ids", "INVALID_ARGUMENT"),
        ({"tokenized": {"input_ids": [1, 258]}}, "tokenized.input_ids[1]", "INVALID_ARGUMENT"),
        ({"text": ""}, "text", "INVALID_ARGUMENT"),
        ({"request_id": "no blanks"}, "request_id", "INVALID_ARGUMENT"),
        ({"data_parallel_rank": 1}, "data_parallel_rank", "INVALID_ARGUMENT"),
        ({"kv_transfer_params": {}}, "kv_transfer_params", "UNIMPLEMENTED"),
        ({"kv_transfer_params_json": "{}"}, "kv_transfer_params_json", "UNIMPLEMENTED"),
        ({"mm_inputs": {}}, "mm_inputs", "UNIMPLEMENTED"),
        ({"extra_mm_inputs": [{}]}, "extra_mm_inputs", "UNIMPLEMENTED"),
        ({"media_refs": {}}, "media_refs", "UNIMPLEMENTED"),
    ],
)
async def test_refusals_have_the_protocols_names(
    fields: dict[str, Any], path: str, code: str
) -> None:
    async with gateway() as (h, stub):
        error = await failed(stub, asks(**fields))
        assert (error.code.name, error.field) == (code, path)
        assert error.message.startswith(f"{path}: ")
        assert "spec." not in error.message
        assert not h.engine.submitted
        assert (await answers(stub, asks(data_parallel_rank=0)))[0].complete.output_ids
        assert h.registry.live == 0


async def test_an_input_is_needed() -> None:
    async with gateway() as (_, stub):
        assert (await failed(stub, pb.GenerateRequest())).field == "input"


async def test_a_model_without_a_tokenizer_takes_token_ids() -> None:
    async with gateway(has_tokenizer=False) as (_, stub):
        [answer] = await answers(stub, asks(sampling={"max_tokens": 3, "logprobs": 1}))
        assert len(answer.complete.output_ids) == 3
        for fields, path in (
            ({"sampling": {"stop": ["a"]}}, "sampling_params.stop"),
            ({"sampling": {"regex": "a"}}, "sampling_params"),
            ({"text": "a"}, "text"),
        ):
            error = await failed(stub, asks(**fields))
            assert (error.code.name, error.field) == ("UNIMPLEMENTED", path)
        error = await refused(stub.GetTokenizer(common.GetTokenizerRequest()).read())
        assert error.reason == "NO_TOKENIZER"


async def test_a_grammar_that_fails_late_is_named_as_sent() -> None:
    async with gateway(FakeEngine(auto=False)) as (h, stub):
        call = stub.Generate(asks(stream=True, sampling={"regex": "a+"}))
        await until(lambda: h.engine.num_live)
        failure = RequestFailure("grammar.regex: takes too long", "id", field="grammar.regex")
        h.engine.fail(h.engine.submitted[0].request_id, failure)
        h.engine.run()
        error = await refused(call.read())
        assert (error.code.name, error.field) == ("INVALID_ARGUMENT", "sampling_params.regex")
        assert "structured_output" not in error.message


async def test_a_dead_engine_ends_the_stream_as_retryable() -> None:
    async with gateway(FakeEngine(auto=False)) as (h, stub):
        call = stub.Generate(asks(stream=True))
        await until(lambda: h.engine.num_live)
        h.engine.step()
        assert (await call.read()).chunk.token_ids
        h.engine.die(RuntimeError("gone"))
        error = await refused(call.read())
        assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "ENGINE_STOPPED")
        assert "RetryInfo" in error.details


async def test_admission_refuses_with_a_delay() -> None:
    async with gateway(FakeEngine(auto=False), max_open_requests=1) as (h, stub):
        call = stub.Generate(asks(stream=True))
        await until(lambda: h.engine.num_live)
        error = await failed(stub, asks())
        assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "RetryInfo" in error.details
        call.cancel()
        await until(lambda: h.engine.cancelled)


async def test_an_answer_too_large_for_a_message_says_so() -> None:
    info = model_info(max_context_tokens=1 << 15)
    engine = FakeEngine(script=says("x", eos=False), info=info, tokens_per_step=1000)
    limits = {"max_send_bytes": 4 << 20, "max_undelivered_bytes": 0}
    async with gateway(engine, **limits) as (_, stub):
        sampling = {"max_tokens": 8000, "logprobs": 128}
        error = await failed(stub, asks(sampling=sampling))
        assert (error.code.name, error.reason) == ("OUT_OF_RANGE", "ANSWER_TOO_LARGE")
        assert "set stream" in error.message
        found = await answers(stub, asks(stream=True, sampling=sampling))
        assert sum(len(chunk.token_ids) for chunk in chunks_of(found)) == 8000


# Ending requests


async def test_abort_ends_a_stream_and_may_be_repeated() -> None:
    async with gateway(FakeEngine(auto=False)) as (h, stub):
        call = stub.Generate(asks(request_id="mine", stream=True))
        await until(lambda: h.engine.num_live)
        h.engine.step()
        assert (await call.read()).chunk.token_ids
        for _ in range(2):
            await stub.Abort(pb.AbortRequest(request_ids=["mine", "no such one", ""]))
        h.engine.run()
        assert (await call.read()).complete.finish_reason == "abort"
        assert await call.read() is grpc.aio.EOF
        await stub.Abort(pb.AbortRequest(request_ids=["mine"]))
        error = await refused(stub.Abort(pb.AbortRequest(request_ids=["x"] * 1025)))
        assert error.field == "request_ids"


async def test_a_lost_call_ends_its_request_and_frees_its_id() -> None:
    async with gateway(FakeEngine(auto=False)) as (h, stub):
        for _ in range(2):
            before = len(h.engine.cancelled)
            call = stub.Generate(asks(request_id="again"))
            await until(lambda: h.engine.num_live)
            call.cancel()
            await until(lambda before=before: len(h.engine.cancelled) > before)
            await stub.Abort(pb.AbortRequest(request_ids=["again"]))  # comes afterwards
            h.engine.run()
            assert h.engine.num_live == 0
        await until(lambda: h.registry.live == 0)


# Hostile messages


@pytest.mark.parametrize(
    ("request_of", "path"),
    [
        (lambda: asks(extra_mm_inputs=[{}] * 20_000), "extra_mm_inputs"),
        (lambda: asks(media_refs={"items": [{}] * 20_000}), "media_refs.items"),
        (
            lambda: asks(mm_inputs={"model_specific_tensors": {str(i): {} for i in range(20_000)}}),
            "mm_inputs.model_specific_tensors",
        ),
        (
            lambda: asks(mm_inputs={"flat_keys": {str(i): "" for i in range(20_000)}}),
            "mm_inputs.flat_keys",
        ),
        (lambda: asks(sampling={"stop": [""] * 100_000}), "sampling_params.stop"),
        (
            lambda: asks(sampling={"choice": {"choices": ["a"] * 100_000}}),
            "sampling_params.choice",
        ),
        (
            lambda: asks(sampling={"logit_bias": dict.fromkeys(range(10000), 1.0)}),
            "sampling_params.logit_bias",
        ),
        (lambda: asks(tokenized={"input_ids": [1] * 900_000}), "tokenized.input_ids"),
        (lambda: pb.AbortRequest(request_ids=[""] * 100_000), "request_ids"),
    ],
)
async def test_long_lists_are_counted_before_they_are_walked(
    request_of: Any, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with gateway() as (h, stub):
        request = request_of()
        if isinstance(request, pb.AbortRequest):
            error = await refused(stub.Abort(request))
        else:
            error = await failed(stub, request)
        assert (error.code.name, error.field) == ("INVALID_ARGUMENT", path)
        assert not h.engine.submitted


async def test_bytes_of_any_kind_do_no_harm(caplog: pytest.LogCaptureFixture) -> None:
    source = random.Random(7)
    valid = asks(
        request_id="m",
        stream=True,
        sampling={"max_tokens": 2, "logprobs": 1, "stop": ["a"], "n": 2},
    ).SerializeToString()
    seen: Counter[str] = Counter()
    async with gateway() as (h, _):
        generate = h.channel.unary_stream(f"/{NAME}/Generate")
        for number in range(300):
            raw = bytearray(valid) if number % 3 else bytearray(source.randbytes(30))
            raw[source.randrange(len(raw))] = source.randrange(256)
            if number % 4 == 0:
                raw = raw[: source.randint(0, len(raw))]
            code = "OK"
            try:
                async for _ in generate(bytes(raw)):
                    pass
            except grpc.aio.AioRpcError as error:
                code = error.code().name
            try:
                pb.GenerateRequest.FromString(bytes(raw))
            except DecodeError:
                assert code == "INVALID_ARGUMENT"
            else:
                assert code in ("OK", "INVALID_ARGUMENT", "UNIMPLEMENTED"), bytes(raw)
            seen[code] += 1
        assert min(seen["OK"], seen["INVALID_ARGUMENT"]) > 10, seen
        await until(lambda: h.registry.live == 0)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
