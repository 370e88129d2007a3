"""Prompts of conversations over HTTP are transformers' own, for the templates of families."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from engine.text import Tokenizer
from tests.chat.families import (
    CONVERSATIONS,
    FAMILIES,
    NOW,
    Conversation,
    make_directory,
    reference,
)
from tests.chat.template_server import CONTEXT_TOKENS, VOCAB_SIZE
from tests.openai.doors import USER, OpenDoor, open_door
from tests.service.fake_engine import FakeEngine, model_info
from tests.service.helpers import serving

RENDER = "/v1/chat/completions/render"


@pytest.mark.parametrize("family", FAMILIES)
async def test_rendered_prompts_are_transformers_own(family: str, tmp_path: Path) -> None:
    """With arguments of calls as the text that OpenAI's API has, and as objects."""
    directory = make_directory(family, tmp_path)
    expected = {name: reference(directory, one) for name, one in CONVERSATIONS.items()}
    info = model_info(max_context_tokens=CONTEXT_TOKENS, vocab_size=VOCAB_SIZE)
    tokenizer = Tokenizer.load(directory, VOCAB_SIZE, clock=lambda: NOW)
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(
            serving(FakeEngine(info=info), tokenizer=tokenizer)
        )
        door = await stack.enter_async_context(open_door(server.server.addresses[0]))
        for as_text in (True, False):
            made = {
                name: await _rendered(door, one, as_text=as_text)
                for name, one in CONVERSATIONS.items()
            }
            assert made == expected


async def _rendered(
    door: OpenDoor, conversation: Conversation, *, as_text: bool
) -> list[int] | None:
    """The prompt's ids; None if the template refuses the conversation."""
    messages = json.loads(json.dumps(conversation.messages))
    for message in messages if as_text else ():
        for call in message.get("tool_calls", ()):
            function = call["function"]
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    body: dict[str, Any] = {"messages": messages, **conversation.options}
    if conversation.tools is not None:
        body["tools"] = conversation.tools
    if conversation.arguments:
        body["chat_template_kwargs"] = conversation.arguments
    answer = await door.post(RENDER, json=body)
    if answer.status_code == 400:
        error = answer.json()["error"]
        assert error["param"] in ("messages", "tools")
        assert error["message"].startswith(error["param"])
        assert "the model's chat template" in error["message"]
        return None
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert set(found) == {"token_ids"}
    tokenized = await door.ask("/tokenize", body)
    assert tokenized == {
        "count": len(found["token_ids"]),
        "max_model_len": CONTEXT_TOKENS,
        "tokens": found["token_ids"],
    }
    return list(found["token_ids"])


async def test_what_is_rendered_is_what_is_generated_from() -> None:
    async with serving() as h, open_door(h.server.addresses[0]) as door:
        body = {"messages": [{"role": "developer", "content": "be brief"}, *USER]}
        rendered = await door.ask(RENDER, body | {"model": "", "temperature": 0, "stream": True})
        answer = await door.ask("/v1/chat/completions", body | {"return_token_ids": True})
        assert answer["prompt_token_ids"] == rendered["token_ids"]
        assert answer["usage"]["prompt_tokens"] == len(rendered["token_ids"])
        [request] = h.engine.submitted
        assert list(request.prompt) == rendered["token_ids"]
        assert bytes(rendered["token_ids"]).decode() == "[developer]be brief[user]hi[assistant]"


async def test_texts_are_rendered_one_by_one() -> None:
    async with serving() as h, open_door(h.server.addresses[0]) as door:
        path = "/v1/completions/render"
        assert await door.ask(path, {"prompt": "hé"}) == [{"token_ids": [*"hé".encode()]}]
        found = await door.ask(path, {"prompt": ["a", [7, 8]]})
        assert found == [{"token_ids": [97]}, {"token_ids": [7, 8]}]
        assert (await door.ask("/tokenize", {"prompt": "abc"}))["tokens"] == [97, 98, 99]
        error = await door.fails(path, {"prompt": []})
        assert (error["status"], error["param"], error["code"]) == (400, "prompt", "invalid_field")
    assert not h.engine.submitted
