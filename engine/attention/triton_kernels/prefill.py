"""Requests with more tokens than one: each tile of a request's tokens is a program.

_find_tile  which request and which of its tokens are this program's ─▶ attend ─▶ the output
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.attention.triton_kernels.attend import STEP_ARRAYS, add_sink, attend


@triton.jit
def _find_tile(tile, cu_seqlens, extent, BLOCK_Q: tl.constexpr):
    """Where a tile is: the row of its request, the request's first token in the flat row, and the
    tile's first token in the request, which may not be one of its tokens.

    The first tile of request r of those with more tokens is (their tokens before it) // BLOCK_Q +
    r. From there it has at least as many tiles as it needs, and the index is computed without
    looking at earlier requests.
    """
    first_row = tl.load(extent)  # also the number of tokens before that request
    left = first_row
    right = first_row + tl.load(extent + 1)
    while right - left > 1:
        middle = (left + right) // 2
        first_tile = (tl.load(cu_seqlens + middle) - first_row) // BLOCK_Q + middle - first_row
        if first_tile <= tile:
            left = middle
        else:
            right = middle
    begin = tl.load(cu_seqlens + left)
    offset = (tile - (begin - first_row) // BLOCK_Q - (left - first_row)) * BLOCK_Q
    return left, begin, offset


@triton.jit(do_not_specialize=STEP_ARRAYS)
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
    """Grid [tiles, Hkv]: the requests with more tokens than one, in tiles of BLOCK_Q tokens."""
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)  # the longest contexts first
    head = tl.program_id(1)
    if tile >= (tl.load(extent + 2) - tl.load(extent)) // BLOCK_Q + tl.load(extent + 1):
        return
    row, begin, offset = _find_tile(tile, cu_seqlens, extent, BLOCK_Q)
    count = tl.load(counts + row)
    if (offset < 0) | (offset >= count):
        return
    start = tl.load(starts + row).to(tl.int32)
    table = blocks + tl.load(table_offsets + row)
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
    acc, highest, total = attend(
        block, positions, lowest, keys + head * DIM, values + head * VALUE_DIM, table,
        first, newest + 1, inner_scale, outer_scale, WINDOW, SOFTCAP, BLOCK_SIZE, KV_HEADS, DIM,
        VALUE_DIM, BLOCK_D, BLOCK_V, BLOCK_M, BLOCK_N, newest,
    )  # fmt: skip
    if SINKS:
        acc, total = add_sink(
            acc, highest, total, tl.load(sinks + head * GROUPS + members % GROUPS)
        )
    result = (acc / total[:, None]).to(output.dtype.element_ty)
    output += ((begin + offset) * KV_HEADS + head) * GROUPS * VALUE_DIM
    rows = tokens * (KV_HEADS * GROUPS) + members % GROUPS
    place = output + rows[:, None] * VALUE_DIM + value_dims[None, :]
    tl.store(place, result, mask=ours[:, None] & (value_dims < VALUE_DIM)[None, :])
