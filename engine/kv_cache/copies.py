"""The block copies that a step makes before it computes anything.

This package plans them, and the runner makes them. Their order matters, because an offloaded block
may be allocated to another request in the same step.

    1. offloads   device block → host block    a preempted request's KV is saved
    2. restores   host block → device block    saved KV is restored unchanged
    3. forks      device block → device block  what is kept before a step overwrites it; then
                                               choices diverge within a shared block
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.contract.types import GroupId, RequestKey


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """A copy of one block, in all layers of one group.

    Host blocks are numbered per group, from 0.
    """

    group: GroupId
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class StepCopies:
    """A step's block copies, in the order in which they are made.

    Attributes:
        keys: the requests whose KV is lost if the copies are not made. Used by
            `KVCacheManager.copies_failed`, not by the runner.
    """

    offloads: tuple[BlockCopy, ...] = ()
    restores: tuple[BlockCopy, ...] = ()
    forks: tuple[BlockCopy, ...] = ()
    keys: frozenset[RequestKey] = frozenset()

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to copy."""
        return not (self.offloads or self.restores or self.forks)


NO_COPIES = StepCopies()
"""An empty `StepCopies`, used for most steps."""
