"""Paged attention on a CUDA device, in Triton. Contexts are read in place, through the block
tables.

    write    one program a token: its key and value into the cache
    decode   requests with one token: as many programs as the device has places for; each takes an
             equal share of all cuts of all contexts
    merge    merges a context's cuts, in order
    prefill  the other requests: one program a (tile of one request's tokens, key/value head)

All query heads of a key/value head are rows of one tile, so that a context is read once for them.
There are two kernels, because a decode program would have too few rows for the prefill kernel's
tiles, and a single program for a long context would leave the device idle. In a mixed step, each
request's own number of tokens decides which kernel computes it, so its result does not depend on
the other requests in the step.

Lengths are read on the device, so that a launch can be captured and replayed, whatever the lengths
are: each decode program counts the cuts of all requests and finds its share, so a long context
among short ones is computed by many programs; a prefill grid is an upper bound, and programs with
nothing to do end at once. The cuts of a context depend only on the request's own position
(`_cuts`), which program computes a cut does not change it, and tiles of keys begin at multiples of
BLOCK_N. So a request's result does not depend on other requests.

Scores, softmax and sums are float32. Scores are in units of log 2, because the hardware computes
2^x. Memory beyond a context or before a window is never read, because it may be NaN. The arrays of
a step are those of `step_arrays`, all int64.
"""

from __future__ import annotations

import triton
import triton.language as tl

CUT = tl.constexpr(256)
"""Tokens in the shortest cut; longer ones are multiples of it. Itself a multiple of BLOCK_N."""
MERGED = tl.constexpr(16)
"""How many cuts are merged at a time."""
SCANNED = tl.constexpr(128)
"""How many requests' cuts are counted at a time."""

_LOG2E = tl.constexpr(1.4426950408889634)
_STEP_ARRAYS = [
    "slot_mapping",
    "cu_seqlens",
    "starts",
    "counts",
    "table_offsets",
    "extent",
    "blocks",
]


