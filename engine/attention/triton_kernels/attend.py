"""What decode and prefill have in common: rows of queries attend to a run of a context's keys.

    attend          keys that only some rows see ─▶ keys that all see ─▶ keys that only some see
    _attend_tiles   block table ─▶ slots ─▶ keys ─▶ scores ─▶ weights, their sum, weighted values

A tile's keys and values are copied by the hardware while earlier ones are computed; in parts
(IN_PARTS, see `prefill`) they are loaded into registers instead.
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
    "blocks",
]


@triton.jit
def _slots(
    table, start, end, MASKED: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Where the keys from `start` on are in the cache, [BLOCK_N]. MASKED: those from `end` on are
    anywhere.
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
    """A head's keys, or values, at `slots` [N]: [N, BLOCK], 0 beyond DIM. MASKED: 0 also where not
    `there` [N], and not read.
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
    """As `_load`, for elements of 16 bits from part * BLOCK on, as bits. A product's operand is put
    in shared memory where it is made; bits become one only where they are cast, so they can arrive
    in registers while something else is multiplied.
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
    """Products of queries, in four parts [M, BLOCK_D], with keys whose first part is `ahead`:
    [M, N]; and values, as bits [N, BLOCK_V]. Each next part is read while one is multiplied.
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
    """The weights of keys at `places` [N], from scores [M, N]; by how much earlier weights shrink,
    [M]; and the highest score and the sum of weights, these included.
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
    """Accumulate a run of keys, from `begin`, a multiple of BLOCK_N, to `end`.

    acc [M, BLOCK_V], highest [M] and total [M] are the weighted values, the highest score and the
    sum of weights so far. query [M, BLOCK_D] is at positions [M]. MASKED: some rows do not attend
    to all of these keys, and keys before `low` and from `end` on are not read. Otherwise all rows
    attend to all keys. IN_PARTS: see `attend`.
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
    """Attend for rows at positions [M], from `lowest` to `newest`, over the keys from `begin`, a
    multiple of BLOCK_N, to `end`. Returns acc [M, BLOCK_V], highest score [M], sum of weights [M].

    The keys in the middle, to which all rows attend, need no mask. IN_PARTS: query is four parts
    [M, BLOCK_D], and acc is made of the values from value_part * BLOCK_V on; see `prefill`.
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
    """Add a sink, which takes part in the softmax without a value. acc [M, V], the others [M]."""
    sink = sink.to(tl.float32) * _LOG2E
    base = tl.maximum(highest, sink)
    shrunk = tl.exp2(highest - base)
    return acc * shrunk[:, None], total * shrunk + tl.exp2(sink - base)
