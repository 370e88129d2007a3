"""Captures a step's device work once and replays it: CUDA graphs, behind a small protocol.

A replay launches a whole forward pass as one unit, without Python code and without a launch for
each kernel. Captured work reads and writes only fixed addresses; see `static_inputs`.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from typing_extensions import override


class CapturedGraph(Protocol):
    """Captured device work."""

    def replay(self) -> torch.Tensor:
        """Queue the work again.

        The result always has the same address. Read it before the next replay of any graph, with
        work queued on the same stream.
        """
        ...


class GraphBackend(Protocol):
    """A way to capture device work."""

    def capture(self, run: Callable[[], torch.Tensor]) -> CapturedGraph:
        """Capture the work that `run` queues. `run` may be called several times.

        Raises:
            RuntimeError: `run` does something that cannot be captured, such as waiting for the
                device.
        """
        ...


@dataclass(frozen=True, slots=True)
class _CudaGraph:
    graph: Any
    output: torch.Tensor

    def replay(self) -> torch.Tensor:
        self.graph.replay()
        return self.output


class CaptureDevice(Protocol):
    """The device operations that capturing needs."""

    def side_stream(self) -> AbstractContextManager[None]:
        """Queue work on a separate stream inside the `with` block, because a stream is captured as
        a whole.

        The work is ordered after what was queued before the block, and before what follows. The
        current stream is always restored.
        """
        ...

    def refusing_waits(self) -> AbstractContextManager[None]:
        """Make any operation that waits for the device raise a RuntimeError, inside the `with`
        block.
        """
        ...

    def begin(self) -> Any:
        """Begin to capture the current stream, and return the graph."""
        ...

    def end(self, graph: Any) -> None:
        """End the capture. Raises RuntimeError if something was queued that cannot be captured."""
        ...

    def abandon(self, graph: Any) -> None:
        """Restore the stream and the memory pool to their state before `begin`. Never raises.

        This works whether or not `end` was called.
        """
        ...


class CudaCapture(CaptureDevice):
    """A CUDA device. Its graphs share one memory pool, because only one of them runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextmanager
    @override
    def side_stream(self) -> Iterator[None]:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            current.wait_stream(self._stream)

    @contextmanager
    def refusing_waits(self) -> Iterator[None]:
        """See CaptureDevice. torch's setting applies to all threads of the process."""
        before = torch.cuda.get_sync_debug_mode()
        try:
            _set_sync_debug_mode("error")
            yield
        finally:
            _set_sync_debug_mode(before)

    def begin(self) -> torch.cuda.CUDAGraph:
        """See CaptureDevice. Other threads of the process may use the device in the meantime."""
        torch.cuda.synchronize(self._device)
        # What was run before has left memory that only this stream could use: it is the graph's.
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(self._pool, capture_error_mode="thread_local")
        return graph

    @override
    def end(self, graph: torch.cuda.CUDAGraph) -> None:
        graph.capture_end()

    @override
    def abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        with suppress(RuntimeError):
            graph.capture_end()  # the stream stops capturing, also where this raises
        # Where it raises, torch 2.11 leaves its allocator in the pool (pytorch issue 180395).
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(self._stream.device_index, self._pool)


def _set_sync_debug_mode(mode: str | int) -> None:
    """Set the mode without torch's warning that it is a prototype.

    If warnings are errors, the warning would be raised after the mode has been set, and the mode
    would remain.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode(mode)


class CapturingBackend:
    """Captures work on a device, and restores the device's state if that fails.

    run ──▶ run, waits refused ──▶ run, captured
    │                │                    └ the graph
    │                └ an operation that waits is found before anything is captured
    └ libraries initialize and kernels are compiled at their first call, which may wait
    """

    def __init__(self, device: CaptureDevice) -> None:
        self._device = device

    def capture(self, run: Callable[[], torch.Tensor]) -> CapturedGraph:
        """See GraphBackend. `run` is called three times."""
        device = self._device
        with device.side_stream():
            run()
            with device.refusing_waits():
                run()
            with _without_garbage_collection():
                graph = device.begin()
                try:
                    output = run()
                    device.end(graph)
                except BaseException:
                    device.abandon(graph)
                    raise
        return _CudaGraph(graph, output)


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Disable garbage collection, which may free memory that another stream has used. That cannot
    be captured.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
