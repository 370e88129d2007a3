"""A real server whose model says what a test wrote down: one reply for each request, in the form of
Hermes' tool calls.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.service.fake_engine import EOS, VOCAB_SIZE, FakeEngine, model_info
from tests.service.helpers import Harness, serving
from tests.service.replies.templates import tokenizer

ENDLESS = "…"
"""At a reply's end: it does not end by itself."""


def call(name: str, arguments: str) -> str:
    """A call as the model writes it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@asynccontextmanager
async def talking(*replies: str, auto: bool = True, **options: Any) -> AsyncIterator[Harness]:
    """The server; a request more than there are replies fails the test."""
    left = iter(replies)

    def script(*_: Any) -> list[int]:
        reply = next(left)
        ids: list[int] = tokenizer().encode(reply.removesuffix(ENDLESS))
        return ids if reply.endswith(ENDLESS) else [*ids, EOS]

    engine = FakeEngine(script=script, info=model_info(vocab_size=VOCAB_SIZE + 16), auto=auto)
    async with serving(engine, tokenizer=tokenizer(), **options) as harness:
        yield harness


def prompts(harness: Harness) -> list[str]:
    """The prompts of all requests so far, as the template laid them out."""
    return [
        tokenizer().decode(request.prompt, skip_special_tokens=False)
        for request in harness.engine.submitted
    ]
