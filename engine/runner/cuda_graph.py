"""Captures a step's device work once and replays it: CUDA graphs, behind a small protocol.

A replay launches a whole forward pass as one unit, without Python code and without a launch for
each kernel. Captured work reads and writes only fixed addresses; see `static_inputs`.
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
    """Captured device work."""

    def replay(self) -> torch.Tensor:
        """Queue the work again. The result has the same address each time: read it before the next
        replay of any graph, with work that is queued on the same stream.
        """
        ...


class GraphBackend(Protocol):
    """A way to capture device work."""

    def capture(self, run: Callable[[], torch.Tensor]) -> CapturedGraph:
        """Capture what `run` queues; `run` may be called several times.

        Raises:
            RuntimeError: `run` does something that cannot be captured, such as waiting for the
                device.
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
        # Run once before, on the side stream: libraries initialize at their first call, which
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
    """A captured forward pass, and its inputs' tensors."""

    inputs: StaticInputs
    graph: CapturedGraph

    def replay(self, inputs: InputBatch) -> torch.Tensor:
        """Copy a step's inputs in and replay it. Returns the logits [S, V] of the rows that it
        needs.
        """
        logits = self.graph.replay()
        rows = inputs.logit_rows
        if not self.inputs.shape.is_decode or np.array_equal(rows, np.arange(len(rows))):
            return logits[: len(rows)]
        return logits.index_select(0, torch.from_numpy(rows).to(logits.device))


class GraphCache:
    """Captured steps by shape; the least recently used one is dropped first."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._steps: OrderedDict[StaticShape, CapturedStep] = OrderedDict()

    def __len__(self) -> int:
        return len(self._steps)

    def __contains__(self, shape: object) -> bool:
        return shape in self._steps

    def get(self, shape: StaticShape) -> CapturedStep | None:
        """The step for a shape; the call counts as a use."""
        step = self._steps.get(shape)
        if step is not None:
            self._steps.move_to_end(shape)
        return step

    def put(self, shape: StaticShape, step: CapturedStep) -> None:
        """Keep a step; beyond the limit, another one is dropped."""
        self._steps[shape] = step
        self._steps.move_to_end(shape)
        if len(self._steps) > self.limit:
            self._steps.popitem(last=False)
