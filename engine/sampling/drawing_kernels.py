"""Draws a token for each row in Triton: four launches, whatever the filters. R: rows, V: width.

    count_values  one program per (row, cut): how often each value occurs among allowed tokens
    find_bound    one program per row: where top_k and top_p cut, from the counts, then clears them
    sum_weights   one program per (row, cut): the sum of the remaining weights
    pick_token    one program per row: the cut in which the draw falls, then the token in it

Logits have 16 bits, so a row has few distinct values. A filter only needs to know how often each
value occurs: a mass is a count times a weight. A value's key is how many steps of its type it lies
below the row's largest value. A row's counts are zero between draws. Without filters, the last two
kernels are enough, and they accept logits of any type.

Counts and sums are integers, so they do not depend on the order of addition. Weights are computed
bit for bit as in `engine.sampling.filters`, so both give the same tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

CUT = tl.constexpr(4096)
"""The number of entries of a row that one program reads."""
KEYS = tl.constexpr(1 << 16)
"""The number of counts per row."""
GROUPS = tl.constexpr(64)
"""The number of groups in a cut. If top_k is at most this, the largest entries of the groups tell
which entries cannot be among the k.
"""
COLUMNS = tl.constexpr(5)
"""How many parameters a row has; see `engine.sampling.plain`."""
_WEIGHTLESS = tl.constexpr(28.0)
"""The distance from which a weight is 0: e^-28 is less than 2^-40."""
_RANGE = tl.constexpr(28.5)
"""Slightly more than `_WEIGHTLESS`, to find the last key, which is computed in a different way."""
_KEYS_AT_ONCE = tl.constexpr(4096)
_WEIGHT_ONE = tl.constexpr(1 << 40)
"""The largest weight; see `engine.sampling.ops`."""


@triton.jit
def _scaled(value, best, temperature):
    return tl.div_rn(value - best, temperature)


@triton.jit
def _weight(scaled, farthest, min_p, FILTERED: tl.constexpr, INTERPRETED: tl.constexpr):
    """Return the int64 weights of entries within the bounds, and 0 for entries beyond them."""
    likelihood = tl.exp(scaled) if INTERPRETED else libdevice.exp(scaled)
    if FILTERED:
        is_kept = (scaled >= -farthest) & (likelihood >= min_p)
        likelihood = tl.where(is_kept, likelihood, 0.0)
    return (likelihood * _WEIGHT_ONE).to(tl.int64)


@triton.jit
def _ordered(value):
    """Map 16-bit floats to integers that have the same order."""
    bits = value.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return tl.where(bits >= 0x8000, 0xFFFF - bits, bits + 0x8000)


@triton.jit
def _value(ordered, T: tl.constexpr):
    """Convert a number from `_ordered` back to its float, as float32."""
    bits = tl.where(ordered >= 0x8000, ordered - 0x8000, 0xFFFF - ordered)
    return bits.to(tl.int16).to(T, bitcast=True).to(tl.float32)


@triton.jit
def count_values(logits, stride, tokens, numbers, counts, width):
    """Count the values of the entries in one cut of a row.

    logits: 16-bit floats [R, V], one row every `stride`. tokens: int64 [R], the most likely ones;
    a negative token marks an invalid row. numbers: float64 [R, COLUMNS]; a row with a negative
    uniform number draws nothing. counts: int32 [R, KEYS].
    """
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(tokens + row)
    numbers += row * COLUMNS
    if (token >= 0) & (tl.load(numbers) >= 0.0):
        best = tl.load(logits + row * stride + token)
        temperature = tl.load(numbers + 1).to(tl.float32)
        top_k = tl.load(numbers + 2).to(tl.int32)
        places = tl.program_id(1) * CUT + tl.arange(0, CUT)
        value = tl.load(logits + row * stride + places, mask=places < width, other=float("-inf"))
        distance = -_scaled(value.to(tl.float32), best.to(tl.float32), temperature)
        is_counted = distance < _WEIGHTLESS
        if top_k <= GROUPS:
            # What is farther than the nearest of k groups has k entries before it.
            nearest = tl.min(tl.reshape(distance, (GROUPS, CUT // GROUPS)), 1)
            before = (tl.expand_dims(nearest, 0) < tl.expand_dims(nearest, 1)).to(tl.int32)
            rank = tl.sum(before, 1)
            is_counted = is_counted & (distance <= tl.max(tl.where(rank < top_k, nearest, 0.0), 0))
        # The largest entry may be -0, and +0 another.
        key = tl.maximum(_ordered(best) - _ordered(value), 0)
        # Rows of almost one value are known: what occurs most is not added one by one.
        first = tl.min(tl.where(is_counted, key, KEYS), 0)
        is_first = is_counted & (key == first)
        counts += row * KEYS
        tl.atomic_add(counts + key, 1, mask=is_counted & (key != first), sem="relaxed")
        if first < KEYS:
            tl.atomic_add(counts + first, tl.sum(is_first.to(tl.int32), 0), sem="relaxed")


@triton.jit
def _distances(keys, nearest, best, temperature, T: tl.constexpr):
    """The distances of the values with these keys; infinity for keys beyond the last value."""
    value = _value(tl.maximum(nearest - keys, 0), T)
    return tl.where(keys <= nearest, -_scaled(value, best, temperature), float("inf"))


@triton.jit
def _kth(counts, end, nearest, best, temperature, top_k, T: tl.constexpr):
    """The distance of the k-th entry, or infinity if there are fewer than k entries."""
    seen = tl.zeros((), tl.int64)
    found = tl.full((), float("inf"), tl.float32)
    start = tl.zeros((), tl.int32)
    while (start < end) & (seen < top_k):
        keys = start + tl.arange(0, _KEYS_AT_ONCE)
        upto = seen + tl.cumsum(tl.load(counts + keys, mask=keys < end, other=0).to(tl.int64), 0)
        seen = tl.max(upto, 0)
        if seen >= top_k:
            distance = _distances(keys, nearest, best, temperature, T)
            found = tl.min(tl.where(upto >= top_k, distance, float("inf")), 0)
        start += _KEYS_AT_ONCE
    return found


@triton.jit
def _masses(count, distance, kth, INTERPRETED: tl.constexpr):
    """The mass of each key's entries, int64; 0 for those that top_k removes."""
    weight = _weight(-distance, kth, 0.0, True, INTERPRETED)
    return count.to(tl.int64) * weight


