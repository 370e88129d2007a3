"""Layer groups: layers of a model that store their KV in the same way and can share block tables.

A request has one block table per group. Layers with full attention form one group; layers with a
sliding window form one group per window. The load gate creates the groups from the windows and
shapes that it observes in the model.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.contract.types import GroupId


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Layers that share block tables.

    Attributes:
        group_id: the index of the group.
        window: the number of tokens that a token attends to, including itself. None if it attends
            to all tokens up to itself.
        layers: the indices of the layers.
        bytes_per_token: KV bytes per token, summed over the group's layers.
    """

    group_id: GroupId
    window: int | None
    layers: tuple[int, ...]
    bytes_per_token: int


def window_blocks(window: int, block_size: int, num_tokens: int) -> int:
    """Return the most blocks that one request holds in a sliding group during a step.

    The step computes `num_tokens` tokens. It reads window − 1 earlier tokens and writes num_tokens;
    either end may lie within a block.
    """
    return (window - 1 + num_tokens + block_size - 1) // block_size + 1


def sliding_group_blocks(
    window: int, block_size: int, num_blocks: int, max_requests: int, max_batch_tokens: int
) -> int:
    """Return how many blocks a sliding group needs to never be the bottleneck.

    Every running request holds the blocks of its window, and the step's token budget is divided
    among the requests.
    """
    per_request = window_blocks(window, block_size, 1) + 1
    budget = (max_batch_tokens + block_size - 1) // block_size
    return min(num_blocks, max_requests * per_request + budget)


def growth_blocks(num_running: int, smallest_pool: int) -> int:
    """Return how many blocks of each group to reserve when another request is started.

    The running requests grow into these blocks, so that the new request does not cause a
    preemption. The reserve is one block per running request, up to a tenth of the smallest pool.
    """
    return min(num_running, smallest_pool // 10)
