"""Every field that is refused: the code, the path, and what to change."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from headrace._capabilities import with_capabilities
from headrace.v1 import generation_pb2 as pb
from headrace.v1 import generation_service_pb2 as rpc
from headrace.v1 import model_service_pb2 as model

from tests.service.fake_engine import FakeEngine, byte_tokenizer, model_info, says
from tests.service.helpers import Harness, refused, serving, spec, text_of

USER = {"role": pb.CHAT_ROLE_USER, "content": "hi"}


def said_with(*parts: dict[str, Any]) -> dict[str, Any]:
    """A conversation of one message with these parts."""
    message = {"role": pb.CHAT_ROLE_USER, "content_parts": {"parts": parts}}
    return {"chat": {"messages": [message]}}


def with_call(**call: Any) -> dict[str, Any]:
    """A conversation whose second message has a call of a tool."""
    message = {"role": pb.CHAT_ROLE_ASSISTANT, "tool_calls": [{"name": "f"}, call]}
    return {"chat": {"messages": [USER, message]}}


def with_tool(**tool: Any) -> dict[str, Any]:
    """A conversation with a second tool."""
    return {"chat": {"messages": [USER], "tools": [{"name": "f"}, tool]}}


UNSUPPORTED = {
    "adapter": {"adapter": "lora"},
    "chat.messages[0].content_parts.parts[1].image": said_with({"text": "a"}, {"image": {}}),
    "chat.messages[0].content_parts.parts[0].audio": said_with({"audio": {"data": b"x"}}),
    "chat.messages[0].content_parts.parts[0].video": said_with({"video": {"uri": "x"}}),
}

INVALID = [
    ("request_id", {"request_id": "with blank"}),
    ("request_id", {"request_id": "x" * 129}),
    ("text.text", {"text": ""}),
    ("text.text", {"text": "x" * 2048}),
    ("tokens.ids", {"tokens": {}}),
    ("tokens.ids[1]", {"tokens": {"ids": [1, 258]}}),
    ("chat.messages", {"chat": {}}),
    ("chat.messages[0].role", {"chat": {"messages": [{"content": "hi"}]}}),
    ("chat.messages[0].tool_call_id", {"chat": {"messages": [{**USER, "tool_call_id": "x"}]}}),
    ("chat.tools[0].name", {"chat": {"messages": [USER], "tools": [{}]}}),
    ("chat.tools[1].name", with_tool(parameters_json="{}")),
    ("chat.tools[1].parameters_json", with_tool(name="g", parameters_json="[]")),
    ("chat.tools[1].definition_json", with_tool(definition_json='"f"')),
    ("chat.tools[1].definition_json", with_tool(definition_json="{}", name="g")),
    ("chat.tools[1].definition_json", with_tool(definition_json="{}", description="")),
    ("chat.tools[1].definition_json", with_tool(definition_json="{}", parameters_json="{}")),
    ("chat.messages[1].tool_calls[1].name", with_call(arguments_json="{}")),
    ("chat.messages[1].tool_calls[1].arguments_json", with_call(name="f", arguments_json="{")),
    ("chat.messages[1].tool_calls[1].arguments_json", with_call(name="f", arguments_json="3")),
    (
        "chat.messages[1].tool_calls[1].arguments_json",
        with_call(name="f", arguments_json='{"a":' + "[" * 64 + "]" * 64 + "}"),
    ),
    ("chat.messages[0].content_parts.parts", said_with()),
    ("chat.messages[0].content_parts.parts[1]", said_with({"text": "a"}, {})),
    (
        "chat.template_arguments_json.messages",
        {"chat": {"messages": [USER], "template_arguments_json": '{"messages": "x"}'}},
    ),
    (
        "chat.template_arguments_json",
        {"chat": {"messages": [USER], "template_arguments_json": '{"x": Infinity}'}},
    ),
    (
        "chat.continue_final_message",
        {
            "chat": {
                "messages": [USER],
                "add_generation_prompt": True,
                "continue_final_message": True,
            }
        },
    ),
    ("sampling.temperature", {"sampling": {"temperature": -1}}),
    ("sampling.temperature", {"sampling": {"temperature": math.nan}}),
    ("sampling.temperature", {"sampling": {"temperature": math.inf}}),
    ("sampling.top_p", {"sampling": {"top_p": 0}}),
    ("sampling.min_p", {"sampling": {"min_p": 1.5}}),
    ("sampling.repetition_penalty", {"sampling": {"repetition_penalty": 0}}),
    ("sampling.presence_penalty", {"sampling": {"presence_penalty": 2.5}}),
    ("sampling.frequency_penalty", {"sampling": {"frequency_penalty": -math.inf}}),
    ("sampling.logit_bias[300]", {"sampling": {"logit_bias": {300: 1.0}}}),
    ("sampling.logit_bias[3]", {"sampling": {"logit_bias": {3: math.nan}}}),
    ("sampling.typical_p", {"sampling": {"typical_p": 0}}),
    ("sampling.typical_p", {"sampling": {"typical_p": 1.1}}),
    ("sampling.no_repeat_ngram_size", {"sampling": {"no_repeat_ngram_size": 1025}}),
    ("sampling.allowed_token_ids[1]", {"sampling": {"allowed_token_ids": [1, 258]}}),
    ("sampling.allowed_token_ids", {"sampling": {"allowed_token_ids": [1] * ((1 << 18) + 1)}}),
    ("sampling.banned_token_ids[0]", {"sampling": {"banned_token_ids": [2**32 - 1]}}),
    (
        "sampling.allowed_token_ids",
        {"sampling": {"allowed_token_ids": [1, 2], "banned_token_ids": [2, 1, 3]}},
    ),
    ("sampling.banned_token_ids", {"sampling": {"banned_token_ids": list(range(258))}}),
    (
        "stop.min_tokens",
        {
            "sampling": {"allowed_token_ids": [256, 5], "banned_token_ids": [5]},
            "stop": {"max_tokens": 2, "min_tokens": 1},
        },
    ),
    ("n", {"n": 0}),
    ("n", {"n": 17}),
    ("structured_output", {"structured_output": {}}),
    (
        "structured_output.flexible_whitespace",
        {"structured_output": {"regex": "a", "flexible_whitespace": True}},
    ),
    ("structured_output.json_schema", {"structured_output": {"json_schema": ""}}),
    ("structured_output.json_schema", {"structured_output": {"json_schema": "{"}}),
    ("structured_output.regex", {"structured_output": {"regex": ""}}),
    ("structured_output.regex", {"structured_output": {"regex": "x" * (1 << 18 | 1)}}),
    ("structured_output.grammar", {"structured_output": {"grammar": ""}}),
    ("structured_output.choice", {"structured_output": {"choice": {}}}),
    ("structured_output.choice", {"structured_output": {"choice": {"choices": ["a", ""]}}}),
    ("scheduling.priority", {"scheduling": {"priority": 101}}),
    ("scheduling.priority", {"scheduling": {"priority": -(2**31)}}),
    ("output.prompt_logprobs", {"output": {"prompt_logprobs": 129}}),
    ("output.logprob_token_ids[0]", {"output": {"logprob_token_ids": [258]}}),
    ("output.logprob_token_ids", {"output": {"logprob_token_ids": [1] * 129}}),
    ("stop.min_tokens", {"stop": {"max_tokens": 2, "min_tokens": 3}}),
    ("stop.stop_strings", {"stop": {"stop_strings": ["x"] * 17}}),
    ("stop.stop_strings[1]", {"stop": {"stop_strings": ["x", ""]}}),
    ("stop.stop_strings[0]", {"stop": {"stop_strings": ["x" * 257]}}),
    ("stop.stop_token_ids[0]", {"stop": {"stop_token_ids": [258]}}),
    ("stop.stop_token_ids", {"stop": {"stop_token_ids": [1] * 257}}),
    ("stop.eos_token_ids[1]", {"stop": {"eos_token_ids": [1, 999]}}),
    ("stop.stop_strings", {"stop": {"stop_strings": ["x"]}, "output": {"omit_text": True}}),
    ("output.echo", {"output": {"omit_text": True, "echo": True}}),
    ("output.logprobs", {"output": {"logprobs": 129}}),
    ("output.min_tokens_per_delta", {"output": {"min_tokens_per_delta": 0}}),
    ("output.delivery", {"output": {"delivery": 7}}),
    ("scheduling.time_limit", {"scheduling": {"time_limit": {}}}),
    ("scheduling.time_limit", {"scheduling": {"time_limit": {"seconds": -1}}}),
    ("scheduling.time_limit", {"scheduling": {"time_limit": {"nanos": 2_000_000_000}}}),
    ("scheduling.time_limit", {"scheduling": {"time_limit": {"seconds": 100_000}}}),
    ("cache.salt", {"cache": {"salt": "x" * 129}}),
    ("truncation.max_prompt_tokens", {"truncation": {}}),
    ("truncation.side", {"truncation": {"max_prompt_tokens": 1, "side": 9}}),
]


def make(fields: dict[str, object]) -> pb.GenerationSpec:
    fields = dict(fields)
    text = fields.pop("text", "hi")
    return spec(str(text), **fields)


async def check_everywhere(h: Harness, message: pb.GenerationSpec, path: str) -> None:
    """The same answer in every RPC that takes a spec, and nothing reaches the engine."""
    calls = (
        h.generate(message),
        h.generation.AddRequest(rpc.AddRequestRequest(spec=message)),
        h.generation.GenerateStream(rpc.GenerateStreamRequest(spec=message)).read(),
    )
    for call in calls:
        error = await refused(call)
        assert error.field == path
        assert error.message.startswith(path)
    assert not h.engine.submitted
    assert not h.registry.requests


async def test_what_is_not_done_yet_is_refused_by_name() -> None:
    async with serving() as h:
        for path, fields in UNSUPPORTED.items():
            await check_everywhere(h, make(fields), f"spec.{path}")
            error = await refused(h.generate(make(fields)))
            assert (error.code, error.reason) == (
                grpc.StatusCode.UNIMPLEMENTED,
                "UNSUPPORTED_FIELD",
            )


async def test_what_is_wrong_is_refused_by_name() -> None:
    async with serving() as h:
        for path, fields in INVALID:
            await check_everywhere(h, make(fields), f"spec.{path}")
            error = await refused(h.generate(make(fields)))
            assert (error.code, error.reason) == (
                grpc.StatusCode.INVALID_ARGUMENT,
                "INVALID_FIELD",
            )


async def test_a_priority_that_no_scheduler_heeds_is_refused() -> None:
    async with serving(FakeEngine(info=model_info(heeds_priorities=False))) as h:
        error = await refused(h.generate(spec(scheduling={"priority": 1})))
        card = (await h.models.GetModel(model.GetModelRequest())).model
        await h.generate(spec(scheduling={"priority": 0}, stop={"max_tokens": 1}))
    assert (error.code, error.field) == (grpc.StatusCode.UNIMPLEMENTED, "spec.scheduling.priority")
    assert "priorities" not in card.capabilities.names


async def test_prompt_logprobs_that_fit_no_message_are_refused() -> None:
    async with serving(max_send_bytes=4 << 20) as h:
        error = await refused(h.generate(spec("x" * 2000, output={"prompt_logprobs": 24})))
        assert not h.engine.submitted
        await h.generate(spec("x" * 2000, output={"prompt_logprobs": 20}, stop={"max_tokens": 0}))
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert error.field == "spec.output.prompt_logprobs"
    assert "max_send_bytes" in error.message


GRAMMAR_BYTES = 256 * 1024
AT_THE_CAP: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("text.text", {"text": "x" * 2047}, {"text": "x" * 2048}),
    ("n", {"n": 16}, {"n": 17}),
    ("output.logprobs", {"output": {"logprobs": 128}}, {"output": {"logprobs": 129}}),
    (
        "output.prompt_logprobs",
        {"output": {"prompt_logprobs": 128}},
        {"output": {"prompt_logprobs": 129}},
    ),
    (
        "output.logprob_token_ids",
        {"output": {"logprob_token_ids": [1] * 128}},
        {"output": {"logprob_token_ids": [1] * 129}},
    ),
    (
        "stop.stop_strings",
        {"stop": {"stop_strings": ["\N{SNOWMAN}"] * 16}},
        {"stop": {"stop_strings": ["\N{SNOWMAN}"] * 17}},
    ),
    (
        "stop.stop_strings[0]",
        {"stop": {"stop_strings": ["é" * 128]}},
        {"stop": {"stop_strings": ["é" * 128 + "x"]}},
    ),
    (
        "stop.stop_token_ids",
        {"stop": {"stop_token_ids": [1] * 256}},
        {"stop": {"stop_token_ids": [1] * 257}},
    ),
    (
        "sampling.logit_bias",
        {"sampling": {"logit_bias": dict.fromkeys(range(1024), 1.0)}},
        {"sampling": {"logit_bias": dict.fromkeys(range(1025), 1.0)}},
    ),
    (
        "structured_output.json_schema",
        {"structured_output": {"json_schema": '"' + "x" * (GRAMMAR_BYTES - 2) + '"'}},
        {"structured_output": {"json_schema": '"' + "x" * (GRAMMAR_BYTES - 1) + '"'}},
    ),
    (
        "structured_output.regex",
        {"structured_output": {"regex": "x" * GRAMMAR_BYTES}},
        {"structured_output": {"regex": "x" * (GRAMMAR_BYTES + 1)}},
    ),
    (
        "structured_output.grammar",
        {"structured_output": {"grammar": "x" * GRAMMAR_BYTES}},
        {"structured_output": {"grammar": "x" * (GRAMMAR_BYTES + 1)}},
    ),
    (
        "structured_output.choice",
        {"structured_output": {"choice": {"choices": ["x" * GRAMMAR_BYTES]}}},
        {"structured_output": {"choice": {"choices": ["x" * GRAMMAR_BYTES, "y"]}}},
    ),
    (
        "chat.messages",
        {"chat": {"messages": [{"role": pb.CHAT_ROLE_USER}] * 1}},
        {"chat": {"messages": [{"role": pb.CHAT_ROLE_USER}] * 4097}},
    ),
]


@pytest.mark.parametrize(("path", "most", "more"), AT_THE_CAP, ids=[c[0] for c in AT_THE_CAP])
async def test_a_cap_admits_the_most_and_no_more(
    path: str, most: dict[str, Any], more: dict[str, Any]
) -> None:
    # A script that ends at once: what is looked at is whether the request is taken in.
    engine = FakeEngine(script=says(""), info=model_info(vocab_size=5000))
    async with serving(engine, tokenizer=byte_tokenizer()) as h:
        error = await refused(h.generate(make(more)))
        assert (error.code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, f"spec.{path}")
        assert not engine.submitted
        await h.generate(make(most))
        assert len(engine.submitted) == 1


async def test_output_has_no_cap_but_the_context() -> None:
    async with serving(FakeEngine()) as h:
        result = await h.generate(spec("x" * 2000, stop={"max_tokens": 2**32 - 1}))
    assert result.choices[0].finished.reason == pb.FINISH_REASON_CONTEXT
    assert result.usage.completion_tokens == 48


async def test_missing_parts() -> None:
    async with serving() as h:
        assert (await refused(h.generate(pb.GenerationSpec()))).field == "spec.input"
        error = await refused(h.generation.Generate(rpc.GenerateRequest()))
        assert error.field == "spec"


@pytest.mark.parametrize(
    "place",
    [
        lambda s: s,
        lambda s: s.sampling,
        lambda s: s.scheduling.time_limit,
        lambda s: s.chat.messages[1],
    ],
)
async def test_unknown_fields_are_ignored_and_counted_at_any_depth(
    place: Callable[[pb.GenerationSpec], Any],
) -> None:
    message = spec(chat={"messages": [USER, USER]})
    message.sampling.top_k = 1
    message.scheduling.time_limit.seconds = 1
    place(message).MergeFromString(b"\xf8\x07\x01")  # field 127, a varint
    async with serving() as h:
        await h.generate(message)
        assert h.server.state.incoming.unknown == 1
        await h.generate(spec())
        assert h.server.state.incoming.unknown == 1


@pytest.mark.parametrize("kind", ["image", "audio", "video"])
async def test_a_part_that_is_no_text_is_refused_by_its_capability(kind: str) -> None:
    request = with_capabilities(
        rpc.GenerateRequest(spec=make(said_with({"text": "a"}, {kind: {"uri": "x"}})))
    )
    assert set(request.required_capabilities) == {"chat", "content_parts", f"{kind}_input"}
    async with serving() as h:
        error = await refused(h.generation.Generate(request))
        card = (await h.models.GetModel(model.GetModelRequest())).model
    assert (error.code, error.reason) == (grpc.StatusCode.UNIMPLEMENTED, "CAPABILITY_MISSING")
    assert f"'{kind}_input'" in error.message
    assert list(card.capabilities.input.content_parts) == ["text"]


async def test_a_capability_that_is_missing_is_refused_by_name_everywhere() -> None:
    async with serving() as h:
        assert "chat" in h.server.state.front.card.capabilities.names
        request = rpc.GenerateRequest(spec=spec(), required_capabilities=["chat", "time_travel"])
        error = await refused(h.generation.Generate(request))
        read = rpc.GetResultRequest(request_id="a", required_capabilities=["time_travel"])
        others = [
            await refused(h.generation.GetResult(read)),
            await refused(h.models.GetModel(model.GetModelRequest(required_capabilities=["x"]))),
        ]
        too_many = rpc.CancelRequest(request_ids=["a"], required_capabilities=["chat"] * 65)
        bounded = await refused(h.generation.Cancel(too_many))
        session = h.session()
        command = rpc.StreamResultRequest(
            command_id=7, add=rpc.AddCommand(spec=spec()), required_capabilities=["time_travel"]
        )
        await session.call.write(command)
        [rejection] = (await session.read()).rejections
        await h.generation.Generate(
            rpc.GenerateRequest(spec=spec(), required_capabilities=["chat", "structured_output"])
        )
    for one in (error, *others):
        assert (one.code, one.reason) == (grpc.StatusCode.UNIMPLEMENTED, "CAPABILITY_MISSING")
        assert one.field == "required_capabilities"
    assert error.details["ErrorInfo"].metadata["capability"] == "time_travel"
    assert "'time_travel'" in error.message
    assert "structured_output" in error.message  # those that it has
    assert bounded.code is grpc.StatusCode.INVALID_ARGUMENT
    assert (rejection.command_id, rejection.status.code) == (7, 12)


async def test_long_texts_in_errors_are_cut() -> None:
    async with serving() as h:
        arguments = json.dumps({"ä-" * 2500: 1})
        message = spec(chat={"messages": [USER], "template_arguments_json": arguments})
        error = await refused(h.generate(message))
        assert error.code is grpc.StatusCode.INVALID_ARGUMENT
        assert error.status.ByteSize() < 2500


async def test_messages_above_the_limit_are_refused_and_the_connection_lives() -> None:
    async with serving(max_receive_bytes=64 << 10) as h:
        error = await refused(h.generate(spec("x" * (64 << 10))))
        assert (error.code, error.reason) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "MESSAGE_TOO_LARGE",
        )
        metadata = error.details["ErrorInfo"].metadata
        assert (metadata["limit"], metadata["max_receive_bytes"]) == (
            "max_receive_bytes",
            str(64 << 10),
        )
        assert int(metadata["present"]) > 64 << 10
        far = await refused(h.generate(spec("x" * (1 << 20))))
        assert far.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        session = h.session()
        await session.add(spec("x" * (64 << 10)))
        ended = await refused(session.call.read())
        assert ended.reason == "MESSAGE_TOO_LARGE"
        card = (await h.models.GetModel(model.GetModelRequest())).model
        assert card.limits.max_message_bytes == 64 << 10
        await h.generate(spec(stop={"max_tokens": 1}))


async def test_an_answer_that_no_message_holds_is_refused_with_what_to_do() -> None:
    info = model_info(max_context_tokens=1 << 20)
    async with serving(FakeEngine(info=info), max_send_bytes=4 << 20) as h:
        # What is to be generated would fit, but not with the prompt in front of each choice.
        large = spec("x" * 300_000, n=16, stop={"max_tokens": 3}, output={"echo": True})
        error = await refused(h.generate(large))
        assert (error.code, error.reason) == (grpc.StatusCode.OUT_OF_RANGE, "ANSWER_TOO_LARGE")
        metadata = error.details["ErrorInfo"].metadata
        assert (metadata["limit"], metadata["max_send_bytes"]) == (
            "max_send_bytes",
            str(4 << 20),
        )
        assert int(metadata["present"]) > 4 << 20
        assert "GenerateStream" in error.message
        messages = await h.stream(large)
        assert sum(len(text_of(message.events, 15)) for message in messages) == 300_003


async def test_the_card_tells_how_weights_are_kept() -> None:
    for quantization, told in (("none", ""), ("int8", "int8")):
        async with serving(FakeEngine(info=model_info(quantization=quantization))) as h:
            card = (await h.models.GetModel(model.GetModelRequest())).model
        assert (card.dtype, card.quantization) == ("float32", told)


async def test_model_service() -> None:
    async with serving(served_name="mine") as h:
        card = (await h.models.GetModel(model.GetModelRequest())).model
        tokens = await h.models.Tokenize(
            model.TokenizeRequest(text={"text": "aé"}, token_details=True)
        )
        chat = await h.models.Tokenize(model.TokenizeRequest(chat={"messages": [USER]}))
        text = await h.models.Detokenize(
            model.DetokenizeRequest(token_ids=[97, 256, 0xC3], skip_special_tokens=False)
        )
        plain = await h.models.Detokenize(model.DetokenizeRequest(token_ids=[97, 256]))
        errors = [
            await refused(h.models.Tokenize(model.TokenizeRequest())),
            await refused(h.models.Tokenize(model.TokenizeRequest(chat={}))),
            await refused(h.models.Detokenize(model.DetokenizeRequest(token_ids=[1, 999]))),
        ]
    assert (card.name, card.vocab_size, card.capabilities.input.chat) == ("mine", 258, True)
    assert card.limits.max_context_tokens == 2048
    assert card.limits.max_prompt_tokens == 2047
    assert card.limits.max_queue_size == 1024
    assert card.default_sampling.temperature == pytest.approx(0.7)
    assert not card.default_sampling.HasField("seed")
    assert {"chat", "tools", "content_parts"} <= set(card.capabilities.names)
    assert card.capabilities.output.logprobs
    assert list(tokens.token_ids) == [97, 0xC3, 0xA9]
    assert tokens.tokens[1].bytes == b"\xc3"
    assert bytes(chat.token_ids) == b"[user]hi[assistant]"
    assert text.text == "a<eos>\N{REPLACEMENT CHARACTER}"
    assert plain.text == "a"
    assert [e.field for e in errors] == ["input", "chat.messages", "token_ids[1]"]
