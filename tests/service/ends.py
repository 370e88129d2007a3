"""How a request ended for its caller, and the documented ends: what the tests of the table in
docs/sessions.md and `tests.campaign` have in common.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from headrace.v1 import generation_pb2 as pb
from headrace.v1 import generation_service_pb2 as rpc

from tests.service.fault_proxy import FaultProxy
from tests.service.helpers import (
    DEADLINE_S,
    Harness,
    Refused,
    Session,
    check_course,
    ids_of,
    spec,
    until,
)

DOCS = Path(__file__).resolve().parents[2] / "docs" / "sessions.md"
RPCS = ("Generate", "GenerateStream", "StreamResult", "AddRequest")
STATES = ("queued", "prefilling", "decoding")
NAME = "target"
MAX_TOKENS = 6
IMPOSSIBLE = {("finish", "queued"): "what finishes by itself has been running"}


def table() -> dict[tuple[str, str], str]:
    """The documented cells, by (what happens, RPC)."""
    text = DOCS.read_text()
    text = text[text.index("<!-- ends -->") : text.index("<!-- /ends -->")]
    rows = [
        [cell.strip().replace("`", "") for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    ]
    assert tuple(rows[0][1:]) == RPCS
    return {
        (row[0], kind): cell for row in rows[2:] for kind, cell in zip(RPCS, row[1:], strict=True)
    }


@dataclass(frozen=True, slots=True)
class Cell:
    """An event that happens to a request of some kind in some state."""

    kind: str
    event: str
    state: str

    def __str__(self) -> str:
        return f"{self.kind}, {self.event}, {self.state}"


TABLE = table()
CELLS = [
    Cell(kind, event, state)
    for (event, kind), cell in TABLE.items()
    for state in STATES
    if cell != "—" and (event, state) not in IMPOSSIBLE
]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the caller got.

    Attributes:
        status: the RPC's.
        end: the finish reason, "Failed <code>", or "" where no end was delivered.
        usage: of the end.
        tokens: how many were delivered.
        reason: ErrorInfo's, of the RPC's status.
        ids: those tokens, where they came with events or with an answer.
    """

    status: str
    end: str = ""
    usage: pb.Usage | None = None
    tokens: int = 0
    reason: str = ""
    ids: tuple[int, ...] = ()


def of_events(events: list[pb.ResultEvent], status: str, reason: str = "") -> Outcome:
    """The outcome that a request's events tell."""
    ids = tuple(ids_of(events))
    if not events or events[-1].WhichOneof("event") not in ("finished", "failed"):
        return Outcome(status, tokens=len(ids), reason=reason, ids=ids)
    check_course(events)
    last = events[-1]
    if last.HasField("failed"):
        code = next(c for c in grpc.StatusCode if c.value[0] == last.failed.status.code)
        end, usage = f"Failed {code.name}", last.failed.usage
    else:
        end, usage = name_of(last.finished.reason), last.finished.usage
    return Outcome(status, end, usage, len(ids), reason, ids)


def name_of(reason: int) -> str:
    """A finish reason as the documentation writes it."""
    return pb.FinishReason.Name(reason).removeprefix("FINISH_REASON_")  # type: ignore[arg-type]


