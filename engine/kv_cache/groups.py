"""Layer groups: layers of a model that store their KV in the same way, and so can share block
tables.

A request has one block table per group. Layers with full attention form one group; layers with a
sliding window form one group per window. Filled by the load gate, which observes the windows and
shapes that the model really uses.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.contract.types import GroupId


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Layers that share block tables.

    Attributes:
        group_id: index of the group.
        window: how many tokens a token attends to, itself included; None: all before it.
        layers: the indices of the layers.
        bytes_per_token: KV bytes of one token, summed over the group's layers.
    """

    group_id: GroupId
    window: int | None
    layers: tuple[int, ...]
    bytes_per_token: int


def window_blocks(window: int, block_size: int, num_tokens: int) -> int:
    """The most blocks one request holds in a sliding group while `num_tokens` tokens are computed
    in one step.

    The step reads window − 1 earlier tokens and writes num_tokens; both ends may lie within a
    block.
    """
    return (window - 1 + num_tokens + block_size - 1) // block_size + 1


def sliding_group_blocks(
    window: int, block_size: int, num_blocks: int, max_requests: int, max_batch_tokens: int
) -> int:
    """How many blocks a sliding group needs so that its own pool is never the bottleneck.

    Every running request holds the blocks of its window, and the step's token budget is divided
    among them.
    """
    per_request = window_blocks(window, block_size, 1) + 1
    budget = (max_batch_tokens + block_size - 1) // block_size
    return min(num_blocks, max_requests * per_request + budget)


def growth_blocks(num_running: int, smallest_pool: int) -> int:
    """How many blocks of each group are left for the growth of the running requests when one more
    is started, so that it does not cause a preemption: one for each, up to a tenth of the smallest
    pool.
    """
    return min(num_running, smallest_pool // 10)
