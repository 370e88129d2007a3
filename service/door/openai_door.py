"""The HTTP door: the program `headrace openai` as a child of the server. It serves OpenAI's HTTP
API as a client of this server's gRPC contract.

    HTTP clients ──▶ child ── a separate Unix socket ──▶ the server
    HttpDoor ── secret, by its stdin ──▶ child      child ── stderr, line by line ──▶ the log

A defect of the child, or anything that HTTP clients send to it, ends no gRPC stream: the child is
restarted. Its stdin stays open until this process ends, for whatever reason, and then the child
ends too. SIGTERM drains it: it accepts no more requests, and ends with its last request.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from engine.contract.errors import ConfigError
from engine.logs.lines import LineReader, open_pipe
from engine.logs.records import MAX_MESSAGE, cut, foreign
from service.door.address import Address
from service.door.network_config import DAY_S, NetworkOptions

logger = logging.getLogger(__name__)

_CHILD = "openai"  # in the log
_LEVELS = frozenset({"DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"})
_FIRST_PAUSE_S = 0.1
_MAX_PAUSE_S = 5.0
_PAUSE_AFTER_READY_S = 0.2
"""The longest pause, in seconds, before the child is restarted if it had accepted requests."""
_STABLE_S = 30.0
"""After running this long, in seconds, the child is restarted without a pause."""
_LAST_WORDS_S = 0.5


def check_packages() -> None:
    """Check that the packages that the child imports are installed, without importing them here.
    Raises ConfigError.
    """
    packages = ("starlette", "uvicorn", "httptools")
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            "openai",
            f"needs {', '.join(missing)}, not installed here: pip install 'headrace[openai]'",
        )


class HttpDoor:
    """Supervises the child; see the module. All methods run on one event loop.

    Attributes:
        address: where the child listens.
        restarts: how often it was restarted.
    """

    def __init__(self, config: NetworkOptions, address: Address, own: Address, secret: str) -> None:
        """Start the child. It listens on `address`, and calls the server at `own` with `secret`."""
        self.address = address
        self.restarts = 0
        self._secret = secret
        self._command = [sys.executable, "-P", "-m", "headrace_command", "openai", "--supervised"]
        self._command += ["--listen", address.target, "--target", own.target]
        self._command += ["--drain", f"{DAY_S:g}"]  # how long it may take, the server decides
        if config.tls_cert is not None and config.tls_key is not None:
            self._command += ["--tls-cert", config.tls_cert, "--tls-key", config.tls_key]
        else:
            self._command.append("--plain")  # the config has refused what may not be so
        for host in config.openai_host:
            self._command += ["--openai-host", host]
        for origin in config.openai_origin:
            self._command += ["--openai-origin", origin]
        if config.openai_ignore_unknown:
            self._command.append("--openai-ignore-unknown")
        self._ready = asyncio.Event()
        self._was_ready = False
        self._process: asyncio.subprocess.Process | None = None
        self._ending = asyncio.Event()
        self._running = asyncio.create_task(self._run())

    async def answers(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` until the child accepts requests. Return whether it does."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._ready.wait(), timeout_s)
        return self._ready.is_set()

    def drain(self) -> None:
        """Let the child end with its last request. It is not restarted."""
        if not self._ending.is_set():  # a second signal would end what still runs
            self._ending.set()
            self._terminate()

    def _terminate(self) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.terminate()

    async def stop(self, grace_s: float) -> None:
        """End the child, and wait for its end. If it still runs after `grace_s`, it is killed."""
        self.drain()
        await asyncio.wait({self._running}, timeout=grace_s)
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)

    async def _run(self) -> None:
        pause_s = 0.0
        while True:
            began = asyncio.get_running_loop().time()
            try:
                how = await self._run_once()
            except (OSError, RuntimeError) as error:  # no file, thread or process is left for it
                how = f"it cannot be started: {error}"
            if self._ending.is_set():
                logger.info("the HTTP door has closed (%s)", how)
                return
            if asyncio.get_running_loop().time() - began > _STABLE_S:
                pause_s = 0.0
            if self._was_ready:
                pause_s = min(pause_s, _PAUSE_AFTER_READY_S)
            logger.error("the HTTP door has ended (%s); started again in %g s", how, pause_s)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), pause_s)
                return
            self.restarts += 1
            pause_s = min(max(2 * pause_s, _FIRST_PAUSE_S), _MAX_PAUSE_S)

    async def _run_once(self) -> str:
        """Run the child to its end. Return how it ended."""
        reading, stderr = open_pipe()
        loop = asyncio.get_running_loop()
        lines = LineReader(
            reading, partial(_log, loop, self._ready.set)
        )  # ends when the other end is closed everywhere
        # The server's own options are none of the child's, nor is a HEADRACE_TOKEN.
        environ = {key: value for key, value in os.environ.items() if key[:9] != "HEADRACE_"}
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                env=environ,
                stdin=asyncio.subprocess.PIPE,
                stdout=stderr,
                stderr=stderr,
                start_new_session=True,  # the server handles a terminal's Ctrl-C
            )
        finally:
            os.close(stderr)
        try:
            self._process = process
            if process.stdin is not None:
                process.stdin.write(f"{self._secret}\n".encode())
            if self._ending.is_set():
                self._terminate()
            code = await process.wait()
        finally:
            self._process = None
            self._was_ready = self._ready.is_set()
            self._ready.clear()
            if process.returncode is None:
                process.kill()
                await process.wait()
            await asyncio.to_thread(lines.join, _LAST_WORDS_S)
        return f"signal {-code}" if code < 0 else f"exit code {code}"


def _log(loop: asyncio.AbstractEventLoop, ready: Callable[[], None], line: str) -> None:
    """Log a line from the child: `LEVEL message`, or other output."""
    level, _, message = line.partition(" ")
    record = foreign(line, _CHILD)
    if level in _LEVELS:
        record.name, record.levelname = "headrace.openai", level
        record.levelno = logging.getLevelNamesMapping()[level]
        record.args = (cut(message, MAX_MESSAGE),)
        if message.startswith("ready: "):
            loop.call_soon_threadsafe(ready)
    log = logging.getLogger(record.name)
    if log.isEnabledFor(record.levelno):
        log.handle(record)
