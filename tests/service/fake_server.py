"""The real process around the fake engine: `python -m tests.service.fake_server ADDRESS …
[--refuse | --hang]`.

Every request goes on until it is cancelled or reaches max_tokens, one token every 5 ms. `process`
starts it.
"""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NoReturn

from engine.contract.engine_client import ModelInfo, ProgressSink, StepSink
from engine.contract.errors import ModelRefusedError
from service.command.process import run_to_the_end
from service.config import ServiceConfig
from service.logs.output import Output
from tests.service.fake_engine import FakeEngine, byte_tokenizer, model_info, says
from tests.service.helpers import DEADLINE_S
from tests.service.readme import ROOT


class SlowEngine(FakeEngine):
    """A fake engine that takes its time."""

    async def _run_loop(self) -> None:
        while True:
            self.step()
            await asyncio.sleep(0.005)


class HangingEngine(FakeEngine):
    """An engine that never has its model."""

    async def start(self, sink: StepSink, progress: ProgressSink) -> ModelInfo:
        await asyncio.Event().wait()
        raise AssertionError


def main() -> NoReturn:
    """Serve, and end as `headrace-server` ends."""
    options = {argument for argument in sys.argv[1:] if argument.startswith("--")}
    addresses = tuple(argument for argument in sys.argv[1:] if argument not in options)
    info = model_info(max_context_tokens=1 << 20)
    slow = SlowEngine(script=says("x", eos=False), info=info)
    engine = HangingEngine() if "--hang" in options else slow
    if "--refuse" in options:
        engine.load_error = ModelRefusedError("the model is of a kind that would be run wrongly")
    [auth_file] = [one[7:] for one in options if one.startswith("--auth=")] or [None]
    config = ServiceConfig(listen=addresses, drain_timeout_s=30, auth_file=auth_file)
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
