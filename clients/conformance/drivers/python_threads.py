"""The driver of the Python library's client for threads; see ../README.md.

Commands that wait have a thread each; the others are done in the order of their lines.
"""

from __future__ import annotations

import itertools
import json
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import headrace

from clients.conformance.drivers import python_telling as telling

WAITING = {
    "generate", "read", "result", "leave", "close_session", "close_client", "batch",
    "add_request", "get_result", "cancel_ids",
}  # fmt: skip


class Driver:
    """The clients, sessions and handles that the runner has named."""

    def __init__(self, tell: Callable[[dict[str, Any]], None]) -> None:
        self.tell = tell
        self.clients: dict[str, headrace.Client] = {}
        self.sessions: dict[str, headrace.Session] = {}
        self.handles: dict[str, Any] = {}
        self.iterators: dict[str, Iterator[headrace.Chunk]] = {}

    def take(self, command: dict[str, Any]) -> None:
        """Begins a command."""
        if command["op"] in WAITING:
            threading.Thread(target=self.answer, args=[command], daemon=True).start()
        else:
            self.answer(command)

    def answer(self, command: dict[str, Any]) -> None:
        """Does a command, and answers it."""
        act = getattr(self, command["op"], None)
        if act is None:
            self.tell({"id": command["id"], "unsupported": "threads have no such means"})
            return
        chunks: list[dict[str, Any]] = []
        try:
            with telling.traced(command):
                told = act(command, chunks) if command["op"] == "read" else act(command)
        except Exception as error:  # every one is told; the runner judges it
            answer = {"id": command["id"], "error": telling.tell_error(error)}
            self.tell({**answer, "chunks": chunks} if command["op"] == "read" else answer)
        else:
            self.tell({"id": command["id"], "ok": told or {}})

    def connect(self, command: dict[str, Any]) -> None:
        targets, options = telling.connect_options(command)
        self.clients[command["client"]] = headrace.Client(targets, **options)

    def close_client(self, command: dict[str, Any]) -> None:
        self.clients.pop(command["client"]).close()

    def generate(self, command: dict[str, Any]) -> dict[str, Any]:
        request = command["request"]
        client = self.clients[command["client"]]
        prompt = telling.prompt_of(request)
        return telling.tell_result(client.generate(prompt, **telling.options_of(request)))

    def stream(self, command: dict[str, Any]) -> None:
        request = command["request"]
        client = self.clients[command["client"]]
        stream = client.stream(telling.prompt_of(request), **telling.options_of(request))
        stream.__enter__()
        self.handles[command["handle"]] = stream

    def leave(self, command: dict[str, Any]) -> None:
        self.handles[command["handle"]].close()

    def open_session(self, command: dict[str, Any]) -> None:
        client = self.clients[command["client"]]
        self.sessions[command["session"]] = client.session(**telling.session_options(command))

    def submit(self, command: dict[str, Any]) -> dict[str, Any]:
        request = command["request"]
        session = self.sessions[command["session"]]
        handle = session.submit(telling.prompt_of(request), **telling.options_of(request))
        self.handles[command["handle"]] = handle
        return {"request_id": handle.request_id}

    def attach(self, command: dict[str, Any]) -> None:
        self.handles[command["handle"]] = self.sessions[command["session"]].attach(
            command["request_id"], from_seq=command.get("from_seq", 1), n=command.get("n")
        )

    def resume(self, command: dict[str, Any]) -> None:
        old = self.handles[command["of"]]
        self.handles[command["handle"]] = self.sessions[command["session"]].resume(old)

    def read(self, command: dict[str, Any], chunks: list[dict[str, Any]]) -> dict[str, Any]:
        name = command["handle"]
        if name not in self.iterators:
            self.iterators[name] = iter(self.handles[name])
        wanted = command.get("chunks")
        for chunk in itertools.islice(self.iterators[name], wanted):
            chunks.append(telling.tell_chunk(chunk))
        return {"chunks": chunks, "end": wanted is None or len(chunks) < wanted}

    def result(self, command: dict[str, Any]) -> dict[str, Any]:
        handle = self.handles[command["handle"]]
        if command.get("timeout_ms") is not None:
            return telling.tell_result(handle.result(command["timeout_ms"] / 1000))
        return telling.tell_result(handle.result())

    def cancel(self, command: dict[str, Any]) -> None:
        self.handles[command["handle"]].cancel()

    def session(self, command: dict[str, Any]) -> dict[str, Any]:
        return telling.tell_session(self.sessions[command["session"]])

    def close_session(self, command: dict[str, Any]) -> None:
        self.sessions[command["session"]].close(cancel=bool(command.get("cancel")))

    def batch(self, command: dict[str, Any]) -> dict[str, Any]:
        requests = [
            headrace.Request(telling.prompt_of(one), **telling.options_of(one))
            for one in command["requests"]
        ]
        outcomes = self.clients[command["client"]].batch(
            requests,
            max_in_flight=command.get("max_in_flight", 64),
            ordered=bool(command.get("ordered")),
        )
        return telling.tell_outcomes(list(outcomes))

    def add_request(self, command: dict[str, Any]) -> dict[str, Any]:
        request = command["request"]
        client = self.clients[command["client"]]
        prompt = telling.prompt_of(request)
        accepted = client.add_request(prompt, **telling.options_of(request))
        return {"request_id": accepted.request_id}

    def get_result(self, command: dict[str, Any]) -> dict[str, Any]:
        timeout = command.get("timeout_ms")
        seconds = None if timeout is None else timeout / 1000
        client = self.clients[command["client"]]
        return telling.tell_result(client.get_result(command["request_id"], timeout=seconds))

    def cancel_ids(self, command: dict[str, Any]) -> dict[str, Any]:
        statuses = self.clients[command["client"]].cancel(command["request_ids"])
        return {"statuses": {name: str(status) for name, status in statuses.items()}}


def serve(make: Callable[[Callable[[dict[str, Any]], None]], Driver] = Driver) -> None:
    """Takes commands from stdin until it ends; `make`: another driver than the true one."""
    lock = threading.Lock()

    def tell(answer: dict[str, Any]) -> None:
        line = json.dumps(answer, ensure_ascii=False).encode() + b"\n"
        with lock:
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()

    driver = make(tell)
    tell({"ready": {"language": "python", "protocol": 1}})
    for line in sys.stdin.buffer:
        driver.take(json.loads(line))
    for client in driver.clients.values():
        client.close()


if __name__ == "__main__":
    serve()
