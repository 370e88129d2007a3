"""Carries out a step's block copies exactly, for all layers of a group at the same time.

    offload   cache ─index_select─▶ staging ─one copy per run of blocks─▶ host     device → host
    restore   host ─one copy per run of blocks─▶ staging ─index_copy─▶ cache       host → device
    fork      cache ─index_select─▶ staging ─index_copy─▶ cache                   on the device

All copies are queued on the device's stream in this order, before the step's own work, so nothing
waits for them. On CUDA the host memory is pinned, and only these copies access it. So the order of
the stream also ensures that a block is written before it is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from engine.kv_cache.copies import BlockCopy, StepCopies
from engine.native.device_copy import to_device
from engine.runner.kv_tensors import KVTensors


class BlockCopier:
    """Copies blocks within a cache, and between the cache and the host."""

    def __init__(self, kv: KVTensors) -> None:
        """Create a copier for a cache."""
        self._pairs = tuple(kv.pairs(group) for group in kv.groups)
        self._device = kv.device

    def run(self, copies: StepCopies) -> None:
        """Queue a step's copies in order."""
        for part in _independent(copies.offloads, same_side=False):
            sources = self._index(part.sources)
            for cache, host in self._pairs[part.group]:
                staging = cache.index_select(0, sources)
                for begin, end, first in _runs(part.targets):
                    host[first : first + end - begin].copy_(staging[begin:end], non_blocking=True)
        for part in _independent(copies.restores, same_side=False):
            targets = self._index(part.targets)
            for cache, host in self._pairs[part.group]:
                staging = cache.new_empty((len(part.sources), cache.shape[1]))
                for begin, end, first in _runs(part.sources):
                    staging[begin:end].copy_(host[first : first + end - begin], non_blocking=True)
                cache.index_copy_(0, targets, staging)
        for part in _independent(copies.forks, same_side=True):
            sources, targets = self._index(part.sources), self._index(part.targets)
            for cache, _ in self._pairs[part.group]:
                cache.index_copy_(0, targets, cache.index_select(0, sources))

    def _index(self, blocks: Sequence[int]) -> torch.Tensor:
        return to_device(np.array(blocks, dtype=np.int64), self._device)


class _Part:
    """Copies in one group that can be made at the same time: no block is written twice, or written
    before it is read.
    """

    __slots__ = ("group", "sources", "targets")

    def __init__(self, group: int) -> None:
        self.group = group
        self.sources: list[int] = []
        self.targets: list[int] = []


def _independent(copies: Sequence[BlockCopy], *, same_side: bool) -> Iterator[_Part]:
    """Split copies into sets of copies that can be made at the same time.

    Args:
        copies: in the order in which they take effect.
        same_side: whether sources and targets are blocks of the same memory.
    """
    open_parts: dict[int, tuple[_Part, set[int]]] = {}
    for copy in copies:
        part, written = open_parts.get(copy.group) or (_Part(copy.group), set())
        if copy.target in written or (same_side and copy.source in written):
            yield part
            part, written = _Part(copy.group), set()
        part.sources.append(copy.source)
        part.targets.append(copy.target)
        written.add(copy.target)
        open_parts[copy.group] = part, written
    for part, _ in open_parts.values():
        yield part


def _runs(blocks: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Split a list of blocks into runs of consecutive ones.

    Yield the begin and end of each run in the list, and its first block.
    """
    begin = 0
    for index in range(1, len(blocks) + 1):
        if index == len(blocks) or blocks[index] != blocks[index - 1] + 1:
            yield begin, index, blocks[begin]
            begin = index