@triton.jit(do_not_specialize=_STEP_ARRAYS)
def write_kernel(
    key,
    value,
    keys,
    values,
    slot_mapping,
    key_head_stride,
    key_token_stride,
    value_head_stride,
    value_token_stride,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Grid [T]."""
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


@triton.jit
def _cuts_of_rows(starts, counts, base, num_rows, WINDOW: tl.constexpr, MAX_CUTS: tl.constexpr):
    """How many cuts each of the SCANNED rows from `base` on has; 0 if it is not decoded."""
    rows = base + tl.arange(0, SCANNED)
    there = rows < num_rows
    last = tl.load(starts + rows, mask=there, other=0).to(tl.int32)
    is_decoded = tl.load(counts + rows, mask=there, other=0) == 1
    _, _, cuts = _cuts(last, WINDOW, MAX_CUTS)
    return tl.where(is_decoded, cuts, 0)


@triton.jit
def _share(starts, counts, num_rows, WINDOW: tl.constexpr, MAX_CUTS: tl.constexpr):
    """This program's share of the cuts of all rows, numbered one row after the other: the first of
    them, the end, the row of the first, and how many cuts come before that row.
    """
    total = num_rows * 0
    for base in range(0, num_rows, SCANNED):
        total += tl.sum(_cuts_of_rows(starts, counts, base, num_rows, WINDOW, MAX_CUTS), 0)
    place = tl.program_id(0).to(tl.int64)
    begin = (place * total // tl.num_programs(0)).to(tl.int32)
    end = ((place + 1) * total // tl.num_programs(0)).to(tl.int32)
    row = num_rows * 0
    before = num_rows * 0
    seen = num_rows * 0
    for base in range(0, num_rows, SCANNED):
        cuts = _cuts_of_rows(starts, counts, base, num_rows, WINDOW, MAX_CUTS)
        ends = seen + tl.cumsum(cuts, 0)
        is_before = (ends <= begin) & (base + tl.arange(0, SCANNED) < num_rows)
        row += tl.sum(is_before.to(tl.int32), 0)
        before = tl.maximum(before, tl.max(tl.where(is_before, ends, 0), 0))
        seen += tl.sum(cuts, 0)
    return begin, end, row, before


@triton.jit(do_not_specialize=[*_STEP_ARRAYS, "num_rows", "num_tokens"])
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
    extent,
    blocks,
    num_rows,
    num_tokens,
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
    """Grid [places, Hkv]: the requests with one token among the first `num_rows`. Also sets the
    output of padding tokens to 0, because no other kernel writes it.

    partials: float32 [rows, Hkv, MAX_CUTS, G, Dv]; highests, totals: [rows, Hkv, MAX_CUTS, G].
    The result of a context with a single cut goes to the output directly.
    """
    head = tl.program_id(1)
    members = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    value_dims = tl.arange(0, BLOCK_V)
    heads = head * GROUPS + members
    stored = (members < GROUPS)[:, None] & (value_dims < VALUE_DIM)[None, :]
    row_size = KV_HEADS * GROUPS * VALUE_DIM
    written = heads[:, None] * VALUE_DIM + value_dims[None, :]
    padding = tl.load(extent + 2).to(tl.int32) + tl.program_id(0)
    for unused in range(padding, num_tokens, tl.num_programs(0)):
        zeros = tl.zeros([BLOCK_M, BLOCK_V], dtype=output.dtype.element_ty)
        tl.store(output + tl.cast(unused, tl.int64) * row_size + written, zeros, mask=stored)
    begin, end, row, before = _share(starts, counts, num_rows, WINDOW, MAX_CUTS)
    while begin < end:
        last = tl.load(starts + row).to(tl.int32)
        first, length, num_cuts = _cuts(last, WINDOW, MAX_CUTS)
        stop = tl.minimum(end, before + num_cuts)
        table = blocks + tl.load(table_offsets + row)
        token = tl.load(cu_seqlens + row)
        source = query + token * query_token_stride + head.to(tl.int64) * GROUPS * query_head_stride
        source += members[:, None] * query_head_stride + dims[None, :]
        inside = (members < GROUPS)[:, None] & (dims < DIM)[None, :]
        tile = tl.load(source, mask=inside, other=0.0)
        positions = last + members * 0
        origin = (row.to(tl.int64) * KV_HEADS + head) * MAX_CUTS
        for cut in range(begin - before, stop - before):
            left = first + cut * length
            right = tl.minimum(left + length, last + 1)
            acc, highest, total = _attend(
                tile, positions, last, keys + head * DIM, values + head * VALUE_DIM, table,
                left, right, inner_scale, outer_scale, WINDOW, SOFTCAP, BLOCK_SIZE, KV_HEADS, DIM,
                VALUE_DIM, BLOCK_D, BLOCK_V, BLOCK_M, BLOCK_N, last,
            )  # fmt: skip
            if num_cuts == 1:
                if SINKS:
                    sink = tl.load(sinks + heads, mask=members < GROUPS, other=0.0)
                    acc, total = _add_sink(acc, highest, total, sink)
                result = (acc / total[:, None]).to(output.dtype.element_ty)
                tl.store(output + token * row_size + written, result, mask=stored)
            else:
                part = (origin + cut) * GROUPS
                places = members[:, None] * VALUE_DIM + value_dims[None, :]
                tl.store(partials + part * VALUE_DIM + places, acc, mask=stored)
                tl.store(highests + part + members, highest, mask=members < GROUPS)
                tl.store(totals + part + members, total, mask=members < GROUPS)
        begin = stop
        before += num_cuts
        row += 1


@triton.jit
def _add_sink(acc, highest, total, sink):
    """Add a sink, which takes part in the softmax without a value. acc [M, V], the others [M]."""
    sink = sink.to(tl.float32) * _LOG2E
    base = tl.maximum(highest, sink)
    shrunk = tl.exp2(highest - base)
    return acc * shrunk[:, None], total * shrunk + tl.exp2(sink - base)


@triton.jit(do_not_specialize=_STEP_ARRAYS)
def merge_kernel(
    output,
    partials,
    highests,
    totals,
    sinks,
    cu_seqlens,
    starts,
    counts,
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
    origin = (row * (HEADS // GROUPS) + head // GROUPS) * MAX_CUTS * GROUPS + head % GROUPS
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


@triton.jit(do_not_specialize=_STEP_ARRAYS)
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
    extent,
    blocks,
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
    """Grid [tiles, Hkv]: the requests with more tokens than one, in tiles of BLOCK_Q tokens.

    The first tile of request r of these is (their tokens before it) // BLOCK_Q + r. From there it
    has at least as many tiles as it needs, and the index is computed without looking at earlier
    requests.
    """
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)  # the longest contexts first
    head = tl.program_id(1)
    first_row = tl.load(extent)  # also the number of tokens before that request
    num_rows = tl.load(extent + 1)
    if tile >= (tl.load(extent + 2) - first_row) // BLOCK_Q + num_rows:
        return
    left = first_row
    right = first_row + num_rows
    while right - left > 1:
        middle = (left + right) // 2
        first_tile = (tl.load(cu_seqlens + middle) - first_row) // BLOCK_Q + middle - first_row
        if first_tile <= tile:
            left = middle
        else:
            right = middle
    begin = tl.load(cu_seqlens + left)
    count = tl.load(counts + left)
    offset = (tile - (begin - first_row) // BLOCK_Q - (left - first_row)) * BLOCK_Q
    if (offset < 0) | (offset >= count):
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
    query += (begin + offset) * query_token_stride + head.to(tl.int64) * GROUPS * query_head_stride
    # Within a tile, 32 bits are enough.
    place = query + (tokens * query_token_stride + members % GROUPS * query_head_stride)[:, None]
    block = tl.load(place + dims[None, :], mask=ours[:, None] & (dims < DIM)[None, :], other=0.0)
    first = start * 0
    if WINDOW > 0:
        first = tl.maximum(lowest - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    acc, highest, total = _attend(
        block, positions, lowest, keys + head * DIM, values + head * VALUE_DIM, table,
        first, newest + 1, inner_scale, outer_scale, WINDOW, SOFTCAP, BLOCK_SIZE, KV_HEADS, DIM,
        VALUE_DIM, BLOCK_D, BLOCK_V, BLOCK_M, BLOCK_N, newest,
    )  # fmt: skip
    if SINKS:
        acc, total = _add_sink(
            acc, highest, total, tl.load(sinks + head * GROUPS + members % GROUPS)
        )
    result = (acc / total[:, None]).to(output.dtype.element_ty)
    output += ((begin + offset) * KV_HEADS + head) * GROUPS * VALUE_DIM
    rows = tokens * (KV_HEADS * GROUPS) + members % GROUPS
    place = output + rows[:, None] * VALUE_DIM + value_dims[None, :]
    tl.store(place, result, mask=ours[:, None] & (value_dims < VALUE_DIM)[None, :])
