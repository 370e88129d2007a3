"""The gateway process: its socket, its signals and its shutdown."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from headrace._targets import is_local
from headrace.openai.door import Door
from headrace.openai.protocol import make_protocol

SWITCH_SECONDS = 0.001
"""How long a thread with a large body or answer may delay the streams at a time."""
KEEP_ALIVE_SECONDS = 75
"""How long an idle connection is kept, which is longer than proxies keep theirs."""


@dataclass(frozen=True, slots=True)
class Listening:
    """Where HTTP is served.

    Attributes:
        address: the address, as host:port.
        cert, key: the TLS certificate and key (PEM); None for plaintext.
        drain_seconds: how long running requests may continue after SIGTERM.
    """

    address: str
    cert: Path | None = None
    key: Path | None = None
    drain_seconds: float = 30.0

    @property
    def url(self) -> str:
        """The base URL for clients."""
        return f"{'https' if self.cert else 'http'}://{self.address}/v1"

    @property
    def place(self) -> tuple[str, int]:
        """The host and port.

        Raises:
            ValueError: the address is not host:port.
        """
        host, _, port = self.address.rpartition(":")
        if not (host and port.isascii() and port.isdigit() and int(port) < 65536):
            raise ValueError(f"{self.address!r} is no address; use host:port")
        return host.removeprefix("[").removesuffix("]"), int(port)

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it. Raises ValueError if the address is invalid."""
        host, port = self.place
        return is_local(f"{host}:{port}")

    def bind(self) -> socket.socket:
        """Opens a listening socket.

        Raises:
            OSError: the address is in use, or does not belong to this machine.
        """
        family = socket.AF_INET6 if ":" in self.place[0] else socket.AF_INET
        return socket.create_server(self.place, family=family, backlog=2048)


class _Server(uvicorn.Server):
    """A uvicorn server that reports when it is ready.

    Unlike uvicorn's own, it does not end the process with the signal that stopped it.
    """

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts accepting requests."""
        await super().startup(sockets)
        if self.started:
            self._ready()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Does nothing, because `serve` handles signals."""
        yield

    def stop(self) -> None:
        """Stops once running requests have ended or, if called again, immediately."""
        self.force_exit = self.should_exit
        self.should_exit = True


async def serve(
    door: Door, listening: Listening, ready: Callable[[], None], parent: int | None
) -> None:
    """Serves until a signal arrives or the parent is gone. A second signal stops immediately.

    Args:
        door: the application.
        listening: where to listen.
        ready: called when requests are accepted.
        parent: a pipe whose other end the parent holds open; None if there is no parent.

    Raises:
        OSError: the address is in use, or a file cannot be read.
    """
    config = uvicorn.Config(
        door,
        http=make_protocol(),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=max(1, round(listening.drain_seconds)),
        ssl_certfile=listening.cert,
        ssl_keyfile=listening.key,
    )
    logging.getLogger("uvicorn").setLevel(logging.ERROR)  # what a client does is no line of a log
    sys.setswitchinterval(SWITCH_SECONDS)
    server, loop = _Server(config, ready), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.stop)

    def watch(pipe: int) -> None:
        if not os.read(pipe, 4096):
            loop.remove_reader(pipe)
            server.stop()

    if parent is not None:
        loop.add_reader(parent, watch, parent)
    with listening.bind() as made:
        async with door.running():
            await server.serve(sockets=[made])


def log_to_stderr(is_supervised: bool) -> None:
    """Logs the gateway's messages to stderr, for a person or for the server that started it."""
    handler = logging.StreamHandler(sys.stderr)
    form = "%(levelname)s %(message)s" if is_supervised else "headrace openai: %(message)s"
    handler.setFormatter(logging.Formatter(form))
    logging.getLogger().addHandler(handler)
    logging.getLogger("headrace.openai").setLevel(logging.INFO)
