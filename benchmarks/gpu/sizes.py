"""How much the parts measure on a GPU, and on a CPU."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from benchmarks.rig.bench import Case

SPARE_BLOCKS = 8
SMOKE_BATCHES = (1, 32, 128)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much is measured. Prompts and outputs are in tokens.

    Attributes:
        batches: the batch sizes of the decode parts.
        prompt, output: the tokens of each request.
        prompts: how many prompts are computed to measure prefill.
        pair: the batch size where systems are compared with each other.
        pair_output: the output tokens of each request there.
        session: the requests of the session through gRPC.
        rates, seconds: for the open loop: requests per second, and for how long they arrive.
        budgets: the token budgets of a step there; None for the engine's default.
        profiled: the batches whose decode steps are profiled, and how many steps.
        block: tokens per block of the KV cache.
    """

    batches: tuple[int, ...]
    prompt: int
    output: int
    prompts: int
    pair: tuple[int, ...]
    pair_output: int
    session: int
    rates: tuple[float, ...]
    seconds: float
    budgets: tuple[int | None, ...]
    profiled: tuple[int, ...]
    profile_steps: int
    block: int
    turns: int = 3

    def blocks(self, case: Case) -> int:
        """Return the number of blocks for a case, including the reserve for its growth."""
        # Not above: it needs torch, which the command does not.
        from engine.planning.memory_plan import blocks_for

        longest = max(one.total for one in case.lengths)
        return blocks_for(case.most_at_once, longest, self.block) + SPARE_BLOCKS


GPU_SIZES = Sizes(
    batches=(1, 8, 32, 64, 128, 256),
    prompt=1024,
    output=128,
    prompts=32,
    pair=(1, 32),
    pair_output=64,
    session=128,
    rates=(4.0, 16.0),
    seconds=10.0,
    budgets=(None, 2048, 1024, 512),
    profiled=(1, 32, 128),
    profile_steps=30,
    block=256,
)
CPU_SIZES = Sizes(
    batches=(1, 4),
    prompt=48,
    output=12,
    prompts=4,
    pair=(2,),
    pair_output=8,
    session=8,
    rates=(8.0,),
    seconds=1.0,
    budgets=(None, 32),
    profiled=(),
    profile_steps=0,
    block=32,
    turns=1,
)
"""Small sizes, to show that the command works."""


def smoke_sizes(sizes: Sizes) -> Sizes:
    """One turn of each kind, and a profile of the steps."""
    batches = tuple(batch for batch in SMOKE_BATCHES if batch <= max(sizes.batches))
    return dataclasses.replace(
        sizes,
        batches=batches,
        output=min(sizes.output, 64),
        prompts=min(sizes.prompts, 8),
        profiled=batches if sizes.profiled else (),
        profile_steps=min(sizes.profile_steps, 10),
        turns=1,
    )


def small_sizes(sizes: Sizes) -> Sizes:
    """The smallest and the largest batch, with a profile of both."""
    batches = (min(sizes.batches), max(sizes.batches))
    return dataclasses.replace(
        sizes, batches=batches, profiled=batches if sizes.profiled else (), turns=1
    )
