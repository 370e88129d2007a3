"""Allocates the KV cache's tensors, layer by layer, once the number of blocks is known.

shapes of layers ─▶ groups by window ─▶ blocks of each group ─▶ KVTensors
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence

import torch

from engine.attention.interface import LayerCache, LayerShape
from engine.contract.types import GroupId
from engine.kv_cache.group_kinds import FullAttention, SlidingAttention
from engine.kv_cache.groups import LayerGroup
from engine.loading.pinned import pinned_zeros
from engine.runner.kv_tensors import CacheSize, KVTensors


def make_groups(shapes: Sequence[LayerShape], dtype: torch.dtype) -> tuple[LayerGroup, ...]:
    """Group layers by window: full attention first, then windows in ascending order."""
    windows = sorted({shape.window for shape in shapes}, key=lambda window: window or 0)
    groups = []
    for index, window in enumerate(windows):
        layers = tuple(i for i, shape in enumerate(shapes) if shape.window == window)
        elements = sum(shapes[layer].elements_per_token for layer in layers)
        groups.append(
            LayerGroup(
                group_id=GroupId(index),
                kind=FullAttention() if window is None else SlidingAttention(window),
                layers=layers,
                bytes_per_token=elements * dtype.itemsize,
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
    """Allocate one zeroed cache per layer.

    `num_blocks` are the blocks of each group; the null block is added to them. Zeros are needed
    because masked reads of unwritten slots must not find NaN.
    """
    slots = [(count + 1) * block_size for count in num_blocks]
    return _allocate(shapes, groups, slots, dtype=dtype, device=device)


def allocate_host_caches(
    shapes: Sequence[LayerShape],
    groups: Sequence[LayerGroup],
    host_blocks: Sequence[int],
    block_size: int,
    dtype: torch.dtype,
    *,
    pin_memory: bool,
) -> tuple[LayerCache, ...]:
    """Allocate one host cache per layer, with `host_blocks` blocks per group, numbered from 0.

    There is no null block. The result is empty if no group has host blocks. `pin_memory` allows a
    CUDA device to copy asynchronously.
    """
    if not any(host_blocks):
        return ()
    slots = [count * block_size for count in host_blocks]
    host = torch.device("cpu")
    return _allocate(shapes, groups, slots, dtype=dtype, device=host, pin_memory=pin_memory)


def allocate_kv(
    shapes: Sequence[LayerShape],
    groups: tuple[LayerGroup, ...],
    size: CacheSize,
    dtype: torch.dtype,
    device: torch.device,
) -> KVTensors:
    """Allocate a complete cache, on the device and on the host."""
    return KVTensors(
        groups=groups,
        caches=allocate_caches(shapes, groups, size.num_blocks, size.block_size, dtype, device),
        host_caches=allocate_host_caches(
            shapes,
            groups,
            size.host_blocks,
            size.block_size,
            dtype,
            pin_memory=device.type == "cuda",
        ),
        block_size=size.block_size,
    )


def _allocate(
    shapes: Sequence[LayerShape],
    groups: Sequence[LayerGroup],
    slots: Sequence[int],
    *,
    dtype: torch.dtype,
    device: torch.device,
    pin_memory: bool = False,
) -> tuple[LayerCache, ...]:
    """Create one cache per layer, with as many token slots as its group has."""
    group_of = {layer: group.group_id for group in groups for layer in group.layers}
    sizes = [
        (slots[group_of[layer]], shape.num_kv_heads, dim)
        for layer, shape in enumerate(shapes)
        for dim in (shape.key_dim, shape.value_dim)
    ]
    if pin_memory:
        made = pinned_zeros(sizes, dtype)
    elif device.type == "cpu":
        made = [zeros_on_demand(size, dtype) for size in sizes]
    else:
        made = [torch.zeros(size, dtype=dtype, device=device) for size in sizes]
    return tuple(
        LayerCache(keys=made[2 * layer], values=made[2 * layer + 1], group=group_of[layer])
        for layer in range(len(shapes))
    )


def zeros_on_demand(size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Allocate zeros that the kernel provides on first access, in large pages if possible.

    `torch.zeros` would write all of the memory. This takes many seconds for gigabytes, and commits
    memory that a server with few requests never needs. It would also start OpenMP workers for this
    thread, which slow down those of the engine's own thread (see `engine.core.threads`).
    """
    count = math.prod(size)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, max(count * dtype.itemsize, 1), flags=flags)
    with contextlib.suppress(OSError):  # a kernel without large pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=count).view(*size)
