"""Requests with one token.

Their contexts are divided into cuts, and each program attends to an equal share of all cuts. The
results of a context's cuts are merged in order.

    _share         find the cuts of this program
    attend         a cut ─▶ the output, if the context has no other cut, or partial results
    merge_kernel   partial results ─▶ the output
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.attention.triton_kernels.attend import STEP_ARRAYS, add_sink, attend
from engine.attention.triton_kernels.overlap import follow, let_next_start, wait_for_last

CUT = tl.constexpr(256)
"""Tokens in the shortest cut, a multiple of BLOCK_N. Longer cuts are multiples of this."""
MERGED = tl.constexpr(16)
"""The number of cuts that are merged at a time."""
SCANNED = tl.constexpr(128)
"""The number of requests whose cuts are counted at a time."""


@triton.jit
def _cuts(last, WINDOW: tl.constexpr, MAX_CUTS: tl.constexpr):
    """Divide the context of a token at position `last` into cuts.

    Returns the start of the first cut, the length of each cut, and the number of cuts.
    """
    first = last * 0
    if WINDOW > 0:
        first = tl.maximum(last - WINDOW + 1, 0) // CUT * CUT
    length = tl.cdiv(tl.cdiv(last + 1 - first, CUT), MAX_CUTS) * CUT
    return first, length, tl.cdiv(last + 1 - first, length)


@triton.jit
def _cuts_of_rows(starts, counts, base, num_rows, WINDOW: tl.constexpr, MAX_CUTS: tl.constexpr):
    """Return the number of cuts of each of the SCANNED rows from `base` on.

    It is 0 for rows that are not decoded.
    """
    rows = base + tl.arange(0, SCANNED)
    there = rows < num_rows
    last = tl.load(starts + rows, mask=there, other=0).to(tl.int32)
    is_decoded = tl.load(counts + rows, mask=there, other=0) == 1
    _, _, cuts = _cuts(last, WINDOW, MAX_CUTS)
    return tl.where(is_decoded, cuts, 0)


@triton.jit
def _share(
    starts, counts, num_rows, ROWS: tl.constexpr, WINDOW: tl.constexpr, MAX_CUTS: tl.constexpr
):
    """Find this program's share of the cuts of all rows, which are numbered row by row.

    Returns the first cut, the end, the row of the first cut, and the number of cuts before that
    row. For ROWS, see `decode_kernel`.
    """
    place = tl.program_id(0).to(tl.int64)
    row = num_rows * 0
    before = num_rows * 0
    if ROWS == 1:
        _, _, total = _cuts(tl.load(starts).to(tl.int32), WINDOW, MAX_CUTS)
        total = tl.where(tl.load(counts) == 1, total, 0)
        begin = (place * total // tl.num_programs(0)).to(tl.int32)
        end = ((place + 1) * total // tl.num_programs(0)).to(tl.int32)
    elif ROWS == SCANNED:
        cuts = _cuts_of_rows(starts, counts, 0, num_rows, WINDOW, MAX_CUTS)
        total = tl.sum(cuts, 0)
        begin = (place * total // tl.num_programs(0)).to(tl.int32)
        end = ((place + 1) * total // tl.num_programs(0)).to(tl.int32)
        ends = tl.cumsum(cuts, 0)
        is_before = (ends <= begin) & (tl.arange(0, SCANNED) < num_rows)
        row += tl.sum(is_before.to(tl.int32), 0)
        before = tl.maximum(before, tl.max(tl.where(is_before, ends, 0), 0))
    else:
        total = num_rows * 0
        for base in range(0, num_rows, SCANNED):
            total += tl.sum(_cuts_of_rows(starts, counts, base, num_rows, WINDOW, MAX_CUTS), 0)
        begin = (place * total // tl.num_programs(0)).to(tl.int32)
        end = ((place + 1) * total // tl.num_programs(0)).to(tl.int32)
        seen = num_rows * 0
        for base in range(0, num_rows, SCANNED):
            cuts = _cuts_of_rows(starts, counts, base, num_rows, WINDOW, MAX_CUTS)
            ends = seen + tl.cumsum(cuts, 0)
            is_before = (ends <= begin) & (base + tl.arange(0, SCANNED) < num_rows)
            row += tl.sum(is_before.to(tl.int32), 0)
            before = tl.maximum(before, tl.max(tl.where(is_before, ends, 0), 0))
            seen += tl.sum(cuts, 0)
    return begin, end, row, before


@triton.jit
def _clear(places, stored, row_size, extent, num_tokens):
    """Set the output of this program's share of the padding tokens to 0.

    places and stored, both [M, V], are the output addresses and the mask for the first token.
    """
    zeros = tl.zeros(places.shape, dtype=places.dtype.element_ty)
    padding = tl.load(extent + 2).to(tl.int32) + tl.program_id(0)
    for unused in range(padding, num_tokens, tl.num_programs(0)):
        tl.store(places + tl.cast(unused, tl.int64) * row_size, zeros, mask=stored)


@triton.jit
def _store_cut(
    acc,
    highest,
    total,
    is_whole,
    written,
    stored,
    sink_places,
    partials,
    highests,
    totals,
    part,
    SINKS: tl.constexpr,
    GROUPS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Store the result of `attend` for one cut.

    If is_whole, the context has no other cut, and the final result is stored at `written` [M, V].
    Otherwise, partial results are stored at index `part`.
    """
    members = tl.arange(0, BLOCK_M)
    if is_whole:
        if SINKS:
            sink = tl.load(sink_places, mask=members < GROUPS, other=0.0)
            acc, total = add_sink(acc, highest, total, sink)
        result = (acc / total[:, None]).to(written.dtype.element_ty)
        tl.store(written, result, mask=stored)
    else:
        places = members[:, None] * VALUE_DIM + tl.arange(0, BLOCK_V)[None, :]
        tl.store(partials + part * VALUE_DIM + places, acc, mask=stored)
        tl.store(highests + part + members, highest, mask=members < GROUPS)
        tl.store(totals + part + members, total, mask=members < GROUPS)


