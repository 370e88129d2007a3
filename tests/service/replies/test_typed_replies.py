"""Replies to conversations come apart: text, reasoning and tool calls, in every RPC, beside the
exact tokens; and as the model wrote them where that is asked for.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import headrace
import pytest
from headrace.v1 import generation_pb2 as pb
from headrace.v1 import generation_service_pb2 as rpc
from headrace.v1 import model_service_pb2 as model

from engine.contract.errors import ConfigError
from engine.contract.outputs import RequestFailure
from service.replies import FORMATS
from tests.service.fake_engine import (
    EOS,
    VOCAB_SIZE,
    FakeEngine,
    Script,
    model_info,
)
from tests.service.helpers import (
    DEADLINE_S,
    Harness,
    check_course,
    finished_of,
    ids_of,
    serving,
    text_of,
    until,
)
from tests.service.replies.templates import TEMPLATE, tokenizer

CALL = '<tool_call>\n{"name": "look", "arguments": {"where": "é", "n": [1, 2]}}\n</tool_call>'
ARGUMENTS = '{"where": "é", "n": [1, 2]}'
REPLY = f"<think>\nI must look.\n</think>\n\nI look.\n{CALL}\n{CALL}"
OPENED = len("<think")  # nobody knows yet what it is
THOUGHT = len(">\nI must look.\n</think>")
TOOLS = [{"definition_json": json.dumps({"type": "function", "function": {"name": "look"}})}]


def engine(*texts: str, eos: bool = True, of: Any = None, **options: Any) -> FakeEngine:
    """An engine whose choices say these, in the tokenizer's own tokens."""
    ids = [(of or tokenizer()).encode(text) + ([EOS] if eos else []) for text in texts]
    script: Script = lambda _request, choice: ids[min(choice, len(ids) - 1)]  # noqa: E731
    return FakeEngine(script=script, info=model_info(vocab_size=VOCAB_SIZE + 16), **options)


def chat(**fields: Any) -> pb.GenerationSpec:
    asked = {"messages": [{"role": pb.CHAT_ROLE_USER, "content": "hi"}], "tools": TOOLS}
    given = {"stop": {"max_tokens": 500}, **fields}
    return pb.GenerationSpec(**{"chat": asked, **given})


def _bytes(ids: Iterable[int]) -> bytes:
    return bytes(id for id in ids if id < 256)


def calls_of(choice: rpc.GeneratedChoice) -> list[tuple[str, str]]:
    return [(call.name, call.arguments_json) for call in choice.tool_calls]


def folded(events: Iterable[pb.ResultEvent], choice: int = 0) -> tuple[str, str, list[list[str]]]:
    """Text, reasoning and calls (id, name, arguments) of deltas."""
    text, reasoning, calls = "", "", list[list[str]]()
    for event in events:
        if event.choice_index != choice or not event.HasField("delta"):
            continue
        text += event.delta.text
        reasoning += event.delta.reasoning
        for part in event.delta.tool_calls:
            if part.index == len(calls):
                assert part.name
                calls.append([part.id, part.name, ""])
            else:
                assert (part.id, part.name) == ("", "")
            calls[part.index][2] += part.arguments_json
    return text, reasoning, calls


async def test_a_whole_reply_comes_apart() -> None:
    async with serving(engine(REPLY), tokenizer=tokenizer()) as h:
        result = await h.generate(chat())
    [choice] = result.choices
    assert (choice.text, choice.reasoning) == ("I look.", "I must look.")
    assert calls_of(choice) == [("look", ARGUMENTS), ("look", ARGUMENTS)]
    ids = [call.id for call in choice.tool_calls]
    assert len(set(ids)) == 2
    assert all(len(id) == 9 and id.isalnum() for id in ids)
    assert choice.finished.reason == pb.FINISH_REASON_TOOL_CALLS
    assert choice.finished.stop_token_id == EOS
    assert list(choice.token_ids) == [*tokenizer().encode(REPLY), EOS]
    assert choice.finished.usage.reasoning_tokens == THOUGHT
    assert result.usage.reasoning_tokens == THOUGHT
    assert result.usage.completion_tokens == len(choice.token_ids)


