"""The door as a process: its socket, its signals, its end."""

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
"""How long a thread with a large body or answer may hold up the streams at a time."""
KEEP_ALIVE_SECONDS = 75
"""How long a connection without a request is kept: longer than proxies keep theirs."""


@dataclass(frozen=True, slots=True)
class Listening:
    """Where HTTP is spoken.

    Attributes:
        address: host:port.
        cert, key: of TLS (PEM); None: plain text.
        drain_seconds: how long what runs may go on after SIGTERM.
    """

    address: str
    cert: Path | None = None
    key: Path | None = None
    drain_seconds: float = 30.0

    @property
    def url(self) -> str:
        """What clients are given as their base URL."""
        return f"{'https' if self.cert else 'http'}://{self.address}/v1"

    @property
    def place(self) -> tuple[str, int]:
        """Host and port.

        Raises:
            ValueError: the address has another form.
        """
        host, _, port = self.address.rpartition(":")
        if not (host and port.isascii() and port.isdigit() and int(port) < 65536):
            raise ValueError(f"{self.address!r} is no address; use host:port")
        return host.removeprefix("[").removesuffix("]"), int(port)

    @property
    def is_local(self) -> bool:
        """Whether this machine alone can reach it. Raises ValueError, as `place`."""
        host, port = self.place
        return is_local(f"{host}:{port}")

    def bind(self) -> socket.socket:
        """A socket there.

        Raises:
            OSError: the address is in use, or not of this machine.
        """
        family = socket.AF_INET6 if ":" in self.place[0] else socket.AF_INET
        return socket.create_server(self.place, family=family, backlog=2048)


class _Server(uvicorn.Server):
    """uvicorn's, which says when it is ready, and does not end the process by the signal that it
    was given.
    """

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begins to take requests."""
        await super().startup(sockets)
        if self.started:
            self._ready()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Nothing: `serve` handles them."""
        yield

    def stop(self) -> None:
        """Ends when what runs has ended; the second time at once."""
        self.force_exit = self.should_exit
        self.should_exit = True


async def serve(
    door: Door, listening: Listening, ready: Callable[[], None], parent: int | None
) -> None:
    """Serves until a signal, or until the parent is gone; a second signal ends what still runs.

    Args:
        door: the application.
        listening: where.
        ready: is called when requests are taken.
        parent: a pipe whose other end the parent holds open; None: there is none.

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
    """Lines of the door's own, for a person or for the server that started it."""
    handler = logging.StreamHandler(sys.stderr)
    form = "%(levelname)s %(message)s" if is_supervised else "headrace openai: %(message)s"
    handler.setFormatter(logging.Formatter(form))
    logging.getLogger().addHandler(handler)
    logging.getLogger("headrace.openai").setLevel(logging.INFO)
