"""The real process around the fake engine: `python -m tests.service.fake_server ADDRESS …
[--refuse | --hang] [--step-ms 5] [--running 64] …`.

Every request goes on until it is cancelled or reaches max_tokens, one token every step. The tokens
depend on the prompt alone, so that a client can check whether it got exactly its tokens
(`expected`). `process` starts it.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import types
from asyncio.subprocess import PIPE, Process
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, NoReturn, cast

from engine.contract.engine_client import ModelInfo, ProgressSink, StepSink
from engine.contract.errors import ModelRefusedError
from engine.contract.request import GenerationRequest
from engine.contract.types import TokenId
from service.command.process import run_to_the_end
from service.config import ServiceConfig
from service.logs.output import Output
from tests.service.fake_engine import FakeEngine, byte_tokenizer, default_script, model_info
from tests.service.helpers import DEADLINE_S
from tests.service.readme import ROOT

PREFIX = 256
"""How many tokens a cached prefix has."""


def expected(prompt: Sequence[int], tokens: int) -> tuple[int, ...]:
    """What a server generates for a prompt of token ids."""
    request = cast(GenerationRequest, types.SimpleNamespace(prompt=tuple(prompt)))
    return tuple(default_script(request)[:tokens])


class TimedEngine(FakeEngine):
    """A fake engine whose steps take a given time. Its prefix cache has room for some prefixes and
    gives up the least recently used one.
    """

    def __init__(self, *, step_s: float, cached: int, **options: Any) -> None:
        super().__init__(**options)
        self._step_s = step_s
        self._cached = cached
        self._found: OrderedDict[tuple[TokenId, ...], None] = OrderedDict()

    async def _run_loop(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            if not self._live:
                self._work.clear()
                await self._work.wait()
            due = loop.time() + self._step_s
            self.step()
            await asyncio.sleep(due - loop.time())

    def _look_up(self, request: GenerationRequest) -> int:
        prefix = tuple(request.prompt[:PREFIX])
        found = prefix in self._found
        self._found[prefix] = None
        self._found.move_to_end(prefix)
        if len(self._found) > self._cached:
            self._found.popitem(last=False)
        return min(len(prefix), len(request.prompt) - 1) if found else 0


class HangingEngine(TimedEngine):
    """An engine that never has its model."""

    async def start(self, sink: StepSink, progress: ProgressSink) -> ModelInfo:
        await asyncio.Event().wait()
        raise AssertionError


def main() -> NoReturn:
    """Serve, and end as `headrace-server` ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("addresses", nargs="+")
    parser.add_argument("--refuse", action="store_true", help="the model")
    parser.add_argument("--hang", action="store_true", help="never have the model")
    parser.add_argument("--auth", help="the callers file")
    parser.add_argument("--step-ms", type=float, default=5)
    parser.add_argument("--running", type=int, default=64, help="requests at a time")
    parser.add_argument("--cached", type=int, default=30, help="prefixes")
    parser.add_argument("--drain", type=float, default=30)
    parser.add_argument("--connection-age", type=float, default=0)
    given = parser.parse_args()
    engine = (HangingEngine if given.hang else TimedEngine)(
        step_s=given.step_ms / 1000,
        cached=given.cached,
        info=model_info(max_context_tokens=1 << 20, max_running_requests=given.running),
    )
    if given.refuse:
        engine.load_error = ModelRefusedError("the model is of a kind that would be run wrongly")
    config = ServiceConfig(
        listen=tuple(given.addresses),
        insecure=True,
        drain_timeout_s=given.drain,
        max_connection_age_s=given.connection_age,
        auth_file=given.auth,
    )
    with Output(config.log_format, config.log_level) as output:
        run_to_the_end(config, engine, output, tokenizer_loader=lambda _info: byte_tokenizer())


@asynccontextmanager
async def process(address: str, *options: str) -> AsyncIterator[Process]:
    started = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.service.fake_server", address, *options, cwd=ROOT, stderr=PIPE
    )
    try:
        yield started
    finally:
        if started.returncode is None:
            started.kill()
            await started.wait()


async def read_until(started: Process, mark: str) -> str:
    """What the process says, up to a line with this mark."""
    assert started.stderr is not None
    said = ""
    async with asyncio.timeout(30):
        while mark not in said:
            line = (await started.stderr.readline()).decode()
            assert line, f"the process ended: {said}"
            said += line
    return said


async def ended(started: Process) -> int:
    async with asyncio.timeout(DEADLINE_S):
        assert started.stderr is not None
        await started.stderr.read()
        return await started.wait()


if __name__ == "__main__":
    main()
