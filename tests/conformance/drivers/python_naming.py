"""What both Python drivers share: the names that the runner gives, the commands that neither kind
of client waits for, and the lines.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import headrace

from tests.conformance.drivers import python_telling as telling

Command = dict[str, Any]
Tell = Callable[[dict[str, Any]], None]
ClientT = TypeVar("ClientT", headrace.Client, headrace.AsyncClient)


def begin() -> Tell:
    """Tells the runner that the driver is ready. Returns what writes an answer, from any thread."""
    lock = threading.Lock()

    def tell(answer: dict[str, Any]) -> None:
        line = json.dumps(answer, ensure_ascii=False).encode() + b"\n"
        with lock:
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()

    tell({"ready": {"language": "python", "protocol": 1}})
    return tell


def seconds(command: Command) -> float | None:
    """A wait's bound; None: it has none."""
    timeout = command.get("timeout_ms")
    return None if timeout is None else timeout / 1000


class Naming(Generic[ClientT]):
    """The clients, sessions and handles that the runner has named."""

    def __init__(self, tell: Tell) -> None:
        self.tell = tell
        self.clients: dict[str, ClientT] = {}
        self.sessions: dict[str, Any] = {}
        self.handles: dict[str, Any] = {}
        self.iterators: dict[str, Any] = {}

    def tell_failure(self, command: Command, error: Exception, chunks: list[Any]) -> None:
        """Answers with an error; `chunks`: those that a `read` took before."""
        answer = {"id": command["id"], "error": telling.tell_error(error)}
        self.tell({**answer, "chunks": chunks} if command["op"] == "read" else answer)

    def asked(self, command: Command) -> tuple[ClientT, Any, dict[str, Any]]:
        """A command's client, prompt and options."""
        request = command["request"]
        client = self.clients[command["client"]]
        return client, telling.prompt_of(request), telling.options_of(request)

    def outcomes_of(self, command: Command) -> Any:
        """The outcomes of a batch, as its client gives them."""
        requests = [
            headrace.Request(telling.prompt_of(one), **telling.options_of(one))
            for one in command["requests"]
        ]
        return self.clients[command["client"]].batch(
            requests,
            max_in_flight=command.get("max_in_flight", 64),
            ordered=bool(command.get("ordered")),
        )

    # ---- commands ------------------------------------------------------------------------------

    def submit(self, command: Command) -> dict[str, Any]:
        request = command["request"]
        session = self.sessions[command["session"]]
        handle = session.submit(telling.prompt_of(request), **telling.options_of(request))
        self.handles[command["handle"]] = handle
        return {"request_id": handle.request_id}

    def attach(self, command: Command) -> None:
        self.handles[command["handle"]] = self.sessions[command["session"]].attach(
            command["request_id"], from_seq=command.get("from_seq", 1), n=command.get("n")
        )

    def resume(self, command: Command) -> None:
        old = self.handles[command["of"]]
        self.handles[command["handle"]] = self.sessions[command["session"]].resume(old)

    def session(self, command: Command) -> dict[str, Any]:
        return telling.tell_session(self.sessions[command["session"]])
