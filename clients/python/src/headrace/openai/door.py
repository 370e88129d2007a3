"""The routes, as an ASGI application: the HTTP layer around `serving`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from functools import partial
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response

from headrace._trace import serving_span
from headrace.errors import HeadraceError
from headrace.model_card import ModelCard
from headrace.openai import asked
from headrace.openai.bodies import Bodies
from headrace.openai.callers import Callers
from headrace.openai.door_metrics import DoorMetrics
from headrace.openai.errors import ApiError, from_headrace, invalid
from headrace.openai.fields import Route
from headrace.openai.guard import Guard
from headrace.openai.protocol import WRITER, Writer
from headrace.openai.replies import Replies, dumps
from headrace.openai.serving import Run

COMMENT_SECONDS = 10.0
"""How long a stream may have no events before it sends a comment, to prevent timeouts."""
TIDY_SECONDS = 30.0
LEFT = 499
"""The status, in metrics, of a request whose client disconnected."""
Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
Receive = Callable[[], Awaitable[Message]]
Answer = Callable[[Request], Awaitable[Response]]
_log = logging.getLogger("headrace.openai")


class Door:
    """The ASGI application.

    Args:
        callers: the sessions with the servers.
        guard: decides which requests are let in.
        ignore_unknown: whether unknown members of bodies are ignored.
    """

    def __init__(self, callers: Callers, guard: Guard, *, ignore_unknown: bool = False) -> None:
        self._callers = callers
        self._guard = guard
        self._ignore = ignore_unknown
        # One large body or answer at a time: what a thread makes of it slows all streams.
        self._turn = asyncio.Lock()
        self._bodies = Bodies(self._turn)
        self._metrics = DoorMetrics()
        self._created = int(time.time())

        self._routes: dict[str, tuple[str, Answer]] = {
            "/v1/chat/completions": ("POST", partial(self._complete, "chat")),
            "/v1/completions": ("POST", partial(self._complete, "completions")),
            "/v1/chat/completions/render": ("POST", partial(self._render, "chat")),
            "/v1/completions/render": ("POST", partial(self._render, "completions")),
            "/tokenize": ("POST", self._tokenize),
            "/v1/models": ("GET", self._models),
            "/health": ("GET", self._health),
            "/ready": ("GET", self._ready),
            "/metrics": ("GET", self._page),
        }

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Handles an ASGI request: admits or refuses it, and records the outcome."""
        request, began, status = Request(scope, receive), time.monotonic(), LEFT
        headers, name = self._guard.cors(request), _request_id(request)
        headers.append((b"x-request-id", name.encode()))
        route = _route(scope["path"])
        route = route if route in self._routes else "other"

        async def sent(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *headers]
            await send(message)

        self._metrics.active += 1
        with serving_span(request.method, route, _trace_of(request)) as tell:
            try:
                try:
                    response = await self._answer(request)
                except ApiError as error:
                    response = _refused(error)
                await response(scope, receive, sent)
            except (ClientDisconnect, _ClientLeftError):
                status = LEFT
            except Exception:
                _log.exception("request %s failed by a defect", name)
                if status != LEFT:
                    raise  # the head is out: the connection ends
                said = "the door has a defect; its log says more"
                await _refused(ApiError(500, said, type="server_error"))(scope, receive, sent)
            finally:
                self._metrics.active -= 1
                self._metrics.ended(route, status, time.monotonic() - began)
                tell(status)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Ends idle sessions within the block, and all sessions at its end."""

        async def tidy() -> None:
            while True:
                await asyncio.sleep(TIDY_SECONDS)
                self._callers.tidy()

        task = asyncio.create_task(tidy())
        try:
            yield
        finally:
            task.cancel()
            await self._callers.close()

    async def _answer(self, request: Request) -> Response:
        self._guard.check(request)
        if (allowed := self._guard.preflight(request)) is not None:
            return Response(status_code=204, headers=allowed)
        path = request.scope["path"]
        found = self._routes.get(_route(path))
        if found is None:
            there = ", ".join(sorted(self._routes))
            message = f"there is no {path[:200]} here; there are {there}"
            raise ApiError(404, message, type="not_found_error", code="no_such_route")
        method, answer = found
        if request.method != method and (request.method, method) != ("HEAD", "GET"):
            raise ApiError(
                405, f"{path} takes {method} alone", code="method_not_allowed",
                headers={"allow": method},
            )  # fmt: skip
        return await answer(request)

    # ---- the routes -----------------------------------------------------------------------------

    async def _complete(self, route: Route, request: Request) -> Response:
        async with self._run(request, route, asked.read) as run:
            try:
                replies = await _while_there(request.receive, run.start())
            except BaseException:
                await run.__aexit__()
                raise
        if run.asked.is_stream:
            return _Stream(run, replies, self._metrics)
        async with run:
            answer = await _while_there(request.receive, run.whole(replies))
        return Response(answer, media_type="application/json")

    async def _render(self, route: Route, request: Request) -> Response:
        async with self._run(request, route, asked.rendered) as run, run:
            found = [{"token_ids": ids} for ids in await run.rendered()]
        return _json(found[0] if route == "chat" else found)

    async def _tokenize(self, request: Request) -> Response:
        async with self._run(request, None, asked.rendered) as run, run:
            if len(run.asked.specs) > 1:
                raise invalid("prompt", "is a list of prompts; this route takes one")
            [ids] = await run.rendered()
            most = (await run.card()).limits.max_context_tokens
        return _json({"count": len(ids), "max_model_len": most, "tokens": ids})

    async def _models(self, request: Request) -> Response:
        caller = self._guard.caller(request)
        try:
            cards = await self._callers.models(caller)
            named: list[tuple[str, ModelCard, dict[str, str]]] = [
                (name, one, {}) for one in cards.values() for name in (one.name, *one.aliases)
            ]
            for target, card in cards.items():
                parent = {"parent": card.name}
                adapters = await self._callers.adapters(target, card, caller)
                named += [(name, card, parent) for name in adapters]
        except HeadraceError as error:
            raise from_headrace(error, {}) from None
        found: dict[str, dict[str, Any]] = {}
        for name, card, more in named:
            model = {
                "id": name,
                "object": "model",
                "created": self._created,
                "owned_by": "headrace",
                "root": card.name,
                "max_model_len": card.limits.max_context_tokens,
            }
            found.setdefault(name, model | more)
        wanted = request.scope["path"].removeprefix("/v1/models").removeprefix("/")
        if not wanted:
            return _json({"object": "list", "data": list(found.values())})
        if wanted in found:
            return _json(found[wanted])
        message = f"there is no model {wanted[:100]!r}; there are {', '.join(found)}"
        raise ApiError(404, message, type="not_found_error", param="model", code="model_not_found")

    async def _health(self, request: Request) -> Response:
        return _json({"status": "ok"})

    async def _page(self, request: Request) -> Response:
        return PlainTextResponse(self._metrics.page())

    async def _ready(self, request: Request) -> Response:
        if await self._callers.is_ready():
            return _json({"status": "ready"})
        message, again = "no server is ready", {"retry-after": "1"}
        raise ApiError(503, message, type="server_error", code="not_ready", headers=again)

    @contextlib.asynccontextmanager
    async def _run(
        self, request: Request, route: Route | None, read: Callable[..., asked.Asked]
    ) -> AsyncIterator[Run]:
        """Yields the run of a body. Leave the block once the requests are forwarded.

        If `route` is None, a body with messages is a conversation, and any other is a text.
        """
        caller = self._guard.caller(request)
        key = request.headers.get("idempotency-key", "")

        def understand(body: dict[str, Any]) -> asked.Asked:
            of = route or ("chat" if "messages" in body else "completions")
            return read(body, of, ignore_unknown=self._ignore)

        async with self._bodies.read(request, caller.peer, understand) as wanted:
            yield Run(self._callers, caller, wanted, key, _trace_of(request), self._turn)


class _Stream(Response):
    """Server-sent events, until they end or the client disconnects."""

    def __init__(self, run: Run, replies: Replies, metrics: DoorMetrics) -> None:
        super().__init__(
            headers={"cache-control": "no-cache, no-transform", "x-accel-buffering": "no"},
            media_type="text/event-stream",
        )
        del self.headers["content-length"]
        self._run = run
        self._replies = replies
        self._metrics = metrics

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Sends the events as they come. Raises _ClientLeftError if the client disconnects."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        writer: Writer = scope[WRITER]
        comments = asyncio.create_task(_comment(writer))
        self._metrics.streams += 1
        try:
            await _while_there(receive, self._run.stream(self._replies, writer))
        finally:
            self._metrics.streams -= 1
            comments.cancel()
            await self._run.__aexit__()
        await send({"type": "http.response.body", "body": b""})


async def _comment(writer: Writer) -> None:
    while True:
        left = writer.wrote_at + COMMENT_SECONDS - time.monotonic()
        if left > 0:
            await asyncio.sleep(left)
        else:
            await writer.room()
            writer(": waiting\n\n")


class _ClientLeftError(Exception):
    """The client has closed its connection."""


async def _while_there(receive: Receive, work: Any) -> Any:
    """Returns the result of `work`, which is cancelled if the client disconnects.

    Raises:
        _ClientLeftError: the client has disconnected.
    """

    async def left() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.ensure_future(work), asyncio.create_task(left())
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise _ClientLeftError
    finally:
        watch.cancel()
        if not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


def _route(path: str) -> str:
    """Returns the route of a path. The routes of single models count as one."""
    return "/v1/models" if path.startswith("/v1/models/") else path


def _refused(error: ApiError) -> Response:
    return _json(error.body(), error.status, error.headers)


def _json(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(dumps(body), status, headers, media_type="application/json")


def _request_id(request: Request) -> str:
    given = request.headers.get("x-request-id", "")
    is_plain = given.isascii() and given.isprintable() and 0 < len(given) <= 128
    return given if is_plain else f"req-{uuid.uuid4().hex}"


def _trace_of(request: Request) -> dict[str, str]:
    """Returns the caller's trace context, without invalid values."""
    found = {}
    for name in ("traceparent", "tracestate"):
        value = request.headers.get(name, "")
        if value.isascii() and value.isprintable() and 0 < len(value) <= 128:
            found[name] = value
    return found
