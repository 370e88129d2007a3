"""Paged attention on a CUDA device, in Triton. Contexts are read in place, through the block
tables.

    write    one program a token: its key and value into the cache
    decode   requests with one token: one program a (request, key/value head, split); of n splits,
             each takes every n-th cut of the context
    merge    merges the cuts, in order
    prefill  the other requests: one program a (tile of one request's tokens, key/value head)

All query heads of a key/value head are rows of one tile, so that a context is read once for them.
There are two kernels, because a decode program would have too few rows for the prefill kernel's
tiles, and a single program for a long context would leave the device idle. In a mixed step, each
request's own number of tokens decides which kernel computes it, so its result does not depend on
the other requests in the step.

Lengths are read on the device, so that a launch can be captured and replayed: a grid is an upper
bound, and programs with nothing to do end at once. The cuts of a context depend only on the
request's own position (`_cuts`), the number of splits changes which program computes a cut but not
the result, and tiles of keys begin at multiples of BLOCK_N. So a request's result does not depend
on other requests.

Scores, softmax and sums are float32. Scores are in units of log 2, because the hardware computes
2^x. Memory beyond a context or before a window is never read, because it may be NaN.

Arrays of a step, all int64 (see `triton_backend`):
    slot_mapping [T]    where a token's key and value go; in the null block: padding
    cu_seqlens [R + 1]  a request's first token in the flat row
    starts [R]          its position
    counts [R]          its tokens; 0: padding
    table_offsets [R]   where its row of blocks begins in `blocks`
    blocks [*]
"""

from __future__ import annotations

import triton
import triton.language as tl

CUT = tl.constexpr(256)
"""Tokens in the shortest cut; longer ones are multiples of it. Itself a multiple of BLOCK_N."""
MERGED = tl.constexpr(16)
"""How many cuts are merged at a time."""

_LOG2E = tl.constexpr(1.4426950408889634)
_STEP_ARRAYS = ["slot_mapping", "cu_seqlens", "starts", "counts", "table_offsets", "blocks"]


