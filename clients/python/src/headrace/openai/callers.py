"""Sessions with the servers, one for each caller and server.

All requests of a caller share a session. A server sends one message for each step and session,
which makes many streams cheap. A caller is identified by a token, which is forwarded unchanged, and
an address, so that the server applies its shares and limits to each caller separately. With credit,
output that an HTTP client does not read stays on the server, within the caller's own share. Callers
share a few connections; otherwise a thousand invalid tokens would cause a thousand handshakes.
Calls that need a stream for each request use separate connections.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

from headrace.async_client import AsyncClient
from headrace.async_session import AsyncRequestHandle, AsyncSession
from headrace.async_streams import AsyncStream
from headrace.errors import HeadraceError
from headrace.model_card import ModelCard
from headrace.openai.errors import ApiError
from headrace.results import HealthStatus
from headrace.v1.generation_pb2 import GenerationSpec
from headrace.v1.model_service_pb2 import ADAPTER_STATE_LOADED

CREDIT = 512
"""How many tokens of a request a server may send ahead of its reader."""
MAX_SESSIONS = 512
CONNECTIONS = 16
"""The number of connections that sessions share. By default, a server accepts 100 streams on each.
"""
IDLE_SECONDS = 120.0
"""How long a session without requests is kept."""
CARD_SECONDS = 10.0
"""How long the list of models is cached."""

Metadata = tuple[tuple[str, str], ...]
MakeClient = Callable[[str, Metadata, int], AsyncClient]
"""Creates a client of a target, with a caller's metadata. Clients with the same number share a
connection.
"""


@dataclass(frozen=True, slots=True)
class Caller:
    """The identity of a caller: its token as received, if any, and its address."""

    authorization: str | None
    peer: str


@dataclass(slots=True)
class Line:
    """A caller's client of one server and the session on it.

    `make` creates a client with a separate connection.
    """

    client: AsyncClient
    session: AsyncSession
    make: Callable[[], AsyncClient]
    own: AsyncClient | None = None
    users: int = 0
    used_at: float = field(default_factory=time.monotonic)
    is_dropped: bool = False

    @property
    def is_over(self) -> bool:
        """Whether it accepts no more requests, because it was dropped or its server ended the
        session.
        """
        return self.is_dropped or self.session.ended

    def attach(self, request_id: str) -> AsyncStream:
        """Returns a stream of a request that continues without the stream."""
        self.own = self.own or self.make()
        return self.own.attach(request_id)

    async def close(self) -> None:
        """Closes the session and the clients, and cancels what runs on the session."""
        await self.session.close(cancel=True)
        await self.client.close()
        if self.own is not None:
            await self.own.close()


_NOBODY = Caller(None, "127.0.0.1")
"""The caller used to ask whether a server is ready."""


class Callers:
    """All sessions.

    Args:
        targets: servers or fleets, each with a different model.
        make: creates a client of a target.
        secret: the secret that makes a server trust the reported address of a caller; None if the
            address is not reported.
    """

    def __init__(self, targets: Sequence[str], make: MakeClient, secret: str | None) -> None:
        self._targets = targets
        self._make = make
        self._secret = secret
        self._lines: dict[tuple[str, Caller], Line] = {}
        self._cards: dict[str, ModelCard] = {}
        self._cards_at = float("-inf")
        self._numbers = itertools.count()
        self._closing: set[asyncio.Task[None]] = set()

    async def models(self, caller: Caller) -> dict[str, ModelCard]:
        """Returns the models that the servers report to this caller, by target, without unreachable
        servers.

        Raises:
            HeadraceError: no server can be asked.
        """
        found = await asyncio.gather(
            *(self._card(target, caller) for target in self._targets), return_exceptions=True
        )
        errors = [one for one in found if isinstance(one, BaseException)]
        for error in errors:
            if not isinstance(error, HeadraceError) or len(errors) == len(found):
                raise error
        pairs = zip(self._targets, found, strict=True)
        self._cards = {target: one for target, one in pairs if isinstance(one, ModelCard)}
        self._cards_at = time.monotonic()
        return self._cards

    async def adapters(self, target: str, card: ModelCard, caller: Caller) -> list[str]:
        """Returns the names of a server's adapters that a caller may use. Requests can name them as
        their model.

        Raises:
            HeadraceError: the server cannot be asked.
        """
        if "adapters" not in card.capabilities.names:
            return []
        async with self.line(target, caller) as line:
            found = await line.client.adapters(timeout=5.0)
        return [one.name for one in found if one.state == ADAPTER_STATE_LOADED]

    async def card(self, target: str, caller: Caller) -> ModelCard:
        """Returns the model card of a server, which may be some seconds old.

        Raises:
            HeadraceError: the server cannot be asked.
        """
        await self._know(caller)
        return self._cards.get(target) or await self._card(target, caller)

    async def target(self, model: str, caller: Caller) -> str:
        """Returns the target that serves a model.

        Raises:
            ApiError: no server has the model, or the model must be named.
            HeadraceError: no server can be asked.
        """
        if len(self._targets) == 1:
            return self._targets[0]  # which refuses another name itself
        await self._know(caller)
        for target, card in self._cards.items():
            if model and model in (card.name, *card.aliases):
                return target
        for target, card in self._cards.items() if model else ():
            if model in await self.adapters(target, card, caller):  # of this caller: not kept
                return target
        served = ", ".join(card.name for card in self._cards.values())
        said = f"there is no model {model[:100]!r}" if model else "model is missing"
        raise ApiError(
            404 if model else 400,
            f"{said}; there are {served}",
            type="not_found_error" if model else "invalid_request_error",
            param="model",
            code="model_not_found" if model else "missing_field",
        )

    async def is_ready(self) -> bool:
        """Whether any server accepts requests."""
        found = await asyncio.gather(*map(self._is_ready, self._targets))
        return any(found)

    @asynccontextmanager
    async def line(self, target: str, caller: Caller) -> AsyncIterator[Line]:
        """Yields the caller's session, which is kept open within the block.

        Raises:
            ApiError: there are too many callers at the same time.
        """
        key = (target, caller)
        line = self._lines.get(key)
        if line is not None and line.session.ended:
            self._drop(key, line)
        if line is None or line.is_over:
            self._make_room()
            line = await self._open(target, caller)
            self._lines[key] = line
        line.users += 1
        try:
            yield line
        finally:
            line.users -= 1
            line.used_at = time.monotonic()
            if line.is_over:
                self._drop(key, line)

    async def submit(self, line: Line, spec: GenerationSpec) -> AsyncRequestHandle:
        """Starts a request, and waits until its server has accepted it.

        Raises:
            HeadraceError: the request was refused, or the server cannot be reached.
        """
        handle = line.session.submit(spec)
        try:
            await handle.accepted()
        except asyncio.CancelledError:
            handle.cancel()
            raise
        return handle

    async def close(self) -> None:
        """Ends all sessions."""
        lines, self._lines = list(self._lines.values()), {}
        await asyncio.gather(*(line.close() for line in lines), *self._closing)

    def tidy(self) -> None:
        """Ends sessions that have been idle for a while."""
        due = time.monotonic() - IDLE_SECONDS
        for key, line in list(self._lines.items()):
            if not line.users and line.used_at < due:
                self._drop(key, line)

    async def _know(self, caller: Caller) -> None:
        is_old = time.monotonic() - self._cards_at > CARD_SECONDS
        if is_old or len(self._cards) < len(self._targets):
            await self.models(caller)

    async def _card(self, target: str, caller: Caller) -> ModelCard:
        async with self.line(target, caller) as line:
            return await line.client.model(timeout=5.0)

    async def _is_ready(self, target: str) -> bool:
        try:
            async with self.line(target, _NOBODY) as line:
                return await line.client.health(timeout=2.0) is HealthStatus.SERVING
        except HeadraceError:
            return False

    async def _open(self, target: str, caller: Caller) -> Line:
        metadata: list[tuple[str, str]] = []
        if caller.authorization is not None:
            metadata.append(("authorization", caller.authorization))
        if self._secret is not None:
            metadata += [("x-headrace-door", self._secret), ("x-headrace-peer", caller.peer)]
        number = next(self._numbers)
        client = self._make(target, tuple(metadata), number % CONNECTIONS)
        session = client.session(initial_credit=CREDIT, room_timeout=0)
        await session.__aenter__()
        own = partial(self._make, target, tuple(metadata), CONNECTIONS + number)
        return Line(client, session, own)

    def _make_room(self) -> None:
        if len(self._lines) < MAX_SESSIONS:
            return
        idle = [key for key, line in self._lines.items() if not line.users]
        if not idle:
            raise ApiError(
                503,
                f"there are {MAX_SESSIONS} callers at once; try again",
                type="server_error",
                code="too_many_callers",
                headers={"retry-after": "1"},
            )
        key = min(idle, key=lambda one: self._lines[one].used_at)
        self._drop(key, self._lines[key])

    def _drop(self, key: tuple[str, Caller], line: Line) -> None:
        if self._lines.get(key) is line:
            del self._lines[key]
        line.is_dropped = True
        if not line.users:
            task = asyncio.get_running_loop().create_task(line.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
