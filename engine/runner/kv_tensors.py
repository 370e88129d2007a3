"""The tensors of the KV cache: one pair per layer, addressed by slot, and those on the host for the
blocks of preempted requests. `engine.loading.kv_memory` allocates them once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from engine.attention.interface import LayerCache
from engine.attention.step_states import NOTHING_RECURS, Recurrence, StateTensors
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
        caches: by layer that attends, on the device.
        host_caches: the same on the host. Empty if nothing is offloaded.
        block_size: the number of tokens in a block.
        recurrence: the layers that carry states.
        states, host_states: their states on the device, and on the host if anything is offloaded.
    """

    groups: tuple[LayerGroup, ...]
    caches: Mapping[int, LayerCache]
    host_caches: Mapping[int, LayerCache]
    block_size: int
    recurrence: Recurrence = NOTHING_RECURS
    states: StateTensors = field(default_factory=dict)
    host_states: StateTensors = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """The device of the cache."""
        return next(iter(self._tensors())).device

    def like(self, group: LayerGroup) -> torch.Tensor | None:
        """Return a tensor with the type and device of a group's keys. None if it holds states."""
        return None if group.slot_bytes else self.caches[group.layers[0]].keys

    def pairs(self, group: LayerGroup) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
        """Return a group's tensors, each with its counterpart on the host: one row per block. The
        counterparts are empty if nothing is offloaded.
        """
        if group.slot_bytes:
            found = [(one, self.host_states.get(shape)) for shape, one in self.states.items()]
            size = 1
        else:
            found = [
                (
                    getattr(self.caches[layer], name),
                    getattr(self.host_caches.get(layer), name, None),
                )
                for layer in group.layers
                for name in ("keys", "values")
            ]
            size = self.block_size
        return tuple(
            (_rows(one, size), _rows(one[:0] if host is None else host, size))
            for one, host in found
        )

    def _tensors(self) -> Iterator[torch.Tensor]:
        yield from (one.keys for one in self.caches.values())
        yield from self.states.values()


def _rows(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """View [num_slots, ...] with one row for every `size` slots."""
    return tensor.view(-1, size * tensor[:1].numel()) if len(tensor) else tensor.flatten(1)