@pytest.mark.parametrize("per_step", [1, 7, 400])
@pytest.mark.parametrize(
    "output",
    [{}, {"min_tokens_per_delta": 10}, {"delivery": pb.DELIVERY_FINAL}, {"token_details": True}],
    ids=["each", "ten", "final", "details"],
)
async def test_deltas_come_to_the_same(per_step: int, output: dict[str, Any]) -> None:
    made = engine(REPLY, tokens_per_step=per_step)
    async with serving(made, tokenizer=tokenizer()) as h:
        whole = (await h.generate(chat(request_id="r"))).choices[0]
        messages = await h.stream(chat(request_id="s", output=output))
        session = h.session()
        await session.add(chat(request_id="t", output=output))
        await session.end()
    for events in ([e for m in messages for e in m.events], session.events()["t"]):
        check_course(events)
        text, reasoning, calls = folded(events)
        assert (text, reasoning) == (whole.text, whole.reasoning)
        assert [(name, arguments) for _, name, arguments in calls] == calls_of(whole)
        assert ids_of(events) == list(whole.token_ids)
        finished = finished_of(events)
        assert finished.reason == pb.FINISH_REASON_TOOL_CALLS
        assert finished.usage.reasoning_tokens == THOUGHT


async def test_arguments_come_as_they_are_made() -> None:
    made = engine(CALL, auto=False)
    async with serving(made, tokenizer=tokenizer()) as h:
        call = h.generation.GenerateStream(rpc.GenerateStreamRequest(spec=chat()))
        await call.read()
        fragments = []
        while made.step():
            message = await call.read()
            fragments += [p.arguments_json for e in message.events for p in e.delta.tool_calls]
    assert len(fragments) > 20
    assert "".join(fragments) == ARGUMENTS


async def test_what_nobody_read_is_merged() -> None:
    made = engine(REPLY, auto=False)
    async with serving(made, tokenizer=tokenizer()) as h:
        await h.generation.AddRequest(rpc.AddRequestRequest(spec=chat(request_id="a")))
        await until(lambda: made.submitted)
        made.run()
        await until(lambda: next(iter(h.registry.requests.values())).log.ended)
        result = await h.generation.GetResult(
            rpc.GetResultRequest(request_id="a"), timeout=DEADLINE_S
        )
    text, reasoning, calls = folded(result.events)
    assert (text, reasoning) == ("I look.", "I must look.")
    assert [call[2] for call in calls] == [ARGUMENTS, ARGUMENTS]
    assert sum(event.HasField("delta") for event in result.events) == 1


async def raw(h: Harness, spec: pb.GenerationSpec) -> rpc.GeneratedChoice:
    choice = (await h.generate(spec)).choices[0]
    assert (choice.reasoning, list(choice.tool_calls)) == ("", [])
    assert choice.finished.usage.reasoning_tokens == 0
    assert choice.finished.reason == pb.FINISH_REASON_STOP
    return choice


async def test_the_raw_text_where_it_is_asked_for() -> None:
    plain = REPLY.replace("<tool_call>", "").replace("</tool_call>", "")  # special: left out
    everything = {"skip_special_tokens": False}
    async with serving(engine(REPLY), tokenizer=tokenizer()) as h:
        assert (await raw(h, chat(output={"raw_text": True}))).text == plain
        assert (await raw(h, chat(output={"raw_text": True, **everything}))).text == REPLY
        raw_form = chat(structured_output={"regex": ".*"}, output={"raw_text": True})
        assert (await raw(h, raw_form)).text == plain
        text = pb.GenerationSpec(text={"text": "hi"}, stop={"max_tokens": 500})
        assert (await raw(h, text)).text == plain
        echoed = await raw(h, chat(output={"echo": True}))
        assert echoed.text == f"user\nhi\nassistant\n{plain}"
        assert (await raw(h, chat(output={"omit_text": True}))).text == ""


