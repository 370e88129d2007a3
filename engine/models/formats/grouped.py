"""Weights of 4 or 8 bits with scales by group of inputs, for bfloat16 inputs and results on a CPU.

    Codes of some outputs ─▶ packed codes, scales and minima ─▶ products, rows, and the same Codes

Kernels multiply by the integers and scale the sums of groups in float32, so nothing is rounded but
what goes in and comes out.
"""

from __future__ import annotations

import ctypes

import torch
from typing_extensions import override

from engine.models.formats.codes import Codes, Layout
from engine.models.formats.native import (
    PANEL,
    Native,
    in_panels,
    native_library,
    packed_bytes,
    why_missing,
)
from engine.native.library import CODES

_EIGHT = 8
"""Groups end where lanes of the packed weight do, which have up to this many inputs."""


class Grouped(Native):
    """A weight of integers; see Native, and Layout for what they mean."""

    name = "grouped"
    changes_results = True
    is_writable = False
    scales: torch.Tensor

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        layout: Layout,
        memory: torch.Tensor | None = None,
    ) -> None:
        """Allocate a weight without contents.

        Args:
            shape, dtype, memory: see WeightFormat.
            layout: one for which `why_not_held` has no reason.
        """
        self.bits, self.group = layout.bits, layout.group
        super().__init__(shape, dtype, memory)
        count = in_panels(shape[0]) * self._groups
        self.scales = torch.zeros(count, dtype=layout.scale_dtype)
        if layout.has_minima:
            self.minima = torch.zeros(count, dtype=layout.minimum_dtype)
        if layout.per_factor:
            factors = count // layout.per_factor * (1 + layout.has_minima)
            self.factors = torch.zeros(factors, dtype=torch.float16)
        self.order = None if layout.order is None else layout.order.int()

    @property
    def _groups(self) -> int:
        return -(-self.shape[1] // self.group)

    @property
    def layout(self) -> Layout:
        """What all outputs have in common."""
        order = None if self.order is None else self.order.long()
        minima = torch.float32 if self.minima is None else self.minima.dtype
        return Layout(
            bits=self.bits,
            group=self.group,
            has_minima=self.minima is not None,
            order=order,
            scale_dtype=self.scales.dtype,
            minimum_dtype=minima,
            per_factor=self.per_factor,
        )

    @classmethod
    @override
    def why_not(cls, device: torch.device, dtype: torch.dtype) -> str | None:
        if device.type != "cpu" or dtype is not torch.bfloat16:
            return (
                f"it is for bfloat16 on a CPU, and this is {dtype} on {device}; choose these, or "
                "none"
            )
        return why_missing()

    @classmethod
    @override
    def described(cls) -> str:
        slow = ", which is slow" if native_library().isa == "portable" else ""
        return f"{super().described()}{slow}"

    def pack_codes(self, first_output: int, codes: Codes) -> None:
        """Hold some outputs.

        Args:
            first_output: a multiple of PANEL.
            codes: of the layout. Their number is a multiple of PANEL unless they are the last.

        Raises:
            ValueError: scales, minima or factors are not of the layout's type.
        """
        own = self.part(first_output, len(codes.codes))
        weight = own.for_kernels(None)
        weight.dtype = CODES
        given = codes.codes.contiguous()
        native_library().linear_pack(
            ctypes.byref(weight), given.data_ptr(), given.stride(0), torch.get_num_threads()
        )
        outputs = torch.arange(len(given))
        for held, values in zip(own.of_groups, codes.parts[1:], strict=True):
            if held is not None and values is not None:
                if not torch.equal(values.to(held.dtype).float(), values):
                    raise ValueError(f"scales are not {held.dtype}, as the layout says")
                blocks = held.view(-1, values.shape[1], PANEL)
                blocks[outputs // PANEL, :, outputs % PANEL] = values.to(held.dtype)

    def codes(self, indices: torch.Tensor) -> Codes:
        """Return some outputs, exactly as they were packed. indices: int64 [n].

        Raises:
            IndexError: there is no such output.
        """
        weight = self.for_kernels(None)
        weight.dtype = CODES
        codes = self._read(indices, weight, torch.uint8)
        minima, factors = (
            None if one is None else self._of_outputs(one, indices)
            for one in (self.minima, self.factors)
        )
        return Codes(codes, self._of_outputs(self.scales, indices), minima, factors)

    def _of_outputs(self, held: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        count = len(held) // in_panels(self.shape[0])
        return held.view(-1, count, PANEL)[indices // PANEL, :, indices % PANEL].float()

    @override
    def pack(self, weight: torch.Tensor) -> None:
        """Raise ValueError: the codes of a file have other elements in no other way."""
        raise ValueError("is quantized in its file; load a file that has other weights")


def why_not_held(inputs: int, layout: Layout) -> str | None:
    """Return why the kernels cannot hold a weight of this layout, or None if they can."""
    if layout.bits not in (4, 8):
        return f"codes have {layout.bits} bits, and the kernels take 4 and 8"
    if layout.group < inputs and layout.group % _EIGHT:
        return (
            f"groups have {layout.group} inputs, and the kernels take multiples of {_EIGHT}, or "
            "whole rows"
        )
    return None


def held_bytes(shape: tuple[int, ...], layout: Layout) -> int:
    """Return how many bytes a weight of this layout takes in all."""
    outputs, inputs = shape
    a_group = layout.scale_dtype.itemsize + layout.minimum_dtype.itemsize * layout.has_minima
    order = 0 if layout.order is None else 4 * inputs
    groups = in_panels(outputs) * -(-inputs // layout.group)
    factors = 2 * groups // layout.per_factor * (1 + layout.has_minima) if layout.per_factor else 0
    return packed_bytes(shape, torch.bfloat16, layout.bits) + groups * a_group + factors + order