@triton.jit
def _share(
    counts, end, nearest, best, temperature, kth, top_p, T: tl.constexpr, INTERPRETED: tl.constexpr
):
    """The distance at which the cumulative mass of what top_k keeps reaches top_p of its total."""
    total = tl.zeros((), tl.int64)
    start = tl.zeros((), tl.int32)
    last = tl.zeros((), tl.float32)
    while (start < end) & (last <= kth):
        keys = start + tl.arange(0, _KEYS_AT_ONCE)
        count = tl.load(counts + keys, mask=keys < end, other=0)
        distance = _distances(keys, nearest, best, temperature, T)
        if tl.max(count, 0) > 0:
            total += tl.sum(_masses(count, distance, kth, INTERPRETED), 0)
        last = tl.max(distance, 0)
        start += _KEYS_AT_ONCE
    target = tl.ceil(top_p * total.to(tl.float64)).to(tl.int64)
    seen = tl.zeros((), tl.int64)
    found = tl.full((), float("inf"), tl.float32)
    start = tl.zeros((), tl.int32)
    last = tl.zeros((), tl.float32)
    while (start < end) & (seen < target) & (last <= kth):
        keys = start + tl.arange(0, _KEYS_AT_ONCE)
        count = tl.load(counts + keys, mask=keys < end, other=0)
        distance = _distances(keys, nearest, best, temperature, T)
        if tl.max(count, 0) > 0:
            upto = seen + tl.cumsum(_masses(count, distance, kth, INTERPRETED), 0)
            seen = tl.max(upto, 0)
            found = tl.min(tl.where(upto >= target, distance, float("inf")), 0)
        last = tl.max(distance, 0)
        start += _KEYS_AT_ONCE
    return tl.minimum(found, kth)


