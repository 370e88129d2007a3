"""Block copies that a step makes before it computes anything. Planned here, made by the runner.

Their order counts: a block that is offloaded may be given to somebody else in the same step.

    1. offloads   device block → host block    a preempted request's KV is kept
    2. restores   host block → device block    and comes back, bit by bit
    3. forks      device block → device block  choices part where a block is partly shared
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.types import GroupId, RequestKey


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """One block of all layers of one group. Host blocks are counted per group, from 0."""

    group: GroupId
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class StepCopies:
    """A step's block copies, in the order in which they are made.

    Attributes:
        keys: the requests whose KV the copies keep, bring back or divide: without the copies, it is
            lost. For `KVCacheManager.copies_failed`; the runner needs it not.
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
"""What most steps copy."""
