"""A Triton kernel that multiplies rows by the weights of their experts.

    pairs (token, expert), sorted by expert ─▶ tiles of one expert's pairs each
                                             ─▶ one program per (tile, BLOCK_N outputs)

Each program finds its tile by reading the experts' end offsets on the device. The host knows only
the maximum number of tiles, and programs without a tile end immediately. So a launch never waits
and can be captured.

Weights may have any strides. Products are summed in the order of the inputs, in float32. The
offsets of rows and experts are int64.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def experts_product_kernel(
    x,
    order,
    ends,
    weights,
    biases,
    output,
    EXPERTS: tl.constexpr,
    SHARE: tl.constexpr,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    STRIDE_E: tl.constexpr,
    STRIDE_N: tl.constexpr,
    STRIDE_K: tl.constexpr,
    BIASED: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Multiply each (token, expert) pair. Grid: [maximum number of tiles, blocks of BLOCK_N
    outputs].

    Pair p reads row p // SHARE of x and writes row p of output. STRIDE_E, STRIDE_N and STRIDE_K are
    the strides of the weights by expert, output and input.
    """
    T: tl.constexpr = x.dtype.element_ty
    tile = tl.program_id(0)
    place = tl.arange(0, BLOCK_E)
    end = tl.load(ends + place, mask=place < EXPERTS, other=0)
    begin = tl.load(ends + place - 1, mask=(place > 0) & (place < EXPERTS), other=0)
    tiles = tl.where(place < EXPERTS, (end - begin + BLOCK_M - 1) // BLOCK_M, 0)
    # Experts all of whose tiles come before this one; without any tile, the next one's do not.
    expert = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)
    if expert < EXPERTS:
        before = tl.sum(tl.where(place < expert, tiles, 0), 0)
        first = tl.load(ends + expert - 1, mask=expert > 0, other=0) + (tile - before) * BLOCK_M
        rows = first + tl.arange(0, BLOCK_M)
        there = rows < tl.load(ends + expert)
        pairs = tl.load(order + rows, mask=there, other=0)
        columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = columns < OUTPUTS
        inputs = tl.arange(0, BLOCK_K)
        left = x + (pairs // SHARE)[:, None] * INPUTS + inputs[None, :]
        right = weights + expert.to(tl.int64) * STRIDE_E
        right += columns[None, :] * STRIDE_N + inputs[:, None] * STRIDE_K
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for start in range(0, INPUTS, BLOCK_K):
            if INPUTS % BLOCK_K == 0:
                a = tl.load(left, mask=there[:, None], other=0.0)
                b = tl.load(right, mask=inside[None, :], other=0.0)
            else:
                rest = inputs < INPUTS - start
                a = tl.load(left, mask=there[:, None] & rest[None, :], other=0.0)
                b = tl.load(right, mask=inside[None, :] & rest[:, None], other=0.0)
            acc = tl.dot(a, b, acc, input_precision="ieee")
            left += BLOCK_K
            right += BLOCK_K * STRIDE_K
        made = acc.to(T)
        if BIASED:
            bias = tl.load(biases + expert.to(tl.int64) * OUTPUTS + columns, mask=inside, other=0.0)
            made = (made.to(tl.float32) + bias.to(tl.float32)[None, :]).to(T)
        target = output + pairs[:, None] * OUTPUTS + columns[None, :]
        tl.store(target, made, mask=there[:, None] & inside[None, :])
