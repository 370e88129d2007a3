"""The real server around a fake engine: greedy output is the prompt's bytes, over and over.

Run as a program it listens on a free TCP port and on the Unix socket that it is given, prints the
port, and serves until its standard input ends.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Sequence

from engine.contract.request import GenerationRequest
from service.config import ServiceConfig
from service.server import HeadraceServer
from tests.service.fake_engine import FakeEngine, byte_tokenizer, model_info

STEP_SECONDS = 0.002
CONTEXT_TOKENS = 100_000


def prompt_again(request: GenerationRequest, _choice: int) -> Sequence[int]:
    """The prompt's bytes, shifted by one place, without special tokens; more than fit."""
    prompt = [token for token in request.prompt if token < 256]
    return list(itertools.islice(itertools.cycle([*prompt[1:], prompt[0]]), CONTEXT_TOKENS))


async def serve(unix_path: str) -> None:
    """Serves until the standard input ends."""
    engine = FakeEngine(
        script=prompt_again, auto=False, info=model_info(max_context_tokens=CONTEXT_TOKENS)
    )
    server = HeadraceServer(
        ServiceConfig(listen=("127.0.0.1:0", f"unix:{unix_path}")),
        engine,
        tokenizer_loader=lambda _info: byte_tokenizer(),
    )
    await server.start()
    await server.ready()
    sys.stdout.write(f"{next(a.port for a in server.bound if a.path is None)}\n")
    sys.stdout.flush()

    ended = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    while not ended.done():
        engine.step()
        await asyncio.sleep(STEP_SECONDS)
    await server.stop()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
