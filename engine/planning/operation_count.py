"""Counts the tensor operations of a forward pass, on any device, including the meta device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

VIEWS = frozenset(
    (
        *("alias", "detach", "view", "_unsafe_view", "reshape", "clone", "contiguous", "unsqueeze"),
        *("squeeze", "transpose", "permute", "slice", "select", "split", "split_with_sizes"),
        "expand",
    )
)
"""Operations that compute nothing."""


class OperationCount(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts tensor operations, except those of excluded modules."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: Counter[str] = Counter()
        self._paused = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if not self._paused:
            self.seen[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))

    @contextmanager
    def without(self, modules: Sequence[torch.nn.Module]) -> Iterator[None]:
        """Exclude the operations of these modules from the count, inside the `with` block."""

        def pause(*_: object) -> None:
            self._paused += 1

        def resume(*_: object) -> None:
            self._paused -= 1

        hooks = [module.register_forward_pre_hook(pause) for module in modules]
        hooks += [module.register_forward_hook(resume) for module in modules]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @property
    def computing(self) -> Counter[str]:
        """Return the counts of the operations that compute something."""
        return Counter({name: count for name, count in self.seen.items() if name not in VIEWS})
