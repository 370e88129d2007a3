"""Handles forks: what a fork of the process breaks, and how the child recovers.

Threads serve gRPC's connections and calls, and a child has none of its parent's threads.

1. Each connection (`Link`, `AsyncLink`) is `watched` and tracks its open calls.
2. In the child, before anything else runs, the objects of the parent's connections are kept alive
   forever. Releasing a call or a channel would wait for those threads and notify the parent's
   server.
3. Each client is then notified through its `forked`. It reconnects on next use, or raises an error
   if calls were open on its connections.
4. Sessions and streams belong to the process that opened them. `check` refuses them elsewhere.

Whether gRPC itself still works in a child is up to gRPC. A new channel works unless the parent had
an asyncio channel or GRPC_ENABLE_FORK_SUPPORT is 0. If the parent had open calls, gRPC reports
"skipping fork() handlers", and about one child in a few hundred crashes with a segmentation fault
as it connects. With GRPC_ENABLE_FORK_SUPPORT=1, the fork waits until gRPC's threads are idle, and
no child crashes.
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
    """Whether it is an asyncio connection."""

    channel: Any

    @property
    def open_calls(self) -> list[Any]:
        """The calls not yet known to have ended."""


class Forkable(Protocol):
    """A client that is notified of forks."""

    def forked(self) -> None:
        """Called in a child of the process that created the client, before it has other threads."""


_links: weakref.WeakSet[Watched] = weakref.WeakSet()
_clients: weakref.WeakSet[Forkable] = weakref.WeakSet()
_generation = 0
_cannot_connect = ""


def may_connect() -> None:
    """Raises an error if gRPC cannot connect in this process.

    Raises:
        FailedPreconditionError: this process is a child in which gRPC cannot connect.
    """
    if _cannot_connect:
        raise FailedPreconditionError(_cannot_connect)


def watch(link: Watched) -> None:
    """Registers a connection to be kept alive in children.

    Raises:
        FailedPreconditionError: gRPC cannot connect in this process.
    """
    may_connect()
    _links.add(link)


def forget(link: Watched) -> None:
    """Unregisters a closed connection."""
    _links.discard(link)


def tell(client: Forkable) -> None:
    """Registers a client to be notified in children."""
    _clients.add(client)


def keep(one: object) -> None:
    """Keeps an object alive forever, even at interpreter exit."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))


def generation() -> int:
    """Returns the number of forks between the first process and this one."""
    return _generation


def check(born: int, what: str) -> None:
    """Raises an error if something was opened by another process.

    Raises:
        FailedPreconditionError: `born` is not this process's generation.
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
    """Why a child of a process with these connections cannot connect; empty if it can."""
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
