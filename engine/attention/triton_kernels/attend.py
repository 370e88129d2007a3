"""The code shared by decode and prefill: rows of queries attend to a range of a context's keys.

    attend          keys visible to some rows ─▶ keys visible to all ─▶ keys visible to some rows
    _attend_tiles   block table ─▶ slots ─▶ keys ─▶ scores ─▶ weights, their sum, weighted values

The hardware copies a tile's keys and values while earlier tiles are computed. With IN_PARTS (see
`prefill`), they are loaded into registers instead.
"""

from __future__ import annotations

import triton
import triton.language as tl

_LOG2E = tl.constexpr(1.4426950408889634)
STEP_ARRAYS = [
    "slot_mapping",
    "cu_seqlens",
    "starts",
    "counts",
    "table_offsets",
    "extent",
    "entries",
]


@triton.jit
def _slots(
    table, start, end, MASKED: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Return the cache slots of the keys from position `start`, [BLOCK_N].

    With MASKED, the slots of positions from `end` on are arbitrary.
    """
    offsets = tl.arange(0, BLOCK_N)
    if BLOCK_SIZE % BLOCK_N == 0:  # a tile is within one block
        block = tl.load(table + start // BLOCK_SIZE)
        slots = block * BLOCK_SIZE + start % BLOCK_SIZE + offsets
    else:
        places = start + offsets
        if MASKED:
            block = tl.load(table + places // BLOCK_SIZE, mask=places < end, other=0)
        else:
            block = tl.load(table + places // BLOCK_SIZE)
        slots = block * BLOCK_SIZE + places % BLOCK_SIZE
    return slots


@triton.jit
def _load(
    cache,
    slots,
    there,
    MASKED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Load one head's keys or values at `slots` [N] as [N, BLOCK], with 0 beyond DIM.

    With MASKED, rows for which `there` [N] is false are not read; they are 0.
    """
    dims = tl.arange(0, BLOCK)[None, :]
    places = cache + slots[:, None] * (KV_HEADS * DIM) + dims
    if MASKED:
        found = tl.load(places, mask=there[:, None] & (dims < DIM), other=0.0)
    elif DIM == BLOCK:
        found = tl.load(places)
    else:
        found = tl.load(places, mask=dims < DIM, other=0.0)
    return found


@triton.jit
def _load_ahead(
    cache,
    slots,
    there,
    part,
    MASKED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Load the elements from part * BLOCK on like `_load`, as the bits of 16-bit elements.

    The compiler puts a product's operand in shared memory where it is created. Bits only become an
    operand when they are cast, so they can arrive in registers during another product.
    """
    dims = part * BLOCK + tl.arange(0, BLOCK)[None, :]
    places = cache.to(tl.pointer_type(tl.int16), bitcast=True)
    places += slots[:, None] * (KV_HEADS * DIM) + dims
    if MASKED:
        found = tl.load(places, mask=there[:, None] & (dims < DIM), other=0)
    elif DIM % BLOCK == 0:
        found = tl.load(places)
    else:
        found = tl.load(places, mask=dims < DIM, other=0)
    return found


@triton.jit
def _multiply_parts(
    query,
    ahead,
    keys,
    values,
    value_part,
    slots,
    there,
    MASKED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Multiply queries with keys in four parts.

    `query` is four parts [M, BLOCK_D], and `ahead` is the first part of the keys. Each part is
    loaded while the previous one is multiplied. Returns the products [M, N], and the values as bits
    [N, BLOCK_V].
    """
    T: tl.constexpr = query[0].dtype
    second = _load_ahead(keys, slots, there, 1, MASKED, KV_HEADS, DIM, BLOCK_D)
    products = tl.dot(query[0], tl.trans(ahead.to(T, bitcast=True)))
    third = _load_ahead(keys, slots, there, 2, MASKED, KV_HEADS, DIM, BLOCK_D)
    products = tl.dot(query[1], tl.trans(second.to(T, bitcast=True)), products)
    fourth = _load_ahead(keys, slots, there, 3, MASKED, KV_HEADS, DIM, BLOCK_D)
    products = tl.dot(query[2], tl.trans(third.to(T, bitcast=True)), products)
    value = _load_ahead(values, slots, there, value_part, MASKED, KV_HEADS, VALUE_DIM, BLOCK_V)
    products = tl.dot(query[3], tl.trans(fourth.to(T, bitcast=True)), products)
    return products, value


@triton.jit
def _weigh(
    scores,
    places,
    positions,
    highest,
    total,
    outer_scale,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Convert the scores [M, N] of keys at positions `places` [N] to weights.

    Returns the weights, the factor [M] by which earlier weights shrink, and the highest score and
    the sum of weights, both including these keys.
    """
    if SOFTCAP:
        # tanh: exact at both ends, where 2^x is 0 or infinite.
        scores = (1.0 - 2.0 / (tl.exp2(scores * (2.0 * _LOG2E)) + 1.0)) * outer_scale
    if MASKED:
        seen = places[None, :] <= positions[:, None]
        if WINDOW > 0:
            seen = seen & (places[None, :] > positions[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
    new_highest = tl.maximum(highest, tl.max(scores, 1))
    # For a row without any keys so far, nothing is added.
    base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
    weights = tl.exp2(scores - base[:, None])
    shrunk = tl.exp2(highest - base)
    return weights, shrunk, new_highest, total * shrunk + tl.sum(weights, 1)


@triton.jit
def _attend_tiles(
    acc,
    highest,
    total,
    query,
    positions,
    keys,
    values,
    value_part,
    table,
    begin,
    end,
    low,
    inner_scale,
    outer_scale,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IN_PARTS: tl.constexpr,
):
    """Accumulate the keys from `begin`, a multiple of BLOCK_N, to `end`.

    acc [M, BLOCK_V], highest [M] and total [M] are the weighted values, the highest score and the
    sum of weights so far. query [M, BLOCK_D] holds the queries at `positions` [M]. With MASKED,
    some rows do not attend to all of these keys, and keys before `low` or from `end` on are not
    read. Otherwise, all rows attend to all keys. For IN_PARTS, see `attend`.
    """
    offsets = tl.arange(0, BLOCK_N)
    if IN_PARTS:
        first = tl.maximum(tl.minimum(begin, end - 1) // BLOCK_N * BLOCK_N, 0)
        there = (first + offsets >= low) & (first + offsets < end)
        slots = _slots(table, first, end, True, BLOCK_SIZE, BLOCK_N)
        ahead = _load_ahead(keys, slots, there, 0, True, KV_HEADS, DIM, BLOCK_D)
    for start in range(begin, end, BLOCK_N):
        places = start + offsets
        there = (places >= low) & (places < end)
        slots = _slots(table, start, end, MASKED, BLOCK_SIZE, BLOCK_N)
        if IN_PARTS:
            products, bits = _multiply_parts(
                query, ahead, keys, values, value_part, slots, there,
                MASKED, KV_HEADS, DIM, VALUE_DIM, BLOCK_D, BLOCK_V,
            )  # fmt: skip
        else:
            key = _load(keys, slots, there, MASKED, KV_HEADS, DIM, BLOCK_D)
            products = tl.dot(query, tl.trans(key), input_precision="ieee")
        weights, shrunk, highest, total = _weigh(
            products * inner_scale, places, positions, highest, total, outer_scale,
            MASKED, WINDOW, SOFTCAP,
        )  # fmt: skip
        if IN_PARTS:
            # After the last tile, that one again.
            following = tl.where(start + BLOCK_N < end, start + BLOCK_N, start)
            there = (following + offsets >= low) & (following + offsets < end)
            slots = _slots(table, following, end, MASKED, BLOCK_SIZE, BLOCK_N)
            ahead = _load_ahead(keys, slots, there, 0, MASKED, KV_HEADS, DIM, BLOCK_D)
            value = bits.to(query[0].dtype, bitcast=True)
        else:
            value = _load(values, slots, there, MASKED, KV_HEADS, VALUE_DIM, BLOCK_V)
        acc = acc * shrunk[:, None]
        acc = tl.dot(weights.to(value.dtype), value, acc, input_precision="ieee")
    return acc, highest, total


@triton.jit
def attend(
    query,
    positions,
    lowest,
    keys,
    values,
    value_part,
    table,
    begin,
    end,
    inner_scale,
    outer_scale,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    newest,
    IN_PARTS: tl.constexpr,
):
    """Attend to the keys from `begin`, a multiple of BLOCK_N, to `end`.

    The rows are at positions [M], from `lowest` to `newest`. All rows attend to the keys in the
    middle, which therefore need no mask. With IN_PARTS, `query` is four parts [M, BLOCK_D], and acc
    covers the values from value_part * BLOCK_V on; see `prefill`.

    Returns acc [M, BLOCK_V], the highest scores [M], and the sums of weights [M].
    """
    acc = tl.zeros([BLOCK_M, BLOCK_V], dtype=tl.float32)
    highest = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    low = begin
    seen_begin = begin
    if WINDOW > 0:
        low = tl.maximum(lowest - WINDOW + 1, 0)
        seen_begin = tl.maximum(
            tl.cdiv(tl.maximum(newest - WINDOW + 1, 0), BLOCK_N) * BLOCK_N, begin
        )
        acc, highest, total = _attend_tiles(
            acc, highest, total, query, positions, keys, values, value_part, table,
            begin, tl.minimum(seen_begin, end), low, inner_scale, outer_scale,
            True, WINDOW, SOFTCAP, BLOCK_SIZE, KV_HEADS, DIM, VALUE_DIM, BLOCK_D, BLOCK_V, BLOCK_N,
            IN_PARTS,
        )  # fmt: skip
    seen_end = tl.minimum(end, lowest + 1) // BLOCK_N * BLOCK_N
    acc, highest, total = _attend_tiles(
        acc, highest, total, query, positions, keys, values, value_part, table,
        seen_begin, seen_end, low, inner_scale, outer_scale,
        False, WINDOW, SOFTCAP, BLOCK_SIZE, KV_HEADS, DIM, VALUE_DIM, BLOCK_D, BLOCK_V, BLOCK_N,
        IN_PARTS,
    )  # fmt: skip
    return _attend_tiles(
        acc, highest, total, query, positions, keys, values, value_part, table,
        tl.maximum(seen_begin, seen_end), end, low, inner_scale, outer_scale,
        True, WINDOW, SOFTCAP, BLOCK_SIZE, KV_HEADS, DIM, VALUE_DIM, BLOCK_D, BLOCK_V, BLOCK_N,
        IN_PARTS,
    )  # fmt: skip


@triton.jit
def add_sink(acc, highest, total, sink):
    """Add a sink, which takes part in the softmax without a value.

    acc is [M, V]; the other arguments are [M].
    """
    sink = sink.to(tl.float32) * _LOG2E
    base = tl.maximum(highest, sink)
    shrunk = tl.exp2(highest - base)
    return acc * shrunk[:, None], total * shrunk + tl.exp2(sink - base)
