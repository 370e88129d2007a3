"""The tensors of the KV cache: one pair per layer, addressed by slot, and those on the host for the
blocks of preempted requests. `engine.loading.kv_memory` allocates them once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from engine.attention.interface import LayerCache
from engine.kv_cache.groups import LayerGroup


class CacheSize(Protocol):
    """The size of a cache in blocks of `block_size` tokens, by layer group, on the device and on
    the host.
    """

    @property
    def num_blocks(self) -> tuple[int, ...]: ...

    @property
    def host_blocks(self) -> tuple[int, ...]: ...

    @property
    def block_size(self) -> int: ...


@dataclass(frozen=True, slots=True)
class KVTensors:
    """The whole cache of a model.

    Attributes:
        groups: the layer groups.
        caches: by layer, on the device.
        host_caches: by layer, on the host. Empty if nothing is offloaded.
        block_size: the number of tokens in a block.
    """

    groups: tuple[LayerGroup, ...]
    caches: tuple[LayerCache, ...]
    host_caches: tuple[LayerCache, ...]
    block_size: int

    @property
    def device(self) -> torch.device:
        """The device of the cache."""
        return self.caches[0].keys.device
