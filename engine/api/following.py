"""Runs a non-zero rank of a tensor-parallel model: it loads its part, then follows rank 0."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from engine.contract.config import LoadConfig
from engine.contract.environment import RankPlace
from engine.contract.startup import Paced
from engine.core.threads import call_on_own_thread

if TYPE_CHECKING:
    from engine.loading.verified import VerifiedModel
    from engine.parallel.follower import ModelPart

logger = logging.getLogger(__name__)


def is_follower(load_config: LoadConfig) -> bool:
    """Whether this process follows rank 0.

    Raises:
        ConfigError: torchrun's environment variables contradict each other.
    """
    place = RankPlace.read() if load_config.tensor_parallel == "auto" else None
    return place is not None and place.rank > 0


def follow(
    model: str,
    load_config: LoadConfig,
    on_loaded: Callable[[], None] = lambda: None,
) -> None:
    """Load this rank's part of a model and compute for rank 0 until rank 0 ends.

    Args:
        model: a directory, or a hub id.
        load_config: the same as rank 0's.
        on_loaded: called on another thread once this rank has loaded its part.

    Raises:
        ModelRefusedError: the model is refused, here or on another rank.
        ConfigError: load_config asks for something that is not available here.
        RanksLostError: another rank has failed, or ended unexpectedly.
    """

    def work() -> None:
        from engine.loading.loader import load_model
        from engine.parallel.follower import Follower

        verified = load_model(model, load_config, Paced(logger.info))
        on_loaded()
        if verified.ranks is not None:
            Follower(_part_of(verified), verified.ranks).follow()

    call_on_own_thread(work, "headrace-follower")


def _part_of(verified: VerifiedModel) -> ModelPart:
    """Return this rank's part of a split model."""
    from engine.loading.kv_memory import allocate_kv, make_groups
    from engine.loading.running import free_memory
    from engine.parallel.follower import ModelPart

    shapes, dtype, device = verified.probe.shapes, verified.probe.dtype, verified.device
    groups = make_groups(shapes, dtype)
    return ModelPart(
        verified.model,
        verified.backend,
        device,
        free_memory=lambda: free_memory(verified),
        allocate=lambda size: allocate_kv(shapes, groups, size, dtype, device),
    )
