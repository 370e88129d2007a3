"""Captures that fail: the device is left as it was, on a stand-in that keeps account of it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.runner.cuda_graph import CapturingBackend, CudaCapture

LOGITS = torch.zeros(1)


class Graph:
    """A graph of the stand-in."""

    def __init__(self) -> None:
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1


@dataclass
class Device:
    """A device with one capture at a time, as CUDA has it: while a stream is captured nothing may
    wait, and a capture in which something did is invalid at its end.
    """

    stream: str = "main"
    refuses_waits: bool = False
    capturing: Graph | None = None
    pool_is_open: bool = False
    is_invalid: bool = False
    begun: int = 0
    ends: list[str] = field(default_factory=list)
    fails_at_end: bool = False

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        before, self.stream = self.stream, "side"
        try:
            yield
        finally:
            self.stream = before

    @contextmanager
    def refusing_waits(self) -> Iterator[None]:
        before, self.refuses_waits = self.refuses_waits, True
        try:
            yield
        finally:
            self.refuses_waits = before

    def begin(self) -> Graph:
        assert self.stream == "side"
        assert self.capturing is None
        self.capturing, self.pool_is_open, self.is_invalid = Graph(), True, False
        self.begun += 1
        return self.capturing

    def end(self, graph: Graph) -> None:
        assert self.capturing is graph
        if self.is_invalid or self.fails_at_end:
            raise RuntimeError("CUDA error: operation failed due to a previous error")
        self.capturing, self.pool_is_open = None, False
        self.ends.append("end")

    def abandon(self, graph: Graph) -> None:
        self.capturing, self.pool_is_open = None, False
        self.ends.append("abandon")

    def wait(self) -> None:
        """An operation that waits for the device, deep inside a library."""
        if self.refuses_waits:
            raise RuntimeError("called a synchronizing CUDA operation")
        if self.capturing is not None:
            self.is_invalid = True
            raise RuntimeError("operation not permitted when stream is capturing")

    @property
    def is_as_before(self) -> bool:
        return (self.stream, self.refuses_waits, self.capturing, self.pool_is_open) == (
            "main",
            False,
            None,
            False,
        ) and gc.isenabled()


def fails_at(call: int, error: BaseException) -> Callable[[], torch.Tensor]:
    """What raises when it is called for the n-th time."""
    calls = 0

    def run() -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == call:
            raise error
        return LOGITS

    return run


def test_a_capture_and_its_replays() -> None:
    device = Device()
    seen: list[tuple[str, bool, bool, bool]] = []

    def run() -> torch.Tensor:
        seen.append(
            (device.stream, device.refuses_waits, device.capturing is not None, gc.isenabled())
        )
        return LOGITS

    graph: Any = CapturingBackend(device).capture(run)
    assert seen == [
        ("side", False, False, True),
        ("side", True, False, True),
        ("side", False, True, False),
    ]
    assert device.is_as_before
    assert graph.replay() is LOGITS
    assert graph.graph.replays == 1


def test_a_wait_is_found_before_anything_is_captured() -> None:
    device = Device()

    def run() -> torch.Tensor:
        device.wait()
        return LOGITS

    with pytest.raises(RuntimeError, match="synchronizing"):
        CapturingBackend(device).capture(run)
    assert device.begun == 0
    assert device.is_as_before


def test_a_wait_that_the_probe_does_not_see_leaves_the_device_as_it_was() -> None:
    device = Device()

    def run() -> torch.Tensor:
        if device.capturing is not None:
            device.wait()
        return LOGITS

    with pytest.raises(RuntimeError, match="stream is capturing"):
        CapturingBackend(device).capture(run)
    assert device.ends == ["abandon"]
    assert device.is_as_before


@pytest.mark.parametrize("call", [1, 2, 3])
@pytest.mark.parametrize(
    "error", [RuntimeError("x"), torch.OutOfMemoryError(), KeyboardInterrupt()]
)
def test_whatever_raises(call: int, error: BaseException) -> None:
    device = Device()
    with pytest.raises(type(error)):
        CapturingBackend(device).capture(fails_at(call, error))
    assert device.is_as_before
    assert device.ends == (["abandon"] if call == 3 else [])
    CapturingBackend(device).capture(lambda: LOGITS)
    assert device.ends[-1] == "end", "the next one is captured"


def test_a_capture_whose_end_raises() -> None:
    device = Device(fails_at_end=True)
    with pytest.raises(RuntimeError, match="previous error"):
        CapturingBackend(device).capture(lambda: LOGITS)
    assert device.ends == ["abandon"]
    assert device.is_as_before


def test_garbage_collection_stays_off_where_it_was() -> None:
    gc.disable()
    try:
        CapturingBackend(Device()).capture(lambda: LOGITS)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_the_mode_that_refuses_waits_is_left_whatever_happens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch warns, once in a process, that the mode is a prototype; warnings are errors here."""

    def fail() -> None:
        assert torch.cuda.get_sync_debug_mode() == 2
        raise ValueError("of the model's")

    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)  # there need not be a device
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    warned = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        capture = CudaCapture(torch.device("cuda"))
        with pytest.raises(ValueError, match="of the model's"), capture.refusing_waits():
            fail()
        assert torch.cuda.get_sync_debug_mode() == 0
    finally:
        torch.set_warn_always(warned)


def test_a_capture_begins_with_what_memory_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs before it were on the stream that is captured, whose blocks no other stream gets: a
    graph's pool would come on top of them.
    """
    calls: list[str] = []
    graph = SimpleNamespace(capture_begin=lambda *_, **__: calls.append("begin"))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append("wait"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("free"))
    assert CudaCapture(torch.device("cuda")).begin() is graph
    assert calls == ["wait", "free", "begin"]
