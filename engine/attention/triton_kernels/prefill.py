"""Requests with more than one token: each tile of a request's tokens is a program.

    _find_tile   find the request and the tokens of this program
    attend       the tokens' queries to the keys that are visible to them ─▶ the output

16-bit heads of 257 to 512 elements are computed in parts (IN_PARTS) if shared memory has room for
128 rows of queries. A product should be 64 keys wide: for 64 x N x 16 elements, tensor cores need
N / 2 cycles, and shared memory needs 16 + N / 4 cycles at 128 bytes per cycle. Without parts,
registers hold the sums of 64 rows and 512 values, shared memory holds two tiles of 16 keys and
their values, and each half of the warps multiplies 8 keys of a tile. With parts, two programs
compute a tile of 128 rows, each for half of the values; both compute the scores. The cycles of an
H100 multiprocessor for 64 rows and 64 keys, calculated rather than measured, are:

                              tensor cores   shared memory   read from L2
    64 x 16, all values              2,048           6,144         128 KB
    64 x 64, a quarter               5,120           7,168         320 KB
    128 x 64, half of them           3,072           3,328          96 KB

Two tiles of 64 keys do not fit in shared memory along with 128 rows, so none is copied
asynchronously. Instead, each quarter of the keys is loaded into registers while the previous one is
multiplied. The same applies to the values and to the first quarter of the next tile.

Compiled for compute capability 9.0, a program uses 160 KB of shared memory and up to 255 registers
per thread, and spills none. It spills 8 to 88 bytes with a window or a softcap, or for heads of 320
(which no model known to us has). Without parts, 304 bytes are spilled. A program with all values
spills 80 bytes for 64 x 32 (products 16 keys wide) and 1,024 bytes for 64 x 64 (32 keys wide).
Tiles of 64 rows with half of the values, copied asynchronously, need 257 KB.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.attention.triton_kernels.attend import STEP_ARRAYS, add_sink, attend
from engine.attention.triton_kernels.overlap import follow


@triton.jit
def _find_tile(tile, cu_seqlens, extent, BLOCK_Q: tl.constexpr):
    """Return the row of a tile's request, the request's first token, and the tile's offset.

    The first token is an index in the flat row. The offset is the tile's first token in the
    request, and may lie outside the request. Among the requests with several tokens, the first tile
    of request r is (their tokens before it) // BLOCK_Q + r. This gives each request at least as
    many tiles as it needs, and the index is computed without looking at earlier requests.
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


@triton.jit
def _load_queries(places, ours, part, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load the rows at addresses `places` [M, 1] from element part * BLOCK_D on, as [M, BLOCK_D].

    Rows for which `ours` [M] is false are 0.
    """
    dims = part * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    return tl.load(places + dims, mask=ours[:, None] & (dims < DIM), other=0.0)


@triton.jit
def _load_parts(places, ours, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load the rows like `_load_queries`, in four parts."""
    return (
        _load_queries(places, ours, 0, DIM, BLOCK_D),
        _load_queries(places, ours, 1, DIM, BLOCK_D),
        _load_queries(places, ours, 2, DIM, BLOCK_D),
        _load_queries(places, ours, 3, DIM, BLOCK_D),
    )


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
    entries,
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
    IN_PARTS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Compute the requests with several tokens, in tiles of BLOCK_Q. Grid [tiles, Hkv, parts].

    With IN_PARTS (see the module), keys are four parts of BLOCK_D, and values are parts of BLOCK_V.
    """
    follow(OVERLAPS)
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)  # the longest contexts first
    head = tl.program_id(1)
    if tile >= (tl.load(extent + 2) - tl.load(extent)) // BLOCK_Q + tl.load(extent + 1):
        return
    row, begin, offset = _find_tile(tile, cu_seqlens, extent, BLOCK_Q)
    count = tl.load(counts + row)
    if (offset < 0) | (offset >= count):
        return
    start = tl.load(starts + row).to(tl.int32)
    table = entries + tl.load(table_offsets + row)
    members = tl.arange(0, BLOCK_M)
    tokens = members // GROUPS
    ours = (tokens < BLOCK_Q) & (offset + tokens < count)
    lowest = start + offset.to(tl.int32)
    newest = start + (tl.minimum(offset + BLOCK_Q, count) - 1).to(tl.int32)
    positions = tl.minimum(lowest + tokens, newest)  # unused rows also attend to something
    value_part = tl.program_id(2) if IN_PARTS else 0
    value_dims = value_part * BLOCK_V + tl.arange(0, BLOCK_V)
    query += (begin + offset) * query_token_stride + head.to(tl.int64) * GROUPS * query_head_stride
    # Within a tile, 32 bits are enough.
    place = query + (tokens * query_token_stride + members % GROUPS * query_head_stride)[:, None]
    if IN_PARTS:
        block = _load_parts(place, ours, DIM, BLOCK_D)
    else:
        block = _load_queries(place, ours, 0, DIM, BLOCK_D)
    first = start * 0
    if WINDOW > 0:
        first = tl.maximum(lowest - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    acc, highest, total = attend(
        block, positions, lowest, keys + head * DIM, values + head * VALUE_DIM, value_part, table,
        first, newest + 1, inner_scale, outer_scale, WINDOW, SOFTCAP, BLOCK_SIZE, KV_HEADS, DIM,
        VALUE_DIM, BLOCK_D, BLOCK_V, BLOCK_M, BLOCK_N, newest, IN_PARTS,
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
