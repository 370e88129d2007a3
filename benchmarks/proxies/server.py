"""The server behind the proxies: the real service around an engine that computes nothing.

    python -m benchmarks.proxies.server ADDRESS --pings 60

A prompt says what happens to its request, and when (`prompt_of`). The output depends on how often
the request was begun, so a client can check whether it got the whole output of a single run.
`tries_of` is a prompt that asks for this number.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, NoReturn

from engine.contract.outputs import RequestOutput
from engine.contract.request import GenerationRequest
from service.command.process import run_to_the_end
from service.config import ServiceConfig
from service.logs.output import Output
from tests.service.fake_engine import EOS, FakeEngine, byte_tokenizer, model_info

STEP_S = 0.02
_ORDER = re.compile(rb"(\S+) wait=(\S+) every=(\S+) ")
_TRIES = re.compile(rb"tries (\S+)")
_HEAD = 200
"""The order is within this many bytes of the prompt's beginning."""


def prompt_of(key: str, *, wait_s: float, every_s: float, size: int = 0) -> str:
    """Return the prompt of a request.

    Args:
        key: the request's unique name.
        wait_s: the time until its first token.
        every_s: the time between two tokens.
        size: the size of the prompt in bytes; 0 for the smallest.
    """
    return f"{key} wait={wait_s:g} every={every_s:g} ".ljust(size, ".")


def tries_of(key: str) -> str:
    """Return a prompt that asks how often a request was begun."""
    return f"tries {key}"


class PacedEngine(FakeEngine):
    """A fake engine that takes as long as prompts say."""

    def __init__(self, **options: Any) -> None:
        super().__init__(script=self._script_of, **options)
        self._begun: Counter[str] = Counter()
        self._paces: dict[str, tuple[float, float]] = {}

    def _script_of(self, request: GenerationRequest, _choice: int) -> Sequence[int]:
        head = bytes(request.prompt[:_HEAD])
        if asked := _TRIES.match(head):
            self._paces[request.request_id] = (0.0, 0.0)
            return [*f"{self._begun[asked[1].decode()]}".encode(), EOS]
        order = _ORDER.match(head)
        if order is None:  # a neighbour's request, which asks for nothing
            return [EOS]
        key = order[1].decode()
        self._begun[key] += 1
        self._paces[request.request_id] = (float(order[2]), float(order[3]))
        return [*f"{self._begun[key] % 10}".encode()]

    def _outputs(self, live: Any, now: float) -> list[RequestOutput]:
        [choice] = live.choices
        wait, every = self._paces.get(live.spec.request_id, (0.0, 0.0))
        due = live.arrival + wait + every * choice.generated
        is_ending = choice.end is not None or live.failure is not None
        return super()._outputs(live, now) if is_ending or now >= due else []

    async def _run_loop(self) -> None:
        while True:
            due = time.monotonic() + STEP_S
            self.step()
            await asyncio.sleep(due - time.monotonic())


def main() -> NoReturn:
    """Serve until a signal arrives."""
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("--pings", type=float, required=True, help="seconds between two")
    given = parser.parse_args()
    info = model_info(max_context_tokens=1 << 22, max_running_requests=4096)
    config = ServiceConfig(
        listen=(given.address,), max_receive_bytes=8 << 20, keepalive_interval_s=given.pings
    )
    with Output(config.log_format, config.log_level) as output:
        run_to_the_end(
            config, PacedEngine(info=info), output, tokenizer_loader=lambda _info: byte_tokenizer()
        )


if __name__ == "__main__":
    main()
