"""The driver of the Python library's client for threads; see ../README.md.

Commands that wait have a thread each; the others are done in the order of their lines.
"""

from __future__ import annotations

import itertools
import json
import sys
import threading
from collections.abc import Callable
from typing import Any

import headrace

from tests.conformance.drivers import python_telling as telling
from tests.conformance.drivers.python_naming import Naming, Tell, begin, seconds

WAITING = {
    "generate", "read", "result", "leave", "close_session", "close_client", "batch",
    "add_request", "get_result", "cancel_ids", "load_adapter", "unload_adapter", "adapters",
}  # fmt: skip


class Driver(Naming[headrace.Client]):
    """What is done with clients for threads."""

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
            self.tell_failure(command, error, chunks)
        else:
            self.tell({"id": command["id"], "ok": told or {}})

    def connect(self, command: dict[str, Any]) -> None:
        targets, options = telling.connect_options(command)
        self.clients[command["client"]] = headrace.Client(targets, **options)

    def close_client(self, command: dict[str, Any]) -> None:
        self.clients.pop(command["client"]).close()

    def generate(self, command: dict[str, Any]) -> dict[str, Any]:
        client, prompt, options = self.asked(command)
        return telling.tell_result(client.generate(prompt, **options))

    def stream(self, command: dict[str, Any]) -> None:
        client, prompt, options = self.asked(command)
        stream = client.stream(prompt, **options)
        stream.__enter__()
        self.handles[command["handle"]] = stream

    def leave(self, command: dict[str, Any]) -> None:
        self.handles[command["handle"]].close()

    def open_session(self, command: dict[str, Any]) -> None:
        client = self.clients[command["client"]]
        self.sessions[command["session"]] = client.session(**telling.session_options(command))

    def read(self, command: dict[str, Any], chunks: list[dict[str, Any]]) -> dict[str, Any]:
        name = command["handle"]
        if name not in self.iterators:
            self.iterators[name] = iter(self.handles[name])
        wanted = command.get("chunks")
        for chunk in itertools.islice(self.iterators[name], wanted):
            chunks.append(telling.tell_chunk(chunk))
        return {"chunks": chunks, "end": wanted is None or len(chunks) < wanted}

    def result(self, command: dict[str, Any]) -> dict[str, Any]:
        handle, bound = self.handles[command["handle"]], seconds(command)
        return telling.tell_result(handle.result() if bound is None else handle.result(bound))

    def cancel(self, command: dict[str, Any]) -> None:
        self.handles[command["handle"]].cancel()

    def close_session(self, command: dict[str, Any]) -> None:
        self.sessions[command["session"]].close(cancel=bool(command.get("cancel")))

    def batch(self, command: dict[str, Any]) -> dict[str, Any]:
        return telling.tell_outcomes(list(self.outcomes_of(command)))

    def add_request(self, command: dict[str, Any]) -> dict[str, Any]:
        client, prompt, options = self.asked(command)
        return {"request_id": client.add_request(prompt, **options).request_id}

    def get_result(self, command: dict[str, Any]) -> dict[str, Any]:
        client = self.clients[command["client"]]
        result = client.get_result(command["request_id"], timeout=seconds(command))
        return telling.tell_result(result)

    def cancel_ids(self, command: dict[str, Any]) -> dict[str, Any]:
        statuses = self.clients[command["client"]].cancel(command["request_ids"])
        return {"statuses": {name: str(status) for name, status in statuses.items()}}

    def load_adapter(self, command: dict[str, Any]) -> dict[str, Any]:
        control = self.clients[command["client"]].control
        answer = control.load_adapter(**telling.load_options(command))
        return telling.tell_loaded(answer)

    def unload_adapter(self, command: dict[str, Any]) -> dict[str, Any]:
        control = self.clients[command["client"]].control
        return {"live": control.unload_adapter(command["name"], seconds(command))}

    def adapters(self, command: dict[str, Any]) -> dict[str, Any]:
        found = self.clients[command["client"]].adapters()
        return {"adapters": [telling.tell_adapter(one) for one in found]}


def serve(make: Callable[[Tell], Driver] = Driver) -> None:
    """Takes commands from stdin until it ends; `make`: another driver than the true one."""
    driver = make(begin())
    for line in sys.stdin.buffer:
        driver.take(json.loads(line))
    for client in driver.clients.values():
        client.close()


if __name__ == "__main__":
    serve()
