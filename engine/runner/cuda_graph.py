"""Capturing a step's device work once and replaying it: CUDA graphs, behind a small protocol.

A replay launches a whole forward pass as one unit, without the interpreter and without a launch for
each kernel. What is captured reads and writes fixed places alone; see `static_inputs`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from engine.attention.base import StaticShape
from engine.runner.input_batch import InputBatch
from engine.runner.static_inputs import StaticInputs


class CapturedGraph(Protocol):
    """Device work that was captured."""

    def replay(self) -> torch.Tensor:
        """Queue the work again. The result stands at the same place each time: it is to be read
        before the next replay of any graph, by work that is queued on the same stream.
        """
        ...


class GraphBackend(Protocol):
    """A way to capture device work."""

    def capture(self, run: Callable[[], torch.Tensor]) -> CapturedGraph:
        """Capture what `run` queues; it may be called several times.

        Raises:
            RuntimeError: it does something that cannot be captured, such as waiting for the device.
        """
        ...


@dataclass(frozen=True, slots=True)
class _CudaGraph:
    graph: torch.cuda.CUDAGraph
    output: torch.Tensor

    def replay(self) -> torch.Tensor:
        self.graph.replay()
        return self.output


class CudaGraphBackend:
    """CUDA graphs that share one memory pool: only one of them runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(self, run: Callable[[], torch.Tensor]) -> CapturedGraph:
        """See GraphBackend."""
        # Once before, on the side stream: libraries set themselves up at their first call, and that
        # cannot be captured.
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            run()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads of the process may use the device meanwhile.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            output = run()
        return _CudaGraph(graph, output)


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """A captured forward pass, and where its inputs stand."""

    inputs: StaticInputs
    graph: CapturedGraph

    def replay(self, inputs: InputBatch) -> torch.Tensor:
        """Compute a step whose inputs are in place: the logits [S, V] of its wanted rows."""
        logits = self.graph.replay()
        rows = inputs.logit_rows
        if not self.inputs.shape.is_decode or np.array_equal(rows, np.arange(len(rows))):
            return logits[: len(rows)]
        return logits.index_select(0, torch.from_numpy(rows).to(logits.device))


class GraphCache:
    """Captured steps by shape; the one that was not used for longest goes first."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._steps: OrderedDict[StaticShape, CapturedStep] = OrderedDict()

    def __len__(self) -> int:
        return len(self._steps)

    def __contains__(self, shape: object) -> bool:
        return shape in self._steps

    def get(self, shape: StaticShape) -> CapturedStep | None:
        """The step of a shape, which counts as a use."""
        step = self._steps.get(shape)
        if step is not None:
            self._steps.move_to_end(shape)
        return step

    def put(self, shape: StaticShape, step: CapturedStep) -> None:
        """Keep a step; beyond the limit, another one goes."""
        self._steps[shape] = step
        self._steps.move_to_end(shape)
        if len(self._steps) > self.limit:
            self._steps.popitem(last=False)
