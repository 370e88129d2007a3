"""Captured device work without a CUDA device: what a CUDA graph does, on a CPU.

A capture notes every tensor operation, with the very tensors that it reads and writes. A replay
runs these operations again, on these tensors, and nothing else: no line of Python of the captured
function. What depended on a number at the time of the capture therefore shows. What a CUDA graph
cannot hold is refused as CUDA refuses it: looking at a number, or a shape that depends on one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_REFUSED = (
    "aten::_local_scalar_dense",
    "aten::_unique2",
    "aten::masked_select",
    "aten::nonzero",
)


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[torch.Tensor]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.name().split(".")[0] in _REFUSED:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func.name()}")
        with self:  # in inference mode an operation that is made of others comes as a whole
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        result = func(*args, **kwargs)
        read = {_storage(leaf) for leaf in tree_leaves((args, kwargs)) if _is_tensor(leaf)}
        # Views, and what was changed in place, are not results: their storage is an argument's.
        fresh = [t for t in tree_leaves(result) if _is_tensor(t) and _storage(t) not in read]
        is_view = not fresh and not func._schema.is_mutable
        if not is_view:
            self.calls.append((func, args, kwargs, fresh))
        return result


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


class RecordedGraph:
    """Operations that were noted."""

    def __init__(self, recorder: _Recorder, output: torch.Tensor) -> None:
        self._recorder = recorder
        self._output = output
        self.replays = 0

    def replay(self) -> torch.Tensor:
        self.replays += 1
        for func, args, kwargs, results in self._recorder.calls:
            again = func(*args, **kwargs)
            fresh = [t for t in tree_leaves(again) if _is_tensor(t)]
            for place, value in zip(results, fresh, strict=False):
                place.copy_(value)
        return self._output


class RecordingBackend:
    """See the module.

    Attributes:
        graphs: those that were captured.
        fail: raised by captures while it is set.
    """

    def __init__(self) -> None:
        self.graphs: list[RecordedGraph] = []
        self.fail: Exception | None = None

    def capture(self, run: Callable[[], torch.Tensor]) -> RecordedGraph:
        if self.fail is not None:
            raise self.fail
        recorder = _Recorder()
        with recorder:
            output = run()
        # CUDA computes nothing while it captures.
        for _, _, _, results in recorder.calls:
            for result in results:
                if result.is_floating_point():
                    result.fill_(float("nan"))
        self.graphs.append(RecordedGraph(recorder, output))
        return self.graphs[-1]
