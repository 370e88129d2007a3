"""Chooses a token for each row in Triton: at most four launches, whatever the filters.

    find_most_likely  one program per (row, cut): the largest entry; the last one: the row's token
    count_bins        one program per (row, cut): how many entries each bin holds, and their mass;
                      the last one: the bins in which top_k and top_p may cut the row
    sum_weights       one program per (row, cut): the sum of the weights before these bins, and a
                      list of the entries in them
    pick_token        one program per row: the exact bound, from the list; the cut in which the draw
                      falls, and the token in it

Greedy rows need the first kernel alone. Without filters, the second is left out. The first three
read each row once, the last one reads a single cut.

An entry's distance says how far it lies below the row's largest entry, divided by the temperature:
a float32, none negative, so its bits have the order of the distances. A bin holds the distances
that share their first 16 bits, 128 for each power of two, up to the distance from which weights
are 0. So the bins in which a filter cuts hold few entries, whose remaining bits are searched in the
list, where equal ones of a cut are one. If a row has more of them than a list can hold, the row
itself is searched, which is slower.

Counts and weights are integers, so their sums do not depend on the order of addition. Weights are
computed bit for bit as in `engine.sampling.filters`, so both give the same tokens. What a kernel
counts in it sets to zero again: between choices all of it is zero.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.sampling.drawing_bins import (
    BINS,
    CUT,
    INFINITY,
    PLAN,
    add_amounts,
    bin_of,
    clear_table,
    distances_of,
    end_of,
    read_table,
    share_of,
    start_of,
    weights_of,
    write_plan,
)

GROUPS = tl.constexpr(64)
"""The number of groups in a cut. If top_k is at most this, the nearest entries of the groups tell
which entries cannot be among the k.
"""
LISTED = tl.constexpr(8192)
"""The most entries in a row's list."""
_READ = tl.constexpr(2048)
"""The number of entries of a list that are read at a time. With twice as many, registers spill."""
_TIMES = tl.constexpr(1 << 13)
"""More than the entries of a cut: a listed entry's cut times this, plus how many entries of the cut
it stands for, is its mark.
"""
COLUMNS = tl.constexpr(5)
"""How many parameters a row has; see `engine.sampling.plain`."""
_NO_TOKEN = tl.constexpr(-1)
"""The token of an invalid row, `engine.scheduler.runner_protocol.INVALID_TOKEN`."""


@triton.jit
def _is_last(arrived, programs):
    """Count a row's programs, and return whether this is the last one: what the others have stored
    can then be read. The last one sets the count to zero.
    """
    tl.debug_barrier()  # every thread has stored
    is_last = tl.atomic_add(arrived, 1, sem="acq_rel") == programs - 1
    if is_last:
        tl.store(arrived, 0)
    return is_last


@triton.jit
def find_most_likely(logits, stride, tokens, largest, first, arrived, width, CUTS: tl.constexpr):
    """Write the index of each row's largest entry, the first one in a tie, or _NO_TOKEN if that
    entry is not finite or the row has a NaN.

    logits: floats [R, V], one row every `stride`. tokens: int64 [R]. largest, first: float32 and
    int32 [R, CUTS], the largest entry of each cut and its index. arrived: int32 [R], zeros.
    """
    row, cut = tl.program_id(0).to(tl.int64), tl.program_id(1)
    places = cut * CUT + tl.arange(0, CUT)
    value = tl.load(logits + row * stride + places, mask=places < width, other=float("-inf"))
    value = value.to(tl.float32)
    value = tl.where(value == value, value, float("inf"))
    most = tl.max(value, 0)
    largest += row * CUTS
    first += row * CUTS
    tl.store(largest + cut, most)
    tl.store(first + cut, tl.min(tl.where(value == most, places, width), 0))
    if _is_last(arrived + row, tl.num_programs(1)):
        cuts = tl.arange(0, CUTS)
        values = tl.load(largest + cuts, mask=cuts * CUT < width, other=float("-inf"))
        ids = tl.load(first + cuts, mask=cuts * CUT < width, other=width)
        best = tl.max(values, 0)
        token = tl.min(tl.where(values == best, ids, width), 0)
        token = tl.where(tl.abs(best) < float("inf"), token, _NO_TOKEN)
        tl.store(tokens + row, token.to(tl.int64))


