"""Operations of ours as torch knows them: one call, and what it writes, for a compiler and for a
stand-in for CUDA graphs.

They are registered directly: `torch.library.custom_op` puts checks in Python around each call, of
which a layer has six.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import torch

P = ParamSpec("P")
R = TypeVar("R")

FUNCTIONS: dict[str, Callable[..., Any]] = {}
"""What computes each operation, by its name: for stand-ins that see the call."""

_LIBRARY = torch.library.Library("headrace", "FRAGMENT")  # type: ignore[no-untyped-call]


def operation(
    schema: str, fake: Callable[..., object]
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Register a function as `torch.ops.headrace`'s operation.

    Args:
        schema: its name, arguments and results, in torch's words; what it writes is marked.
        fake: makes its results from tensors without contents.
    """

    def register(function: Callable[P, R]) -> Callable[P, R]:
        _LIBRARY.define(schema)  # type: ignore[no-untyped-call]
        name = schema.partition("(")[0]
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        torch.library.register_fake(f"headrace::{name}", fake, lib=_LIBRARY)
        FUNCTIONS[name] = function
        packet = getattr(torch.ops.headrace, name)
        return cast(Callable[P, R], packet.default)

    return register


def writes_nothing(*given: object) -> None:
    """The `fake` of operations that have no result: tensors without contents stay as they are."""
