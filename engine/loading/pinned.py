"""Pinned memory for many tensors that live as long as the engine.

torch's allocator of pinned memory rounds each allocation up to a power of two (torch,
CachingHostAllocator.h), so that freed memory is quickly found again. With one allocation per
tensor, a KV cache on the host would take up to twice the allowed memory. So the tensors are put
into a few allocations whose sizes already are powers of two:

    bytes of tensors ─▶ plan_chunks ─▶ chunks, with the offset of each tensor ─▶ views of them
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

_SPARE = 16
"""The last chunk is not divided further if at most 1/_SPARE of the needed bytes would be unused."""


@dataclass(frozen=True, slots=True)
class PinnedChunk:
    """One allocation.

    Attributes:
        num_bytes: its size, a power of two.
        places: the index of each tensor in it, and the byte offset at which that tensor begins.
    """

    num_bytes: int
    places: tuple[tuple[int, int], ...]


def plan_chunks(sizes: Sequence[int]) -> list[PinnedChunk]:
    """Assign tensors of these sizes in bytes to chunks, the largest first.

    For 32 or more tensors of one size, the chunks exceed their total by at most an eighth. For a
    single tensor, the chunk may be twice as large.
    """
    left = sorted(range(len(sizes)), key=lambda number: sizes[number], reverse=True)
    chunks = []
    while left:
        needed = sum(sizes[number] for number in left)
        num_bytes = 1 << max(needed.bit_length() - 1, 0)
        if num_bytes < needed and (
            num_bytes < sizes[left[0]] or (2 * num_bytes - needed) * _SPARE <= needed
        ):
            num_bytes *= 2
        places, others, used = [], [], 0
        for number in left:
            if used + sizes[number] <= num_bytes:
                places.append((number, used))
                used += sizes[number]
            else:
                others.append(number)
        chunks.append(PinnedChunk(num_bytes, tuple(places)))
        left = others
    return chunks


def pinned_zeros(shapes: Sequence[Sequence[int]], dtype: torch.dtype) -> list[torch.Tensor]:
    """Allocate zeros of these shapes in pinned memory, each contiguous."""
    sizes = [math.prod(shape) * dtype.itemsize for shape in shapes]
    made = [torch.empty(0, dtype=dtype)] * len(shapes)
    for chunk in plan_chunks(sizes):
        memory = torch.zeros(chunk.num_bytes, dtype=torch.uint8, pin_memory=True)
        for number, begin in chunk.places:
            part = memory[begin : begin + sizes[number]]
            made[number] = part.view(dtype).view(*shapes[number])
    return made