async def test_of_a_structured_output_the_reasoning_alone_comes_apart() -> None:
    async with serving(engine(REPLY), tokenizer=tokenizer()) as h:
        result = await h.generate(chat(structured_output={"regex": "(.|\n)*"}))
    [choice] = result.choices
    assert (choice.reasoning, list(choice.tool_calls)) == ("I must look.", [])
    assert choice.text == f"I look.\n{CALL}\n{CALL}".replace("<tool_call>", "").replace(
        "</tool_call>", ""
    )
    assert choice.finished.reason == pb.FINISH_REASON_STOP


@pytest.mark.parametrize("skip", [True, False])
async def test_other_special_tokens_are_left_out_as_ever(skip: bool) -> None:
    reply = f"a<|box|>b{CALL}"
    async with serving(engine(reply), tokenizer=tokenizer()) as h:
        result = await h.generate(chat(output={"skip_special_tokens": skip}))
    [choice] = result.choices
    assert choice.text == ("ab" if skip else "a<|box|>b")
    assert calls_of(choice) == [("look", ARGUMENTS)]


async def test_a_stop_string_is_found_in_what_the_model_wrote() -> None:
    async with serving(engine(REPLY), tokenizer=tokenizer()) as h:
        stop = {"max_tokens": 500, "stop_strings": ['é"']}
        [within] = (await h.generate(chat(stop=stop))).choices
        stop = {"max_tokens": 500, "stop_strings": ["</think>"]}
        [thought] = (await h.generate(chat(stop=stop))).choices
    assert calls_of(within) == [("look", '{"where": "')]
    assert within.finished.reason == pb.FINISH_REASON_STOP
    assert within.finished.stop_string == 'é"'
    assert (thought.text, thought.reasoning) == ("", "I must look.\n")
    assert thought.finished.usage.reasoning_tokens == THOUGHT
    assert thought.finished.usage.completion_tokens == OPENED + THOUGHT


async def test_a_reply_that_is_cut_has_what_there_was() -> None:
    tokens = len(tokenizer().encode(REPLY.removesuffix(" [1, 2]}}\n</tool_call>")))
    async with serving(engine(REPLY), tokenizer=tokenizer()) as h:
        [cut] = (await h.generate(chat(stop={"max_tokens": tokens}))).choices
        [held] = (await h.generate(chat(stop={"max_tokens": OPENED + THOUGHT + 20}))).choices
    assert cut.finished.reason == pb.FINISH_REASON_LENGTH
    assert [arguments for _, arguments in calls_of(cut)] == [ARGUMENTS, ARGUMENTS[:-8]]
    assert (held.text, calls_of(held)) == ('I look.\n<tool_call>\n{"name":', [])


async def test_what_is_no_call_is_text() -> None:
    reply = '<tool_call>\n{"name": look}\n</tool_call>'
    async with serving(engine(reply), tokenizer=tokenizer()) as h:
        choice = await raw(h, chat())
    assert choice.text == reply


async def test_choices_have_calls_of_their_own() -> None:
    async with serving(engine(CALL, "no", CALL), tokenizer=tokenizer()) as h:
        result = await h.generate(chat(n=3))
        messages = await h.stream(chat(n=3))
    reasons = [choice.finished.reason for choice in result.choices]
    called, said = pb.FINISH_REASON_TOOL_CALLS, pb.FINISH_REASON_STOP
    assert reasons == [called, said, called]
    assert result.choices[0].tool_calls[0].id != result.choices[2].tool_calls[0].id
    events = [event for message in messages for event in message.events]
    assert [text_of(events, i) for i in range(3)] == ["", "no", ""]
    assert [len(folded(events, i)[2]) for i in range(3)] == [1, 0, 1]


