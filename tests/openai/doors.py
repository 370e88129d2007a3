"""The door in this process, on a socket of its own: `headrace openai` without its process."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import uvicorn
from headrace import AsyncClient
from headrace.openai.callers import Callers, Metadata
from headrace.openai.door import Door
from headrace.openai.guard import Guard
from headrace.openai.protocol import make_protocol

WAIT_S = 60.0
"""No single wait takes longer: what does is stuck."""
USER = [{"role": "user", "content": "hi"}]


class OpenDoor(httpx2.AsyncClient):
    """A client of a running door.

    Attributes:
        url: without /v1.
    """

    def __init__(self, url: str) -> None:
        super().__init__(base_url=url, timeout=WAIT_S)
        self.url = url

    async def ask(self, path: str, body: Any, **headers: str) -> Any:
        """What a body is answered, which must be with 200."""
        answer = await self.post(path, json=body, headers=_named(headers))
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def fails(self, path: str, body: Any, **headers: str) -> dict[str, Any]:
        """The error that a body is answered, with its status."""
        answer = await self.post(path, json=body, headers=_named(headers))
        assert answer.status_code >= 400, answer.text
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert answer.headers["x-request-id"]
        return {"status": answer.status_code, **error}

    async def events(self, path: str, body: Any, **headers: str) -> list[dict[str, Any]]:
        """The events of a stream, which must end with [DONE]."""
        raw = await self.raw(path, body | {"stream": True}, **headers)
        found = data_of(raw)
        assert found.pop() == "[DONE]"
        return [json.loads(one) for one in found]

    async def raw(self, path: str, body: Any, **headers: str) -> bytes:
        """The bytes of a stream."""
        answer = await self.post(path, json=body, headers=_named(headers))
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        return answer.content


def _named(headers: dict[str, str]) -> dict[str, str]:
    return {name.replace("_", "-"): value for name, value in headers.items()}


def data_of(raw: bytes) -> list[str]:
    """The data of the events in a stream's bytes; comments have none."""
    *events, rest = raw.decode().split("\n\n")
    assert rest == "", "the last event has no end"
    lines = [line for event in events for line in event.split("\n")]
    return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]


@asynccontextmanager
async def open_door(
    *targets: str,
    token: str | None = None,
    hosts: Sequence[str] = (),
    origins: Sequence[str] = (),
    ignore_unknown: bool = False,
) -> AsyncIterator[OpenDoor]:
    """A running door before servers, and a client of it; ended at the end."""

    def make(target: str, metadata: Metadata, number: int) -> AsyncClient:
        options = (("headrace.connection", number),)
        return AsyncClient(target, token=token, metadata=metadata, channel_options=options)

    callers = Callers(targets, make, None)
    door = Door(callers, Guard(hosts, origins), ignore_unknown=ignore_unknown)
    config = uvicorn.Config(
        door, http=make_protocol(), ws="none", lifespan="off", log_config=None, access_log=False,
        timeout_graceful_shutdown=1,
    )  # fmt: skip
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as made:
        host, port = made.getsockname()
        async with door.running():
            # Not serve(): that takes this process's signals.
            task = asyncio.create_task(server._serve([made]))
            try:
                async with OpenDoor(f"http://{host}:{port}") as client:
                    await client.get("/health")
                    yield client
            finally:
                server.should_exit = True
                await asyncio.wait_for(task, WAIT_S)
