"""Checks the invariants of the block tables in tests and when the engine is idle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from engine.contract.types import BlockId, RequestKey
from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.block_table import BlockTable
from engine.kv_cache.copies import BlockCopy


def check_tables(
    pools: Sequence[BlockPool],
    tables: Mapping[RequestKey, Sequence[BlockTable]],
    fork_sources: Iterable[BlockCopy],
) -> None:
    """Check that each used block's holder count is the number of tables and planned forks that hold
    it.

    Raises:
        ValueError: an invariant is broken.
    """
    held = [Counter[BlockId]() for _ in pools]
    for parts in tables.values():
        for counter, table in zip(held, parts, strict=True):
            counter.update(table.held())
    for copy in fork_sources:
        held[copy.group][BlockId(copy.source)] += 1
    for index, (pool, counter) in enumerate(zip(pools, held, strict=True)):
        blocks = pool.used_blocks() | set(counter)
        wrong = sorted(block for block in blocks if pool.holders(block) != counter[block])
        if wrong:
            raise ValueError(f"group {index}: blocks {wrong} are not held as often as counted")


def check_targets(
    pools: Sequence[BlockPool],
    tables: Mapping[RequestKey, Sequence[BlockTable]],
    planned: Iterable[tuple[RequestKey, Sequence[BlockCopy]]],
) -> None:
    """Check that each planned restore or fork writes to a private block.

    Only its request holds the block, and no prefix index contains it.

    Raises:
        ValueError: a target block is not private.
    """
    for key, copies in planned:
        for copy in copies:
            pool, target = pools[copy.group], BlockId(copy.target)
            if key not in tables or target not in tables[key][copy.group].held():
                raise ValueError(f"request {key}: a planned copy's target is not in its table")
            if pool.holders(target) != 1 or pool.index.digest(target) is not None:
                raise ValueError(f"request {key}: a planned copy's target is shared")
