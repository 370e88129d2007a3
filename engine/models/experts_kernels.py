"""Triton kernels for mixtures of experts. A pair is a token with one of its experts.

    scores ─ route ─▶ experts and weights of each token
                          └─ sort ─▶ pairs by expert ─ product ─▶ … ─ weighted sum ─▶

    route         one program per token
    sort          one program per expert
    product       one program per (tile of one expert's pairs, BLOCK_N outputs)
    weighted sum  one program per (token, some elements)

A program of a product finds its tile by reading the experts' end offsets on the device. The host
knows only the maximum number of tiles, and programs without a tile end immediately. So a launch
never waits and can be captured.

Weights may have any strides. Products are summed in the order of the inputs, in float32. The
offsets of rows and experts are int64.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.attention.triton_kernels.overlap import follow


@triton.jit
def route_kernel(
    scores,
    chosen,
    weights,
    EXPERTS: tl.constexpr,
    CHOSEN: tl.constexpr,
    NORMED: tl.constexpr,
    ROUNDS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_C: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Choose the experts with the largest scores and weigh them. Grid: [T].

    scores: [T, E]; chosen: int32 [T, k]; weights: float32 [T, k]. Of equal scores the one of the
    first expert is chosen, as by torch on a device. See `engine.models.description.Routing`.
    """
    follow(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK_E)
    place = tl.arange(0, BLOCK_C)
    inside = expert < EXPERTS
    T: tl.constexpr = scores.dtype.element_ty
    score = tl.load(scores + token * EXPERTS + expert, mask=inside, other=float("-inf"))
    score = score.to(tl.float32)
    total = tl.sum(tl.exp(score - tl.max(score, 0)), 0)
    # Comparisons with NaN would choose experts that do not exist. Its weights remain NaN.
    left = tl.where(score == score, score, float("-inf"))
    best = tl.full((BLOCK_C,), float("-inf"), tl.float32)
    ids = tl.zeros((BLOCK_C,), tl.int32)
    for index in tl.static_range(0, CHOSEN):
        first = tl.argmax(left, 0)
        best = tl.where(place == index, tl.max(left, 0), best)
        ids = tl.where(place == index, first.to(tl.int32), ids)
        left = tl.where(expert == first, float("-inf"), left)
    is_there = place < CHOSEN
    weight = tl.exp(best - tl.max(best, 0))
    weight = weight / total
    if NORMED:
        weight = weight / tl.sum(tl.where(is_there, weight, 0.0), 0)
    if ROUNDS:
        weight = weight.to(T).to(tl.float32)
    tl.store(chosen + token * CHOSEN + place, ids, mask=is_there)
    tl.store(weights + token * CHOSEN + place, weight, mask=is_there)


@triton.jit(do_not_specialize=["pairs"])
def sort_kernel(
    chosen,
    order,
    ends,
    pairs,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Sort pairs by their expert, in order within an expert. Grid: [E].

    chosen: integers [S]; order, ends: int32 [S] and [E]; see
    `engine.models.triton_experts.sort_pairs`. Each program reads all pairs twice: to count those of
    earlier experts, and to place its own.
    """
    follow(OVERLAPS)
    expert = tl.program_id(0)
    place = tl.arange(0, BLOCK)
    earlier = tl.zeros((BLOCK,), tl.int32)
    own = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, pairs, BLOCK):
        ids = tl.load(chosen + start + place, mask=start + place < pairs, other=EXPERTS)
        earlier += (ids < expert).to(tl.int32)
        own += (ids == expert).to(tl.int32)
    begin = tl.sum(earlier, 0)
    tl.store(ends + expert, begin + tl.sum(own, 0))
    for start in range(0, pairs, BLOCK):
        ids = tl.load(chosen + start + place, mask=start + place < pairs, other=EXPERTS)
        is_own = (ids == expert).to(tl.int32)
        tl.store(order + begin + tl.cumsum(is_own, 0) - 1, start + place, mask=is_own != 0)
        begin += tl.sum(is_own, 0)


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
    OVERLAPS: tl.constexpr,
):
    """Multiply each pair. Grid: [maximum number of tiles, blocks of BLOCK_N outputs].

    Pair p reads row p // SHARE of x and writes row p of output. STRIDE_E, STRIDE_N and STRIDE_K are
    the strides of the weights by expert, output and input.
    """
    follow(OVERLAPS)
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
        pairs = tl.load(order + rows, mask=there, other=0).to(tl.int64)
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


@triton.jit
def weighted_sum_kernel(
    made,
    weights,
    output,
    CHOSEN: tl.constexpr,
    WIDTH: tl.constexpr,
    ROUNDS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Add up the weighted results of each token's experts. Grid: [T, blocks of BLOCK elements].

    made: [T · k, K]; weights: [T, k]; output: [T, K]. ROUNDS: whether weighted results are rounded
    before they are added.
    """
    follow(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < WIDTH
    T: tl.constexpr = made.dtype.element_ty
    total = tl.zeros((BLOCK,), tl.float32)
    for index in tl.static_range(0, CHOSEN):
        pair = token * CHOSEN + index
        weight = tl.load(weights + pair).to(tl.float32)
        result = tl.load(made + pair * WIDTH + place, mask=inside, other=0.0).to(tl.float32)
        result *= weight
        if ROUNDS:
            result = result.to(T).to(tl.float32)
        total += result
    tl.store(output + token * WIDTH + place, total.to(T), mask=inside)
