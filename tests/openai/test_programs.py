"""Programs of others that speak OpenAI's API, where they are installed:

    pip install llm-comply langchain-openai litellm instructor llama-index-llms-openai-like
    pip install 'lm-eval[api]'

They bring some hundred packages, and not all of them agree on one environment; so each is skipped
where it is missing.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tests.openai.asking import TOOLS
from tests.openai.commands import door_process
from tests.openai.doors import USER, open_door
from tests.service.fake_engine import FakeEngine, says
from tests.service.helpers import serving
from tests.service.real_server import demo_server

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(300)]
NULLS = re.compile(
    r"(usage|choices\.\d+\.(finish_reason|logprobs\.(token|top)_logprobs\.0)): None is not"
)
"""What OpenAI sends as null in streams, and of an echoed prompt's first token, though its
description has no null there.
"""
QUESTION = "How is the weather in Ulm?"


class Town(BaseModel):
    """A town."""

    town: Literal["Ulm", "Köln"]
    far: bool


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with door_process(demo_server().addresses[0]) as found:
        yield found


@pytest.fixture(scope="module")
def model(url: str) -> str:
    with openai.OpenAI(base_url=url, api_key="none") as client:
        return client.models.list().data[0].id


# ---- llm-comply: OpenAI's own description of its API ---------------------------------------------


async def test_bodies_are_valid_against_openais_description() -> None:
    comply = pytest.importorskip("llm_comply.schema")
    spec = comply.SpecLoader(Path(comply.__file__).parent / "specs" / "openai_chat.json")
    chat, text = "/v1/chat/completions", "/v1/completions"
    body: dict[str, Any] = {"messages": USER, "max_tokens": 8}
    calls = body | {"tools": TOOLS, "tool_choice": "required"}
    prompt = {"prompt": "a", "max_tokens": 8}
    answers: list[tuple[str, Any]] = []
    # Three choices: a text, a call after reasoning, a text that is cut.
    script = says("hé", "<think>hm</think>", "abcdefghijk")
    async with serving(FakeEngine(script=script)) as h, open_door(h.server.addresses[0]) as door:
        for more in ({}, {"logprobs": True, "top_logprobs": 2}, {"n": 3}):
            answers.append(("CreateChatCompletionResponse", await door.ask(chat, body | more)))
            usage = {"stream_options": {"include_usage": True}}
            for event in await door.events(chat, body | more | usage):
                answers.append(("CreateChatCompletionStreamResponse", event))
        for more in ({}, {"logprobs": 2}, {"echo": True, "logprobs": 0}, {"n": 2}):
            answers.append(("CreateCompletionResponse", await door.ask(text, prompt | more)))
            for event in await door.events(text, prompt | more):
                answers.append(("CreateCompletionResponse", event))
        answers.append(("ListModelsResponse", (await door.get("/v1/models")).json()))
        answers.append(("Model", (await door.get("/v1/models/fake")).json()))
        for path, bad in ((chat, {}), (chat, body | {"top_p": 3}), (text, {"x": 1}), ("/x", {})):
            answers.append(("ErrorResponse", (await door.post(path, json=bad)).json()))
        for request in (body, calls):
            assert spec.validate(request | {"model": "m"}, "CreateChatCompletionRequest") == []
    differ = {
        (kind, error): answer
        for kind, answer in answers
        for error in spec.validate(answer, kind)
        if not NULLS.match(error)
    }
    assert not differ


def test_llm_comply(url: str, model: str) -> None:
    pytest.importorskip("llm_comply")
    done = subprocess.run(
        [
            str(Path(sys.executable).parent / "llm-comply"), "run", "--base-url", url,
            "--model", model, "--api-key", "none", "--format", "openai-chat", "--json",
        ],
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    found = {one["id"]: one for one in json.loads(done.stdout)["results"]}
    failed = {name for name, one in found.items() if one["status"] == "failed"}
    assert failed <= {"chat-image-input"}, [found[name] for name in failed]


# ---- frameworks ----------------------------------------------------------------------------------


def test_langchain(url: str, model: str) -> None:
    langchain = pytest.importorskip("langchain_openai")
    options: Any = {"base_url": url, "api_key": "none", "model": model, "seed": 1, "max_retries": 0}
    llm = langchain.ChatOpenAI(max_tokens=300, **options)
    assert llm.invoke(QUESTION).content == "".join(one.content for one in llm.stream(QUESTION))
    bound = llm.bind_tools(TOOLS, tool_choice="weather")
    whole, streamed = bound.invoke(QUESTION), None
    for one in bound.stream(QUESTION):
        streamed = one if streamed is None else streamed + one
    assert whole.tool_calls[0]["args"]["town"] in ("Ulm", "Bonn")
    assert streamed is not None
    assert [one["args"] for one in streamed.tool_calls] == [one["args"] for one in whole.tool_calls]
    for method in ("json_schema", "function_calling"):
        assert isinstance(llm.with_structured_output(Town, method=method).invoke(QUESTION), Town)
    assert langchain.OpenAI(max_tokens=9, **options).invoke("Once upon")


def test_litellm(url: str, model: str) -> None:
    litellm = pytest.importorskip("litellm")
    options: Any = {
        "model": f"openai/{model}", "api_base": url, "api_key": "none", "max_tokens": 200,
        "seed": 1, "messages": [{"role": "user", "content": QUESTION}],
    }  # fmt: skip
    whole = litellm.completion(**options).choices[0].message.content
    parts = litellm.completion(**options, stream=True)
    assert whole == "".join(one.choices[0].delta.content or "" for one in parts)
    called = litellm.completion(**options, tools=TOOLS, tool_choice="required")
    assert called.choices[0].message.tool_calls
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**options | {"model": "openai/other"})
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(**options, top_p=3)


def test_instructor(url: str, model: str) -> None:
    instructor = pytest.importorskip("instructor")
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
            found = instructor.from_openai(client, mode=mode).chat.completions.create(
                model=model, response_model=Town, max_tokens=300, seed=2,
                messages=[{"role": "user", "content": QUESTION}],
            )  # fmt: skip
            assert isinstance(found, Town)


def test_llama_index(url: str, model: str) -> None:
    pytest.importorskip("llama_index.llms.openai_like")
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.openai_like import OpenAILike

    options: Any = {"model": model, "api_base": url, "api_key": "none", "context_window": 4096}
    chat = OpenAILike(
        is_chat_model=True, is_function_calling_model=True, max_tokens=300, temperature=0, **options
    )
    asked = [ChatMessage(role="user", content=QUESTION)]
    whole = chat.chat(asked).message.content
    assert list(chat.stream_chat(asked))[-1].message.content == whole
    text = OpenAILike(is_chat_model=False, max_tokens=9, temperature=0, **options)
    assert list(text.stream_complete("Once upon"))[-1].text == text.complete("Once upon").text


TASK = """
task: tiny
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
doc_to_choice: "{{{{choices}}}}"
metric_list: [{{metric: acc}}]
"""


def test_lm_eval(url: str, model: str, tmp_path: Path) -> None:
    """A task that is decided by the log-probabilities of what was echoed."""
    pytest.importorskip("lm_eval")
    data = tmp_path / "data.jsonl"
    row = {"question": "Once upon a", "choices": [" time", " zqxv"], "answer": 0}
    data.write_text(f"{json.dumps(row)}\n" * 4)
    (tmp_path / "tiny.yaml").write_text(TASK.format(data=data))
    demo = Path(__file__).resolve().parents[2] / "models" / "demo"
    done = subprocess.run(
        [
            str(Path(sys.executable).parent / "lm-eval"), "run", "--model", "local-completions",
            "--model_args", f"model={model},base_url={url}/completions,tokenizer={demo}",
            "--include_path", str(tmp_path), "--tasks", "tiny",
        ],
        capture_output=True, text=True, timeout=250,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    [line] = [line for line in done.stdout.splitlines() if "|acc" in line]
    assert float(line.split("|")[7]) == 1.0, done.stdout
