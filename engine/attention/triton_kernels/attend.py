"""What decode and prefill have in common: rows of queries attend to a run of a context's keys.

attend ─▶ keys that only some rows see ─▶ keys that all see ─▶ keys that only some see
each:     block table ─▶ slots ─▶ keys ─▶ scores ─▶ weights, their sum, weighted values
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
def _attend_tiles(
    acc,
    highest,
    total,
    query,
    positions,
    keys,
    values,
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
):
    """Accumulate a run of keys, from `begin`, a multiple of BLOCK_N, to `end`.

    acc [M, BLOCK_V], highest [M] and total [M] are the weighted values, the highest score and the
    sum of weights so far. query [M, BLOCK_D] is at positions [M]. MASKED: some rows do not attend
    to all of these keys, and keys before `low` and from `end` on are not read. Otherwise all rows
    attend to all keys.
    """
    offsets = tl.arange(0, BLOCK_N)
    for start in range(begin, end, BLOCK_N):
        places = start + offsets
        there = (places >= low) & (places < end)
        slots = _slots(table, start, end, MASKED, BLOCK_SIZE, BLOCK_N)
        key = _load(keys, slots, there, MASKED, KV_HEADS, DIM, BLOCK_D)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * inner_scale
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
        total = total * shrunk + tl.sum(weights, 1)
        highest = new_highest
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
):
    """Attend for rows at positions [M], from `lowest` to `newest`, over the keys from `begin`, a
    multiple of BLOCK_N, to `end`. Returns acc [M, BLOCK_V], highest score [M], sum of weights [M].

    The keys in the middle, to which all rows attend, need no mask.
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
            acc, highest, total, query, positions, keys, values, table,
            begin, tl.minimum(seen_begin, end), low, inner_scale, outer_scale,
            True, WINDOW, SOFTCAP, BLOCK_SIZE, KV_HEADS, DIM, VALUE_DIM, BLOCK_D, BLOCK_V, BLOCK_N,
        )  # fmt: skip
    seen_end = tl.minimum(end, lowest + 1) // BLOCK_N * BLOCK_N
    acc, highest, total = _attend_tiles(
        acc, highest, total, query, positions, keys, values, table,
        seen_begin, seen_end, low, inner_scale, outer_scale,
        False, WINDOW, SOFTCAP, BLOCK_SIZE, KV_HEADS, DIM, VALUE_DIM, BLOCK_D, BLOCK_V, BLOCK_N,
    )  # fmt: skip
    return _attend_tiles(
        acc, highest, total, query, positions, keys, values, table,
        tl.maximum(seen_begin, seen_end), end, low, inner_scale, outer_scale,
        True, WINDOW, SOFTCAP, BLOCK_SIZE, KV_HEADS, DIM, VALUE_DIM, BLOCK_D, BLOCK_V, BLOCK_N,
    )  # fmt: skip


@triton.jit
def add_sink(acc, highest, total, sink):
    """Add a sink, which takes part in the softmax without a value. acc [M, V], the others [M]."""
    sink = sink.to(tl.float32) * _LOG2E
    base = tl.maximum(highest, sink)
    shrunk = tl.exp2(highest - base)
    return acc * shrunk[:, None], total * shrunk + tl.exp2(sink - base)
