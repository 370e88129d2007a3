"""The Python driver with a fault wrapped around it, named on the command line: what a library (or a
driver) would do that is wrong in one way.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from headrace._fleet import FleetState, Server
from headrace._session import Record, SessionCore

from tests.conformance.drivers import python_threads
from tests.conformance.drivers.python_threads import Driver
from tests.conformance.suite import VECTORS

Tell = Callable[[dict[str, Any]], None]


class Telling(Driver):
    """Tells something else than the library did."""

    def __init__(self, tell: Tell) -> None:
        super().__init__(lambda answer: tell(self.other(answer)))

    def other(self, answer: dict[str, Any]) -> dict[str, Any]:
        """What is told in its place."""
        return answer


class DropsADelta(Telling):
    def other(self, answer: dict[str, Any]) -> dict[str, Any]:
        if answer.get("ok", {}).get("chunks"):
            del answer["ok"]["chunks"][-1]
        return answer


class SplitsACharacter(Telling):
    """Each code point beyond the first 65,536 is two, as halves of it are in UTF-16."""

    def other(self, answer: dict[str, Any]) -> dict[str, Any]:
        text = json.dumps(answer, ensure_ascii=False)
        split = "".join(one if ord(one) < 0x10000 else "\ufffd\ufffd" for one in text)
        made: dict[str, Any] = json.loads(split)
        return made


class SwallowsAnError(Telling):
    def other(self, answer: dict[str, Any]) -> dict[str, Any]:
        error = answer.pop("error", None)
        if error is None:
            return answer
        chunks = {"chunks": answer.pop("chunks", []), "end": True}
        return {**answer, "ok": {**(error.get("partial") or {}), **chunks}}


class ForeignErrors(Telling):
    """The runtime's own error leaves the library."""

    def other(self, answer: dict[str, Any]) -> dict[str, Any]:
        if "error" in answer:
            answer["error"] = {"foreign": "RpcError: INTERNAL"}
        return answer


class AnswersFromTheFile(Telling):
    """Knows the vectors, and not what was sent."""

    def __init__(self, tell: Tell) -> None:
        super().__init__(tell)
        self.texts = [
            event["text"]
            for vector in json.loads((VECTORS / "output.json").read_text(encoding="utf-8"))
            for step in vector["steps"]
            for event in step.get("events", ())
            if isinstance(event, dict) and "text" in event
        ]

    def other(self, answer: dict[str, Any]) -> dict[str, Any]:
        for choice in answer.get("ok", {}).get("choices", ()):
            choice["text"] = self.texts[0]
        return answer


class ForgetsTheAdapter(Driver):
    """Leaves the adapter out of what is sent: the base model would answer."""

    def take(self, command: dict[str, Any]) -> None:
        command.get("request", {}).pop("adapter", None)
        super().take(command)


class LeaksAStream(Driver):
    def close_session(self, command: dict[str, Any]) -> None:
        """Says that it is closed."""

    def close_client(self, command: dict[str, Any]) -> None:
        """Says that it is closed."""


class DoesNotEnd(Driver):
    """Leaves a thread behind."""

    def connect(self, command: dict[str, Any]) -> None:
        import threading

        threading.Thread(target=threading.Event().wait).start()
        super().connect(command)


class SendsTwice(Driver):
    """Asks for the same again, in a call that nobody wanted."""

    def cancel(self, command: dict[str, Any]) -> None:
        super().cancel(command)
        super().cancel(command)


def resume_late() -> None:
    """An attach asks for the event after the one that is due."""
    put = SessionCore.put_attached

    def put_late(core: SessionCore, record: Record, instance_id: str = "") -> None:
        record.fold.next_seq += 1
        put(core, record, instance_id)

    SessionCore.put_attached = put_late  # type: ignore[method-assign]


def retry_early() -> None:
    """A refused request comes again in half of the time that the server told."""
    delay = SessionCore._delay

    def early(core: SessionCore, record: Record, error: Any) -> float | None:
        told = delay(core, record, error)
        return None if told is None else told / 2

    SessionCore._delay = early  # type: ignore[method-assign]


def pay_for_all() -> None:
    """Credit is given for what has arrived, whoever reads it."""
    add = SessionCore.add

    def unlimited(core: SessionCore, spec: Any) -> Record:
        record = add(core, spec)
        record.unlimited = True
        return record

    SessionCore.add = unlimited  # type: ignore[method-assign]


def ask_again() -> None:
    """A server that lacks an adapter is taken for one without room: it may be asked again."""
    choose = FleetState.choose

    def choose_any(state: FleetState, keys: Any, **options: Any) -> Server | None:
        return choose(state, keys, **{**options, "without": ()})

    FleetState.choose = choose_any  # type: ignore[method-assign,assignment]


DRIVERS: dict[str, type[Driver]] = {
    "drops-a-delta": DropsADelta,
    "splits-a-character": SplitsACharacter,
    "swallows-an-error": SwallowsAnError,
    "foreign-errors": ForeignErrors,
    "answers-from-the-file": AnswersFromTheFile,
    "forgets-the-adapter": ForgetsTheAdapter,
    "leaks-a-stream": LeaksAStream,
    "does-not-end": DoesNotEnd,
    "sends-twice": SendsTwice,
}
CHANGES: dict[str, Callable[[], None]] = {
    "resumes-late": resume_late,
    "retries-early": retry_early,
    "pays-for-all": pay_for_all,
    "asks-again": ask_again,
}

if __name__ == "__main__":
    fault = sys.argv[1]
    if fault in CHANGES:
        CHANGES[fault]()
    python_threads.serve(DRIVERS.get(fault, Driver))
