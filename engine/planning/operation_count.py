"""Counts the small operations of a forward pass, on any device, including the meta device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_NOT_COUNTED = frozenset(
    (
        # compute nothing
        *("alias", "detach", "view", "_unsafe_view", "reshape", "clone", "contiguous", "unsqueeze"),
        *("squeeze", "transpose", "permute", "slice", "select", "split", "split_with_sizes"),
        "expand",
        # products
        *("mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "t"),
    )
)


class OperationCount(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts tensor operations of some modules, without products and what computes nothing.

    Attributes:
        operations: the number of operations.
        nbytes: the number of bytes that they write.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations = 0
        self.nbytes = 0
        self._inside = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._inside == 1 and func.overloadpacket.__name__ not in _NOT_COUNTED:
            self.operations += 1
            if isinstance(result, torch.Tensor) and result.dim() > 1:
                self.nbytes += result.nbytes
        return result

    @contextmanager
    def of(self, model: torch.nn.Module, without: Sequence[torch.nn.Module]) -> Iterator[None]:
        """Count the operations of a model, but not those of some of its modules, inside the `with`
        block.
        """

        def enter(*_: object) -> None:
            self._inside += 1

        def leave(*_: object) -> None:
            self._inside -= 1

        modules = [model, *without]
        hooks = [module.register_forward_pre_hook(enter) for module in modules]
        hooks += [module.register_forward_hook(leave) for module in modules]
        try:
            with self:
                yield
        finally:
            for hook in hooks:
                hook.remove()
