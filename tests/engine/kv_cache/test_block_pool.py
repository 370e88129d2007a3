"""The pool's law: free + used = total, whatever is asked of it."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.kv_cache.block_pool import NULL_BLOCK, BlockPool
from engine.types import BlockId


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(13)
        self.held: list[BlockId] = []

    @rule(count=st.integers(0, 15))
    def allocate(self, count: int) -> None:
        free = self.pool.num_free
        if count > free:
            with pytest.raises(ValueError, match="wanted"):
                self.pool.allocate(count)
            assert self.pool.num_free == free
            return
        taken = self.pool.allocate(count)
        assert len(taken) == len(set(taken)) == count
        assert NULL_BLOCK not in taken
        assert not set(taken) & set(self.held)
        self.held += taken

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        chosen = data.draw(st.sets(st.sampled_from(self.held)))
        self.pool.free(chosen)
        self.held = [block for block in self.held if block not in chosen]

    @rule(block=st.integers(-1, 15))
    def free_what_is_not_held(self, block: int) -> None:
        if block not in self.held:
            with pytest.raises(ValueError, match="not in use"):
                self.pool.free([BlockId(block)])

    @invariant()
    def conserved(self) -> None:
        self.pool.check_integrity()
        assert self.pool.num_used == len(self.held)
        assert self.pool.num_free + self.pool.num_used == self.pool.num_blocks == 13


TestPool = PoolMachine.TestCase
TestPool.settings = settings(
    max_examples=50, stateful_step_count=30, deadline=None, derandomize=True, database=None
)


def test_the_last_block_freed_is_the_first_reused() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(4)
    pool.free([blocks[2]])
    assert pool.allocate(1) == [blocks[2]]


def test_integrity_finds_lost_and_doubled_blocks() -> None:
    pool = BlockPool(4)
    pool._free.pop()
    with pytest.raises(ValueError, match="lost"):
        pool.check_integrity()
    pool = BlockPool(4)
    pool._free.append(pool._free[0])
    with pytest.raises(ValueError, match="twice"):
        pool.check_integrity()
