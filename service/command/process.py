"""The server as a process: logging, signals, exit codes.

SIGTERM or SIGINT once: drain (see `service.server`), exit 0
                 twice: end immediately, exit 128 + the signal's number
SIGHUP: read the config file, the callers' file and the TLS files again (`reloading`)
an operator's Drain: like a first signal
the model cannot be loaded, a port is taken: a message, exit 1
the engine dies for good, or nothing listens any more: live requests have failed; exit 1, for a
supervisor to restart

Nothing here waits for the readers of its output (`service.logs`).
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import time
from typing import Any, NoReturn

from engine.contract.engine_client import EngineClient
from engine.contract.errors import HeadraceError
from service.admission.freed_memory import bound_arenas
from service.command.flags import describe
from service.command.reloading import ConfigSource, Reloading
from service.command.welcome import welcome
from service.config import ServiceConfig
from service.door.listening import ListeningError
from service.door.open_files import raise_limit
from service.logs.bar import sink_for
from service.logs.output import Output
from service.server import NO_TELEMETRY, HeadraceServer, TokenizerLoader, load_tokenizer
from service.telemetry.telemetry_config import TelemetryConfig

logger = logging.getLogger(__name__)

_FAILED = 1
_DOOR_PATIENCE_S = 10.0


def run(
    config: ServiceConfig,
    client: EngineClient,
    output: Output,
    *,
    telemetry_config: TelemetryConfig = NO_TELEMETRY,
    tokenizer_loader: TokenizerLoader = load_tokenizer,
    source: ConfigSource | None = None,
    notify: str | None = None,
) -> int:
    """Serve until a signal comes. Return the exit code.

    Args:
        config, client, telemetry_config, tokenizer_loader: see `service.server`.
        output: where the process reports what it does.
        source: where the config comes from, to be read again. None reads only the files that the
            config names.
        notify: systemd's socket, or None if there is none.
    """
    try:
        raise_limit()
        bound_arenas()
        process = _Process(
            config, client, output, telemetry_config, tokenizer_loader, source, notify
        )
        return asyncio.run(process.run())
    except Exception:
        logger.exception("the server has failed")
        return _FAILED


def run_to_the_end(
    config: ServiceConfig,
    client: EngineClient,
    output: Output,
    *,
    telemetry_config: TelemetryConfig = NO_TELEMETRY,
    tokenizer_loader: TokenizerLoader = load_tokenizer,
    source: ConfigSource | None = None,
    notify: str | None = None,
) -> NoReturn:
    """Serve until a signal comes, then end the process with the exit code. By then everything that
    must be closed has been closed. The interpreter's clean-up is skipped, because it would take
    longer than the rest of a drain.
    """
    code = run(
        config,
        client,
        output,
        telemetry_config=telemetry_config,
        tokenizer_loader=tokenizer_loader,
        source=source,
        notify=notify,
    )
    end(code, output)


def end(code: int, output: Output) -> NoReturn:
    """End this process without the interpreter's clean-up."""
    output.close()
    os._exit(code)


class _Process:
    def __init__(
        self,
        config: ServiceConfig,
        client: EngineClient,
        output: Output,
        telemetry_config: TelemetryConfig,
        tokenizer_loader: TokenizerLoader,
        source: ConfigSource | None,
        notify: str | None,
    ) -> None:
        self._config = config
        self._notify = notify
        self._output = output
        self._say = output.say
        self._sink = sink_for(self._told, output.is_terminal, output.draw, lambda: output.columns)
        self._server = HeadraceServer(
            config,
            client,
            telemetry_config=telemetry_config,
            progress=self._sink,
            tokenizer_loader=tokenizer_loader,
        )
        self._reloading = Reloading(self._server, config, source)
        self._signalled = asyncio.Event()

    def _told(self, line: str) -> None:
        self._say(f"[{time.monotonic() - self._output.began:6.1f} s] {line}")

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        loop.add_signal_handler(signal.SIGHUP, self._reloading.begin)
        try:
            await self._server.start()
        except HeadraceError as error:
            self._say(f"headrace-server: {describe(error)}")
            return _FAILED
        self._sink(f"port open on {', '.join(self._server.addresses)}; loading the model")
        ending = loop.create_task(self._wait_for_end())
        loading = loop.create_task(self._server.ready())
        try:
            await asyncio.wait({ending, loading}, return_when=asyncio.FIRST_COMPLETED)
            if not loading.done() or loading.cancelled():
                return await self._interrupted(loading)
            loading.result()
        except HeadraceError as error:
            self._say(f"headrace-server: the model cannot be served: {describe(error)}")
            await self._server.stop()
            return _FAILED
        except Exception:
            logger.exception("loading the model failed")
            await self._server.stop()
            return _FAILED
        else:
            return await self._serve(ending)
        finally:
            ending.cancel()

    async def _serve(self, ending: asyncio.Task[None]) -> int:
        # What start-up made stays: collections that would look at all of it hold every stream up.
        gc.collect()
        gc.freeze()
        state, door = self._server.state, self._server.door
        answers = door is not None and await door.answers(_DOOR_PATIENCE_S)
        seconds = time.monotonic() - self._output.began
        self._say(
            welcome(
                self._config,
                state.front.info,
                self._server.bound,
                self._server.health_bound,
                seconds,
                frozenset(state.front.card.capabilities.names),
                door.address if door is not None and answers else None,
            )
        )
        self._tell("READY=1")
        failed = asyncio.create_task(self._server.failed())
        ends: set[asyncio.Task[Any]] = {ending, failed}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if failed.done() and not ending.done():
            why = failed.result()
            what = "" if isinstance(why, ListeningError) else "the engine has stopped: "
            self._say(f"headrace-server: {what}{why}")
            await self._server.drain(0)
            return _FAILED
        failed.cancel()
        self._tell("STOPPING=1")
        draining = self._server.begin_drain()
        timeout_s = state.drain.timeout_s if state.drain is not None else 0.0
        live = self._server.registry.live
        what = "1 live request" if live == 1 else f"{live} live requests"
        self._say(f"Draining: {what}, at most {timeout_s:g} s.")
        await draining
        self._say("Stopped.")
        return 0

    async def _interrupted(self, loading: asyncio.Task[None]) -> int:
        """Handle a signal or a drain while the model loads. The loading thread cannot be
        interrupted, so the process ends anyway, once clients have read their answers and refusals.
        """
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
        self._tell("STOPPING=1")
        self._server.begin_drain()
        await self._server.unreachable()
        self._say("Stopped while loading.")
        self._exit(0)
        return 0

    async def _wait_for_end(self) -> None:
        """Wait for a signal, or for an operator's drain."""
        loop = asyncio.get_running_loop()
        waits = {
            loop.create_task(self._signalled.wait()),
            loop.create_task(self._server.drain_begun()),
        }
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def _on_signal(self, number: int) -> None:
        if self._signalled.is_set():
            self._say("Stopped at once.")
            self._exit(128 + number)
        self._signalled.set()

    def _tell(self, state: str) -> None:
        """Report the server's state to systemd (sd_notify(3)), without blocking."""
        address = self._notify
        if address is None:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
                told.setblocking(False)
                told.connect("\0" + address[1:] if address[0] == "@" else address)
                told.send(state.encode())
        except OSError as error:
            logger.warning("systemd was not told %s: NOTIFY_SOCKET: %s", state, error)

    def _exit(self, code: int) -> None:
        """End immediately, without waiting: threads that load or compute cannot be interrupted."""
        self._server.sockets.unlink()
        end(code, self._output)
