"""Quantised weights in one normal form, whatever file they are from.

    a reader of a file ─▶ Codes of some outputs ─▶ packed for a kernel, or multiplied out in torch

Element [n, j] is scales[n, g] * codes[n, j] + minima[n, g], where g is j // group. A format with
zeros has minima of -scale * zero, which float32 holds exactly for scales of 16 bits. K-quants have
scales and minima that are themselves integers times a factor of several groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Layout:
    """What all outputs of a weight [N, K] have in common.

    Attributes:
        bits: of a code: 4 or 8.
        group: the number of inputs that share a scale. The last group may be narrower.
        has_minima: False if the zero of every group is 2**(bits - 1), so that no minima are held.
        order: int64 [K], for each place of a code the input that it multiplies. None if they are
            in their own order.
        scale_dtype, minimum_dtype: in which scales and minima are held: float16 if the file's are,
            int8 if they have factors, otherwise float32.
        per_factor: how many groups share a factor, a power of two that divides their number. 0:
            there are no factors.
    """

    bits: int
    group: int
    has_minima: bool
    order: torch.Tensor | None = None
    scale_dtype: torch.dtype = torch.float32
    minimum_dtype: torch.dtype = torch.float32
    per_factor: int = 0


@dataclass(frozen=True, slots=True)
class Codes:
    """Some outputs of a weight.

    Attributes:
        codes: uint8 [n, K], from 0 to 2**bits - 1, in the order of the layout.
        scales: float32 [n, ceil(K / group)], as the file has them.
        minima: float32, of the same shape. None if the layout has none.
        factors: float32 [n, F], of float16: for each `per_factor` groups by what scales are to be
            multiplied, and then by what minima are. None if the layout has none.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    minima: torch.Tensor | None
    factors: torch.Tensor | None = None

    @property
    def parts(self) -> tuple[torch.Tensor | None, ...]:
        """All tensors, in the order of the attributes."""
        return self.codes, self.scales, self.minima, self.factors

    def multiplied(self, layout: Layout) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return scales and minima, times their factors."""
        if self.factors is None:
            return self.scales, self.minima
        kinds = 1 if self.minima is None else 2
        scales, *minima = (
            held * self.factors[:, kind::kinds].repeat_interleave(layout.per_factor, 1)
            for kind, held in enumerate((self.scales, self.minima))
            if held is not None
        )
        return scales, minima[0] if minima else None

    def values(self, layout: Layout) -> torch.Tensor:
        """Return the elements, float32 [n, K], in the order of the inputs."""
        values = self.codes.float()
        scales, minima = self.multiplied(layout)
        if minima is None:
            values -= 1 << (layout.bits - 1)
        whole = values.shape[1] // layout.group
        # Groups of the same width, and the last one if it is narrower.
        for groups in (slice(0, whole), slice(whole, scales.shape[1])):
            width = layout.group if groups.stop == whole else values.shape[1] % layout.group
            first = groups.start * layout.group
            count = groups.stop - groups.start
            if count:
                part = values[:, first : first + count * width].view(-1, count, width)
                part *= scales[:, groups, None]
                if minima is not None:
                    part += minima[:, groups, None]
        if layout.order is None:
            return values
        ordered = torch.empty_like(values)
        ordered[:, layout.order] = values
        return ordered
