"""The other ranks of a tensor-parallel model, which compute only what rank 0 sends them.

receive ─▶ Begin, Allocate  allocate this rank's shard of a cache
           Copies           copy its blocks
           RankStep         the forward pass; rank 0 uses the logits
           End              return
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.attention.interface import AttentionBackend
from engine.contract.errors import RanksLostError
from engine.parallel.rank_messages import Allocate, Begin, Copies, End, RankStep
from engine.parallel.ranks import Ranks
from engine.runner.block_copies import BlockCopier
from engine.runner.forward import CausalModel, ModelForward
from engine.runner.input_batch import InputBatch
from engine.runner.kv_tensors import CacheSize, KVTensors

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelPart:
    """A rank's shard of a model, with what it needs to compute steps.

    Attributes:
        model, backend, device: what computes steps, and where.
        free_memory: returns the bytes that are currently free, on the device and on the host.
        allocate: allocates this rank's shard of a cache. Raises if it does not fit.
    """

    model: CausalModel
    backend: AttentionBackend
    device: torch.device
    free_memory: Callable[[], Sequence[int]]
    allocate: Callable[[CacheSize], KVTensors]


@dataclass(frozen=True, slots=True)
class _Runner:
    """This rank's counterpart of one of rank 0's runners."""

    forward: ModelForward
    copier: BlockCopier


class Follower:
    """Computes what rank 0 sends, on the thread that calls it."""

    def __init__(self, part: ModelPart, ranks: Ranks) -> None:
        self._part = part
        self._ranks = ranks
        self._runners: dict[int, _Runner] = {}

    def follow(self) -> None:
        """Compute steps until rank 0 sends End.

        Raises:
            RanksLostError: a rank has failed, or ended unexpectedly.
        """
        if self._part.device.type == "cuda":
            torch.cuda.set_device(self._part.device)
        try:
            with torch.inference_mode():
                while self._go_on():
                    pass
        except Exception as error:
            raise RanksLostError(
                f"rank {self._ranks.place.rank} ends: it has failed, or another rank has "
                f"({type(error).__name__}: {error})"
            ) from error
        finally:
            self._ranks.leave()

    def _go_on(self) -> bool:
        match self._ranks.receive():
            case Begin() as begin:
                self._runners = {name: self._runners[name] for name in begin.live}
                self._ranks.least(self._part.free_memory())
            case Allocate() as plan:
                self._ranks.least([self._allocate(plan)])
            case Copies() as message:
                self._runners[message.runner].copier.run(message.copies)
            case RankStep() as step:
                self._runners[step.runner].forward.as_it_comes(step.inputs(), _nothing_carried)
            case End():
                return False
        return True

    def _allocate(self, plan: Allocate) -> bool:
        """Allocate a runner's cache. Return whether it fits."""
        part = self._part
        try:
            kv = part.allocate(plan)
        except (RuntimeError, MemoryError, OSError):
            logger.exception("the KV cache does not fit")
            return False
        self._runners[plan.runner] = _Runner(
            ModelForward(part.model, kv, part.backend),
            BlockCopier(kv),
        )
        return True


def _nothing_carried(inputs: InputBatch, token_ids: torch.Tensor) -> None:
    """Do nothing, because the message contains all tokens."""
