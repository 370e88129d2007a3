"""What a weight format can do. docs/extending.md shows how to write one."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar, Self

import torch

SMALLEST = 16
"""The smallest number of inputs and outputs of a packed layer."""


class WeightFormat(ABC):
    """A weight [N, K] in a kernel's form.

    All layers that use the weight share the instance. Its tensors are attributes, and are replaced
    in place.

    Attributes:
        shape: N and K.
        dtype: the type of inputs and results.
        name: what a plan calls it.
        changes_results: whether elements are rounded. The packed model is then the one that is
            observed and compared with.
        is_ours: whether the native kernels read it, so that our decoder can, too.
        reads_rows: whether `rows` is defined. Otherwise an embedding keeps its own weight.
        is_writable: whether `pack` takes any weight.
    """

    name: ClassVar[str]
    changes_results: ClassVar[bool] = False
    is_ours: ClassVar[bool] = False
    reads_rows: ClassVar[bool] = True
    is_writable: ClassVar[bool] = True

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, memory: torch.Tensor | None = None
    ) -> None:
        """Allocate a weight without contents.

        Args:
            shape, dtype: of the weight.
            memory: uint8 [placed_bytes(shape, dtype)] to use. None to allocate it.
        """
        self.shape, self.dtype = (shape[0], shape[1]), dtype

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return what holds the elements, by attribute."""
        return {name: one for name, one in vars(self).items() if isinstance(one, torch.Tensor)}

    @classmethod
    @abstractmethod
    def why_not(cls, device: torch.device, dtype: torch.dtype) -> str | None:
        """Return why the weights of such a model cannot be packed on this machine, or None if they
        can.
        """

    @classmethod
    def takes(cls, weight: torch.Tensor) -> bool:
        """Return whether it can hold this weight of such a model, which may be on the meta
        device.
        """
        return weight.stride(1) == 1 and min(weight.shape) >= SMALLEST

    @classmethod
    def of_tables(cls) -> type[WeightFormat]:
        """Return the format of the output layer, and of weights that embeddings read."""
        return cls

    @classmethod
    def described(cls) -> str:
        """Return what the log calls it."""
        return cls.name

    @classmethod
    def placed_bytes(cls, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Return how many bytes it uses of one allocation for all weights; see `__init__`."""
        return 0

    @classmethod
    def held_bytes(cls, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Return how many bytes a weight takes in all."""
        return math.prod(shape) * dtype.itemsize

    def slices(self, weight: torch.Tensor) -> Iterator[tuple[torch.Tensor, Self]]:
        """Split a weight into rows that can be packed one part after the other, so that both
        versions are never completely in memory.

        Yields:
            Some rows of `weight`, [n, K], and the part of this weight that holds them.
        """
        yield weight, self

    @abstractmethod
    def pack(self, weight: torch.Tensor) -> None:
        """Hold these elements. weight: floating-point [N, K] on the CPU."""

    @abstractmethod
    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return x · Wᵀ + bias: [..., K] → [..., N].

        Args:
            x: in the weight's dtype.
            bias: what `padded` has made of it, if anything, or else [N].
        """

    def padded(self, bias: torch.Tensor | None) -> torch.Tensor | None:
        """Return a copy of a bias as `multiply` reads it. None if it reads the bias itself."""
        return None

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Read rows: int64 or int32 of any shape → [*indices.shape, K].

        Raises:
            IndexError: there is no such row.
        """
        raise NotImplementedError

    def unpacked(self) -> torch.Tensor:
        """Return a copy of the weight, [N, K]."""
        return self.rows(torch.arange(self.shape[0]))

    def holds(self, weight: torch.Tensor, indices: torch.Tensor) -> bool:
        """Return whether rows of what is held are as close to those of a weight as the format
        allows: equal, unless it changes results.
        """
        # The bits, so that NaN equals itself.
        return torch.equal(self.rows(indices).view(torch.int16), weight[indices].view(torch.int16))
