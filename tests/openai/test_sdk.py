"""OpenAI's own SDK, against the demo model behind `headrace openai`."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tests.openai.asking import SCHEMA, TOOLS
from tests.openai.commands import door_process
from tests.openai.field_table import DOCUMENT
from tests.service.readme import code_blocks, shell_commands
from tests.service.real_server import WAIT_S, clean_environment, demo_server, real_server

USER: Any = [{"role": "user", "content": "How is the weather in Ulm?"}]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with door_process(demo_server().addresses[0]) as found:
        yield found


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def model(url: str) -> str:
    with openai.OpenAI(base_url=url, api_key="none") as client:
        return client.models.list().data[0].id


def test_models(client: openai.OpenAI, model: str) -> None:
    assert client.models.retrieve(model).id == model
    assert [one.id for one in client.models.list()] == [model]
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other")
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"


def test_chats_whole_and_streamed_are_the_same(client: openai.OpenAI, model: str) -> None:
    options: Any = {"model": model, "messages": USER, "seed": 5, "max_tokens": 20, "n": 2}
    whole = client.chat.completions.create(**options)
    assert whole.usage is not None
    texts = [choice.message.content for choice in whole.choices]
    parts = ["", ""]
    last = None
    stream = client.chat.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    )
    for last in stream:
        for choice in last.choices:
            parts[choice.index] += choice.delta.content or ""
    assert parts == texts
    assert last is not None
    assert last.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    raw = client.chat.completions.with_raw_response.create(**options)
    assert raw.headers["x-request-id"] == raw.parse()._request_id


def test_the_helper_for_streams(client: openai.OpenAI, model: str) -> None:
    with client.chat.completions.stream(
        model=model, messages=USER, max_completion_tokens=20, seed=1, logprobs=True
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.current_completion_snapshot  # get_final_completion minds a length
    assert "content.delta" in kinds
    assert {"chunk", "content.done", "logprobs.content.delta"} <= set(kinds)
    assert final.choices[0].message.content
    assert final.choices[0].logprobs is not None
    assert final.choices[0].logprobs.content


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"weather", "add"}),
        ({"type": "function", "function": {"name": "add"}}, {"add"}),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "required",
                    "tools": [{"type": "function", "function": {"name": "weather"}}],
                },
            },
            {"weather"},
        ),
        ("none", set()),
    ],
)
def test_tool_choices(client: openai.OpenAI, model: str, choice: Any, names: set[str]) -> None:
    options: Any = {
        "model": model, "messages": USER, "tools": TOOLS, "tool_choice": choice, "seed": 3,
        "max_tokens": 200, "parallel_tool_calls": False,
    }  # fmt: skip
    if choice == "none":
        del options["parallel_tool_calls"]
    whole = client.chat.completions.create(**options).choices[0]
    with client.chat.completions.stream(**options) as stream:
        for _ in stream:
            pass
        streamed = stream.current_completion_snapshot.choices[0]
    for one in (whole, streamed):
        calls = one.message.tool_calls or []
        assert {call.function.name for call in calls} <= names  # type: ignore[union-attr]
        assert bool(calls) == bool(names)
        for call in calls:
            assert isinstance(json.loads(call.function.arguments), dict)  # type: ignore[union-attr]
        right = (
            "stop" if isinstance(choice, dict) and choice["type"] == "function" else "tool_calls"
        )
        assert not names or one.finish_reason == right
    # The answer goes back as it came, with the calls' results.
    messages = [*USER, whole.message, *(
        {"role": "tool", "tool_call_id": call.id, "content": "12 degrees"}
        for call in whole.message.tool_calls or []
    )]  # fmt: skip
    again = client.chat.completions.create(
        model=model, messages=messages, tools=options["tools"], max_tokens=5
    )
    assert again.choices[0].finish_reason


class Town(BaseModel):
    town: Literal["Ulm", "Köln"]
    far: bool


def test_answers_are_parsed(client: openai.OpenAI, model: str) -> None:
    parsed = client.chat.completions.parse(
        model=model, messages=USER, response_format=Town, max_tokens=60, seed=2
    )
    town = parsed.choices[0].message.parsed
    assert isinstance(town, Town)
    with client.chat.completions.stream(
        model=model, messages=USER, response_format=Town, max_tokens=60, seed=2
    ) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == town
    tool = openai.pydantic_function_tool(Town)
    called = client.chat.completions.parse(
        model=model, messages=USER, tools=[tool], tool_choice="required", max_tokens=200, seed=2
    )
    [call, *_] = called.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Town)
    schema = client.chat.completions.create(
        model=model, messages=USER, max_tokens=60, seed=4,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
    )  # fmt: skip
    assert Town.model_validate_json(schema.choices[0].message.content or "")
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(
            model=model, messages=USER, response_format=Town, max_tokens=2
        )


def test_log_probabilities(client: openai.OpenAI, model: str) -> None:
    chat = client.chat.completions.create(
        model=model, messages=USER, logprobs=True, top_logprobs=3, max_tokens=4, temperature=0
    )
    shown = chat.choices[0].logprobs
    assert shown is not None
    assert shown.content is not None
    for token in shown.content:
        assert len(token.top_logprobs) == 3
        assert token.logprob == max(one.logprob for one in token.top_logprobs)
        assert token.bytes is not None
    text = b"".join(bytes(token.bytes or ()) for token in shown.content).decode()
    assert text == chat.choices[0].message.content


def test_completions(client: openai.OpenAI, model: str) -> None:
    options: Any = {"model": model, "max_tokens": 6, "temperature": 0}
    one = client.completions.create(prompt="Once upon a", **options)
    many = client.completions.create(prompt=["Once upon a", [5, 6, 7]], **options)
    assert [choice.index for choice in many.choices] == [0, 1]
    assert many.choices[0].text == one.choices[0].text
    parts = ""
    for chunk in client.completions.create(prompt="Once upon a", stream=True, **options):
        parts += chunk.choices[0].text
    assert parts == one.choices[0].text
    echoed = client.completions.create(
        prompt="Once upon a", echo=True, logprobs=2, model=model, max_tokens=0
    )
    shown = echoed.choices[0].logprobs
    assert echoed.choices[0].text == "Once upon a"
    assert shown is not None
    assert shown.token_logprobs is not None
    assert shown.token_logprobs[0] is None
    assert all(number is not None for number in shown.token_logprobs[1:])
    assert len(client.completions.create(prompt="x", model=model).choices) == 1


def test_extra_members(client: openai.OpenAI, model: str) -> None:
    found = client.chat.completions.create(
        model=model, messages=USER, max_tokens=5,
        extra_body={"top_k": 1, "return_token_ids": True, "structured_outputs": {"regex": "[ab]+"}},
    )  # fmt: skip
    assert set(found.choices[0].message.content or "") <= {"a", "b"}
    assert found.usage is not None
    ids = found.choices[0].token_ids  # type: ignore[attr-defined]
    assert len(ids) == found.usage.completion_tokens
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model=model, messages=USER, extra_body={"temprature": 1}, max_tokens=5
        )
    assert caught.value.param == "temprature"


def test_errors(url: str, client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=model, messages=USER, top_p=3)
    assert (caught.value.param, caught.value.code) == ("top_p", "invalid_field")
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=USER)
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model=model, input="x")
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model=model, input="x")
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.2).chat.completions.create(
            model=model, messages=USER, max_tokens=1500, extra_body={"ignore_eos": True}
        )


async def test_the_asynchronous_client(url: str, model: str) -> None:
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        create = client.chat.completions.create
        options: Any = {"model": model, "messages": USER, "max_tokens": 8}
        whole = await asyncio.gather(*(create(**options, seed=seed) for seed in range(6)))

        async def read(seed: int) -> str:
            stream = await create(**options, seed=seed, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        streamed = await asyncio.gather(*(read(seed) for seed in range(6)))
        assert streamed == [one.choices[0].message.content for one in whole]
        task = asyncio.create_task(
            create(model=model, messages=USER, max_tokens=1500, extra_body={"ignore_eos": True})
        )
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        stream = await create(**options | {"max_tokens": 500}, stream=True)
        await anext(aiter(stream))
        await stream.close()
        assert (await create(**options)).choices


def test_two_servers_behind_one_door() -> None:
    with real_server("--listen", "127.0.0.1:0", "--served-name", "second") as other:
        other.wait_until_ready()
        with (
            door_process(demo_server().addresses[0], other.addresses[0]) as url,
            openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client,
        ):
            first, second = [model.id for model in client.models.list()]
            assert second == "second"
            for model in (first, second):
                answer = client.chat.completions.create(model=model, messages=USER, max_tokens=3)
                assert answer.model == model
            with pytest.raises(openai.NotFoundError):
                client.chat.completions.create(model="third", messages=USER)


def test_what_the_document_has_to_paste(url: str) -> None:
    """The Python program, and curl's line, with the address of this door."""
    [program] = code_blocks("python", DOCUMENT)
    host = url.removesuffix("/v1")
    for command in (
        [sys.executable, "-c", program.replace("http://127.0.0.1:8000", host)],
        shlex.split(shell_commands("curl ", DOCUMENT)[0].replace("http://127.0.0.1:8000", host)),
    ):
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=WAIT_S, env=clean_environment()
        )
        assert done.returncode == 0, done.stderr
        assert re.search(r"\w+ \w+", done.stdout)
