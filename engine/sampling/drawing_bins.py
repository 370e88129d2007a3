"""The distances of a row's entries, and the bins in which they are counted. Device functions for
`engine.sampling.drawing_kernels`, which says what they are for.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

CUT = tl.constexpr(4096)
"""The number of entries of a row that one program reads."""
BINS = tl.constexpr(4096)
"""The number of bins of a row. An entry without weight has this as its bin."""
PLAN = tl.constexpr(4)
"""How many numbers `count_bins` writes for each row."""
_SHARED_BITS = tl.constexpr(16)
"""The number of bits below those that a bin's distances share."""
_FIRST = tl.constexpr(0x41E0 - 4096)
"""The first 16 bits of the distances in the first bin, which holds all smaller ones too. Weights
are 0 from a distance of 28 (0x41E00000) on: e^-28 is less than 2^-40.
"""
INFINITY = tl.constexpr(0x7F800000)
"""The bits of infinity."""
_WEIGHT_ONE = tl.constexpr(1 << 40)
"""The largest weight; see `engine.sampling.ops`."""


@triton.jit
def distances_of(logits, token, temperature, start, width, SIZE: tl.constexpr):
    """The bits of the distances of a row's entries from `start` on, int32 [SIZE]: infinity beyond
    the row's end. logits points to the row; token is its most likely one.
    """
    places = start + tl.arange(0, SIZE)
    value = tl.load(logits + places, mask=places < width, other=float("-inf")).to(tl.float32)
    best = tl.load(logits + token).to(tl.float32)
    scaled = tl.div_rn(value - best, temperature)
    return scaled.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def weights_of(distances, min_p, INTERPRETED: tl.constexpr):
    """The int64 weights of entries at these distances, given as bits; 0: min_p removes them."""
    scaled = -distances.to(tl.float32, bitcast=True)
    likelihood = tl.exp(scaled) if INTERPRETED else libdevice.exp(scaled)
    likelihood = tl.where(likelihood >= min_p, likelihood, 0.0)
    return (likelihood * _WEIGHT_ONE).to(tl.int64)


@triton.jit
def bin_of(distances):
    """The bin of each distance; BINS for those without weight."""
    return tl.minimum(tl.maximum((distances >> _SHARED_BITS) - _FIRST, 0), BINS)


@triton.jit
def start_of(bin):
    """The bits of the smallest distance in a bin."""
    return tl.where(bin > 0, (bin + _FIRST) << _SHARED_BITS, 0)


@triton.jit
def end_of(bin):
    """The bits of the largest distance in a bin."""
    return start_of(bin + 1) - 1


@triton.jit
def _place(bin):
    """Where a bin is in its row's table: neighbours, which are often counted in together, lie in
    different parts of the memory.
    """
    return (bin % 64) * 64 + bin // 64


@triton.jit
def read_table(table):
    """A row's counts or masses, by bin."""
    return tl.load(table + _place(tl.arange(0, BINS)))


@triton.jit
def clear_table(table):
    """Set what `read_table` has returned to zero."""
    tl.debug_barrier()  # every thread has read its part
    bins = tl.arange(0, BINS)
    tl.store(table + _place(bins), tl.zeros((BINS,), table.dtype.element_ty))


@triton.jit
def _majority(bins, is_counted):
    """The bin that holds more than half of the counted entries; any bin if none does. Bit by bit:
    the most frequent one is that of the majority. Four counts of 16 bits are added up at once.
    """
    count = tl.sum(is_counted.to(tl.int64), 0)
    found = tl.zeros((), tl.int32)
    for lowest in tl.static_range(0, 12, 4):
        bits = (bins >> lowest).to(tl.int64)
        fields = (bits & 1) | (bits & 2) << 15 | (bits & 4) << 30 | (bits & 8) << 45
        ones = tl.sum(tl.where(is_counted, fields, 0), 0)
        for field in tl.static_range(4):
            is_set = ((ones >> (16 * field)) & 0xFFFF) * 2 > count
            found |= is_set.to(tl.int32) << (lowest + field)
    return found


@triton.jit
def add_amounts(table, bins, amounts):
    """Add amounts to a row's table by bin. What one bin of a cut holds more than half of, and what
    lies in the last bin, is added up first, so that few additions wait for one another.
    """
    is_last = bins == BINS - 1
    is_added = bins < BINS - 1
    most = _majority(bins, is_added)
    is_most = is_added & (bins == most)
    tl.atomic_add(table + _place(bins), amounts, mask=is_added & (bins != most), sem="relaxed")
    together = tl.sum(tl.where(is_most, amounts, 0), 0)
    tl.atomic_add(table + _place(most), together, mask=together > 0, sem="relaxed")
    together = tl.sum(tl.where(is_last, amounts, 0), 0)
    tl.atomic_add(table + _place(BINS - 1), together, mask=together > 0, sem="relaxed")


@triton.jit
def share_of(top_p, total):
    """The given share of a mass, rounded up."""
    return tl.ceil(top_p * total.to(tl.float64)).to(tl.int64)


@triton.jit
def write_plan(plan, counts, masses, top_k, top_p, width):
    """Write the bins in which a row is cut: the first and the last one in which the cut of top_p
    may lie, the one in which that of top_k lies, and the rank of its entry in that bin. BINS: all
    entries are kept. Without top_p, the first two are that of top_k.
    """
    bins = tl.arange(0, BINS)
    of_k = tl.full((), BINS, tl.int32)
    rank = tl.zeros((), tl.int32)
    if top_k < width:
        count = read_table(counts)
        of_k = tl.sum((tl.cumsum(count, 0) < top_k).to(tl.int32), 0)
        rank = top_k - tl.sum(tl.where(bins < of_k, count, 0), 0)
        clear_table(counts)
    first, last = of_k, of_k
    if top_p < 1.0:
        # How much of its bin top_k keeps is not known yet: nothing, or all of it.
        mass = read_table(masses)
        upto = tl.cumsum(mass, 0)
        most = share_of(top_p, tl.sum(tl.where(bins <= of_k, mass, 0), 0))
        least = share_of(top_p, tl.sum(tl.where(bins < of_k, mass, 0), 0))
        last = tl.minimum(tl.sum((upto < most).to(tl.int32), 0), of_k)
        first = tl.minimum(tl.sum((upto < least).to(tl.int32), 0), last)
    tl.store(plan, first)
    tl.store(plan + 1, last)
    tl.store(plan + 2, of_k)
    tl.store(plan + 3, rank)
