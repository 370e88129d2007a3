"""A snapshot of the engine's statistics, for the service's telemetry and for operators. Independent
of telemetry libraries.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.contract.types import NO_CALLER, CallerKey


@dataclass(frozen=True, slots=True)
class CallerStats:
    """One caller's requests in the engine, and how much service it has received.

    Attributes:
        caller: the caller's name; NO_CALLER if several are summed.
        weight: how much service the caller is due relative to others; 0 if several are summed.
        running, waiting: the numbers of its requests in the batch and in the queue.
        service: the service it has received, as counted by `engine.scheduler.live_callers`, since
            the start or since the caller was last forgotten.
    """

    caller: CallerKey = NO_CALLER
    weight: float = 0.0
    running: int = 0
    waiting: int = 0
    service: int = 0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters (since the start) and gauges (now).

    Attributes:
        running, waiting: requests in the batch, and in the queue.
        blocks_total, blocks_used: KV cache blocks of all layer groups, without the null blocks;
            "used" means held by requests.
        blocks_cached: blocks that no request holds but that keep a prefix; they are evicted when
            blocks are needed.
        host_blocks_total, host_blocks_used: blocks on the host, for the KV of preempted requests.
        steps: steps executed.
        prompt_tokens, generated_tokens: prompt tokens computed (counted again after a preemption),
            and tokens generated.
        requests_accepted, requests_finished: every accepted request is counted as finished once,
            whatever the reason.
        preemptions: how often a request gave up its blocks.
        offloads, restores: how often a preempted request's KV was copied to the host, and copied
            back.
        prefix_queries, prefix_hits: prompt tokens that were looked up in the prefix cache, and
            found.
        last_step_s: the duration of the last step, in seconds.
        held: requests that are neither in the batch nor in the queue because nobody reads their
            results.
        holds: how often a request was held.
        num_decode_steps: steps in which at least one request decoded.
        num_steps_over_target: how many of these took longer than the target step time; 0 if there
            is no target.
        callers: callers by name, up to a fixed number; those with requests come first.
        other_callers: all other callers together, present and past; None if there were none.
        block_size: tokens per block.
    """

    running: int
    waiting: int
    blocks_total: int
    blocks_used: int
    steps: int
    prompt_tokens: int
    generated_tokens: int
    requests_accepted: int
    requests_finished: int
    preemptions: int
    last_step_s: float
    blocks_cached: int = 0
    host_blocks_total: int = 0
    host_blocks_used: int = 0
    offloads: int = 0
    restores: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    held: int = 0
    holds: int = 0
    num_decode_steps: int = 0
    num_steps_over_target: int = 0
    callers: tuple[CallerStats, ...] = ()
    other_callers: CallerStats | None = None
    block_size: int = 0

    @property
    def kv_usage(self) -> float:
        """The fraction of the KV cache that requests hold, from 0 to 1."""
        return self.blocks_used / max(self.blocks_total, 1)