@triton.jit
def count_bins(
    logits,
    stride,
    tokens,
    numbers,
    counts,
    masses,
    plans,
    arrived,
    width,
    INTERPRETED: tl.constexpr,
):
    """Count a cut's entries, and add up their weights, by bin; then find where the row is cut.

    tokens: int64 [R], the most likely ones; a negative token marks an invalid row. numbers: float64
    [R, COLUMNS]; a row with a negative uniform number draws nothing. counts, masses: int32 and
    int64 [R, BINS], zeros; masses stay until `pick_token`. plans: int32 [R, PLAN], see
    `write_plan`. For the others, see `find_most_likely`.
    """
    row, cut = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = tl.load(tokens + row)
    numbers += row * COLUMNS
    plans += row * PLAN
    if (token >= 0) & (tl.load(numbers) >= 0.0):
        top_k, top_p = tl.load(numbers + 2).to(tl.int32), tl.load(numbers + 3)
        counts += row * BINS
        masses += row * BINS
        if (top_k < width) | (top_p < 1.0):
            temperature = tl.load(numbers + 1).to(tl.float32)
            distances = distances_of(
                logits + row * stride, token, temperature, cut * CUT, width, CUT
            )
            bins = bin_of(distances)
            if top_k <= GROUPS:
                # What is farther than the nearest of k groups has k entries before it.
                nearest = tl.min(tl.reshape(distances, (GROUPS, CUT // GROUPS)), 1)
                before = (tl.expand_dims(nearest, 0) < tl.expand_dims(nearest, 1)).to(tl.int32)
                rank = tl.sum(before, 1)
                bound = tl.max(tl.where(rank < top_k, nearest, 0), 0)
                bins = tl.where(distances <= bound, bins, BINS)
            if top_k < width:
                add_amounts(counts, bins, (bins < BINS).to(tl.int32))
            elif top_p < 1.0:
                # Together, entries this far weigh less than what top_p leaves out: it cuts before
                # them, so only their sum matters.
                left_out = (1.0 - top_p).to(tl.float32)
                is_far = distances.to(tl.float32, bitcast=True) > tl.log(width / left_out) + 1.0
                bins = tl.where(is_far, tl.maximum(bins, BINS - 1), bins)
            if top_p < 1.0:
                add_amounts(masses, bins, weights_of(distances, 0.0, INTERPRETED))
            if _is_last(arrived + row, tl.num_programs(1)):
                write_plan(plans, counts, masses, top_k, top_p, width)
        elif cut == 0:
            for place in tl.static_range(3):
                tl.store(plans + place, BINS)


@triton.jit
def _list(near, marks, length, distances, is_listed, cut):
    """Add entries of a cut to its row's list. A row may be full of equal ones: those that are as
    far as the nearest or the farthest are listed once.
    """
    nearest = tl.min(tl.where(is_listed, distances, INFINITY), 0)
    farthest = tl.max(tl.where(is_listed, distances, 0), 0)
    is_nearest = is_listed & (distances == nearest)
    is_farthest = is_listed & (distances == farthest)
    is_other = is_listed & (distances > nearest) & (distances < farthest)
    first = 1 + (nearest < farthest).to(tl.int32)
    begin = tl.atomic_add(length, first + tl.sum(is_other.to(tl.int32), 0), sem="relaxed")
    mark = cut * _TIMES
    tl.store(near + begin, nearest, mask=begin < LISTED)
    tl.store(marks + begin, mark + tl.sum(is_nearest.to(tl.int32), 0), mask=begin < LISTED)
    is_second = (nearest < farthest) & (begin + 1 < LISTED)
    tl.store(near + begin + 1, farthest, mask=is_second)
    tl.store(marks + begin + 1, mark + tl.sum(is_farthest.to(tl.int32), 0), mask=is_second)
    places = begin + first + tl.cumsum(is_other.to(tl.int32), 0) - 1
    is_other = is_other & (places < LISTED)
    tl.store(near + places, distances, mask=is_other)
    tl.store(marks + places, mark + 1, mask=is_other)


@triton.jit
def sum_weights(
    logits,
    stride,
    tokens,
    numbers,
    plans,
    near,
    marks,
    lengths,
    sums,
    width,
    CUTS: tl.constexpr,
    FILTERED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Sum the weights of a cut's entries that are kept for certain, and list those that may be.

    near, marks: int32 [R, LISTED], the bits of the listed entries' distances, and their marks, see
    `_TIMES`. lengths: int32 [R], zeros; how many there are, also if there are more than LISTED.
    sums: int64 [R, CUTS]. If there are no filters, plans and lists are not used. For the others,
    see `count_bins`.
    """
    row, cut = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = tl.load(tokens + row)
    numbers += row * COLUMNS
    if (token >= 0) & (tl.load(numbers) >= 0.0):
        temperature = tl.load(numbers + 1).to(tl.float32)
        distances = distances_of(logits + row * stride, token, temperature, cut * CUT, width, CUT)
        min_p = tl.load(numbers + 4).to(tl.float32) if FILTERED else 0.0
        weights = weights_of(distances, min_p, INTERPRETED)
        if FILTERED:
            plans += row * PLAN
            first = tl.load(plans)
            bins = bin_of(distances)
            weights = tl.where(bins < first, weights, 0)
            is_listed = (bins >= first) & (bins <= tl.load(plans + 1))
            is_listed = (is_listed | (bins == tl.load(plans + 2))) & (bins < BINS)
            if tl.sum(is_listed.to(tl.int32), 0) > 0:
                near += row * LISTED
                marks += row * LISTED
                _list(near, marks, lengths + row, distances, is_listed, cut)
        tl.store(sums + row * CUTS + cut, tl.sum(weights, 0))


@triton.jit
def _listed(entries, start):
    """The distances and marks of _READ listed entries; infinity where there are no more. If there
    are more than a list can hold: those of the row.
    """
    near, marks, length, logits, token, temperature, width = entries
    places = start + tl.arange(0, _READ)
    if length <= LISTED:
        distances = tl.load(near + places, mask=places < length, other=INFINITY)
        found = tl.load(marks + places, mask=places < length, other=0)
    else:
        distances = distances_of(logits, token, temperature, start, width, _READ)
        found = tl.full((_READ,), 1, tl.int32) + start // CUT * _TIMES
    return distances, found


@triton.jit
def _num_listed(entries):
    """How many entries `_listed` has."""
    return tl.where(entries[2] <= LISTED, entries[2], entries[6])


@triton.jit
def _mass(entries, low, high, end, min_p, INTERPRETED: tl.constexpr):
    """The mass of the listed entries whose distances have bits from `low` to `high`, in the cuts
    before `end`: int64.
    """
    mass = tl.zeros((), tl.int64)
    start = tl.zeros((), tl.int32)
    while start < _num_listed(entries):
        distances, marks = _listed(entries, start)
        is_counted = (distances >= low) & (distances <= high) & (marks // _TIMES < end)
        weights = weights_of(distances, min_p, INTERPRETED) * (marks % _TIMES)
        mass += tl.sum(tl.where(is_counted, weights, 0), 0)
        start += _READ
    return mass


@triton.jit
def _least(entries, bin, before, target, COUNTS: tl.constexpr, INTERPRETED: tl.constexpr):
    """The bits of the smallest distance in a bin up to which the entries' number or mass, with what
    is before the bin, reaches the target; if there is none, those of a larger one.
    """
    first, last = start_of(bin), end_of(bin)
    low, high = first, last
    while low < high:
        middle = low + (high - low) // 2
        reached = before
        below, above = low, high
        start = tl.zeros((), tl.int32)
        while start < _num_listed(entries):
            distances, marks = _listed(entries, start)
            is_inside = (distances >= first) & (distances <= last)
            is_upto = is_inside & (distances <= middle)
            amounts = (marks % _TIMES).to(tl.int64)
            if not COUNTS:
                amounts *= weights_of(distances, 0.0, INTERPRETED)
            reached += tl.sum(tl.where(is_upto, amounts, 0), 0)
            below = tl.maximum(below, tl.max(tl.where(is_upto, distances, low), 0))
            is_beyond = is_inside & (distances > middle)
            above = tl.minimum(above, tl.min(tl.where(is_beyond, distances, high), 0))
            start += _READ
        if reached >= target:
            high = below
        else:
            low = above
    return low


@triton.jit
def _bound(entries, plan, masses, top_p, INTERPRETED: tl.constexpr):
    """The bits of the distance of the last entry that top_k and top_p keep. Clears the masses."""
    of_k = tl.load(plan + 2)
    bound = tl.full((), INFINITY, tl.int32)
    if of_k < BINS:
        rank = tl.load(plan + 3).to(tl.int64)
        bound = _least(entries, of_k, tl.zeros((), tl.int64), rank, True, INTERPRETED)
    if top_p < 1.0:
        within = tl.zeros((), tl.int64)
        if of_k < BINS:
            within = _mass(entries, start_of(of_k), bound, entries[6], 0.0, INTERPRETED)
        bins = tl.arange(0, BINS)
        mass = read_table(masses)
        total = within + tl.sum(tl.where(bins < of_k, mass, 0), 0)
        target = share_of(top_p, total)
        bin = tl.minimum(tl.sum((tl.cumsum(mass, 0) < target).to(tl.int32), 0), of_k)
        if bin < BINS:
            before = tl.sum(tl.where(bins < bin, mass, 0), 0)
            bound = tl.minimum(bound, _least(entries, bin, before, target, False, INTERPRETED))
        clear_table(masses)
    return bound


@triton.jit
def _before_cut(
    entries,
    sums,
    first,
    bound,
    cut,
    min_p,
    CUTS: tl.constexpr,
    FILTERED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """The mass of what is kept of the cuts before this one. sums: int64 [CUTS], what is kept of
    each for certain. first: the bits of the smallest distance that is listed.
    """
    mass = tl.sum(tl.where(tl.arange(0, CUTS) < cut, sums, 0), 0)
    if FILTERED:
        mass += _mass(entries, first, bound, cut, min_p, INTERPRETED)
    return mass


@triton.jit
def pick_token(
    logits,
    stride,
    tokens,
    numbers,
    plans,
    masses,
    near,
    marks,
    lengths,
    sums,
    width,
    CUTS: tl.constexpr,
    FILTERED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Replace the most likely token by the drawn one: the first at which the sum of weights exceeds
    the uniform number times the total. For the arguments, see `count_bins` and `sum_weights`.
    """
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(tokens + row)
    numbers += row * COLUMNS
    uniform = tl.load(numbers)
    if (token >= 0) & (uniform >= 0.0):
        temperature = tl.load(numbers + 1).to(tl.float32)
        min_p = tl.load(numbers + 4).to(tl.float32) if FILTERED else 0.0
        logits += row * stride
        near += row * LISTED
        marks += row * LISTED
        entries = (near, marks, tl.load(lengths + row), logits, token, temperature, width)
        bound = tl.full((), INFINITY, tl.int32)
        first = tl.zeros((), tl.int32)
        if FILTERED:
            plans += row * PLAN
            first = start_of(tl.load(plans))
            top_p = tl.load(numbers + 3)
            bound = _bound(entries, plans, masses + row * BINS, top_p, INTERPRETED)
        cuts = tl.arange(0, CUTS)
        kept = tl.load(sums + row * CUTS + cuts, mask=cuts * CUT < width, other=0)
        low = tl.zeros((), tl.int32)
        high = low + tl.cdiv(width, CUT) - 1
        total = _before_cut(
            entries, kept, first, bound, high + 1, min_p, CUTS, FILTERED, INTERPRETED
        )
        # If rounding gives the total itself, the last token must still be chosen.
        target = tl.minimum((uniform * total.to(tl.float64)).to(tl.int64), total - 1)
        while low < high:
            cut = (low + high + 1) // 2
            mass = _before_cut(entries, kept, first, bound, cut, min_p, CUTS, FILTERED, INTERPRETED)
            if mass <= target:
                low = cut
            else:
                high = cut - 1
        mass = _before_cut(entries, kept, first, bound, low, min_p, CUTS, FILTERED, INTERPRETED)
        distances = distances_of(logits, token, temperature, low * CUT, width, CUT)
        weights = tl.where(distances <= bound, weights_of(distances, min_p, INTERPRETED), 0)
        found = tl.sum((tl.cumsum(weights, 0) <= target - mass).to(tl.int32), 0)
        tl.store(tokens + row, tl.minimum(low * CUT + found, width - 1).to(tl.int64))
        if FILTERED:
            tl.debug_barrier()  # every thread has read the length
            tl.store(lengths + row, 0)