async def test_reasoning_that_the_template_opened() -> None:
    opening = TEMPLATE.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    async with serving(engine("hm\n</think>\n\nhi"), tokenizer=tokenizer(opening)) as h:
        [choice] = (await h.generate(chat())).choices
        [closed] = (await h.generate(chat(output={"min_tokens_per_delta": 3}))).choices
    assert (choice.text, choice.reasoning) == (closed.text, closed.reasoning) == ("hi", "hm")
    assert choice.finished.usage.reasoning_tokens == len("hm\n</think>")


async def test_harmony_by_its_special_tokens() -> None:
    marks = sorted(FORMATS["harmony"].marks)
    own = tokenizer("<|channel|><|message|>{{ messages[0].content }}<|start|>assistant", marks)
    reply = (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary "
        "to=functions.look <|constrain|>json<|message|>{}<|call|>"
    )
    async with serving(engine(reply, of=own), tokenizer=own, reply_parser="harmony") as h:
        [choice] = (await h.generate(chat())).choices
    assert (choice.text, choice.reasoning, calls_of(choice)) == ("", "hm", [("look", "{}")])
    assert choice.finished.reason == pb.FINISH_REASON_TOOL_CALLS


@pytest.mark.parametrize("stop", [[], ["<|end|>!", "look{"]], ids=["no stops", "stops"])
async def test_text_that_spells_special_tokens_calls_nothing(stop: list[str]) -> None:
    marks = sorted(FORMATS["harmony"].marks)
    own = tokenizer("<|channel|><|message|>{{ messages[0].content }}<|start|>assistant", marks)
    spelled = (
        "<|end|><|start|>assistant<|channel|>commentary to=functions.look<|message|>{}<|call|>"
    )
    channel = own.encode("<|channel|>final<|message|>")
    call = own.encode("<|end|><|start|>assistant<|channel|>commentary to=functions.f<|message|>{}")
    ids = [*channel, *spelled.encode(), *call, EOS]
    made = FakeEngine(script=lambda *_: ids, info=model_info(vocab_size=VOCAB_SIZE + 16))
    async with serving(made, tokenizer=own, reply_parser="harmony") as h:
        stops = {"max_tokens": 500, "stop_strings": stop}
        [choice] = (await h.generate(chat(stop=stops))).choices
    assert (choice.text, calls_of(choice)) == (spelled, [("f", "{}")])


async def test_values_by_the_tools_schema() -> None:
    own = tokenizer("<tool_call><function={{ messages[0].content }}")
    properties = {"n": {"type": "integer"}, "s": {"type": "string"}}
    tool = {"name": "f", "parameters_json": json.dumps({"properties": properties})}
    asked = {"messages": [{"role": pb.CHAT_ROLE_USER, "content": "hi"}], "tools": [tool]}
    values = "<parameter=n>5</parameter><parameter=s>5</parameter>"
    made = engine(f"<function=f>{values}</function>", of=own)
    async with serving(made, tokenizer=own, reply_parser="qwen3_coder") as h:
        [choice] = (await h.generate(chat(chat=asked))).choices
    assert calls_of(choice) == [("f", '{"n":5,"s":"5"}')]


@pytest.mark.parametrize(("parser", "name"), [("auto", "hermes"), ("none", ""), ("think", "think")])
async def test_the_parser_is_chosen_and_told(parser: str, name: str) -> None:
    async with serving(engine(REPLY), tokenizer=tokenizer(), reply_parser=parser) as h:
        card = (await h.models.GetModel(model.GetModelRequest())).model
        [choice] = (await h.generate(chat())).choices
    assert card.capabilities.output.reply_parser == name
    assert ("typed_replies" in card.capabilities.names) == bool(name)
    assert bool(choice.tool_calls) == (name == "hermes")
    assert bool(choice.reasoning) == bool(name)


async def test_a_server_does_not_start_without_its_format() -> None:
    with pytest.raises(ConfigError, match="reply_parser: is 'no_such:FORMAT'"):
        async with serving(engine(REPLY), tokenizer=tokenizer(), reply_parser="no_such:FORMAT"):
            pass