@triton.jit
def find_bound(logits, stride, tokens, numbers, counts, farthest, width, INTERPRETED: tl.constexpr):
    """Find where top_k and top_p cut each row, then reset the row's counts to zero.

    farthest: float32 [R], how far below its largest entry a row is cut. For the others, see
    `count_values`.
    """
    T: tl.constexpr = logits.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(tokens + row)
    numbers += row * COLUMNS
    if (token >= 0) & (tl.load(numbers) >= 0.0):
        entry = tl.load(logits + row * stride + token)
        best = entry.to(tl.float32)
        temperature = tl.load(numbers + 1).to(tl.float32)
        top_k, top_p = tl.load(numbers + 2).to(tl.int64), tl.load(numbers + 3)
        nearest = _ordered(entry)
        end = tl.minimum(nearest - _ordered((best - _RANGE * temperature).to(T)) + 2, KEYS)
        counts += row * KEYS
        bound = tl.full((), float("inf"), tl.float32)
        if top_k < width:
            bound = _kth(counts, end, nearest, best, temperature, top_k, T)
        if top_p < 1.0:
            bound = _share(counts, end, nearest, best, temperature, bound, top_p, T, INTERPRETED)
        tl.store(farthest + row, bound)
        tl.debug_barrier()  # every thread has read what is cleared
        start = tl.zeros((), tl.int32)
        while start < end:
            keys = start + tl.arange(0, _KEYS_AT_ONCE)
            tl.store(counts + keys, tl.zeros_like(keys), mask=keys < end)
            start += _KEYS_AT_ONCE


@triton.jit
def _weights_of_cut(
    logits,
    token,
    numbers,
    farthest,
    cut,
    width,
    FILTERED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Return int64 [CUT]. logits, numbers and farthest point to the cut's row; token is the row's
    most likely one.
    """
    places = cut * CUT + tl.arange(0, CUT)
    value = tl.load(logits + places, mask=places < width, other=float("-inf")).to(tl.float32)
    best = tl.load(logits + token).to(tl.float32)
    scaled = _scaled(value, best, tl.load(numbers + 1).to(tl.float32))
    bound = tl.full((), float("inf"), tl.float32)
    if FILTERED:
        bound = tl.load(farthest)
    weights = tl.zeros((CUT,), tl.int64)
    if tl.max(scaled, 0) >= -bound:
        min_p = tl.load(numbers + 4).to(tl.float32)
        weights = _weight(scaled, bound, min_p, FILTERED, INTERPRETED)
    return weights


@triton.jit
def sum_weights(
    logits,
    stride,
    tokens,
    numbers,
    farthest,
    sums,
    width,
    CUTS: tl.constexpr,
    FILTERED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Sum the weights in one cut of a row.

    farthest: see `find_bound`; not read if there are no filters. sums: int64 [R, CUTS]. For the
    others, see `count_values`; the logits may be of any type.
    """
    row, cut = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = tl.load(tokens + row)
    numbers += row * COLUMNS
    if (token >= 0) & (tl.load(numbers) >= 0.0):
        logits += row * stride
        weights = _weights_of_cut(
            logits, token, numbers, farthest + row, cut, width, FILTERED, INTERPRETED
        )
        tl.store(sums + row * CUTS + cut, tl.sum(weights, 0))


@triton.jit
def pick_token(
    logits,
    stride,
    tokens,
    numbers,
    farthest,
    sums,
    width,
    CUTS: tl.constexpr,
    FILTERED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Replace the most likely token by the drawn one: the first at which the sum of weights exceeds
    the uniform number times the total. For the arguments, see `sum_weights`.
    """
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(tokens + row)
    numbers += row * COLUMNS
    uniform = tl.load(numbers)
    if (token >= 0) & (uniform >= 0.0):
        logits += row * stride
        cuts = tl.arange(0, CUTS)
        mass = tl.load(sums + row * CUTS + cuts, mask=cuts * CUT < width, other=0)
        total = tl.sum(mass, 0)
        # If rounding gives the total itself, the last token must still be chosen.
        target = tl.minimum((uniform * total.to(tl.float64)).to(tl.int64), total - 1)
        cut = tl.sum((tl.cumsum(mass, 0) <= target).to(tl.int32), 0)
        rest = target - tl.sum(tl.where(cuts < cut, mass, 0), 0)
        weights = _weights_of_cut(
            logits, token, numbers, farthest + row, cut, width, FILTERED, INTERPRETED
        )
        found = tl.sum((tl.cumsum(weights, 0) <= rest).to(tl.int32), 0)
        tl.store(tokens + row, tl.minimum(cut * CUT + found, width - 1).to(tl.int64))
