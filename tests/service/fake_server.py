"""The real process around the fake engine: `python -m tests.service.fake_server ADDRESS …
[--refuse | --hang]`.

Every request goes on until it is cancelled or reaches max_tokens, one token every 5 ms.
"""

from __future__ import annotations

import asyncio
import sys
from typing import NoReturn

from engine.contract.engine_client import ModelInfo, ProgressSink, StepSink
from engine.contract.errors import ModelRefusedError
from service.command.process import run_to_the_end
from service.config import ServiceConfig
from service.logs.output import Output
from tests.service.fake_engine import FakeEngine, byte_tokenizer, model_info, says


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


if __name__ == "__main__":
    main()