class Caller:
    """One RPC that carries the target request, through the proxy."""

    def __init__(self, kind: str, h: Harness, stub: Any, *, text: str = "hi") -> None:
        self.kind = kind
        self.text = text
        self.h = h
        self.stub = stub
        self.call: Any = None
        self.session: Session | None = None
        self.other: asyncio.Future[rpc.GenerateResponse] | None = None

    @property
    def waiting(self) -> int:
        """How many calls wait for the target."""
        request = self.h.registry.requests.get(("anonymous", NAME))
        return 0 if request is None else request.waiting

    async def start(
        self, *, deadline_s: float | None, lease: bool, another: bool, limit_s: float = 0.0
    ) -> None:
        """Start the target. `another`: the same call waits for it on a connection of its own.
        `limit_s`: its time limit; 0: the server's own.
        """
        stop = {"max_tokens": MAX_TOKENS, "ignore_eos": True}
        wanted = spec(self.text, request_id=NAME, stop=stop)
        if limit_s:
            wanted.scheduling.time_limit.FromNanoseconds(round(limit_s * 1e9))
        match self.kind:
            case "Generate":
                message = rpc.GenerateRequest(spec=wanted)
                self.call = self.stub.Generate(message, timeout=deadline_s)
                await until(lambda: self.waiting or self.call.done())
                if another:
                    self.other = asyncio.ensure_future(self.h.generation.Generate(message))
                    await until(lambda: self.waiting == 2 or self.call.done())
            case "GenerateStream":
                streamed = rpc.GenerateStreamRequest(spec=wanted)
                self.call = self.stub.GenerateStream(streamed, timeout=deadline_s)
            case "StreamResult":
                self.session = Session(self.stub.StreamResult(timeout=deadline_s))
                self.call = self.session.call
                if lease:
                    await self.session.send(open=rpc.OpenCommand(lease={"seconds": 60}))
                await self.session.add(wanted)
            case _:
                await self.stub.AddRequest(rpc.AddRequestRequest(spec=wanted), timeout=DEADLINE_S)
                if lease:  # a session may have it; that changes nothing
                    self.session = Session(self.stub.StreamResult())
                    await self.session.send(open=rpc.OpenCommand(lease={"seconds": 60}))
                    await self.session.send(attach=rpc.AttachCommand(request_id=NAME))
                    await self.session.read_until(lambda m: m.attached)
                self.call = self.stub.GetResult(
                    rpc.GetResultRequest(request_id=NAME, until_done=True, wait={"seconds": 60})
                )
                # A server that drains takes no call that is still on its way.
                request = self.h.registry.find("anonymous", NAME)
                await until(lambda: request.readers)
        engine: Any = self.h.engine
        await until(lambda: engine.holds(NAME) or self.call.done())  # done: at its deadline

    async def outcome(self, *, half_close: bool = False) -> Outcome:
        """Wait for what the caller gets."""
        async with asyncio.timeout(DEADLINE_S):
            try:
                if self.kind == "GenerateStream":
                    return await self._stream()
                if self.kind == "StreamResult":
                    return await self._session(half_close=half_close)
                answer = await self.call
            except grpc.aio.AioRpcError as error:
                return Outcome(error.code().name, reason=_reason(error))
            except asyncio.CancelledError:
                assert self.call.cancelled()
                return Outcome("CANCELLED")
        if self.kind == "AddRequest":
            assert answer.done
            return of_events(list(answer.events), "OK")
        [choice] = answer.choices
        finished = choice.finished
        assert answer.usage == finished.usage
        ids = tuple(choice.token_ids)
        return Outcome("OK", name_of(finished.reason), finished.usage, len(ids), ids=ids)

    async def _stream(self) -> Outcome:
        events: list[pb.ResultEvent] = []
        try:
            async for message in self.call:
                events += message.events
        except grpc.aio.AioRpcError as error:
            return of_events(events, error.code().name, _reason(error))
        except asyncio.CancelledError:
            assert self.call.cancelled()
            return of_events(events, "CANCELLED")
        return of_events(events, "OK")

    async def _session(self, *, half_close: bool) -> Outcome:
        """Read the session until the request's end, and then end it: OK only if it ends so."""
        session = self.session
        assert session is not None
        over = ("finished", "failed")
        try:
            if half_close:
                await session.call.done_writing()
            while (message := await session.call.read()) is not grpc.aio.EOF:
                session.messages.append(message)
                kinds = {event.WhichOneof("event") for event in message.events}
                if kinds & set(over) and not half_close:
                    await session.call.done_writing()
            status = (await session.call.code()).name
        except grpc.aio.AioRpcError as error:
            status = error.code().name
        except asyncio.CancelledError:
            assert self.call.cancelled()
            status = "CANCELLED"
        return of_events(session.events().get(NAME, []), status)


EVENTS = {
    "finish": "finish",
    "Cancel by its id": "cancel",
    "RPC cancelled": "cancel_call",
    "RPC cancelled, lease": "cancel_call",
    "RPC cancelled, another waits": "cancel_call",
    "RPC deadline": "let_go",
    "RPC deadline, lease": "let_go",
    "RPC deadline, another waits": "let_go",
    "its time limit": "pass_limit",
    "its own error": "error",
    "server drains": "drain",
    "server stops": "stop",
    "engine dies": "die",
    "half-close": "half_close",
    "connection lost": "lose",
    "connection lost, lease": "lose",
    "connection lost, another waits": "lose",
}
"""The rows of the table, and how they come about: the methods of a scene."""


@dataclass(eq=False)
class Scene:
    """A server with the target in its state, and what may happen to it. Each event returns once it
    has reached the service.

    Attributes:
        tasks: what to await at the end.
    """

    h: Harness
    engine: Any
    proxy: FaultProxy
    caller: Caller
    tasks: list[asyncio.Future[Any]] = field(default_factory=list, kw_only=True)

    async def happen(self, event: str) -> None:
        """Let an event of the table happen."""
        await getattr(self, EVENTS[event])()

    async def finish(self) -> None:
        """It ends by itself."""

    async def cancel(self) -> None:
        """Cancel it by its id."""
        await self.h.generation.Cancel(rpc.CancelRequest(request_ids=[NAME]))

    async def cancel_call(self) -> None:
        """Cancel the RPC that carries it."""
        self.caller.call.cancel()
        await self.let_go()

    async def let_go(self) -> None:
        """Wait until the service has noticed that the caller is gone."""
        caller = self.caller
        await until(caller.call.done)
        await until(
            lambda: (
                not self.h.registry.stats().streamed_requests
                and (caller.kind != "Generate" or caller.waiting <= (caller.other is not None))
            )
        )

    async def pass_limit(self) -> None:
        """Let its time limit pass."""
        raise NotImplementedError

    async def error(self) -> None:
        """Let the engine fail with it alone."""
        raise NotImplementedError

    async def drain(self) -> None:
        """Drain the server."""
        self.tasks.append(asyncio.ensure_future(self.h.server.drain(60)))
        await until(lambda: self.h.server.state.phase.value == "draining")

    async def stop(self) -> None:
        """Stop the server."""
        self.tasks.append(asyncio.ensure_future(self.h.server.stop()))
        await asyncio.sleep(0)

    async def die(self) -> None:
        """Let the engine die."""
        raise NotImplementedError

    async def half_close(self) -> None:
        """End the caller's side of its call; the task that is added last has the outcome."""
        self.tasks.append(asyncio.ensure_future(self.caller.outcome(half_close=True)))
        await asyncio.sleep(0)

    async def lose(self) -> None:
        """Cut the caller's connection."""
        self.proxy.cut()
        await self.let_go()


def _reason(error: grpc.aio.AioRpcError) -> str:
    info = Refused(error).details.get("ErrorInfo")
    return str(info.reason) if info is not None else ""
