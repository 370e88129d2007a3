"""Real servers around fake engines, one for each family of `families`, in one process.

Run as a program with the directory that has the families' directories: prints a line of JSON, the
address of each family's server, and serves until its standard input ends.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from engine.text import Tokenizer
from tests.chat.families import NOW
from tests.service.fake_engine import FakeEngine, model_info
from tests.service.helpers import serving

CONTEXT_TOKENS = 100_000
VOCAB_SIZE = 10_000


async def serve(directories: Sequence[Path]) -> None:
    """Serves until the standard input ends."""
    async with AsyncExitStack() as stack:
        addresses = {}
        for directory in directories:
            info = model_info(max_context_tokens=CONTEXT_TOKENS, vocab_size=VOCAB_SIZE)
            tokenizer = Tokenizer.load(directory, VOCAB_SIZE, clock=lambda: NOW)
            harness = await stack.enter_async_context(
                serving(FakeEngine(info=info), tokenizer=tokenizer)
            )
            addresses[directory.name] = harness.server.addresses[0]
        sys.stdout.write(json.dumps(addresses) + "\n")
        sys.stdout.flush()
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(serve(sorted(Path(sys.argv[1]).iterdir())))
