"""Servers for measurements of a fleet: the real service, as a process, around an engine that
computes nothing.

    python -m benchmarks.fleet.servers ADDRESS --step-ms 10 --running 16 --cached 30

Each step gives every running request its next token. The token depends only on the request's
prompt, so a client can check whether it got exactly its tokens. The prefix cache holds up to
`--cached` prefixes, each of which is the first PREFIX tokens of a prompt, and evicts the least
recently used one.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import queue
import signal
import subprocess
import sys
import threading
import types
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NoReturn, cast

from benchmarks.processes import ROOT
from engine.contract.request import GenerationRequest
from engine.contract.types import TokenId
from service.command.process import run_to_the_end
from service.config import ServiceConfig
from service.logs.output import Output
from tests.service.fake_engine import FakeEngine, byte_tokenizer, default_script, model_info

PREFIX = 256
"""How many tokens a cached prefix has."""
WAIT_S = 60.0
"""The limit of each wait; whatever takes longer is stuck."""


def expected(prompt: Sequence[int], tokens: int) -> tuple[int, ...]:
    """Return what a server generates for a prompt of token ids."""
    request = cast(GenerationRequest, types.SimpleNamespace(prompt=tuple(prompt)))
    return tuple(default_script(request)[:tokens])


class TimedEngine(FakeEngine):
    """A fake engine whose steps take a given time, with a bounded prefix cache."""

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


class ServerProcess:
    """One server.

    Attributes:
        address: where it listens.
    """

    def __init__(self, module: str, address: str, *options: str) -> None:
        """Start a module that serves at an address, with these options."""
        self.address = address
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, address, *options],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stderr=subprocess.PIPE,
            text=True,
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._said: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_until_ready(self) -> None:
        """Wait for the last line of the start-up output."""
        while "Stop it with" not in (line := self._lines.get(timeout=WAIT_S)):
            self._said.append(line)
            if not line:
                raise RuntimeError("".join(self._said))

    def drain(self) -> None:
        """Start an orderly shutdown."""
        self._process.send_signal(signal.SIGTERM)

    def wait(self, within_s: float = WAIT_S) -> int:
        """Wait for the process to end and return its exit code.

        Raises:
            subprocess.TimeoutExpired: it has not ended.
        """
        return self._process.wait(within_s)

    def kill(self) -> None:
        """Kill the process immediately."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(WAIT_S)
        self._reader.join(WAIT_S)

    def _read(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for line in lines:
                self._lines.put(line)
        self._lines.put("")


def timed_server(
    address: str,
    *,
    step_ms: float,
    running: int,
    cached: int,
    drain_s: float = 30,
    connection_age_s: float = 0,
) -> ServerProcess:
    """Start a server from this module."""
    return ServerProcess(
        "benchmarks.fleet.servers", address,
        "--step-ms", f"{step_ms:g}", "--running", f"{running}", "--cached", f"{cached}",
        "--drain", f"{drain_s:g}", "--connection-age", f"{connection_age_s:g}",
    )  # fmt: skip


def main() -> NoReturn:
    """Serve until a signal arrives."""
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("--step-ms", type=float, required=True)
    parser.add_argument("--running", type=int, required=True)
    parser.add_argument("--cached", type=int, required=True)
    parser.add_argument("--drain", type=float, default=30)
    parser.add_argument("--connection-age", type=float, default=0)
    given = parser.parse_args()
    info = model_info(max_context_tokens=1 << 16, max_running_requests=given.running)
    engine = TimedEngine(step_s=given.step_ms / 1000, cached=given.cached, info=info)
    config = ServiceConfig(
        listen=(given.address,),
        insecure=True,
        drain_timeout_s=given.drain,
        max_connection_age_s=given.connection_age,
    )
    with Output(config.log_format, config.log_level) as output:
        run_to_the_end(config, engine, output, tokenizer_loader=lambda _info: byte_tokenizer())


if __name__ == "__main__":
    main()
