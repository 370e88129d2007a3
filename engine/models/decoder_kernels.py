"""Triton kernels for the operations between a decoder's matrix products and its attention, one for
each operation of `engine.models.operations`:

    add_norm  one program per token
    turn      one program per (token, some heads of queries, keys or values)
    gate      one program per (token, some elements), also in the form that gpt-oss has

and one for products in steps with a single token:

    product   one program per group of outputs

A kernel reads and writes each element once, and rounds wherever its plain torch counterpart does.
Where that does not round between a product and a sum, the two must not be fused, so these kernels
are launched with enable_fp_fusion off. Row offsets are int64.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.attention.triton_kernels.overlap import follow, let_next_start, wait_for_last

PLAIN = tl.constexpr(1)
FROM_ONE = tl.constexpr(2)
ROUNDED_FIRST = tl.constexpr(3)
CENTERED = tl.constexpr(4)
"""The variants of norms; 0 means no norm. See `engine.models.description.NormForm`."""
SILU = tl.constexpr(0)
GELU_TANH = tl.constexpr(1)
RELU_SQUARED = tl.constexpr(2)


@triton.jit
def _scaled(normed, weight, bias, FORM: tl.constexpr, BIASED: tl.constexpr, T: tl.constexpr):
    """Multiply float32 elements by a norm's weight, add its bias, and round the result."""
    if FORM == ROUNDED_FIRST:
        normed = normed.to(T).to(tl.float32)
    if FORM == FROM_ONE:
        weight = weight + 1.0
    made = normed * weight
    if BIASED:
        made = made + bias
    return made.to(T).to(tl.float32)


@triton.jit
def _row_norm(
    x,
    weights,
    biases,
    eps,
    place,
    inside,
    FORM: tl.constexpr,
    BIASED: tl.constexpr,
    WIDTH: tl.constexpr,
    T: tl.constexpr,
):
    """Return the norm of a row, float32 [BLOCK]."""
    if FORM == CENTERED:
        x = tl.where(inside, x - tl.sum(x, 0) / WIDTH, 0.0)
    normed = x * tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)
    weight = tl.load(weights + place, mask=inside, other=0.0).to(tl.float32)
    bias = weight
    if BIASED:
        bias = tl.load(biases + place, mask=inside, other=0.0).to(tl.float32)
    return _scaled(normed, weight, bias, FORM, BIASED, T)


