"""The calls that are tried through each proxy: calls of the Python client in several situations."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from headrace import AsyncClient, HeadraceError, Result

from benchmarks.rig.load import OWN_CONNECTION
from benchmarks.scripted_engine import prompt_of, tries_of

LIMIT_S = 280.0
"""The time after which a call that has not ended, not counting its idle time, is reported as such.
"""
LEASE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What happens to the requests of a call.

    Attributes:
        wait_s: the time until a request's first token.
        every_s: the time between two tokens.
        size: the size of a single request's prompt, in bytes; 0 for a small one.
        many: how many requests a session or batch has.
        each: the size of one of them, in bytes; 0 for a small one.
        idle_s: how long a session is idle before a second request.
        calls: the calls to which it applies; empty for all.
    """

    name: str
    wait_s: float = 0.0
    every_s: float = 0.02
    tokens: int = 10
    size: int = 0
    many: int = 1
    each: int = 0
    idle_s: float = 0.0
    calls: tuple[str, ...] = ()


@dataclass(slots=True)
class Order:
    """One call in one situation, and what it has delivered so far.

    Attributes:
        texts: the text of each of its requests, by key.
        request_id: the id of a request that was added to run by itself; empty if there is none.
    """

    key: str
    situation: Situation
    texts: dict[str, str] = field(default_factory=dict)
    request_id: str = ""

    @property
    def keys(self) -> list[str]:
        """Return the keys of the requests of a session or batch."""
        return [f"{self.key}/{number}" for number in range(self.situation.many)]

    def single(self) -> str:
        """Return the prompt of a call with one request."""
        return self._prompt(self.key, self.situation.size)

    def prompts(self) -> dict[str, str]:
        """Return the prompts of a session or batch, by key."""
        return {key: self._prompt(key, self.situation.each) for key in self.keys}

    def take(self, key: str, text: str) -> None:
        self.texts[key] = self.texts.get(key, "") + text

    def whole(self) -> int:
        """Return how many requests have all of their tokens, all from one run."""
        tokens = self.situation.tokens
        return sum(len(one) == tokens and len(set(one)) == 1 for one in self.texts.values())

    def _prompt(self, key: str, size: int) -> str:
        situation = self.situation
        return prompt_of(key, wait_s=situation.wait_s, every_s=situation.every_s, size=size)


async def _generate(client: AsyncClient, order: Order) -> None:
    result = await client.generate(order.single(), max_tokens=order.situation.tokens)
    order.take(order.key, result.text)


async def _stream(client: AsyncClient, order: Order) -> None:
    async with client.stream(order.single(), max_tokens=order.situation.tokens) as stream:
        async for chunk in stream:
            order.take(order.key, chunk.text)


async def _session(client: AsyncClient, order: Order, *, lease: float | None = None) -> None:
    async with client.session(lease=lease) as session:

        async def read(key: str, prompt: str) -> None:
            async for chunk in session.submit(prompt, max_tokens=order.situation.tokens):
                order.take(key, chunk.text)

        if order.situation.idle_s:
            await read(order.key, order.single())
            await asyncio.sleep(order.situation.idle_s)
        await _all([read(key, prompt) for key, prompt in order.prompts().items()])


async def _batch(client: AsyncClient, order: Order) -> None:
    keys, failed = order.keys, []
    outcomes = client.batch(order.prompts().values(), max_tokens=order.situation.tokens)
    async for index, outcome in outcomes:
        if isinstance(outcome, Result):
            order.take(keys[index], outcome.text)
        else:
            failed.append(outcome)
    if failed:
        raise failed[0]


async def _add(client: AsyncClient, order: Order) -> None:
    accepted = await client.add_request(order.single(), max_tokens=order.situation.tokens)
    order.request_id = accepted.request_id


async def _add_and_get(client: AsyncClient, order: Order) -> None:
    await _add(client, order)
    order.take(order.key, (await client.get_result(order.request_id)).text)