@triton.jit(do_not_specialize=_STEP_ARRAYS)
def write_kernel(
    key,
    value,
    keys,
    values,
    output,
    slot_mapping,
    key_head_stride,
    key_token_stride,
    value_head_stride,
    value_token_stride,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Grid [T]. Also sets the output of padding tokens (in the null block) to 0, because no other
    kernel writes it.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    heads = tl.arange(0, BLOCK_H)[:, None]
    dims = tl.arange(0, BLOCK_D)[None, :]
    inside = (heads < KV_HEADS) & (dims < DIM)
    source = key + token * key_token_stride + heads * key_head_stride + dims
    target = keys + slot * (KV_HEADS * DIM) + heads * DIM + dims
    tl.store(target, tl.load(source, mask=inside, other=0.0), mask=inside)
    dims = tl.arange(0, BLOCK_V)[None, :]
    inside = (heads < KV_HEADS) & (dims < VALUE_DIM)
    source = value + token * value_token_stride + heads * value_head_stride + dims
    target = values + slot * (KV_HEADS * VALUE_DIM) + heads * VALUE_DIM + dims
    tl.store(target, tl.load(source, mask=inside, other=0.0), mask=inside)
    if slot < BLOCK_SIZE:
        for begin in range(0, HEADS * VALUE_DIM, 256):
            place = begin + tl.arange(0, 256)
            zeros = tl.zeros([256], dtype=output.dtype.element_ty)
            row = output + token * (HEADS * VALUE_DIM)
            tl.store(row + place, zeros, mask=place < HEADS * VALUE_DIM)


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
    dims = tl.arange(0, BLOCK_D)
    value_dims = tl.arange(0, BLOCK_V)
    for start in range(begin, end, BLOCK_N):
        places = start + offsets
        if BLOCK_SIZE % BLOCK_N == 0:  # a tile is within one block
            block = tl.load(table + start // BLOCK_SIZE)
            slot = block * BLOCK_SIZE + start % BLOCK_SIZE + offsets
        else:
            if MASKED:
                block = tl.load(table + places // BLOCK_SIZE, mask=places < end, other=0)
            else:
                block = tl.load(table + places // BLOCK_SIZE)
            slot = block * BLOCK_SIZE + places % BLOCK_SIZE
        key_places = keys + slot[:, None] * (KV_HEADS * DIM) + dims[None, :]
        value_places = values + slot[:, None] * (KV_HEADS * VALUE_DIM) + value_dims[None, :]
        if MASKED:
            there = ((places >= low) & (places < end))[:, None]
            key = tl.load(key_places, mask=there & (dims[None, :] < DIM), other=0.0)
        elif DIM == BLOCK_D:
            key = tl.load(key_places)
        else:
            key = tl.load(key_places, mask=dims[None, :] < DIM, other=0.0)
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
        if MASKED:
            there = ((places >= low) & (places < end))[:, None]
            value = tl.load(value_places, mask=there & (value_dims[None, :] < VALUE_DIM), other=0.0)
        elif VALUE_DIM == BLOCK_V:
            value = tl.load(value_places)
        else:
            value = tl.load(value_places, mask=value_dims[None, :] < VALUE_DIM, other=0.0)
        acc = acc * shrunk[:, None]
        acc = tl.dot(weights.to(value.dtype), value, acc, input_precision="ieee")
    return acc, highest, total


@triton.jit
def _attend(
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
def _cuts(last, WINDOW: tl.constexpr, MAX_CUTS: tl.constexpr):
    """The cuts of the context of a token at position `last`: where the first one begins, how long
    each is, and how many there are.
    """
    first = last * 0
    if WINDOW > 0:
        first = tl.maximum(last - WINDOW + 1, 0) // CUT * CUT
    length = tl.cdiv(tl.cdiv(last + 1 - first, CUT), MAX_CUTS) * CUT
    return first, length, tl.cdiv(last + 1 - first, length)


@triton.jit(do_not_specialize=[*_STEP_ARRAYS, "splits", "cut_places"])
def decode_kernel(
    query,
    keys,
    values,
    output,
    partials,
    highests,
    totals,
    sinks,
    cu_seqlens,
    starts,
    counts,
    table_offsets,
    blocks,
    splits,
    cut_places,
    inner_scale,
    outer_scale,
    query_head_stride,
    query_token_stride,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MAX_CUTS: tl.constexpr,
):
    """Grid [rows, Hkv, splits].

    partials: float32 [rows, Hkv, cut_places, G, Dv]; highests, totals: [rows, Hkv, cut_places, G].
    The result of a context with a single cut goes to the output directly.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    if tl.load(counts + row) != 1:
        return
    last = tl.load(starts + row).to(tl.int32)
    table = blocks + tl.load(table_offsets + row)
    token = tl.load(cu_seqlens + row)
    first, length, num_cuts = _cuts(last, WINDOW, MAX_CUTS)
    members = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    value_dims = tl.arange(0, BLOCK_V)
    place = query + token * query_token_stride
    place += (head * GROUPS + members)[:, None].to(tl.int64) * query_head_stride + dims[None, :]
    inside = (members < GROUPS)[:, None] & (dims < DIM)[None, :]
    tile = tl.load(place, mask=inside, other=0.0)
    positions = last + members * 0
    stored = (members < GROUPS)[:, None] & (value_dims < VALUE_DIM)[None, :]
    for cut in range(tl.program_id(2), num_cuts, splits):
        begin = first + cut * length
        end = tl.minimum(begin + length, last + 1)
        acc, highest, total = _attend(
            tile, positions, last, keys + head * DIM, values + head * VALUE_DIM, table, begin, end,
            inner_scale, outer_scale, WINDOW, SOFTCAP, BLOCK_SIZE, KV_HEADS, DIM, VALUE_DIM,
            BLOCK_D, BLOCK_V, BLOCK_M, BLOCK_N, last,
        )  # fmt: skip
        if num_cuts == 1:
            if SINKS:
                sink = tl.load(sinks + head * GROUPS + members, mask=members < GROUPS, other=0.0)
                acc, total = _add_sink(acc, highest, total, sink)
            result = (acc / total[:, None]).to(output.dtype.element_ty)
            outputs = token * (KV_HEADS * GROUPS) + head * GROUPS + members
            outputs = output + outputs[:, None] * VALUE_DIM + value_dims[None, :]
            tl.store(outputs, result, mask=stored)
        else:
            parts = ((row * KV_HEADS + head) * cut_places + cut) * GROUPS + members
            tl.store(partials + parts[:, None] * VALUE_DIM + value_dims[None, :], acc, mask=stored)
            tl.store(highests + parts, highest, mask=members < GROUPS)
            tl.store(totals + parts, total, mask=members < GROUPS)


@triton.jit
def _add_sink(acc, highest, total, sink):
    """Add a sink, which takes part in the softmax without a value. acc [M, V], the others [M]."""
    sink = sink.to(tl.float32) * _LOG2E
    base = tl.maximum(highest, sink)
    shrunk = tl.exp2(highest - base)
    return acc * shrunk[:, None], total * shrunk + tl.exp2(sink - base)


@triton.jit(do_not_specialize=[*_STEP_ARRAYS, "cut_places"])
def merge_kernel(
    output,
    partials,
    highests,
    totals,
    sinks,
    cu_seqlens,
    starts,
    counts,
    cut_places,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    MAX_CUTS: tl.constexpr,
):
    """Grid [rows, Hq]. Merges cuts in order, MERGED at a time."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    if tl.load(counts + row) != 1:
        return
    _, _, num_cuts = _cuts(tl.load(starts + row).to(tl.int32), WINDOW, MAX_CUTS)
    if num_cuts == 1:
        return
    origin = (row * (HEADS // GROUPS) + head // GROUPS) * cut_places * GROUPS + head % GROUPS
    dims = tl.arange(0, BLOCK_V)
    offsets = tl.arange(0, MERGED)
    highest = tl.full([1], float("-inf"), dtype=tl.float32)
    for cut in range(0, num_cuts, MERGED):
        there = cut + offsets < num_cuts
        place = origin + (cut + offsets) * GROUPS
        found = tl.load(highests + place, mask=there, other=float("-inf"))
        highest = tl.maximum(highest, tl.max(found, 0))
    acc = tl.zeros([1, BLOCK_V], dtype=tl.float32)
    total = tl.zeros([1], dtype=tl.float32)
    for cut in range(0, num_cuts, MERGED):
        there = cut + offsets < num_cuts
        place = origin + (cut + offsets) * GROUPS
        weight = tl.exp2(tl.load(highests + place, mask=there, other=float("-inf")) - highest)
        total += tl.sum(weight * tl.load(totals + place, mask=there, other=0.0), 0)
        inside = there[:, None] & (dims < VALUE_DIM)[None, :]
        part = tl.load(
            partials + place[:, None] * VALUE_DIM + dims[None, :], mask=inside, other=0.0
        )
        acc += tl.sum(weight[:, None] * part, 0)[None, :]
    if SINKS:
        acc, total = _add_sink(acc, highest, total, tl.load(sinks + head + tl.arange(0, 1)))
    result = (acc / total[:, None]).to(output.dtype.element_ty)
    place = (tl.load(cu_seqlens + row) * HEADS + head) * VALUE_DIM
    tl.store(output + place + dims[None, :], result, mask=(dims < VALUE_DIM)[None, :])


@triton.jit(do_not_specialize=[*_STEP_ARRAYS, "first_row", "num_rows"])
def prefill_kernel(
    query,
    keys,
    values,
    output,
    sinks,
    cu_seqlens,
    starts,
    counts,
    table_offsets,
    blocks,
    first_row,
    num_rows,
    inner_scale,
    outer_scale,
    query_head_stride,
    query_token_stride,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):
    """Grid [tiles, Hkv]: `num_rows` requests from `first_row` on, in tiles of BLOCK_Q tokens.

    The first tile of request r of these is (tokens before it) // BLOCK_Q + r. From there it has at
    least as many tiles as it needs, and the index is computed without looking at earlier requests.
    """
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)  # the longest contexts first
    head = tl.program_id(1)
    left = first_row * 1
    right = first_row + num_rows
    while right - left > 1:
        middle = (left + right) // 2
        if tl.load(cu_seqlens + middle) // BLOCK_Q + middle - first_row <= tile:
            left = middle
        else:
            right = middle
    begin = tl.load(cu_seqlens + left)
    count = tl.load(counts + left)
    offset = (tile - begin // BLOCK_Q - (left - first_row)) * BLOCK_Q
    if (offset < 0) | (offset >= count) | (count == 1):
        return
    start = tl.load(starts + left).to(tl.int32)
    table = blocks + tl.load(table_offsets + left)
    members = tl.arange(0, BLOCK_M)
    tokens = members // GROUPS
    ours = (tokens < BLOCK_Q) & (offset + tokens < count)
    lowest = start + offset.to(tl.int32)
    newest = start + (tl.minimum(offset + BLOCK_Q, count) - 1).to(tl.int32)
    positions = tl.minimum(lowest + tokens, newest)  # unused rows also attend to something
    dims = tl.arange(0, BLOCK_D)
    value_dims = tl.arange(0, BLOCK_V)
    heads = head * GROUPS + members % GROUPS
    rows = begin + offset + tokens
    place = query + (rows * query_token_stride + heads * query_head_stride)[:, None] + dims[None, :]
    block = tl.load(place, mask=ours[:, None] & (dims < DIM)[None, :], other=0.0)
    first = start * 0
    if WINDOW > 0:
        first = tl.maximum(lowest - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    acc, highest, total = _attend(
        block, positions, lowest, keys + head * DIM, values + head * VALUE_DIM, table,
        first, newest + 1, inner_scale, outer_scale, WINDOW, SOFTCAP, BLOCK_SIZE, KV_HEADS, DIM,
        VALUE_DIM, BLOCK_D, BLOCK_V, BLOCK_M, BLOCK_N, newest,
    )  # fmt: skip
    if SINKS:
        acc, total = _add_sink(acc, highest, total, tl.load(sinks + heads))
    result = (acc / total[:, None]).to(output.dtype.element_ty)
    place = (rows * (KV_HEADS * GROUPS) + heads)[:, None] * VALUE_DIM + value_dims[None, :]
    tl.store(output + place, result, mask=ours[:, None] & (value_dims < VALUE_DIM)[None, :])