@triton.jit
def add_norm_kernel(
    x,
    made,
    also,
    total,
    normed,
    after_weight,
    after_bias,
    before_weight,
    before_bias,
    after_eps,
    before_eps,
    factor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    MADE: tl.constexpr,
    SCALED: tl.constexpr,
    AFTER: tl.constexpr,
    AFTER_BIASED: tl.constexpr,
    BEFORE: tl.constexpr,
    BEFORE_BIASED: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Add up to two tensors to a row and norm the sum. Grid: [T].

    MADE is how many of `made` and `also` are added. `total` is written if MADE > 0, and `normed` if
    there is a norm before the next operation.
    """
    follow(OVERLAPS)
    row = tl.program_id(0).to(tl.int64) * WIDTH
    place = tl.arange(0, BLOCK)
    inside = place < WIDTH
    T: tl.constexpr = x.dtype.element_ty
    value = tl.load(x + row + place, mask=inside, other=0.0).to(tl.float32)
    for which in tl.static_range(0, MADE):
        source = made if which == 0 else also
        added = tl.load(source + row + place, mask=inside, other=0.0).to(tl.float32)
        if AFTER:
            added = _row_norm(
                added, after_weight, after_bias, after_eps, place, inside,
                AFTER, AFTER_BIASED, WIDTH, T,
            )  # fmt: skip
        if SCALED:
            added = (added * factor).to(T).to(tl.float32)
        value = (value + added).to(T).to(tl.float32)
    if MADE > 0:
        tl.store(total + row + place, value.to(T), mask=inside)
    if BEFORE:
        value = _row_norm(
            value, before_weight, before_bias, before_eps, place, inside,
            BEFORE, BEFORE_BIASED, WIDTH, T,
        )  # fmt: skip
        tl.store(normed + row + place, value.to(T), mask=inside)


@triton.jit
def _product(x, table, ROUNDS: tl.constexpr, T: tl.constexpr):
    made = x * table
    if ROUNDS:
        made = made.to(T).to(tl.float32)
    return made


@triton.jit
def _turned(left, right, cos, sin, ROUNDS: tl.constexpr, T: tl.constexpr):
    """Rotate pairs of elements, float32 [BLOCK_H, BLOCK_HALF] each."""
    first = _product(left, cos, ROUNDS, T) - _product(right, sin, ROUNDS, T)
    second = _product(right, cos, ROUNDS, T) + _product(left, sin, ROUNDS, T)
    return first.to(T).to(tl.float32), second.to(T).to(tl.float32)


@triton.jit
def _part_norm(
    x,
    inverse,
    weights,
    biases,
    place,
    inside,
    FORM: tl.constexpr,
    BIASED: tl.constexpr,
    T: tl.constexpr,
):
    """Norm some of the elements of heads, given the inverse root of their mean square."""
    weight = tl.load(weights + place, mask=inside, other=0.0).to(tl.float32)
    bias = weight
    if BIASED:
        bias = tl.load(biases + place, mask=inside, other=0.0).to(tl.float32)
    return _scaled(x * inverse, weight, bias, FORM, BIASED, T)


@triton.jit
def _sums(left, right, rest, WHOLE: tl.constexpr, HAS_REST: tl.constexpr):
    """Sum over each head, or over all heads: [BLOCK_H, 1] or [1, 1]."""
    found = tl.sum(left, 1) + tl.sum(right, 1)
    if HAS_REST:
        found += tl.sum(rest, 1)
    found = found[:, None]
    if WHOLE:
        found = tl.sum(found, 0)[:, None]
    return found


@triton.jit
def _heads_norm(
    left,
    right,
    rest,
    weights,
    biases,
    eps,
    left_place,
    right_place,
    rest_place,
    inside,
    inside_rest,
    FORM: tl.constexpr,
    BIASED: tl.constexpr,
    WHOLE: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_REST: tl.constexpr,
    T: tl.constexpr,
):
    """Norm heads that are split into three tensors, each head by itself or all heads together."""
    if FORM == CENTERED:
        mean = _sums(left, right, rest, WHOLE, HAS_REST) / WIDTH
        left = tl.where(inside, left - mean, 0.0)
        right = tl.where(inside, right - mean, 0.0)
        if HAS_REST:
            rest = tl.where(inside_rest, rest - mean, 0.0)
    squares = _sums(left * left, right * right, rest * rest, WHOLE, HAS_REST)
    inverse = tl.rsqrt(squares / WIDTH + eps)
    left = _part_norm(left, inverse, weights, biases, left_place, inside, FORM, BIASED, T)
    right = _part_norm(right, inverse, weights, biases, right_place, inside, FORM, BIASED, T)
    if HAS_REST:
        rest = _part_norm(rest, inverse, weights, biases, rest_place, inside_rest, FORM, BIASED, T)
    return left, right, rest


@triton.jit
def _rotate_heads(
    source,
    target,
    first,
    weights,
    biases,
    eps,
    cos,
    sin,
    COUNT: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    PAIRED: tl.constexpr,
    TURNS: tl.constexpr,
    ROUNDS: tl.constexpr,
    FORM: tl.constexpr,
    BIASED: tl.constexpr,
    WHOLE: tl.constexpr,
    LAST: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Norm and rotate up to BLOCK_H heads of one token, starting at head `first`.

    Heads are read from source [COUNT, DIM] and written to target. cos and sin are the token's,
    [HALF].
    """
    T: tl.constexpr = source.dtype.element_ty
    REST: tl.constexpr = DIM - 2 * HALF
    heads = (first + tl.arange(0, BLOCK_H))[:, None]
    there = heads < COUNT
    dims = tl.arange(0, BLOCK_HALF)[None, :]
    inside = there & (dims < HALF)
    if PAIRED:
        left_dims, right_dims = 2 * dims, 2 * dims + 1
    else:
        left_dims, right_dims = dims, HALF + dims
    rest_dims = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
    inside_rest = there & (rest_dims < DIM)
    left = tl.load(source + heads * DIM + left_dims, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(source + heads * DIM + right_dims, mask=inside, other=0.0).to(tl.float32)
    rest = left
    if REST > 0:
        rest = tl.load(source + heads * DIM + rest_dims, mask=inside_rest, other=0.0)
        rest = rest.to(tl.float32)
    if TURNS:
        cosines = tl.load(cos + dims, mask=dims < HALF, other=0.0).to(tl.float32)
        sines = tl.load(sin + dims, mask=dims < HALF, other=0.0).to(tl.float32)
        if LAST:
            left, right = _turned(left, right, cosines, sines, ROUNDS, T)
    if FORM:
        origin = heads * DIM if WHOLE else heads * 0
        left, right, rest = _heads_norm(
            left, right, rest, weights, biases, eps,
            origin + left_dims, origin + right_dims, origin + rest_dims, inside, inside_rest,
            FORM, BIASED, WHOLE, COUNT * DIM if WHOLE else DIM, REST > 0, T,
        )  # fmt: skip
    if TURNS and not LAST:
        left, right = _turned(left, right, cosines, sines, ROUNDS, T)
    tl.store(target + heads * DIM + left_dims, left.to(T), mask=inside)
    tl.store(target + heads * DIM + right_dims, right.to(T), mask=inside)
    if REST > 0:
        tl.store(target + heads * DIM + rest_dims, rest.to(T), mask=inside_rest)


@triton.jit(do_not_specialize=["slots"])  # a part of an array, at any address
def rotate_kernel(
    projected,
    queries,
    keys,
    values,
    slots,
    cos,
    sin,
    query_weight,
    query_bias,
    key_weight,
    key_bias,
    query_eps,
    key_eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    PAIRED: tl.constexpr,
    TURNS: tl.constexpr,
    ROUNDS: tl.constexpr,
    LAST: tl.constexpr,
    QUERY_FORM: tl.constexpr,
    QUERY_BIASED: tl.constexpr,
    QUERY_WHOLE: tl.constexpr,
    KEY_FORM: tl.constexpr,
    KEY_BIASED: tl.constexpr,
    KEY_WHOLE: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Norm and rotate queries and keys, and write keys and values to the cache.

    Grid: [T, query groups + 2 · key groups], where a group is BLOCK_H heads.
    """
    follow(OVERLAPS)
    QUERY_PARTS: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    KEY_PARTS: tl.constexpr = (KV_HEADS + BLOCK_H - 1) // BLOCK_H
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    slot = token
    if HAS_SLOTS:
        slot = tl.load(slots + token)
    row = projected + token * ((HEADS + 2 * KV_HEADS) * DIM)
    if TURNS:
        cos += token * HALF
        sin += token * HALF
    if part < QUERY_PARTS:
        _rotate_heads(
            row, queries + token * (HEADS * DIM), part * BLOCK_H,
            query_weight, query_bias, query_eps, cos, sin, HEADS, DIM, HALF,
            PAIRED, TURNS, ROUNDS, QUERY_FORM, QUERY_BIASED, QUERY_WHOLE, LAST,
            BLOCK_H, BLOCK_HALF, BLOCK_REST,
        )  # fmt: skip
    elif part < QUERY_PARTS + KEY_PARTS:
        _rotate_heads(
            row + HEADS * DIM, keys + slot * (KV_HEADS * DIM), (part - QUERY_PARTS) * BLOCK_H,
            key_weight, key_bias, key_eps, cos, sin, KV_HEADS, DIM, HALF,
            PAIRED, TURNS, ROUNDS, KEY_FORM, KEY_BIASED, KEY_WHOLE, LAST,
            BLOCK_H, BLOCK_HALF, BLOCK_REST,
        )  # fmt: skip
    else:
        _rotate_heads(
            row + (HEADS + KV_HEADS) * DIM, values + slot * (KV_HEADS * DIM),
            (part - QUERY_PARTS - KEY_PARTS) * BLOCK_H,
            key_weight, key_bias, key_eps, cos, sin, KV_HEADS, DIM, HALF,
            False, False, False, 0, False, False, False,
            BLOCK_H, BLOCK_HALF, BLOCK_REST,
        )  # fmt: skip


@triton.jit
def gate_kernel(
    inner,
    output,
    WIDTH: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Compute the activation of an MLP. Grid: [T, blocks of BLOCK elements]."""
    follow(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < WIDTH
    T: tl.constexpr = inner.dtype.element_ty
    source = inner + token * (2 * WIDTH if GATED else WIDTH)
    x = tl.load(source + place, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == RELU_SQUARED:
        x = tl.where(x < 0.0, 0.0, x)
        x = x * x
    else:
        z = x
        if ACTIVATION == GELU_TANH:
            # x / 2 · (1 + tanh y) is x / (1 + e^-2y).
            z = 1.5957691216057308 * (x + 0.044715 * (x * x * x))
        # x / (1 + e^-z), where e^z may be infinite.
        power = tl.exp(-tl.abs(z))
        x = x * tl.where(z < 0.0, power, 1.0) / (1.0 + power)
    if GATED:
        up = tl.load(source + WIDTH + place, mask=inside, other=0.0).to(tl.float32)
        x = x.to(T).to(tl.float32) * up
    tl.store(output + token * WIDTH + place, x.to(T), mask=inside)


@triton.jit
def clamped_gate_kernel(
    inner,
    output,
    factor,
    limit,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Compute a `ClampedGate`. Grid: [T, blocks of BLOCK elements].

    inner: [T, 2 · WIDTH], gate and up by turns.
    """
    follow(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    both = 2 * first + tl.arange(0, 2 * BLOCK)
    T: tl.constexpr = inner.dtype.element_ty
    pairs = tl.load(inner + token * (2 * WIDTH) + both, mask=both < 2 * WIDTH, other=0.0)
    gate, up = tl.split(tl.reshape(pairs.to(tl.float32), (BLOCK, 2)))
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, up)
    up = tl.where(up < -limit, -limit, up)
    scaled = (gate * factor).to(T).to(tl.float32)
    # 1 / (1 + e^-z), where e^z may be infinite.
    power = tl.exp(-tl.abs(scaled))
    share = (tl.where(scaled < 0.0, power, 1.0) / (1.0 + power)).to(T).to(tl.float32)
    made = (gate * share).to(T).to(tl.float32)
    made *= (up + 1.0).to(T).to(tl.float32)
    place = first + tl.arange(0, BLOCK)
    tl.store(output + token * WIDTH + place, made.to(T), mask=place < WIDTH)


@triton.jit
def product_kernel(
    x,
    weight,
    bias,
    output,
    outputs,
    INPUTS: tl.constexpr,
    BIASED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Multiply one row by a weight. Grid: [blocks of BLOCK_N outputs].

    x: [K]; weight: [N, K]; bias, output: [N]. The first weights are loaded while the previous
    kernel is still running.
    """
    let_next_start(OVERLAPS)
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    places = tl.arange(0, BLOCK_K)
    source = weight + rows.to(tl.int64)[:, None] * INPUTS
    is_row = rows < outputs
    inside = is_row[:, None] & (places < INPUTS)[None, :]
    part = tl.load(source + places[None, :], mask=inside, other=0.0).to(tl.float32)
    wait_for_last(OVERLAPS)
    made = part * tl.load(x + places, mask=places < INPUTS, other=0.0).to(tl.float32)[None, :]
    for start in tl.static_range(BLOCK_K, INPUTS, BLOCK_K):
        place = start + places
        inside = is_row[:, None] & (place < INPUTS)[None, :]
        part = tl.load(source + place[None, :], mask=inside, other=0.0).to(tl.float32)
        made += part * tl.load(x + place, mask=place < INPUTS, other=0.0).to(tl.float32)[None, :]
    total = tl.sum(made, 1)
    if BIASED:
        total += tl.load(bias + rows, mask=is_row, other=0.0).to(tl.float32)
    tl.store(output + rows, total.to(output.dtype.element_ty), mask=is_row)