@triton.jit(do_not_specialize=[*STEP_ARRAYS, "num_rows", "num_tokens"])
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
    ROWS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Compute the requests with one token among the first `num_rows`. Grid [programs, Hkv].

    This kernel also sets the output of padding tokens to 0, because no other kernel writes it.

    ROWS limits the number of rows: 1 is a single row, SCANNED is up to that many, and 0 is any
    number. The lower the limit, the sooner a program knows its share. No kernel writes the data
    from which the share is computed.

    partials: float32 [rows, Hkv, MAX_CUTS, G, Dv]; highests, totals: [rows, Hkv, MAX_CUTS, G].
    The result of a context with a single cut is written directly to the output.
    """
    let_next_start(OVERLAPS)
    begin, end, row, before = _share(starts, counts, num_rows, ROWS, WINDOW, MAX_CUTS)
    wait_for_last(OVERLAPS)
    head = tl.program_id(1)
    members = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    value_dims = tl.arange(0, BLOCK_V)
    heads = head * GROUPS + members
    stored = (members < GROUPS)[:, None] & (value_dims < VALUE_DIM)[None, :]
    row_size = KV_HEADS * GROUPS * VALUE_DIM
    written = output + heads[:, None] * VALUE_DIM + value_dims[None, :]
    _clear(written, stored, row_size, extent, num_tokens)
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
            acc, highest, total = attend(
                tile, positions, last, keys + head * DIM, values + head * VALUE_DIM, 0, table,
                left, right, inner_scale, outer_scale, WINDOW, SOFTCAP, BLOCK_SIZE, KV_HEADS, DIM,
                VALUE_DIM, BLOCK_D, BLOCK_V, BLOCK_M, BLOCK_N, last, False,
            )  # fmt: skip
            _store_cut(
                acc, highest, total, num_cuts == 1, written + token * row_size, stored,
                sinks + heads if SINKS else None, partials, highests, totals,
                (origin + cut) * GROUPS, SINKS, GROUPS, VALUE_DIM, BLOCK_M, BLOCK_V,
            )  # fmt: skip
        begin = stop
        before += num_cuts
        row += 1


@triton.jit(do_not_specialize=STEP_ARRAYS)
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
    OVERLAPS: tl.constexpr,
):
    """Merge the results of cuts in order, MERGED at a time. Grid [rows, Hq]."""
    follow(OVERLAPS)
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
        acc, total = add_sink(acc, highest, total, tl.load(sinks + head + tl.arange(0, 1)))
    result = (acc / total[:, None]).to(output.dtype.element_ty)
    place = (tl.load(cu_seqlens + row) * HEADS + head) * VALUE_DIM
    tl.store(output + place + dims[None, :], result, mask=(dims < VALUE_DIM)[None, :])
