"""The routes, as an ASGI application: what is HTTP's own of each request, around `serving`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route as Path

from headrace.errors import HeadraceError
from headrace.openai import asked
from headrace.openai.bodies import Bodies
from headrace.openai.callers import Callers
from headrace.openai.errors import ApiError, from_headrace
from headrace.openai.fields import Route
from headrace.openai.guard import Guard
from headrace.openai.metrics import Metrics
from headrace.openai.replies import dumps
from headrace.openai.serving import Run

COMMENT_SECONDS = 10.0
"""After so long without an event a stream sends a comment, so that nobody on the way gives up."""
TIDY_SECONDS = 30.0
LEFT = 499
"""The status, in metrics, of a request whose client left."""
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
]
_FOREIGN = ("/v1/", "/api/", "/openai/", "/generate")
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
_log = logging.getLogger("headrace.openai")


@dataclass(frozen=True, slots=True)
class Settings:
    """What the operator chose.

    Attributes:
        ignore_unknown: whether members that there are not are passed over.
    """

    ignore_unknown: bool = False


class Door:
    """The application."""

    def __init__(self, callers: Callers, guard: Guard, settings: Settings) -> None:
        self._callers = callers
        self._guard = guard
        self._ignore = settings.ignore_unknown
        self._bodies = Bodies()
        self._metrics = Metrics()
        self._created = int(time.time())
        self._routes: dict[str, tuple[str, Callable[[Request], Awaitable[Answer]]]] = {
            "/v1/chat/completions": ("POST", lambda request: self._complete(request, "chat")),
            "/v1/completions": ("POST", lambda request: self._complete(request, "completions")),
            "/v1/chat/completions/render": ("POST", lambda request: self._render(request, "chat")),
            "/v1/completions/render": (
                "POST",
                lambda request: self._render(request, "completions"),
            ),
            "/tokenize": ("POST", self._tokenize),
            "/v1/models": ("GET", self._models),
            "/v1/models/{model:path}": ("GET", self._models),
            "/health": ("GET", self._health),
            "/ready": ("GET", self._ready),
            "/metrics": ("GET", self._page),
        }
        self.asgi = Starlette(
            routes=[
                Path(path, _Endpoint(self, path, run), methods=[method])
                for path, (method, run) in self._routes.items()
            ],
            exception_handlers={HTTPException: self._not_found},
            lifespan=self._lifespan,
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
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

    # ---- one request ----------------------------------------------------------------------------

    async def answer(
        self, route: str, run: Callable[[Request], Awaitable[Answer]], request: Request, send: Send
    ) -> None:
        """Answers one request, whatever happens."""
        began, status, has_begun = time.monotonic(), 500, False

        async def sent(message: MutableMapping[str, Any]) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        request_id = _request_id(request)
        headers = [(b"x-request-id", request_id.encode())]
        headers += self._cors(request)
        self._metrics.active += 1
        try:
            self._guard.check(request)
            answer = await run(request)
            status = answer.status
            await answer.send(headers, request.receive, sent)
        except ApiError as error:
            status = error.status
            own = [(k.encode(), v.encode()) for k, v in error.headers.items()]
            await Answer(error.body(), status).send(headers + own, request.receive, send)
        except (ClientDisconnect, _ClientLeftError):
            status = LEFT
        except Exception:
            _log.exception("request %s failed by a defect", request_id)
            if has_begun:
                raise
            body = ApiError(500, "the door has a defect; its log says more", type="server_error")
            await Answer(body.body(), 500).send(headers, request.receive, send)
        finally:
            self._metrics.active -= 1
            self._metrics.ended(route, status, time.monotonic() - began)

    def _cors(self, request: Request) -> list[tuple[bytes, bytes]]:
        origin = request.headers.get("origin")
        if origin is None or not self._guard.allows(origin):
            return []
        return [
            (b"access-control-allow-origin", origin.encode()),
            (b"access-control-expose-headers", b"x-request-id, retry-after"),
            (b"vary", b"origin"),
        ]

    async def _not_found(self, request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        headers = dict(self._cors(request))
        if request.method == "OPTIONS" and headers:  # a browser asks whether it may ask
            headers |= {
                b"access-control-allow-methods": b"GET, POST",
                b"access-control-allow-headers": request.headers.get(
                    "access-control-request-headers", "authorization, content-type"
                ).encode("latin-1"),
                b"access-control-max-age": b"600",
            }
            return Response(
                status_code=204,
                headers={k.decode("latin-1"): v.decode("latin-1") for k, v in headers.items()},
            )
        path = request.url.path[:200]
        if status == 405:
            method = next((m for p, (m, _) in self._routes.items() if p == path), "GET")
            found = ApiError(405, f"{path} takes {method} alone", code="method_not_allowed")
            found.headers["allow"] = method
        else:
            there = ", ".join(self._routes)
            found = ApiError(
                404, f"there is no {path} here; there are {there}", type="not_found_error",
                code="no_such_route",
            )  # fmt: skip
        self._metrics.ended("other", status, 0.0)
        return Response(dumps(found.body()), status, found.headers, media_type="application/json")

    # ---- the routes -----------------------------------------------------------------------------

    async def _complete(self, request: Request, route: Route) -> Answer:
        run = await self._run(request, route, asked.read)
        if not run.asked.is_stream:

            async def whole() -> dict[str, Any]:
                async with run:
                    return await run.whole(await run.start())

            return Answer(await _while_there(request, whole()))
        try:
            replies = await _while_there(request, run.start())
        except BaseException:
            await run.__aexit__()
            raise
        return Stream(run, run.events(replies), self._metrics)

    async def _render(self, request: Request, route: Route) -> Answer:
        async with await self._run(request, route, asked.rendered) as run:
            found = [{"token_ids": ids} for ids in await run.rendered()]
        return Answer(found[0] if route == "chat" else found)

    async def _tokenize(self, request: Request) -> Answer:
        body = await self._bodies.read(request, self._guard.caller(request).peer)
        wants_texts = body.pop("return_token_strs", None)
        if wants_texts:
            raise ApiError(
                400, "return_token_strs is not supported", param="return_token_strs",
                code="unsupported_field",
            )  # fmt: skip
        route: Route = "chat" if "messages" in body else "completions"
        wanted = asked.rendered(body, route, ignore_unknown=self._ignore)
        async with self._made(request, wanted) as run:
            [ids, *_] = await run.rendered()
            card = await run.card()
        most = card.limits.max_context_tokens
        return Answer({"count": len(ids), "max_model_len": most, "tokens": ids})

    async def _models(self, request: Request) -> Answer:
        try:
            cards = await self._callers.models(self._guard.caller(request))
        except HeadraceError as error:
            raise from_headrace(error, {}) from None
        found = [
            {
                "id": name,
                "object": "model",
                "created": self._created,
                "owned_by": "headrace",
                "root": card.name,
                "max_model_len": card.limits.max_context_tokens,
            }
            for card in cards
            for name in (card.name, *card.aliases)
        ]
        wanted = request.path_params.get("model")
        if wanted is None:
            return Answer({"object": "list", "data": found})
        for one in found:
            if one["id"] == wanted:
                return Answer(one)
        served = ", ".join(str(one["id"]) for one in found)
        raise ApiError(
            404, f"there is no model {wanted[:100]!r}; there are {served}",
            type="not_found_error", param="model", code="model_not_found",
        )  # fmt: skip

    async def _health(self, request: Request) -> Answer:
        return Answer({"status": "ok"})

    async def _ready(self, request: Request) -> Answer:
        if await self._callers.is_ready():
            return Answer({"status": "ready"})
        raise ApiError(
            503, "no server is ready", type="server_error", code="not_ready",
            headers={"retry-after": "1"},
        )  # fmt: skip

    async def _page(self, request: Request) -> Answer:
        return Answer(self._metrics.page())

    async def _run(self, request: Request, route: Route, read: Callable[..., asked.Asked]) -> Run:
        peer = self._guard.caller(request).peer
        body = await self._bodies.read(request, peer)
        return self._made(request, read(body, route, ignore_unknown=self._ignore))

    def _made(self, request: Request, wanted: asked.Asked) -> Run:
        labels = {}
        for name in ("traceparent", "tracestate"):
            value = request.headers.get(name)
            if value and value.isascii() and value.isprintable() and len(value) <= 128:
                labels[name] = value
        key = request.headers.get("idempotency-key", "")
        return Run(self._callers, self._guard.caller(request), wanted, key, labels)


class _Endpoint:
    """A route's ASGI application."""

    def __init__(self, door: Door, route: str, run: Callable[[Request], Awaitable[Answer]]) -> None:
        self._door, self._route, self._run = door, route, run

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        await self._door.answer(self._route, self._run, Request(scope, receive, send), send)


