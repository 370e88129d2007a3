"""How a runner computes a step: the options of the configuration, resolved for one device."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config import ContinuousBatchingConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerOptions:
    """What a runner does beside the plain thing; the default is the plain thing alone.

    Attributes:
        max_decode_blocks: a step in which every request computes one token takes the decode path
            if no request has more blocks than this; 0: never.
        q_interval: the tokens of a step are padded to a multiple of this; 0: not at all.
        kv_interval: the context that is read is padded to a multiple of this many tokens; 0: not at
            all.
    """

    max_decode_blocks: int = 0
    q_interval: int = 0
    kv_interval: int = 0


PLAIN = RunnerOptions()
"""Steps as they come, on the path for varying lengths."""


def resolve_options(config: ContinuousBatchingConfig, *, max_blocks: int) -> RunnerOptions:
    """The options for a device.

    Args:
        config: the configuration.
        max_blocks: blocks of the longest request that can be.
    """
    limit = config.max_blocks_per_request
    return RunnerOptions(
        max_decode_blocks=max_blocks if limit is None else min(limit, max_blocks),
        q_interval=config.q_padding_interval_size,
        kv_interval=config.kv_padding_interval_size,
    )
