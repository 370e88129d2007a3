"""What `torch.nn.attention.varlen.varlen_attn_out` is documented to do with a paged cache, in plain
torch, on any device: the same name, the same arguments, the same refusals.

It is stricter than the documentation where FlashAttention is: which types and sizes it takes. And
it reads as FlashAttention reads, in tiles of keys whose hidden ones have the weight 0: what is not
a number there is not a number in the result.
"""

from __future__ import annotations

import torch

_TILE = 128
"""Keys that are read at once."""


def varlen_attn_out(
    out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: object | None = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    """Of N requests: [T, Hq, D] into `out`. key, value: [pages, page size, Hkv, D]."""
    assert return_aux is None
    assert num_splits == 1, "FlashAttention 2 mixes up the rows of requests whose pages it splits"
    assert cu_seq_k is not None
    assert seqused_k is not None
    assert block_table is not None
    (_, heads, dim), (_, page, kv_heads, _) = query.shape, key.shape
    requests = len(cu_seq_q) - 1
    for tensor in (query, key, value, out):
        assert tensor.dtype in (torch.bfloat16, torch.float16)
        assert tensor.dtype is query.dtype
        assert tensor.stride(-1) == 1
    for tensor in (cu_seq_q, cu_seq_k, seqused_k, block_table):
        assert tensor.dtype is torch.int32
        assert tensor.stride(-1) == 1
    assert cu_seq_q.is_contiguous()
    assert cu_seq_k.is_contiguous()
    assert seqused_k.is_contiguous()
    assert out.shape == query.shape
    assert key.shape == value.shape
    assert key.shape[-1] == dim
    assert dim <= 256
    assert dim % 8 == 0
    assert page % 256 == 0
    assert heads % kv_heads == 0
    assert enable_gqa or heads == kv_heads
    assert len(cu_seq_k) == requests + 1
    assert len(seqused_k) == requests
    assert block_table.shape[0] == requests
    assert isinstance(max_q, int)
    assert isinstance(max_k, int)
    left, right = window_size
    for row in range(requests):
        begin, end = int(cu_seq_q[row]), int(cu_seq_q[row + 1])
        length, count = int(seqused_k[row]), end - begin
        assert int(cu_seq_k[row + 1] - cu_seq_k[row]) == length
        assert count <= max_q
        assert length <= max_k
        assert length <= block_table.shape[1] * page
        if not count:
            continue
        queries = torch.arange(length - count, length)[:, None]  # the last of the context
        first = max(0, length - count - left) // _TILE * _TILE if left >= 0 else 0
        places = torch.arange(first, length)
        slots = block_table[row].long()[places // page] * page + places % page
        keys, values = (one.reshape(-1, kv_heads, dim)[slots].double() for one in (key, value))
        hidden = torch.zeros((count, len(places)), dtype=torch.bool)
        if left >= 0:
            hidden |= places < queries - left
        if right >= 0:
            hidden |= places > queries + right
        groups = heads // kv_heads
        scores = torch.einsum(
            "nhd,shd->hns", query[begin:end].double(), keys.repeat_interleave(groups, 1)
        )
        scores = scores * (dim**-0.5 if scale is None else scale)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        output = torch.einsum("hns,shd->nhd", weights, values.repeat_interleave(groups, 1))
        out[begin:end] = output.to(out.dtype)
    return out
