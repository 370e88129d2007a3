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

from engine.attention.step_arrays import SHORTEST_CUT
from engine.attention.triton_kernels.attend import STEP_ARRAYS, add_sink, attend
from engine.attention.triton_kernels.overlap import let_next_start, wait_for_last

CUT = tl.constexpr(SHORTEST_CUT)
"""A multiple of BLOCK_N."""
MERGED = tl.constexpr(16)
"""The number of cuts that are merged at a time."""


@triton.jit
def _cuts(last, WINDOW: tl.constexpr, MAX_CUTS: tl.constexpr):
    """Divide the context of a token at position `last` into cuts.

    Returns the start of the first cut, the length of each cut, and the number of cuts, which is
    that of `step_arrays.count_cuts`.
    """
    first = last * 0
    if WINDOW > 0:
        first = tl.maximum(last - WINDOW + 1, 0) // CUT * CUT
    length = tl.cdiv(tl.cdiv(last + 1 - first, CUT), MAX_CUTS) * CUT
    return first, length, tl.cdiv(last + 1 - first, length)


@triton.jit
def _share(extent, entries, MAX_CUTS: tl.constexpr):
    """Find this program's share of the cuts of all rows, which are numbered row by row.

    Returns the first cut, the end, the row of the first cut, and the number of cuts before that
    row.
    """
    place, programs = tl.program_id(0), tl.num_programs(0)
    total = tl.load(extent + 3).to(tl.int32)
    least, more = total // programs, total % programs
    begin = place * least + tl.minimum(place, more)
    end = begin + least + (place < more).to(tl.int32)
    number = tl.load(entries + tl.load(extent + 4) + begin, mask=begin < end, other=0).to(tl.int32)
    return begin, end, number // MAX_CUTS, begin - number % MAX_CUTS


@triton.jit
def _row(starts, cu_seqlens, table_offsets, row, there):
    """Return a row's position, the index of its token, and the offset of its block table."""
    last = tl.load(starts + row, mask=there, other=0).to(tl.int32)
    token = tl.load(cu_seqlens + row, mask=there, other=0)
    return last, token, tl.load(table_offsets + row, mask=there, other=0)


@triton.jit
def _clear(places, stored, row_size, used_tokens, num_tokens):
    """Set the output of this program's share of the padding tokens to 0.

    places and stored, both [M, V], are the output addresses and the mask for the first token.
    """
    zeros = tl.zeros(places.shape, dtype=places.dtype.element_ty)
    padding = used_tokens + tl.program_id(0)
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


@triton.jit(do_not_specialize=[*STEP_ARRAYS, "num_tokens"])
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
    table_offsets,
    extent,
    entries,
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
    OVERLAPS: tl.constexpr,
):
    """Compute the requests with one token. Grid [programs, Hkv].

    This kernel also sets the output of padding tokens to 0, because no other kernel writes it. No
    kernel writes a step's arrays, so what a program needs to begin is read while the previous
    kernel still runs.

    partials: float32 [rows, Hkv, MAX_CUTS, G, Dv]; highests, totals: [rows, Hkv, MAX_CUTS, G].
    The result of a context with a single cut is written directly to the output.
    """
    let_next_start(OVERLAPS)
    begin, end, row, before = _share(extent, entries, MAX_CUTS)
    last, token, offset = _row(starts, cu_seqlens, table_offsets, row, begin < end)
    used_tokens = tl.load(extent + 2).to(tl.int32)
    wait_for_last(OVERLAPS)
    head = tl.program_id(1)
    members = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    value_dims = tl.arange(0, BLOCK_V)
    heads = head * GROUPS + members
    stored = (members < GROUPS)[:, None] & (value_dims < VALUE_DIM)[None, :]
    row_size = KV_HEADS * GROUPS * VALUE_DIM
    written = output + heads[:, None] * VALUE_DIM + value_dims[None, :]
    _clear(written, stored, row_size, used_tokens, num_tokens)
    while begin < end:
        first, length, num_cuts = _cuts(last, WINDOW, MAX_CUTS)
        stop = tl.minimum(end, before + num_cuts)
        table = entries + offset
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
        last, token, offset = _row(starts, cu_seqlens, table_offsets, row, begin < end)


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
    let_next_start(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    _, _, num_cuts = _cuts(tl.load(starts + row).to(tl.int32), WINDOW, MAX_CUTS)
    is_merged = (tl.load(counts + row) == 1) & (num_cuts > 1)
    token = tl.load(cu_seqlens + row)
    wait_for_last(OVERLAPS)
    if not is_merged:
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
    place = (token * HEADS + head) * VALUE_DIM
    tl.store(output + place + dims[None, :], result, mask=(dims < VALUE_DIM)[None, :])
