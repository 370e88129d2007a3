"""What an input is."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from benchmarks.hostile.sending import Sender

BOTH = ("demo", "long")


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """A hostile input.

    Attributes:
        name: unique among all.
        meaning: one line that says what is sent.
        send: sends it; it ends when everything was sent and answered, or is cancelled when its time
            is over.
        models: those that it is tried on.
        stranger: whether it has no token: then its memory has a bound of its own.
        judge: looks at the answers too; what is wrong with them, or None.
        seconds: its time, where it needs another than the campaign's.
    """

    name: str
    meaning: str
    send: Callable[[Sender], Awaitable[None]]
    models: tuple[str, ...] = BOTH
    stranger: bool = False
    judge: Callable[[Mapping[str, int]], str | None] | None = None
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """Inputs that are tried on one server, after one calm minute.

    Attributes:
        name: unique among all groups.
        inputs: in the order in which they are tried.
        tls: whether the server speaks TLS on a TCP address; the witness is then on a Unix socket.
    """

    name: str
    inputs: tuple[Input, ...]
    tls: bool = False
