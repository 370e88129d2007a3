"""A profile of an engine's steps is of those computed meanwhile, and leaves no request behind."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.adapters import profiling
from benchmarks.adapters.headrace_engine import HeadraceEngine
from benchmarks.adapters.loop import Turn

BUFFERED = 7
"""Tokens that come while the profiler starts."""


class Manager:
    """An engine that has gone on meanwhile."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.read = 0

    def add_request(self, prompt: list[int], **_: Any) -> str:
        self.events.append("added")
        return f"{len(self.events)}"

    def request_id_iter(self, name: str) -> Iterator[object]:
        early = [time.monotonic() - 1.0] * (1 + BUFFERED)
        for index in range(100):
            self.read = index + 1
            came = early[index] if index < len(early) else time.monotonic()
            yield SimpleNamespace(timestamps=[came])

    def cancel_request(self, name: str) -> None:
        self.events.append("cancelled")

    def get_result(self, name: str) -> None:
        self.events.append("read")


def profiled(
    manager: Manager, monkeypatch: pytest.MonkeyPatch, profile: Callable[[Any], dict[str, Any]]
) -> None:
    system = HeadraceEngine()
    system._manager = manager  # type: ignore[assignment]
    monkeypatch.setattr(profiling, "set_up", lambda: manager.events.append("set up"))
    monkeypatch.setattr(profiling, "profile_device", profile)
    requests = [{"prompt": [1], "max_tokens": 100, "at": 0.0}] * 2
    try:
        system.run(Turn(requests, profile_steps=5))
    finally:
        assert manager.events == [
            *("set up", "added", "added"),
            *("cancelled", "cancelled", "read"),
        ]


def test_tokens_that_were_there_before_are_no_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    manager, found = Manager(), list[int]()

    def profile(work: Callable[[], int]) -> dict[str, Any]:
        found.extend((work(), manager.read))
        return {"steps": found[0]}

    profiled(manager, monkeypatch, profile)
    assert found == [5, 1 + BUFFERED + 5]


def test_requests_end_where_nothing_can_be_profiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(work: object) -> dict[str, Any]:
        raise RuntimeError("the profiler saw nothing on the device")

    with pytest.raises(RuntimeError, match="saw nothing"):
        profiled(Manager(), monkeypatch, fail)
