"""The door as a process: its socket, its signals, its end."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import signal
import socket
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import uvicorn

from headrace.openai.protocol import make_protocol

KEEP_ALIVE_SECONDS = 75
"""How long a connection without a request is kept: longer than proxies keep theirs."""
_log = logging.getLogger("headrace.openai")


@dataclass(frozen=True, slots=True)
class Listening:
    """Where HTTP is spoken.

    Attributes:
        address: host:port or unix:/path.
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
        if self.address.startswith("unix:"):
            return self.address
        return f"{'https' if self.cert else 'http'}://{self.address}/v1"

    @property
    def is_local(self) -> bool:
        """Whether this machine alone can reach it."""
        if self.address.startswith("unix:"):
            return True
        host = self.address.rpartition(":")[0].removeprefix("[").removesuffix("]")
        if host == "localhost":
            return True
        try:
            return ipaddress.ip_address(host).is_loopback
        except ValueError:
            return False


def bind(address: str) -> socket.socket:
    """A socket that listens.

    Raises:
        ValueError: the address is not understood.
        OSError: it is in use, or not of this machine.
    """
    if address.startswith("unix:"):
        return _bind_path(address.removeprefix("unix:"))
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isascii() and port.isdigit() and int(port) < 65536):
        raise ValueError(f"{address!r} is no address; use host:port or unix:/path")
    host = host.removeprefix("[").removesuffix("]")
    family, kind, protocol, _, where = socket.getaddrinfo(
        host, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind(where)
    except OSError:
        made.close()
        raise
    return made


def _bind_path(path: str) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    try:
        if Path(path).exists() and stat.S_ISSOCK(os.stat(path).st_mode):
            if made.connect_ex(path) == 0:
                raise OSError(f"{path} is in use by another process")
            os.unlink(path)  # of a process that was killed
            made.close()
            made = socket.socket(socket.AF_UNIX)
        made.bind(path)
    except OSError:
        made.close()
        raise
    return made


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


def serve(
    app: Any,
    listening: Listening,
    made: socket.socket,
    said: Callable[[str], None],
    parent: IO[str] | None,
) -> None:
    """Serves until a signal, or until the parent is gone; a second signal ends what still runs.

    Args:
        app: an ASGI application.
        listening, made: where.
        said: is told the URL when requests are taken.
        parent: a pipe whose other end the parent holds; None: there is none.
    """
    config = uvicorn.Config(
        app,
        http=make_protocol(),
        ws="none",
        lifespan="on",
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
    asyncio.run(_serve(_Server(config, lambda: said(listening.url)), made, parent))


async def _serve(server: _Server, made: socket.socket, parent: IO[str] | None) -> None:
    loop = asyncio.get_running_loop()

    def stop() -> None:
        server.force_exit = server.should_exit
        server.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    if parent is not None:
        loop.add_reader(parent.fileno(), lambda: _watch(loop, parent, stop))
    await server.serve(sockets=[made])
    path = made.getsockname() if made.family == socket.AF_UNIX else ""
    if isinstance(path, str) and path:
        with suppress(OSError):
            os.unlink(path)


def _watch(loop: asyncio.AbstractEventLoop, parent: IO[str], stop: Callable[[], None]) -> None:
    if not os.read(parent.fileno(), 4096):
        loop.remove_reader(parent.fileno())
        stop()


def log_to_stderr(is_supervised: bool) -> None:
    """Lines of the door's own, for a person or for the server that started it."""
    handler = logging.StreamHandler(sys.stderr)
    form = "%(levelname)s %(message)s" if is_supervised else "headrace openai: %(message)s"
    handler.setFormatter(logging.Formatter(form))
    logging.getLogger().addHandler(handler)
    _log.setLevel(logging.INFO)
