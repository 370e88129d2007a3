"""A model with recurrent layers, served by the real server: what comes over the network is what the
unmodified model gives.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import headrace
import pytest
from headrace import FinishReason, Message

from engine.contract.sampling_params import GrammarKind
from tests.engine.hybrids import PARAMETERS, TOOLS, Hybrid, save_hybrid
from tests.engine.structured.conftest import form
from tests.service.real_server import WAIT_S, RealServer, real_server
from tests.tiny_models import greedy_reference, make_prompts

BLOCK = 16
COUNT = 40


@pytest.fixture(scope="module", params=["qwen3_5", "mamba2"])
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Hybrid:
    return save_hybrid(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def server(hybrid: Hybrid) -> Iterator[RealServer]:
    with real_server(
        *("--model", str(hybrid.directory), "--dtype", "float32", "--listen", "127.0.0.1:0"),
        *("--block-size", str(BLOCK), "--max-batch-tokens", "64", "--scheduler", "priority"),
    ) as server:
        server.wait_until_ready()
        yield server


@pytest.fixture(scope="module")
def client(server: RealServer) -> Iterator[headrace.Client]:
    with headrace.Client(server.addresses[0]) as client:
        yield client


def _prompt(hybrid: Hybrid, messages: list[dict[str, Any]], **options: Any) -> list[int]:
    text = hybrid.tokenizer.apply_chat_template(messages, **options)
    return hybrid.tokenizer.encode(text, add_special_tokens=False)


def test_a_conversation(hybrid: Hybrid, client: headrace.Client) -> None:
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Answer briefly, please. " * 3}]
    before = 0
    for question in ("How high is the river at Ulm?", "And at Passau?", "Which is higher?"):
        messages.append({"role": "user", "content": question})
        prompt = _prompt(hybrid, messages)
        found = client.generate([Message(**one) for one in messages], max_tokens=COUNT)
        assert list(found.token_ids) == greedy_reference(hybrid.model, prompt, COUNT)
        assert found.usage.prompt_tokens == len(prompt)
        assert found.usage.cached_tokens >= (before - 1) // BLOCK * BLOCK
        before = len(prompt)
        messages.append({"role": "assistant", "content": found.text})
    assert before > 4 * BLOCK


def test_many_at_once_with_priorities_and_choices(hybrid: Hybrid, client: headrace.Client) -> None:
    """Greedy ones get `generate`'s tokens, and the choices of one that is drawn are those that it
    gets alone.
    """
    prompts = make_prompts((20, 90, 5, 33, 61, 130))
    drawn: Any = {"n": 3, "temperature": 1.0, "seed": 7, "max_tokens": COUNT, "ignore_eos": True}
    alone = client.generate(prompts[0], bypass_prefix_cache=True, **drawn)
    assert len({choice.token_ids for choice in alone.choices}) == 3
    with client.session() as session:
        handles = [
            session.submit(one, max_tokens=COUNT, priority=index % 3)
            for index, one in enumerate(prompts)
        ]
        crowded = session.submit(prompts[0], priority=1, **drawn)
        for handle, prompt in zip(handles, prompts, strict=True):
            expected = greedy_reference(hybrid.model, prompt, COUNT)
            assert list(handle.result(WAIT_S).token_ids) == expected
        result = crowded.result(WAIT_S)
    assert [one.token_ids for one in result.choices] == [one.token_ids for one in alone.choices]


def test_a_schema_and_a_tool(hybrid: Hybrid, client: headrace.Client) -> None:
    question = [{"role": "user", "content": "How high is the river at Ulm?"}]
    prompt = _prompt(hybrid, question)
    wanted = hybrid.within(prompt, form(GrammarKind.JSON_SCHEMA, json.dumps(PARAMETERS)), COUNT)
    found = client.generate([Message(**question[0])], json_schema=PARAMETERS, max_tokens=COUNT)
    assert found.finish_reason is FinishReason.STOP
    assert hybrid.without_end(list(found.token_ids)) == wanted
    assert json.loads(found.text)["place"] in ("Ulm", "Passau")
    for _ in range(2):  # the second one from a kept state
        called = client.generate(
            [Message(**question[0])],
            tools=TOOLS,
            tool_choice="required",
            parallel_tool_calls=False,
            max_reasoning_tokens=20,
            max_tokens=200,
        )
        [call] = called.tool_calls
        assert call.name == "read_gauge"
        assert json.loads(call.arguments_json)["days"] in (1, 2, 3)
    assert called.usage.cached_tokens >= called.usage.prompt_tokens - 1 - BLOCK


def test_shared_beginnings_are_found_from_the_third_prompt_on(client: headrace.Client) -> None:
    (common,) = make_prompts((10 * BLOCK,), seed=5)
    tails = make_prompts((20,) * 4, seed=6)
    found = [client.generate(common + tail, max_tokens=2).usage.cached_tokens for tail in tails]
    assert found == [0, 0, len(common), len(common)]
    engine = client.control.statistics().engine
    assert engine.running == 0
