"""Layer groups: layers of a model that keep what they need in the same way and can share block
tables.

A request has one block table per group. Layers with full attention form one group; layers with a
sliding window form one group per window. The load gate creates the groups from the windows and
shapes that it observes in the model.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.contract.types import GroupId
from engine.kv_cache.group_kinds import GroupKind


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Layers that share block tables.

    Attributes:
        group_id: the index of the group.
        kind: what the group keeps of a request, and for how long.
        layers: the indices of the layers.
        bytes_per_token: KV bytes per token, summed over the group's layers.
        slot_bytes: the bytes of one request's states, summed likewise, if the layers carry states.
            Such a group's blocks are slots.
    """

    group_id: GroupId
    kind: GroupKind
    layers: tuple[int, ...]
    bytes_per_token: int = 0
    slot_bytes: int = 0

    def block_bytes(self, block_size: int) -> int:
        """Return the bytes of a block of `block_size` tokens."""
        return block_size * self.bytes_per_token + self.slot_bytes

    @property
    def window(self) -> int | None:
        """The number of tokens that a token attends to, including itself. None if it attends to all
        tokens up to itself.
        """
        return self.kind.window


def growth_blocks(num_running: int, smallest_pool: int) -> int:
    """Return how many blocks of each group to reserve when another request is started.

    The running requests grow into these blocks, so that the new request does not cause a
    preemption. The reserve is one block per running request, up to a tenth of the smallest pool.
    """
    return min(num_running, smallest_pool // 10)