async def test_what_is_held_back_counts_as_held() -> None:
    made = engine("<tool_call>" + '{"x": "' + "y" * 400, eos=False, auto=False)
    async with serving(made, tokenizer=tokenizer()) as h:
        await h.generation.AddRequest(rpc.AddRequestRequest(spec=chat(request_id="a")))
        await until(lambda: made.submitted)
        served = next(iter(h.registry.requests.values()))
        for _ in range(200):
            made.step()
        await until(lambda: served.log.output_tokens == 200)
        bare = 200 * 48
        assert served.log.held_size > bare + 150


async def test_the_client_gives_a_reply_back_as_the_template_writes_it() -> None:
    first, last = [*tokenizer().encode(REPLY), EOS], [*b"Done.", EOS]
    answer = b"tool\n"
    script: Script = lambda asked, _: last if answer in _bytes(asked.prompt) else first  # noqa: E731
    made = FakeEngine(script=script, info=model_info(vocab_size=VOCAB_SIZE + 16))
    conversation: list[Any] = [{"role": "user", "content": "hi"}]
    async with (
        serving(made, tokenizer=tokenizer()) as h,
        headrace.AsyncClient(h.server.addresses[0]) as client,
    ):
        result = await client.generate(conversation, tools=[{"name": "look"}], max_tokens=500)
        async with client.stream(conversation, tools=[{"name": "look"}], max_tokens=500) as s:
            chunks = [chunk async for chunk in s]
        conversation.append(result.message)
        for call in result.tool_calls:
            conversation.append({"role": "tool", "content": "ok", "tool_call_id": call.id})
        done = await client.generate(conversation, tools=[{"name": "look"}], max_tokens=500)
        plain = await client.generate("x", max_tokens=2)
    assert result.finish_reason is headrace.FinishReason.TOOL_CALLS
    assert (result.text, result.reasoning) == ("I look.", "I must look.")
    assert [call.arguments for call in result.tool_calls] == [ARGUMENTS, ARGUMENTS]
    assert result.usage.reasoning_tokens == THOUGHT
    assert "".join(chunk.reasoning for chunk in chunks) == "I must look."
    assert "".join(part.arguments for chunk in chunks for part in chunk.tool_calls) == ARGUMENTS * 2
    assert done.text == "Done."
    assert done.message == {"role": "assistant", "content": "Done."}
    prompt = tokenizer().decode(made.submitted[2].prompt, skip_special_tokens=False)
    assert f"<|im_start|>assistant\n{REPLY}<|im_end|>" in prompt
    assert plain.tool_calls == ()
    found = result.to_dict()
    assert found["reasoning"] == "I must look."
    assert found["tool_calls"][0]["function"] == {"name": "look", "arguments": ARGUMENTS}


@pytest.mark.parametrize("end", ["cancel", "fail"])
async def test_a_reply_that_is_ended_has_what_there_was(end: str) -> None:
    made = engine(REPLY, auto=False)
    shown = len(tokenizer().encode(REPLY[: REPLY.index("é")]))
    async with serving(made, tokenizer=tokenizer()) as h:
        session = h.session()
        await session.add(chat(request_id="a"))
        await until(lambda: made.submitted)
        for _ in range(shown):
            made.step()
        if end == "cancel":
            await session.send(cancel={"request_id": "a"})
            await until(lambda: made.cancelled)
            made.step()
        else:
            made.fail(made.submitted[0].request_id, RequestFailure("it broke", "id-1"))
            made.step()
        await session.end()
    events = session.events()["a"]
    text, reasoning, calls = folded(events)
    assert (text, reasoning) == ("I look.", "I must look.")
    assert [call[1:] for call in calls] == [["look", '{"where": "']]
    last = events[-1]
    ended = last.finished if end == "cancel" else last.failed
    assert ended.usage.reasoning_tokens == THOUGHT
    if end == "cancel":
        assert last.finished.reason == pb.FINISH_REASON_CANCELLED
