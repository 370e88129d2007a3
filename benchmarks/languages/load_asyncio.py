"""The load program of the Python client for asyncio: a task reads each request."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import AsyncExitStack

import headrace


async def count(handle: headrace.AsyncRequestHandle) -> int:
    """Read a request to its end; returns how many tokens it got."""
    tokens = 0
    async for chunk in handle:
        tokens += len(chunk.token_ids)
    return tokens


async def turn(client: headrace.AsyncClient, sessions: int, requests: int, tokens: int) -> int:
    async with AsyncExitStack() as stack:
        opened = [await stack.enter_async_context(client.session()) for _ in range(sessions)]
        handles = [
            session.submit("Once upon a time", max_tokens=tokens, ignore_eos=True, temperature=0)
            for session in opened
            for _ in range(requests)
        ]
        return sum(await asyncio.gather(*map(count, handles)))


async def main() -> None:
    sessions, requests, tokens = map(int, sys.argv[2:])
    async with headrace.AsyncClient(sys.argv[1]) as client:
        while await asyncio.to_thread(sys.stdin.readline):
            told = {"tokens": await turn(client, sessions, requests, tokens)}
            sys.stdout.write(json.dumps(told) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main())
