"""A real Headrace server behind the proxy, in place of a scripted one: its engine is a fake whose
output is the prompt's text over and over, a token a byte, so that what it says is known.

Only vectors with `"real"` have one; the server's code is imported with this module
alone.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.contract.request import GenerationRequest
from service.config import ServiceConfig
from service.server import HeadraceServer
from tests.conformance.proxy import Proxy
from tests.service.fake_engine import FakeEngine, byte_tokenizer, model_info

_STEP_SECONDS = 0.002
_CONTEXT_TOKENS = 100_000


def prompt_again(request: GenerationRequest, _choice: int) -> Sequence[int]:
    """The prompt's bytes, over and over; more than fit."""
    prompt = [token for token in request.prompt if token < 256] or [32]
    return list(itertools.islice(itertools.cycle(prompt), _CONTEXT_TOKENS))


class RealServer:
    """A real server; `options`: of its model and its front end, as a vector gives them."""

    def __init__(self, name: str, proxy: Proxy, folder: Path, options: dict[str, Any]) -> None:
        self.name = name
        self.proxy = proxy
        self._path = folder / f"{name}.server"
        self._options = options
        self._server: HeadraceServer | None = None
        self._steps: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Starts it."""
        running = self._options.get("max_running_requests", 8)
        waiting = self._options.get("max_queue_size", 1024)
        info = model_info(
            max_context_tokens=_CONTEXT_TOKENS,
            max_running_requests=running,
            max_queue_size=waiting,
            serves_adapters=self._options.get("adapters", False),
        )
        engine = FakeEngine(script=prompt_again, auto=False, info=info)
        self._server = HeadraceServer(
            ServiceConfig(listen=(f"unix:{self._path}",)),
            engine,
            tokenizer_loader=lambda _info: byte_tokenizer(),
        )
        await self._server.start()
        await self._server.ready()
        self.proxy.backend = str(self._path)
        self._steps = asyncio.create_task(self._step(engine))

    async def drain(self) -> None:
        """What runs ends; what is new is refused."""
        assert self._server is not None
        self._server.begin_drain(60.0)
        await self._server.drain_begun()

    async def stop(self) -> None:
        """Ends it."""
        if self._steps is not None:
            self._steps.cancel()
            await asyncio.gather(self._steps, return_exceptions=True)
        if self._server is not None:
            await self._server.stop()

    async def _step(self, engine: FakeEngine) -> None:
        while True:
            engine.step()
            await asyncio.sleep(_STEP_SECONDS)


def adapter_digest(source: str) -> str:
    """The digest of what such a server loads from a source, in hexadecimal."""
    return hashlib.sha256(source.encode()).hexdigest()


def echo(text: str, max_tokens: int) -> dict[str, Any]:
    """What such a server makes of a text, as members of RESULT's choice."""
    tokens = list(itertools.islice(itertools.cycle(text.encode()), max_tokens))
    return {
        "text": bytes(tokens).decode(),
        "token_ids": tokens,
        "finish_reason": "length",
        "usage": {"completion_tokens": max_tokens},
    }
