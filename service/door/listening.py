"""Binding the server to its addresses: TLS or plain text, TCP or Unix sockets."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import grp
import logging
import os
import socket
import stat
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import grpc

from engine.contract.errors import ConfigError, HeadraceError
from service.door.address import Address, parse_address
from service.door.network_config import NetworkOptions
from service.door.tls import Tls

logger = logging.getLogger(__name__)

_MAX_GROUP = 2**32 - 2  # in Linux; the next number means "no change"


AnyServer = grpc.Server | grpc.aio.Server


class ListeningError(HeadraceError):
    """The server is no longer listening."""


class UnixSockets:
    """The files of the Unix sockets that this server has bound, to be removed when it ends.

    gRPC removes a file when it stops listening, which may be long before the server ends. Another
    server may have bound a socket at the same path since. So a file is only removed if it is still
    the one that was bound here. To check this, the file (not the socket) is kept open, so no other
    file can get its inode number before `unlink`. Changed permissions do not matter.
    """

    def __init__(self) -> None:
        self._files: dict[str, int] = {}
        self._folders: list[str] = []

    def make_folder(self) -> str:
        """Make a folder for sockets that only this user may reach. It is removed with its files."""
        self._folders.append(tempfile.mkdtemp(prefix="headrace-"))
        return self._folders[-1]

    def add(self, path: str) -> None:
        """Remember a file that was just bound."""
        self._files[path] = os.open(path, os.O_PATH | os.O_NOFOLLOW)

    def unlink(self) -> None:
        """Remove the files that still exist."""
        for path, file in self._files.items():
            with suppress(OSError):  # usually already removed
                if os.path.samestat(os.fstat(file), os.lstat(path)):
                    os.unlink(path)
            os.close(file)
        self._files.clear()
        for folder in self._folders:
            with suppress(OSError):
                os.rmdir(folder)
        self._folders.clear()


def bind(
    config: NetworkOptions,
    tls: Tls,
    server_of: Callable[[Address], grpc.aio.Server],
    health: grpc.Server | None,
    sockets: UnixSockets,
) -> tuple[tuple[Address, ...], Address | None]:
    """Bind all addresses. Return them, and the separate health address if there is one, with the
    ports that were chosen.

    Args:
        config: the addresses.
        tls: the certificate, if there is one.
        server_of: returns the server for an address.
        health: the server that serves only health checks, if there is one.
        sockets: remembers the files of Unix sockets.

    Raises:
        ConfigError: an address is taken or cannot be used. Socket files that were bound before it
            are removed.
    """
    group = _group_id(config.unix_socket_group)
    try:
        bound = [
            _bind_one("listen", text, server_of(parse_address(text)), tls, config, group, sockets)
            for text in config.listen
        ]
        if health is not None and config.health_listen is not None:
            address = _bind_one(
                "health_listen", config.health_listen, health, None, config, group, sockets
            )
            return tuple(bound), address
    except ConfigError:
        sockets.unlink()
        raise
    return tuple(bound), None


def _bind_one(
    option: str,
    text: str,
    server: AnyServer,
    tls: Tls | None,
    config: NetworkOptions,
    group: int | None,
    sockets: UnixSockets,
) -> Address:
    address = parse_address(text, option)
    try:
        if address.path is not None:
            _bind_unix(server, address, sockets)
            _hand_over(address.path, config.unix_socket_mode, group)
            return address
        if tls is not None and (credentials := tls.credentials()) is not None:
            port = server.add_secure_port(address.target, credentials)
        else:
            port = server.add_insecure_port(address.target)
        return Address(host=address.host, port=port)
    except (RuntimeError, OSError) as error:
        raise ConfigError(option, f"cannot listen on {text}: {_reason(address, error)}") from error


def bind_door(text: str, server: grpc.aio.Server, sockets: UnixSockets) -> tuple[Address, Address]:
    """Bind a Unix socket for the HTTP door, which only this user's processes can reach. Return the
    address where the door is to listen, with a free port in place of 0, and the socket.

    Raises:
        ConfigError: the door's address is taken, or does not belong to this machine.
    """
    address = parse_address(text, "openai")
    try:
        port = _try_port(address)
        own = parse_address(f"unix:{sockets.make_folder()}/s", "TMPDIR")
        _bind_unix(server, own, sockets)
    except (RuntimeError, OSError) as error:
        raise ConfigError(
            "openai", f"cannot listen on {text}: {_words('openai', error)}"
        ) from error
    return dataclasses.replace(address, port=port), own


async def wait_ended(server: grpc.aio.Server) -> ListeningError:
    """Wait until a server has ended, either by `stop` or because of a defect."""
    try:
        # If this wait is cancelled, the library's own task must not be.
        await asyncio.shield(server.wait_for_termination())
    except Exception as error:
        logger.error("gRPC's server has ended", exc_info=error)
        ended = ListeningError("gRPC's server has ended, nothing listens any more; see the log")
        ended.__cause__ = error
        return ended
    return ListeningError("gRPC's server was stopped")


def _bind_unix(server: AnyServer, address: Address, sockets: UnixSockets) -> None:
    path = address.path or ""
    _remove_stale(path)
    # A Unix socket needs no TLS: its file's permissions decide who may connect. Until they are set,
    # only this user may.
    former = os.umask(0o177)
    try:
        server.add_insecure_port(address.target)
    finally:
        os.umask(former)
    sockets.add(path)


def _hand_over(path: str, mode: int, group: int | None) -> None:
    """Set the permissions of a socket's file."""
    if group is not None:
        os.chown(path, -1, group)
    os.chmod(path, mode)


def _group_id(name: str | None) -> int | None:
    if name is None:
        return None
    if name.isascii() and name.isdigit() and int(name) <= _MAX_GROUP:
        return int(name)  # need not have a name on this machine
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError as error:
        raise ConfigError("unix_socket_group", f"{name!r} is no group of this machine") from error


def _remove_stale(path: str) -> None:
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            raise OSError(errno.EEXIST, "a file of that name is there, and it is not a socket")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            Path(path).unlink(missing_ok=True)
            return
    raise OSError(errno.EADDRINUSE, "another server listens there")


def _reason(address: Address, error: Exception) -> str:
    """Find out why binding failed: gRPC does not say, so try again with a plain socket."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if address.path is not None:
        return "the path cannot be used; does its directory exist, and may this user write there?"
    try:
        _try_port(address)
    except OSError as cause:
        return _words("listen", cause)
    return "gRPC could not bind it"


def _try_port(address: Address) -> int:
    """Bind a plain socket briefly, and return its port. Raises OSError."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((address.host, address.port))
        return int(probe.getsockname()[1])


def _words(option: str, error: Exception) -> str:
    if not isinstance(error, OSError) or error.errno != errno.EADDRINUSE:
        return getattr(error, "strerror", None) or str(error)
    example = {
        "listen": "--listen; `make run LISTEN=127.0.0.1:50061`",
        "openai": "--openai; `make run ARGS='--openai 127.0.0.1:8001'`",
    }
    return f"the port is taken; stop the other program, or choose another port ({example[option]})"