# ---- answers -------------------------------------------------------------------------------------


class Answer:
    """A whole answer: an object of JSON, or text."""

    def __init__(self, body: Any, status: int = 200) -> None:
        self.status = status
        self._body = (body if isinstance(body, str) else dumps(body)).encode()
        is_text = isinstance(body, str)
        self._kind = b"text/plain; version=0.0.4" if is_text else b"application/json"

    async def send(self, headers: list[tuple[bytes, bytes]], receive: Receive, send: Send) -> None:
        """Sends it."""
        own = [
            (b"content-type", self._kind),
            (b"content-length", str(len(self._body)).encode()),
        ]
        await send({"type": "http.response.start", "status": self.status, "headers": own + headers})
        await send({"type": "http.response.body", "body": self._body})


class Stream(Answer):
    """Server-sent events, until their end or until the client leaves."""

    def __init__(self, run: Run, events: AsyncIterator[str], metrics: Metrics) -> None:
        super().__init__("")
        self._run = run
        self._events = events
        self._metrics = metrics
        self._sent_at = time.monotonic()

    async def send(self, headers: list[tuple[bytes, bytes]], receive: Receive, send: Send) -> None:
        """Sends the events as they come; raises _ClientLeftError if nobody reads them."""
        await send(
            {"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS + headers}
        )
        comments = asyncio.create_task(self._comment(send))
        self._metrics.streams += 1
        try:
            await _while_there(receive, self._pass_on(send))
        finally:
            self._metrics.streams -= 1
            comments.cancel()
            await self._run.__aexit__()

    async def _pass_on(self, send: Send) -> None:
        async for event in self._events:
            await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
            self._sent_at = time.monotonic()
        await send({"type": "http.response.body", "body": b""})

    async def _comment(self, send: Send) -> None:
        while True:
            left = self._sent_at + COMMENT_SECONDS - time.monotonic()
            if left > 0:
                await asyncio.sleep(left)
                continue
            self._sent_at = time.monotonic()
            await send({"type": "http.response.body", "body": b": waiting\n\n", "more_body": True})


class _ClientLeftError(Exception):
    """The client has closed its connection."""


async def _while_there(source: Request | Receive, work: Any) -> Any:
    """The result of work, which is cancelled if the client leaves.

    Raises:
        _ClientLeftError: it left.
    """
    receive = source.receive if isinstance(source, Request) else source

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


def _request_id(request: Request) -> str:
    given = request.headers.get("x-request-id", "")
    is_plain = given.isascii() and given.isprintable() and 0 < len(given) <= 128
    return given if is_plain else f"req-{uuid.uuid4().hex}"
