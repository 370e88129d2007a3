"""Writes a step's keys and values to the cache."""

from __future__ import annotations

import triton
import triton.language as tl

from engine.attention.triton_kernels.attend import STEP_ARRAYS
from engine.attention.triton_kernels.overlap import follow


@triton.jit(do_not_specialize=STEP_ARRAYS)
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
    OVERLAPS: tl.constexpr,
):
    """Write the key and value of one token to the cache. Grid [T]."""
    follow(OVERLAPS)
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
