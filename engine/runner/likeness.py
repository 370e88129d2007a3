"""Tools to decide whether one of our forwards is equivalent to a module's own.

`Operations` records the tensor operations of a module's own forward, so that an extra one is found
even if it has no effect on random input, such as a clamp, or a factor that is 1 at most positions.
`agree` compares the elements.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.runner.packed import PackedLinear
from engine.runner.packed_onednn import OneDnnLinear

FAILURES = (AttributeError, IndexError, KeyError, TypeError, ValueError, RuntimeError)
"""What a module may raise for unsuitable input; it is then not changed."""
LINEARS = (torch.nn.Linear, PackedLinear, OneDnnLinear)
"""Layers that are known to compute only a product."""
PROBES = ((1e-3, False), (1.0, False), (1.0, True), (100.0, False))
"""Magnitudes of random input: so small that a norm's eps matters, ordinary, and beyond the usual
clamps; and whether it has only one token, as in a decode step of one request.
"""
Probe = tuple[float, bool]
_MOST_DIFFERENT = 0.01
"""The fraction of elements that may be rounded the other way, because sums are computed in another
order.
"""
_NEIGHBOUR = 2.0**-7
"""The relative distance between neighbouring bfloat16 values."""
FLOAT32 = 2.0**-22
"""A relative difference of float32 values that may come from rounding."""

VIEWS = frozenset(
    (
        *("alias", "detach", "view", "_unsafe_view", "reshape", "clone", "contiguous", "unsqueeze"),
        *("squeeze", "transpose", "permute", "slice", "select", "split", "split_with_sizes"),
        "expand",
    )
)
"""Operations that compute nothing."""


class Likeness:
    """The kinds of modules for which our forwards were found equivalent.

    Models repeat the same layer dozens of times, and the differences that `PROBES` find are in the
    code of its class. So the first module of a kind must pass all of them, and each other one only
    an ordinary probe, which shows whether its own elements are used in the same way.
    """

    def __init__(self) -> None:
        self._kinds: set[Hashable] = set()

    def has(self, kind: Hashable) -> bool:
        """Whether a module of a kind has passed.

        Args:
            kind: a module's class, and every size and constant that our forward uses.
        """
        return kind in self._kinds

    def probes(self, kind: Hashable) -> Sequence[Probe]:
        """The probes that a module of a kind has to pass."""
        return PROBES[1:2] if self.has(kind) else PROBES

    def passed(self, kind: Hashable) -> None:
        """Note that a module of a kind has passed."""
        self._kinds.add(kind)


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
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
        """Do not count the operations of these modules during the block."""

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
        """The operations that compute something."""
        return Counter({name: count for name, count in self.seen.items() if name not in VIEWS})


def agree(
    actual: torch.Tensor,
    expected: torch.Tensor,
    allowed: torch.Tensor | None = None,
    *,
    mixed: bool = False,
) -> bool:
    """Whether elements are equal, except for a few that are rounded to a neighbouring value.

    Args:
        actual, expected: bfloat16.
        allowed: differences to ignore, in the same shape; None: float32 rounding errors relative to
            the largest element.
        mixed: whether each element is a sum over a row of elements that are themselves rounded.
    """
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        return False
    difference = (actual.float() - expected.float()).abs()
    if allowed is None:
        allowed = (expected.float().abs().max() * FLOAT32).expand_as(difference)
    same = (difference <= allowed) | (actual.isnan() & expected.isnan()) | (actual == expected)
    near = (_in_order(actual) - _in_order(expected)).abs() <= 2
    if mixed:
        near |= difference <= expected.float().abs().amax(-1, keepdim=True) * _NEIGHBOUR
    wrong = int((~same).sum())
    return bool((same | near).all()) and wrong <= max(2, _MOST_DIFFERENT * actual.numel())


def _in_order(elements: torch.Tensor) -> torch.Tensor:
    """Map bfloat16 values to integers such that neighbouring values differ by 1."""
    bits = elements.contiguous().view(torch.int16).int()
    return torch.where(bits < 0, -0x8000 - bits, bits)


def random_numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normally distributed around 0.5, the same for the same seed: float32 [*shape]."""
    generator = torch.Generator().manual_seed(seed)
    # Not around 0: then the subtraction of a mean would not show.
    return torch.randn(shape, generator=generator).add_(0.5)


def takes_one_argument(module: torch.nn.Module) -> bool:
    """Whether a module's forward takes exactly one argument."""
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    return [one.kind for one in parameters] == [inspect.Parameter.POSITIONAL_OR_KEYWORD]


def has_hooks(module: torch.nn.Module) -> bool:
    """Whether a module has hooks that run before or after its forward."""
    return bool(module._forward_hooks or module._forward_pre_hooks)
