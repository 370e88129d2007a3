"""Reasoning with a bound, and forms that hold after it: with random models, whose reasoning would
not end by itself.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import headrace
import pytest
import pytest_asyncio
from headrace import AsyncClient, FinishReason, Result
from headrace.v1 import generation_pb2 as pb

from service.replies import FORMATS
from tests.service.callers import TEMPLATE, calling, make_directory
from tests.service.fake_engine import FakeEngine, byte_tokenizer
from tests.service.helpers import serving

pytestmark = pytest.mark.asyncio(loop_scope="module")
MESSAGES = [{"role": "user", "content": "How high is the river?"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "high": {"type": "boolean"},
        "cm": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["high", "cm"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "gauge", "parameters": SCHEMA}}
BOUNDS = (0, 1, 50)
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    # The template has opened the reasoning; the marks are special, or tokens, or plain text.
    "opened, special": ("hermes", {"template": TEMPLATE + "<think>\n"}),
    "opened, tokens": (
        "hermes",
        {"template": TEMPLATE + "<think>", "special": (), "added": ("<think>", "</think>")},
    ),
    "opened, text": ("hermes", {"template": TEMPLATE + "<think>\n", "special": ()}),
    # The model may open it.
    "hermes": ("hermes", {}),
    "mistral": ("mistral", {}),
    "deepseek": ("deepseek", {"template": TEMPLATE + "<think>"}),
    "harmony": ("harmony", {}),
    "think": ("think", {"template": TEMPLATE + "<think>"}),
}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        kind: make_directory(tmp_path_factory.mktemp("model"), name, **given)
        for kind, (name, given) in KINDS.items()
    }


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=list(KINDS))
async def client(
    request: pytest.FixtureRequest, directories: dict[str, Path]
) -> AsyncIterator[tuple[str, AsyncClient]]:
    async with calling(directories[request.param], KINDS[request.param][0]) as client:
        yield request.param, client


async def ask(client: AsyncClient, seed: int, **options: Any) -> Result:
    return await client.generate(
        MESSAGES, **{"temperature": 1.0, "seed": seed, "max_tokens": 1500, **options}
    )


async def opening(kind: str, client: AsyncClient) -> dict[int, float]:
    """A bias towards the mark that opens reasoning, where the model opens it."""
    name, given = KINDS[kind]
    if "template" in given:
        return {}
    mark = FORMATS[name].reasoning.opening
    ids = (await client.tokenize(mark)).token_ids
    return dict.fromkeys(ids, 4.0)


def spent(result: Result) -> int:
    """Reasoning tokens, those of the marks among them."""
    return result.usage.reasoning_tokens


@pytest.mark.parametrize("bound", BOUNDS)
async def test_a_form_holds_after_bounded_reasoning(
    client: tuple[str, AsyncClient], bound: int
) -> None:
    kind, caller = client
    bias = await opening(kind, caller)
    asked = [
        ask(caller, seed, json_schema=SCHEMA, max_reasoning_tokens=bound, logit_bias=bias)
        for seed in range(8)
    ]
    results = await asyncio.gather(*asked)
    for result in results:
        assert result.finish_reason is FinishReason.STOP, result
        found = json.loads(result.text)
        assert set(found) == {"high", "cm"}
        assert 0 <= found["cm"] <= 99
        await bounded(caller, result, bound)
    if bound == 50 and kind.startswith("opened"):
        assert any(result.reasoning for result in results)


async def bounded(client: AsyncClient, result: Result, bound: int) -> None:
    """Its reasoning has no more tokens than allowed: each is at least a byte, so that the marks'
    own are at most as many as the bytes of the longest marks. (How many exactly is asked of the
    matcher, in tests/engine/structured.)
    """
    longest = max(
        len((marks.opening + marks.closing).encode())
        for marks in (FORMATS[name].reasoning for name, _ in KINDS.values())
    )
    assert spent(result) <= bound + longest
    if not bound:
        assert not result.reasoning.strip()


@pytest.mark.parametrize("bound", BOUNDS)
async def test_a_required_call_comes_after_bounded_reasoning(
    client: tuple[str, AsyncClient], bound: int
) -> None:
    kind, caller = client
    if kind == "think":
        with pytest.raises(headrace.HeadraceError, match="tool_choice"):
            await ask(caller, 1, tools=[TOOL], tool_choice="required")
        return
    if KINDS[kind][0] == "hermes" and "special" in KINDS[kind][1]:
        assert "tool_choice" in (await caller.model()).capabilities.names
    bias = await opening(kind, caller)
    results = await asyncio.gather(
        *(
            ask(
                caller,
                seed,
                tools=[TOOL],
                tool_choice="required",
                parallel_tool_calls=False,
                max_reasoning_tokens=bound,
                logit_bias=bias,
            )
            for seed in range(6)
        )
    )
    for result in results:
        assert result.finish_reason is FinishReason.TOOL_CALLS, result
        [call] = result.tool_calls
        assert set(json.loads(call.arguments)) == {"high", "cm"}
        assert result.text == ""
        await bounded(caller, result, bound)


async def test_a_bound_alone_ends_the_reasoning(client: tuple[str, AsyncClient]) -> None:
    kind, caller = client
    bias = await opening(kind, caller)
    for bound in BOUNDS:
        results = await asyncio.gather(
            *(
                ask(caller, seed, max_reasoning_tokens=bound, max_tokens=300, logit_bias=bias)
                for seed in range(4)
            )
        )
        for result in results:
            await bounded(caller, result, bound)
            assert result.accepted.stop.max_reasoning_tokens == bound


async def test_the_raw_text_has_the_form_from_its_first_token(
    directories: dict[str, Path],
) -> None:
    kind = "opened, special"
    async with calling(directories[kind], KINDS[kind][0]) as caller:
        result = await ask(caller, 3, json_schema=SCHEMA, raw_text=True)
    assert set(json.loads(result.text)) == {"high", "cm"}
    assert result.usage.reasoning_tokens == 0


# ---- what is refused -----------------------------------------------------------------------------


def chat(**fields: Any) -> pb.GenerationSpec:
    given = {"messages": [{"role": pb.CHAT_ROLE_USER, "content": "hi"}]}
    asked = {name: fields.pop(name) for name in ("tools", "tool_choice") if name in fields}
    return pb.GenerationSpec(chat={**given, **asked}, **fields)


TOOLS = [{"name": "look", "parameters_json": '{"type": "object"}'}, {"name": "now"}]
REFUSED: dict[str, tuple[pb.GenerationSpec, str, str]] = {
    "without tools": (chat(tool_choice={}), "spec.chat.tool_choice", "chat.tools is empty"),
    "with a structured output": (
        chat(tools=TOOLS, tool_choice={}, structured_output={"regex": "a"}),
        "spec.chat.tool_choice",
        "structured_output exclude each other",
    ),
    "names with none": (
        chat(tools=TOOLS, tool_choice={"mode": 2, "tool_names": ["look"]}),
        "spec.chat.tool_choice.tool_names",
        "names tools",
    ),
    "a name that is no tool": (
        chat(tools=TOOLS, tool_choice={"mode": 3, "tool_names": ["listen"]}),
        "spec.chat.tool_choice.tool_names",
        "'listen', which is none of chat.tools",
    ),
    "no such mode": (
        chat(tools=TOOLS, tool_choice={"mode": 9}),
        "spec.chat.tool_choice.mode",
        "9",
    ),
    "a tool twice": (
        chat(tools=[*TOOLS, TOOLS[0]], tool_choice={"mode": 3}),
        "spec.chat.tools[2]",
        "second 'look'",
    ),
    "a tool without a name": (
        chat(tools=[{"definition_json": '{"function": {}}'}], tool_choice={"mode": 3}),
        "spec.chat.tools[0]",
        "no function with a name",
    ),
    "arguments that are no object": (
        chat(
            tools=[{"name": "look", "parameters_json": '{"type": "array"}'}],
            tool_choice={"mode": 3},
        ),
        "spec.chat.tools[0]",
        "another type",
    ),
    "too many tools": (
        chat(tools=[{"name": f"t{n}"} for n in range(129)], tool_choice={"mode": 3}),
        "spec.chat.tool_choice",
        "at most 128",
    ),
    "schemas that are too large": (
        chat(
            tools=[
                {"name": f"t{n}", "parameters_json": json.dumps({"description": "x" * 9_000})}
                for n in range(30)
            ],
            tool_choice={"mode": 3},
        ),
        "spec.chat.tool_choice",
        "at most 262144",
    ),
    "reasoning of a plain text": (
        pb.GenerationSpec(text={"text": "hi"}, stop={"max_reasoning_tokens": 3}),
        "spec.stop.max_reasoning_tokens",
        "for conversations",
    ),
}


@pytest.mark.parametrize("case", list(REFUSED))
async def test_what_cannot_be_held_is_refused_by_name(case: str) -> None:
    spec, field, words = REFUSED[case]
    template = "{% for m in messages %}{{ m.content }}{% endfor %}<tool_call>arguments</think>"
    tokenizer = byte_tokenizer(chat_template=template)
    async with serving(FakeEngine(), tokenizer=tokenizer, reply_parser="hermes") as h:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await h.generate(spec)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    message = caught.value.details() or ""
    assert message.startswith(field), message
    assert words in message


async def test_a_bound_that_holds_the_tools_too_is_named_as_what_asks_for_it() -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}<|channel|>analysis<|message|>"
    nameless = [{"definition_json": '{"function": {}}'}]
    tokenizer = byte_tokenizer(chat_template=template)
    async with serving(FakeEngine(), tokenizer=tokenizer, reply_parser="harmony") as h:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await h.generate(chat(tools=nameless, stop={"max_reasoning_tokens": 3}))
    message = caught.value.details() or ""
    assert message.startswith("spec.chat.tools[0]"), message
    assert "which stop.max_reasoning_tokens needs" in message


async def test_a_model_whose_format_is_not_known_has_no_choice_and_no_bound() -> None:
    tokenizer = byte_tokenizer(chat_template="{% for m in messages %}{{ m.content }}{% endfor %}")
    async with serving(FakeEngine(), tokenizer=tokenizer) as h:
        for spec in (
            chat(tools=TOOLS, tool_choice={"mode": 3}),
            chat(stop={"max_reasoning_tokens": 3}),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await h.generate(spec)
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
