"""A driver's process, as README.md describes it: commands out, answers in."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

ANSWER_SECONDS = 30.0
END_SECONDS = 5.0
ROOT = Path(__file__).resolve().parents[2]
_LINE_BYTES = 256 * 1024 * 1024
_S = TypeVar("_S", asyncio.StreamReader, asyncio.StreamWriter)


class DriverFault(Exception):
    """The driver broke the protocol, or ended."""


class Driver:
    """One driver's process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        """Made by `start`, which gives the process a pipe for each of its three streams."""
        self._process = process
        self._input = _pipe(process.stdin)
        self._output = _pipe(process.stdout)
        self._stderr = _pipe(process.stderr)
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._errors: list[str] = []
        self.fault: str | None = None
        self._ready: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._hear())]

    @classmethod
    async def start(cls, command: Sequence[str], environment: Mapping[str, str]) -> Driver:
        """Starts a driver, and waits until it is ready."""
        kept = {k: v for k, v in os.environ.items() if not _configures(k)}
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=ROOT,
            env={**kept, **environment},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=_LINE_BYTES,
        )
        driver = cls(process)
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await driver._ready
        except TimeoutError:
            await driver.kill()
            raise DriverFault(f"it did not become ready: {driver.said()}") from None
        return driver

    def begin(self, op: str, members: Mapping[str, Any]) -> tuple[int, asyncio.Future[Any]]:
        """Sends a command; returns its id, and its answer that will come."""
        number = next(self._ids)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self.fault is not None:
            raise DriverFault(self.fault)
        self._waiting[number] = future
        line = json.dumps({"id": number, "op": op, **members}, ensure_ascii=False)
        self._input.write(line.encode() + b"\n")
        return number, future

    def said(self) -> str:
        """The last of what it wrote to stderr."""
        return "".join(self._errors)[-3000:]

    async def end(self) -> str | None:
        """Ends its input; returns what is wrong with its end."""
        self._input.close()
        try:
            async with asyncio.timeout(END_SECONDS):
                code = await self._process.wait()
        except TimeoutError:
            await self.kill()
            return f"the driver did not end within {END_SECONDS:g} s of the end of its input"
        await asyncio.gather(*self._tasks, return_exceptions=True)
        return None if code == 0 else f"the driver ended with {code}: {self.said()}"

    async def kill(self) -> None:
        """Ends it at once."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _read(self) -> None:
        try:
            while line := await self._output.readuntil(b"\n"):
                self._take(json.loads(line))
        except (ValueError, asyncio.LimitOverrunError, UnicodeDecodeError) as problem:
            self._fail(f"a line that is not of the protocol: {problem}")
        except asyncio.IncompleteReadError as rest:
            self._fail(f"it ended {'within a line' if rest.partial else ''}: {self.said()}")

    def _take(self, told: dict[str, Any]) -> None:
        if "ready" in told:
            if not self._ready.done():
                self._ready.set_result(told["ready"])
            return
        future = self._waiting.pop(told.get("id", -1), None)
        if future is None:
            raise ValueError(f"an answer that nothing waits for: {told}")
        if not future.done():
            future.set_result(told)

    def _fail(self, fault: str) -> None:
        self.fault = fault
        problem = DriverFault(fault)
        for future in [*self._waiting.values(), self._ready]:
            if not future.done():
                future.set_exception(problem)
                future.exception()  # it may be that nobody asks any more
        self._waiting.clear()

    async def _hear(self) -> None:
        while piece := await self._stderr.read(65536):
            self._errors.append(piece.decode(errors="replace"))
            del self._errors[:-200]


def _pipe(stream: _S | None) -> _S:
    if stream is None:
        raise DriverFault("its process has no pipes for its input, output and errors")
    return stream


def _configures(name: str) -> bool:
    """Whether a variable would configure a client."""
    return name.startswith(("HEADRACE_", "OTEL_")) or name.lower() in (
        "http_proxy", "https_proxy", "no_proxy", "grpc_proxy", "all_proxy",
    )  # fmt: skip
