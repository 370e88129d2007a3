"""Registers our functions as torch operations. A compiler, or a substitute for CUDA graphs, then
sees each one as a single call, and knows what it writes.

They are registered directly, because `torch.library.custom_op` adds checks in Python to each call,
and a layer makes six calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import torch

P = ParamSpec("P")
R = TypeVar("R")

FUNCTIONS: dict[str, Callable[..., Any]] = {}
"""The function that computes each operation, by name, for substitutes that intercept the call."""

_LIBRARY = torch.library.Library("headrace", "FRAGMENT")  # type: ignore[no-untyped-call]


def operation(
    schema: str, fake: Callable[..., object]
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Register a function as an operation in `torch.ops.headrace`.

    Args:
        schema: the name, arguments and results in torch's schema language, which marks what is
            written.
        fake: makes the results from tensors without contents.
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
    """The `fake` of operations that return nothing. It does nothing."""
