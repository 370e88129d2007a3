"""The driver of the Python library's asyncio client; see ../README.md.

Each command is a task; those that do not wait are done before the next line is read.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
from collections.abc import Callable
from typing import Any

import headrace

from tests.conformance.drivers import python_telling as telling
from tests.conformance.drivers.python_naming import Naming, Tell, begin, seconds

_LINE_BYTES = 256 * 1024 * 1024


class Driver(Naming[headrace.AsyncClient]):
    """What is done with clients for asyncio, and the tasks that do it."""

    def __init__(self, tell: Tell) -> None:
        super().__init__(tell)
        self.tasks: dict[int, asyncio.Task[None]] = {}

    async def answer(self, command: dict[str, Any]) -> None:
        """Does a command, and answers it."""
        act = getattr(self, command["op"], None)
        if act is None:
            self.tell({"id": command["id"], "unsupported": "no such command"})
            return
        chunks: list[dict[str, Any]] = []
        try:
            with telling.traced(command):
                told = act(command, chunks) if command["op"] == "read" else act(command)
                if inspect.isawaitable(told):
                    told = await told
        except asyncio.CancelledError:
            error = {"code": "CANCELLED", "message": "the task was cancelled"}
            self.tell({"id": command["id"], "error": error})
        except Exception as error:  # every one is told; the runner judges it
            self.tell_failure(command, error, chunks)
        else:
            self.tell({"id": command["id"], "ok": told or {}})
        finally:
            self.tasks.pop(command["id"], None)

    async def connect(self, command: dict[str, Any]) -> None:
        targets, options = telling.connect_options(command)
        self.clients[command["client"]] = headrace.AsyncClient(targets, **options)

    async def close_client(self, command: dict[str, Any]) -> None:
        await self.clients.pop(command["client"]).close()

    async def generate(self, command: dict[str, Any]) -> dict[str, Any]:
        client, prompt, options = self.asked(command)
        return telling.tell_result(await client.generate(prompt, **options))

    async def abandon(self, command: dict[str, Any]) -> None:
        self.tasks[command["of"]].cancel()

    async def stream(self, command: dict[str, Any]) -> None:
        client, prompt, options = self.asked(command)
        stream = client.stream(prompt, **options)
        await stream.__aenter__()
        self.handles[command["handle"]] = stream

    async def leave(self, command: dict[str, Any]) -> None:
        await self.handles[command["handle"]].__aexit__(None, None, None)

    async def open_session(self, command: dict[str, Any]) -> None:
        client = self.clients[command["client"]]
        session = client.session(**telling.session_options(command))
        self.sessions[command["session"]] = await session.__aenter__()

    async def read(self, command: dict[str, Any], chunks: list[dict[str, Any]]) -> dict[str, Any]:
        name = command["handle"]
        if name not in self.iterators:
            self.iterators[name] = aiter(self.handles[name])
        wanted = command.get("chunks")
        while wanted is None or len(chunks) < wanted:
            try:
                chunks.append(telling.tell_chunk(await anext(self.iterators[name])))
            except StopAsyncIteration:
                return {"chunks": chunks, "end": True}
        return {"chunks": chunks, "end": False}

    async def result(self, command: dict[str, Any]) -> dict[str, Any]:
        try:
            async with asyncio.timeout(seconds(command)):
                return telling.tell_result(await self.handles[command["handle"]].result())
        except TimeoutError as error:  # asyncio's own form of the wait's end
            raise headrace.DeadlineExceededError("the wait ended") from error

    async def cancel(self, command: dict[str, Any]) -> None:
        answer = self.handles[command["handle"]].cancel()
        if answer is not None:
            await answer

    async def close_session(self, command: dict[str, Any]) -> None:
        await self.sessions[command["session"]].close(cancel=bool(command.get("cancel")))

    async def batch(self, command: dict[str, Any]) -> dict[str, Any]:
        return telling.tell_outcomes([one async for one in self.outcomes_of(command)])

    async def add_request(self, command: dict[str, Any]) -> dict[str, Any]:
        client, prompt, options = self.asked(command)
        return {"request_id": (await client.add_request(prompt, **options)).request_id}

    async def get_result(self, command: dict[str, Any]) -> dict[str, Any]:
        client = self.clients[command["client"]]
        result = await client.get_result(command["request_id"], timeout=seconds(command))
        return telling.tell_result(result)

    async def cancel_ids(self, command: dict[str, Any]) -> dict[str, Any]:
        statuses = await self.clients[command["client"]].cancel(command["request_ids"])
        return {"statuses": {name: str(status) for name, status in statuses.items()}}

    async def load_adapter(self, command: dict[str, Any]) -> dict[str, Any]:
        control = self.clients[command["client"]].control
        answer = await control.load_adapter(**telling.load_options(command))
        return telling.tell_loaded(answer)

    async def unload_adapter(self, command: dict[str, Any]) -> dict[str, Any]:
        control = self.clients[command["client"]].control
        return {"live": await control.unload_adapter(command["name"], seconds(command))}

    async def adapters(self, command: dict[str, Any]) -> dict[str, Any]:
        found = await self.clients[command["client"]].adapters()
        return {"adapters": [telling.tell_adapter(one) for one in found]}


async def serve(make: Callable[[Tell], Driver] = Driver) -> None:
    """Takes commands from stdin until it ends; `make`: another driver than the true one."""
    driver = make(begin())
    reader = asyncio.StreamReader(limit=_LINE_BYTES)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        command = json.loads(line)
        driver.tasks[command["id"]] = asyncio.create_task(driver.answer(command))
        await asyncio.sleep(0)  # it begins, in the order of the lines
    for client in driver.clients.values():
        await client.close()


if __name__ == "__main__":
    asyncio.run(serve())
