"""The KV cache's tensors: one pair a layer, allocated once, addressed by slot."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.attention.base import LayerCache, LayerShape
from engine.kv_cache.groups import LayerGroup
from engine.types import GroupId


def make_groups(shapes: Sequence[LayerShape], dtype: torch.dtype) -> tuple[LayerGroup, ...]:
    """Group the layers by their window: the ones with full attention first, then by window."""
    windows = sorted({shape.window for shape in shapes}, key=lambda window: window or 0)
    groups = []
    for index, window in enumerate(windows):
        layers = tuple(i for i, shape in enumerate(shapes) if shape.window == window)
        numbers = sum(shapes[layer].numbers_per_token for layer in layers)
        groups.append(
            LayerGroup(
                group_id=GroupId(index),
                window=window,
                layers=layers,
                bytes_per_token=numbers * dtype.itemsize,
            )
        )
    return tuple(groups)


def allocate_caches(
    shapes: Sequence[LayerShape],
    groups: Sequence[LayerGroup],
    num_blocks: Sequence[int],
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[LayerCache, ...]:
    """Allocate zeroed caches, one a layer; `num_blocks` per group, the null block is added.

    Zeros matter: masked reads of slots that were never written must not meet NaN.
    """
    group_of = {layer: group.group_id for group in groups for layer in group.layers}
    caches = []
    for layer, shape in enumerate(shapes):
        group = group_of[layer]
        slots = (num_blocks[group] + 1) * block_size
        caches.append(
            LayerCache(
                keys=torch.zeros(
                    (slots, shape.num_kv_heads, shape.key_dim), dtype=dtype, device=device
                ),
                values=torch.zeros(
                    (slots, shape.num_kv_heads, shape.value_dim), dtype=dtype, device=device
                ),
                group=group,
            )
        )
    return tuple(caches)
