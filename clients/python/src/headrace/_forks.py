"""What a fork of the process breaks, and what is done for it in the child.

gRPC's connections and calls are served by threads, and a child has none of its parent's threads.

1. Each connection (`Link`, `AsyncLink`) is `watched`, and knows which calls are open on it.
2. In the child, before anything else runs, what the parent's connections hold is kept for ever:
   to let go of a call or a channel waits for those threads, and tells the parent's server.
3. Each client is then told by its `forked`: it makes its connections anew at its next use, or, if
   calls were open on them, says so.
4. Sessions and streams belong to the process that opened them: `check` refuses them elsewhere.

Whether gRPC itself still works in a child is gRPC's. A new channel does, unless the parent had one
of asyncio, or GRPC_ENABLE_FORK_SUPPORT is 0. If the parent had calls open, gRPC says "skipping
fork() handlers" and one child in a few hundred dies of a segmentation fault as it connects; with
GRPC_ENABLE_FORK_SUPPORT=1 the fork waits until gRPC's threads stand still, and none does.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import Any, Protocol

from headrace._environment import fork_support
from headrace.errors import FailedPreconditionError


class Watched(Protocol):
    """A connection to a server."""

    is_asyncio: bool
    """Whether it is one of asyncio's."""

    channel: Any

    @property
    def open_calls(self) -> list[Any]:
        """The calls that have not been seen to end."""


class Forkable(Protocol):
    """A client."""

    def forked(self) -> None:
        """This process is a child of the one that made it; no other thread is there yet."""


_links: weakref.WeakSet[Watched] = weakref.WeakSet()
_clients: weakref.WeakSet[Forkable] = weakref.WeakSet()
_generation = 0
_cannot_connect = ""


def may_connect() -> None:
    """Refuses to connect where gRPC cannot.

    Raises:
        FailedPreconditionError: this process is a child in which it cannot.
    """
    if _cannot_connect:
        raise FailedPreconditionError(_cannot_connect)


def watch(link: Watched) -> None:
    """Has a connection kept in children.

    Raises:
        FailedPreconditionError: gRPC cannot connect in this process.
    """
    may_connect()
    _links.add(link)


def forget(link: Watched) -> None:
    """A connection was closed."""
    _links.discard(link)


def tell(client: Forkable) -> None:
    """Has a client told in children."""
    _clients.add(client)


def keep(one: object) -> None:
    """Never lets go of something, not even at the interpreter's end."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))


def generation() -> int:
    """How many forks this process is away from the first one."""
    return _generation


def check(born: int, what: str) -> None:
    """Refuses what another process has opened.

    Raises:
        FailedPreconditionError: `born` is not this process' generation.
    """
    if born != _generation:
        raise FailedPreconditionError(
            f"this {what} belongs to the process that opened it, which has forked since; "
            f"open another {what} in this process"
        )


def _in_child() -> None:
    global _generation, _cannot_connect
    _generation += 1
    links = list(_links)
    _cannot_connect = _why_not(links) or _cannot_connect
    for link in links:
        for one in (link, link.channel, *link.open_calls):
            keep(one)
    _links.clear()
    for client in list(_clients):
        client.forked()


def _why_not(links: list[Watched]) -> str:
    """Why a child of a process with these connections cannot connect; empty: it can."""
    support = fork_support()
    if links and support is False:
        return (
            "this process was forked after it had connected, and GRPC_ENABLE_FORK_SUPPORT is "
            "off, so that gRPC cannot connect in a child; unset it"
        )
    if any(link.is_asyncio for link in links):
        return (
            "this process was forked while a client for asyncio was open, and gRPC cannot "
            "connect in such a child; close those clients before the fork, or start the "
            "process anew (spawn)"
        )
    if support is None and any(link.open_calls for link in links):
        return (
            "this process was forked while calls to a server were open, and gRPC may crash if it "
            "connects in such a child; set GRPC_ENABLE_FORK_SUPPORT=1 before the parent starts, "
            "let those calls end before the fork, or start the process anew (spawn)"
        )
    return ""


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_in_child)