async def _add_and_attach(client: AsyncClient, order: Order) -> None:
    await _add(client, order)
    async with client.session(lease=LEASE_S) as session:
        async for chunk in session.attach(order.request_id):
            order.take(order.key, chunk.text)


async def _all(reads: list[Awaitable[None]]) -> None:
    """Wait for all of them, then raise the first error."""
    for outcome in await asyncio.gather(*reads, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome


CALLS: Mapping[str, Callable[[AsyncClient, Order], Awaitable[None]]] = {
    "Generate": _generate,
    "GenerateStream": _stream,
    "session": _session,
    "session with a lease": partial(_session, lease=LEASE_S),
    "AddRequest, GetResult": _add_and_get,
    "AddRequest, attach": _add_and_attach,
    "batch": _batch,
}
SILENCE_S = 80.0
"""Longer than nginx' 60 s, and five times Envoy's 15 s."""
_SESSIONS = ("session", "session with a lease")
SITUATIONS = (
    Situation(name="waits", wait_s=SILENCE_S),
    Situation(name="runs", every_s=1.0, tokens=round(SILENCE_S)),
    Situation(name="idle", idle_s=SILENCE_S, calls=_SESSIONS),
    Situation(name="large", size=1_200_000, many=160, each=9_000),
)
LONG = Situation(name="idle long", idle_s=310.0, calls=_SESSIONS)
"""Longer than Envoy's 5 minutes, and longer than all other situations."""


@dataclass(frozen=True, slots=True)
class Way:
    """What is between a client and a server.

    Attributes:
        port: where it listens on 127.0.0.1.
        server: the server's own address.
    """

    name: str
    port: int
    server: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """The outcome of a call.

    Attributes:
        way: the name of what was between client and server.
        whole: whether all of it arrived.
        requests, of_requests: how many requests are whole, and out of how many.
        tokens, of_tokens: how many tokens of a single request were delivered, and out of how many.
        tries: how often the request was begun at the server; if there are several, the first one.
        goes_on: whether a request whose caller did not get it still ran to its end.
        error: what the caller got instead; empty if it got everything.
    """

    way: str
    situation: str
    call: str
    whole: bool
    seconds: float
    requests: int
    of_requests: int
    tokens: int
    of_tokens: int
    tries: int
    goes_on: bool
    error: str


async def tried(way: Way, situation: Situation, call: str) -> Tried:
    order = Order(f"{way.name}/{situation.name}/{call}".replace(" ", "-"), situation)
    error, began = "", time.monotonic()
    limit = LIMIT_S + situation.idle_s
    async with AsyncClient(f"127.0.0.1:{way.port}", channel_options=OWN_CONNECTION) as client:
        try:
            async with asyncio.timeout(limit):
                await CALLS[call](client, order)
        except HeadraceError as failure:
            error = f"{failure.code.name}: {failure}"
        except TimeoutError:
            error = f"no end within {limit:g} s"
    seconds = time.monotonic() - began
    is_single = call not in (*_SESSIONS, "batch")
    keys = [order.key] if is_single or situation.idle_s else []
    keys += [] if is_single else order.keys
    goes_on = False
    async with AsyncClient(way.server, channel_options=OWN_CONNECTION) as client:
        if error and order.request_id:
            later = await client.get_result(order.request_id, timeout=LIMIT_S)
            goes_on = len(later.text) == situation.tokens
        tries = (await client.generate(tries_of(keys[0]))).text
    whole = order.whole()
    return Tried(
        way=way.name,
        situation=situation.name,
        call=call,
        whole=not error and whole == len(keys),
        seconds=seconds,
        requests=whole,
        of_requests=len(keys),
        tokens=len(order.texts.get(keys[-1], "")),
        of_tokens=situation.tokens,
        tries=int(tries),
        goes_on=goes_on,
        error=error,
    )
