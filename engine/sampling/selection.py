"""Finds where a filter cuts a row by radix selection, without sorting it.

The bits of nonnegative float32 values have the same order as the values. So the bound is found
digit by digit, starting with the highest. For each digit, the row's masses are summed by the
digit's value in a table. The value at which the cumulative sum reaches the target is the bound's
digit. Only entries that begin with the digits found so far count for the next digit.

    bits of a float32:  0 eeeeeeee mmm | mmmmmmmmmm | mmmmmmmmmm      three passes over the row
                          11 bits        10 bits      10 bits

All sums are integer sums, which do not depend on the order, so the bound is exactly that of the
sorted row. Nothing waits for the device, and no shape depends on a value, so the work can be
captured.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

LeastBound = Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor], torch.Tensor]
"""Finds the smallest bound for which the mass of the entries up to it reaches the target. Takes

    values  float32 [R, V], none negative; infinity is allowed
    masses  int64 [R, V], none negative, with a sum below 2^63; None if each entry's mass is 1
    target  int64 [R, 1], at least 1

and returns float32 [R, 1]: one of the row's values, or infinity if the target is not reached. The
result for a row with a NaN is arbitrary.
"""

DIGITS = ((20, 11), (10, 10), (0, 10))
"""(lowest bit, number of bits) of each digit."""
INFINITY = 0x7F800000
"""The bits of infinity."""


def least_bound(
    values: torch.Tensor, masses: torch.Tensor | None, target: torch.Tensor
) -> torch.Tensor:
    """A LeastBound that uses torch operations."""
    if masses is None:
        ones = torch.ones((1, 1), dtype=torch.int64, device=values.device)
        masses = ones.expand(values.shape)
    bits = values.view(torch.int32)
    known = torch.zeros_like(target, dtype=torch.int32)
    for lowest, count in DIGITS:
        size = 1 << count
        begin = bits >> lowest
        # Also masked in the first pass: the index of a NaN's digit, too, must be in the table.
        digits = (begin & (size - 1)).to(torch.int64)
        parts = masses if lowest == DIGITS[0][0] else masses.where(begin >> count == known, 0)
        sums = torch.zeros((len(values), size), dtype=torch.int64, device=values.device)
        sums.scatter_add_(-1, digits, parts)
        upto = torch.cumsum(sums, dim=-1)
        digit = torch.searchsorted(upto, target).clamp_(max=size - 1)
        target = target - (upto - sums).gather(-1, digit)
        known = known << count | digit.to(torch.int32)
    return known.clamp_(max=INFINITY).view(torch.float32)
