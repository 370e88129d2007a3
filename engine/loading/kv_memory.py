"""Allocates the KV cache's tensors, layer by layer, once the number of blocks is known.

shapes of layers ─▶ groups by window ─▶ blocks of each group ─▶ KVTensors
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Mapping, Sequence

import torch

from engine.attention.interface import LayerCache, LayerShape
from engine.attention.step_states import NOTHING_RECURS, Recurrence
from engine.contract.types import GroupId
from engine.kv_cache.group_kinds import FullAttention, SlidingAttention
from engine.kv_cache.groups import LayerGroup
from engine.kv_cache.state_slot import StateSlot
from engine.loading.pinned import pinned_zeros
from engine.runner.kv_tensors import CacheSize, KVTensors


def make_groups(
    shapes: Mapping[int, LayerShape], dtype: torch.dtype, recurrence: Recurrence = NOTHING_RECURS
) -> tuple[LayerGroup, ...]:
    """Group layers by window: full attention first, then windows in ascending order. Layers that
    carry a state are the last group, and may be in another one, too.
    """
    windows = sorted({shape.window for shape in shapes.values()}, key=lambda window: window or 0)
    groups = []
    for index, window in enumerate(windows):
        layers = tuple(i for i, shape in shapes.items() if shape.window == window)
        elements = sum(shapes[layer].elements_per_token for layer in layers)
        groups.append(
            LayerGroup(
                group_id=GroupId(index),
                kind=FullAttention() if window is None else SlidingAttention(window),
                layers=layers,
                bytes_per_token=elements * dtype.itemsize,
            )
        )
    if recurrence.shapes:
        groups.append(
            LayerGroup(
                group_id=GroupId(len(groups)),
                kind=StateSlot(),
                layers=recurrence.layers,
                slot_bytes=recurrence.slot_bytes,
            )
        )
    return tuple(groups)


def allocate_caches(
    shapes: Mapping[int, LayerShape],
    groups: Sequence[LayerGroup],
    num_blocks: Sequence[int],
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[int, LayerCache]:
    """Allocate one zeroed cache per layer.

    `num_blocks` are the blocks of each group; the null block is added to them. Zeros are needed
    because masked reads of unwritten slots must not find NaN.
    """
    slots = [(count + 1) * block_size for count in num_blocks]
    return _allocate(shapes, groups, slots, dtype=dtype, device=device)


def allocate_host_caches(
    shapes: Mapping[int, LayerShape],
    groups: Sequence[LayerGroup],
    host_blocks: Sequence[int],
    block_size: int,
    dtype: torch.dtype,
    *,
    pin_memory: bool,
) -> dict[int, LayerCache]:
    """Allocate one host cache per layer, with `host_blocks` blocks per group, numbered from 0.

    There is no null block. The result is empty if no group has host blocks. `pin_memory` allows a
    CUDA device to copy asynchronously.
    """
    if not any(host_blocks):
        return {}
    slots = [count * block_size for count in host_blocks]
    host = torch.device("cpu")
    return _allocate(shapes, groups, slots, dtype=dtype, device=host, pin_memory=pin_memory)


def allocate_kv(
    shapes: Mapping[int, LayerShape],
    groups: tuple[LayerGroup, ...],
    size: CacheSize,
    dtype: torch.dtype,
    device: torch.device,
    recurrence: Recurrence = NOTHING_RECURS,
) -> KVTensors:
    """Allocate a complete cache, on the device and on the host."""
    pin, states = device.type == "cuda", recurrence.shapes
    slots = size.num_blocks[-1] + 1
    host_slots = size.host_blocks[-1] if any(size.host_blocks) else 0
    return KVTensors(
        groups=groups,
        caches=allocate_caches(shapes, groups, size.num_blocks, size.block_size, dtype, device),
        host_caches=allocate_host_caches(
            shapes,
            groups,
            size.host_blocks,
            size.block_size,
            dtype,
            pin_memory=pin,
        ),
        block_size=size.block_size,
        recurrence=recurrence,
        states={one: _zeros((slots, *one.shape), one.dtype, device) for one in states},
        host_states={one: _zeros((host_slots, *one.shape), one.dtype, pinned=pin) for one in states}
        if host_slots
        else {},
    )


def _allocate(
    shapes: Mapping[int, LayerShape],
    groups: Sequence[LayerGroup],
    slots: Sequence[int],
    *,
    dtype: torch.dtype,
    device: torch.device,
    pin_memory: bool = False,
) -> dict[int, LayerCache]:
    """Create one cache per layer, with as many token slots as its group has."""
    group_of = {
        layer: group.group_id for group in groups if not group.slot_bytes for layer in group.layers
    }
    sizes = [
        (slots[group_of[layer]], shape.num_kv_heads, dim)
        for layer, shape in shapes.items()
        for dim in (shape.key_dim, shape.value_dim)
    ]
    if pin_memory:
        made = pinned_zeros(sizes, dtype)
    else:
        made = [_zeros(size, dtype, device) for size in sizes]
    pairs = zip(made[::2], made[1::2], strict=True)
    return {
        layer: LayerCache(keys=keys, values=values, group=group_of[layer])
        for layer, (keys, values) in zip(shapes, pairs, strict=True)
    }


def _zeros(
    size: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device = torch.device("cpu"),  # noqa: B008
    *,
    pinned: bool = False,
) -> torch.Tensor:
    if pinned:
        return pinned_zeros([size], dtype)[0]
    if device.type == "cpu":
        return zeros_on_demand(size, dtype)
    return torch.zeros(size, dtype=dtype, device=device)


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
