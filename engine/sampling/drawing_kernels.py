"""Draws a token of each row in Triton: four launches, whatever the filters. R: rows, V: width.

    count_values  one program a (row, cut): how often each value occurs that a token may have
    find_bound    one program a row: where top_k and top_p cut, from the counts, which it clears
    sum_weights   one program a (row, cut): the sum of the weights that are left
    pick_token    one program a row: the cut in which the draw falls, then the token in it

Logits have 16 bits, so a row has few different values: what a filter needs to know of a row is how
often each occurs, and masses are counts times weights. A value's key is how many steps of its type
it is below the row's largest. A row's counts are zero between draws. Without filters the last two
kernels are enough, and they take logits of any type.

Counts and sums are integers, which are the same in any order. Weights are computed as
`engine.sampling.filters` computes them, bit by bit, so both give the same tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

CUT = tl.constexpr(4096)
"""Entries of a row that a program reads."""
KEYS = tl.constexpr(1 << 16)
"""The counts of a row."""
GROUPS = tl.constexpr(64)
"""A cut's groups; up to this top_k their largest entries say which others cannot be among the k."""
COLUMNS = tl.constexpr(5)
"""Numbers of a row; see `engine.sampling.plain`."""
_WEIGHTLESS = tl.constexpr(28.0)
"""From this distance on a weight is 0: e^-28 is less than 2^-40."""
_RANGE = tl.constexpr(28.5)
"""A little more, for the last key: it is computed another way."""
_KEYS_AT_ONCE = tl.constexpr(4096)
_WEIGHT_ONE = tl.constexpr(1 << 40)
"""The largest weight; see `engine.sampling.ops`."""


@triton.jit
def _scaled(value, best, temperature):
    return tl.div_rn(value - best, temperature)


@triton.jit
def _weight(scaled, farthest, min_p, FILTERED: tl.constexpr, INTERPRETED: tl.constexpr):
    """int64, of entries on this side of the bounds; 0: beyond them."""
    likelihood = tl.exp(scaled) if INTERPRETED else libdevice.exp(scaled)
    if FILTERED:
        is_kept = (scaled >= -farthest) & (likelihood >= min_p)
        likelihood = tl.where(is_kept, likelihood, 0.0)
    return (likelihood * _WEIGHT_ONE).to(tl.int64)


@triton.jit
def _ordered(value):
    """Numbers of 16 bits in the order of the floats."""
    bits = value.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return tl.where(bits >= 0x8000, 0xFFFF - bits, bits + 0x8000)


@triton.jit
def _value(ordered, T: tl.constexpr):
    """The float of such a number, as float32."""
    bits = tl.where(ordered >= 0x8000, ordered - 0x8000, 0xFFFF - ordered)
    return bits.to(tl.int16).to(T, bitcast=True).to(tl.float32)


@triton.jit
def count_values(logits, stride, tokens, numbers, counts, width):
    """logits: 16-bit floats [R, V], a row every `stride`. tokens: int64 [R], the most likely ones;
    negative: the row is of no use. numbers: float64 [R, COLUMNS]; a row with a negative uniform
    number draws nothing. counts: int32 [R, KEYS].
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
    """Of the values with these keys; what is beyond the last value is infinitely far."""
    value = _value(tl.maximum(nearest - keys, 0), T)
    return tl.where(keys <= nearest, -_scaled(value, best, temperature), float("inf"))


@triton.jit
def _kth(counts, end, nearest, best, temperature, top_k, T: tl.constexpr):
    """The distance of the k-th entry; infinity: there are not so many."""
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
    """int64, of the entries with each key, as far as top_k keeps them."""
    weight = _weight(-distance, kth, 0.0, True, INTERPRETED)
    return count.to(tl.int64) * weight


@triton.jit
def _share(
    counts, end, nearest, best, temperature, kth, top_p, T: tl.constexpr, INTERPRETED: tl.constexpr
):
    """The distance up to which the masses of what top_k keeps are top_p of their sum."""
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
    """farthest: float32 [R], how far below its largest entry a row is cut. The others: see
    `count_values`; a row's counts are zeros afterwards.
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
    places,
    width,
    best,
    temperature,
    farthest,
    min_p,
    FILTERED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    value = tl.load(logits + places, mask=places < width, other=float("-inf")).to(tl.float32)
    scaled = _scaled(value, best, temperature)
    weights = tl.zeros((CUT,), tl.int64)
    if tl.max(scaled, 0) >= -farthest:
        weights = _weight(scaled, farthest, min_p, FILTERED, INTERPRETED)
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
    """farthest: see `find_bound`; without filters it is not read. sums: int64 [R, CUTS]. The
    others: see `count_values`; logits of any type.
    """
    row, cut = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = tl.load(tokens + row)
    numbers += row * COLUMNS
    if (token >= 0) & (tl.load(numbers) >= 0.0):
        logits += row * stride
        bound = tl.full((), float("inf"), tl.float32)
        if FILTERED:
            bound = tl.load(farthest + row)
        weights = _weights_of_cut(
            logits,
            cut * CUT + tl.arange(0, CUT),
            width,
            tl.load(logits + token).to(tl.float32),
            tl.load(numbers + 1).to(tl.float32),
            bound,
            tl.load(numbers + 4).to(tl.float32),
            FILTERED,
            INTERPRETED,
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
    """The first token at which the sum of weights exceeds the uniform number times the total takes
    the place of the most likely one. See `sum_weights`.
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
        bound = tl.full((), float("inf"), tl.float32)
        if FILTERED:
            bound = tl.load(farthest + row)
        weights = _weights_of_cut(
            logits,
            cut * CUT + tl.arange(0, CUT),
            width,
            tl.load(logits + token).to(tl.float32),
            tl.load(numbers + 1).to(tl.float32),
            bound,
            tl.load(numbers + 4).to(tl.float32),
            FILTERED,
            INTERPRETED,
        )
        found = tl.sum((tl.cumsum(weights, 0) <= rest).to(tl.int32), 0)
        tl.store(tokens + row, tl.minimum(cut * CUT + found, width - 1).to(tl.int64))
