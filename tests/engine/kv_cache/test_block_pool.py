"""The pool's law: free + used + cached = total, whatever is asked of it; and what it evicts."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.contract.types import BlockId
from engine.kv_cache.block_pool import NULL_BLOCK, BlockPool


class PoolMachine(RuleBasedStateMachine):
    """A pool and its index, beside a model: who holds what, what it says, and in which order the
    cached ones were left.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(13)
        self.held: Counter[BlockId] = Counter()
        self.digests: dict[BlockId, bytes] = {}
        self.cached: list[BlockId] = []

    @rule(count=st.integers(0, 15))
    def allocate(self, count: int) -> None:
        free = self.pool.num_free
        if count > free:
            with pytest.raises(ValueError, match="wanted"):
                self.pool.allocate(count)
            assert self.pool.num_free == free
            return
        truly_free = 13 - len(self.held) - len(self.cached)
        taken = self.pool.allocate(count)
        assert len(taken) == len(set(taken)) == count
        assert NULL_BLOCK not in taken
        assert not set(taken) & set(self.held)
        evicted = self.cached[: max(0, count - truly_free)]
        assert [block for block in taken if block in self.cached] == evicted, "oldest first"
        del self.cached[: len(evicted)]
        for block in evicted:
            del self.digests[block]
        self.held.update(taken)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.held)), unique=True))
        self.pool.free(chosen)
        for block in chosen:
            self.held[block] -= 1
            if not self.held[block]:
                del self.held[block]
                if block in self.digests:
                    self.cached.append(block)

    @rule(block=st.integers(-1, 15))
    def free_what_is_not_held(self, block: int) -> None:
        if block not in self.held:
            with pytest.raises(ValueError, match="not in use"):
                self.pool.free([BlockId(block)])
            with pytest.raises(ValueError, match="not in use"):
                self.pool.publish(BlockId(block), b"of nothing")

    @rule(block=st.integers(-1, 15))
    def share(self, block: int) -> None:
        shared = BlockId(block)
        if shared in self.held or shared in self.cached:
            self.pool.share([shared])
            self.held[shared] += 1
            if shared in self.cached:
                self.cached.remove(shared)
        else:
            with pytest.raises(ValueError, match="could be shared"):
                self.pool.share([shared])

    @precondition(lambda self: self.held)
    @rule(data=st.data(), name=st.integers(0, 9))
    def publish(self, data: st.DataObject, name: int) -> None:
        block = data.draw(st.sampled_from(sorted(self.held)))
        digest = bytes([name])
        if block in self.digests:
            with pytest.raises(ValueError, match="digest already"):
                self.pool.publish(block, digest)
            return
        assert self.pool.publish(block, digest) == (digest not in self.digests.values())
        if digest not in self.digests.values():
            self.digests[block] = digest

    @rule(really=st.integers(0, 5))
    def forget(self, really: int) -> None:
        if really == 0:
            self.pool.forget_prefixes()
            self.digests.clear()
            self.cached.clear()

    @invariant()
    def conserved(self) -> None:
        pool = self.pool
        pool.check_integrity()
        assert pool.num_used == len(self.held)
        assert pool.num_cached == len(self.cached)
        assert pool.num_free + pool.num_used == pool.num_blocks == 13
        assert all(pool.holders(block) == count for block, count in self.held.items())
        assert all(pool.is_cached(block) for block in self.cached)
        assert len(pool.index) == len(self.digests)
        for block, digest in self.digests.items():
            assert pool.index.block(digest) == block
            assert pool.index.digest(block) == digest


TestPool = PoolMachine.TestCase
TestPool.settings = settings(
    max_examples=50, stateful_step_count=30, deadline=None, derandomize=True, database=None
)


def test_the_last_block_freed_is_the_first_reused() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(4)
    pool.free([blocks[2]])
    assert pool.allocate(1) == [blocks[2]]


def test_free_blocks_go_first_then_the_least_recently_used_cached_ones() -> None:
    pool = BlockPool(4)
    first, second, third, plain = pool.allocate(4)
    for block in (first, second, third):
        assert pool.publish(block, b"%d" % block)
    pool.free([first, second, third, plain])
    assert (pool.num_free, pool.num_cached) == (4, 3)
    pool.share([first])
    pool.free([first])  # used again: now the most recent
    assert pool.allocate(3) == [plain, second, third]
    assert pool.index.block(b"%d" % first) == first
    assert pool.index.block(b"%d" % second) is None
    assert pool.allocate(1) == [first]
    assert len(pool.index) == 0


def test_a_shared_block_is_free_when_its_last_holder_has_left() -> None:
    pool = BlockPool(1)
    (block,) = pool.allocate(1)
    pool.share([block])
    pool.free([block])
    assert (pool.num_used, pool.num_free) == (1, 0)
    pool.free([block])
    assert (pool.num_used, pool.num_free) == (0, 1)


def test_integrity_finds_lost_and_doubled_blocks() -> None:
    pool = BlockPool(4)
    pool._free.pop()
    with pytest.raises(ValueError, match="lost"):
        pool.check_integrity()
    pool = BlockPool(4)
    pool._free.append(pool._free[0])
    with pytest.raises(ValueError, match="twice"):
        pool.check_integrity()


def test_integrity_finds_an_index_that_disagrees() -> None:
    pool = BlockPool(4)
    (block,) = pool.allocate(1)
    pool.publish(block, b"x")
    pool.index._blocks[b"x"] = BlockId(block + 1)
    with pytest.raises(ValueError, match="disagree"):
        pool.check_integrity()
    pool = BlockPool(4)
    (block,) = pool.allocate(1)
    pool.publish(block, b"x")
    pool.free([block])
    pool.index.remove(block)
    with pytest.raises(ValueError, match="no digest"):
        pool.check_integrity()
    pool = BlockPool(4)
    pool.index.add(BlockId(1), b"x")
    with pytest.raises(ValueError, match="a free block has a digest"):
        pool.check_integrity()
    pool = BlockPool(4)
    (block,) = pool.allocate(1)
    pool._holders[block] = 0
    with pytest.raises(ValueError, match="no holder"):
        pool.check_integrity()
