"""Rank 0 of a tensor-parallel model. It tells the other ranks what to compute, then computes its
own shard.

    ModelRunner ─┬─▶ LeadingCopier ── Copies ─────▶ other ranks      then it copies its own blocks
                 └─▶ LeadingForward ── RankStep ──▶ other ranks      then it computes its own shard

If the inputs of a step cannot be prepared, only its batch fails, as without ranks. After the step
has been sent, a failure leaves the other ranks at an unknown point inside the model's collectives,
so the engine and all ranks end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Iterator

import torch

from engine.attention.interface import AttentionBackend
from engine.contract.config import ContinuousBatchingConfig
from engine.contract.errors import ConfigError, InsufficientMemoryError, RanksLostError
from engine.kv_cache.copies import StepCopies
from engine.parallel.rank_messages import Allocate, Begin, Copies, End, Message, RankStep
from engine.parallel.ranks import Ranks
from engine.runner.block_copies import BlockCopier
from engine.runner.forward import CausalModel, ModelForward
from engine.runner.input_batch import InputBatch
from engine.runner.kv_tensors import CacheSize, KVTensors

logger = logging.getLogger(__name__)

_END_WAIT_S = 10.0
"""How long `end` waits for a running step."""


class Leader:
    """Leads the other ranks. All methods may be called from any thread."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._lock = threading.Lock()  # the collectives of two runners must not mix
        self._runner_ids = itertools.count(1)
        self._forwards: weakref.WeakValueDictionary[int, LeadingForward] = (
            weakref.WeakValueDictionary()
        )
        self._is_over = ""

    def begin(self, available: int, host_available: int) -> tuple[int, int, int]:
        """Begin to make a runner. The other ranks drop the caches of runners that no longer exist.

        Args:
            available, host_available: free bytes on this rank, on the device and on the host.

        Returns:
            The runner's id, and the bytes that are free on every rank (device, host).

        Raises:
            RanksLostError: the ranks no longer compute together.
        """
        runner_id = next(self._runner_ids)
        with self.telling(Begin(runner_id, tuple(self._forwards))):
            device, host = self._ranks.least([available, host_available])
        return runner_id, device, host

    def allocate(self, runner_id: int, plan: CacheSize, make: Callable[[], KVTensors]) -> KVTensors:
        """Allocate a cache on every rank, using `make` on this one.

        Raises:
            InsufficientMemoryError: the cache does not fit here, or on another rank.
            RanksLostError: the ranks no longer compute together.
        """
        with self.telling(Allocate.of(runner_id, plan)):
            kv, failure = None, None
            try:
                kv = make()
            except (RuntimeError, MemoryError, OSError) as error:
                failure = error
            (is_allocated,) = self._ranks.least([kv is not None])
        if failure is not None:
            raise InsufficientMemoryError(
                f"the KV cache does not fit on rank 0 ({failure}); lower num_blocks or "
                "max_memory_percent"
            ).naming("num_blocks", "max_memory_percent") from failure
        if kv is None or not is_allocated:
            raise InsufficientMemoryError(
                "the KV cache does not fit on one of the other ranks, whose log says why; lower "
                "num_blocks or max_memory_percent"
            ).naming("num_blocks", "max_memory_percent")
        return kv

    def forward(
        self, runner_id: int, model: CausalModel, kv: KVTensors, backend: AttentionBackend
    ) -> LeadingForward:
        """Make the forward pass of a runner."""
        self._forwards[runner_id] = forward = LeadingForward(self, runner_id, model, kv, backend)
        return forward

    def copier(self, runner_id: int, kv: KVTensors) -> BlockCopier:
        """Make the block copier of a runner."""
        return LeadingCopier(self, runner_id, kv)

    @staticmethod
    def config(config: ContinuousBatchingConfig) -> ContinuousBatchingConfig:
        """Return the options without features that a split model does not support.

        Raises:
            ConfigError: such a feature is explicitly enabled.
        """
        asked = {
            "use_async_batching": bool(config.use_async_batching),
            "use_cuda_graph": config.use_cuda_graph not in (None, False, (False, False)),
            "default_compile_level": config.default_compile_level > 0,
            "use_default_compile_configs": config.use_default_compile_configs,
            "varlen_compile_config": config.varlen_compile_config is not None,
            "decode_compile_config": config.decode_compile_config is not None,
        }
        for option, is_asked in asked.items():
            if is_asked:
                raise ConfigError(
                    option,
                    f"is {getattr(config, option)!r}, and tensor_parallel is auto: each rank "
                    "computes its steps as they come, one after the other; leave it out",
                ).naming("tensor_parallel")
        return dataclasses.replace(config, use_async_batching=False, use_cuda_graph=False)

    @contextlib.contextmanager
    def telling(self, message: Message) -> Iterator[None]:
        """Send a message to the other ranks. The `with` block then does the same work on this rank.

        Raises:
            RanksLostError: the ranks no longer compute together, or stopped doing so during the
                block.
        """
        with self._lock:
            if self._is_over:
                raise RanksLostError(self._is_over)
            try:
                self._ranks.send(message)
                yield
            except Exception as error:
                self._is_over = (
                    "a step failed after the other ranks had begun it, or one of them has ended; "
                    "start all of them again"
                )
                self._ranks.leave()
                raise RanksLostError(self._is_over) from error

    def end(self) -> None:
        """Tell the other ranks to end after the running step. Harmless if they have already
        ended.
        """
        if not self._lock.acquire(timeout=_END_WAIT_S):
            logger.warning("a step has not ended; the other ranks end with an error")
            return
        try:
            if self._is_over:
                return
            self._is_over = "the other ranks of this model were told to end"
            self._ranks.send(End())
            self._ranks.leave()
        except RuntimeError as error:
            logger.warning("another rank had ended before it was told to: %s", error)
        finally:
            self._lock.release()


class LeadingForward(ModelForward):
    """A forward pass that the other ranks also compute."""

    def __init__(
        self,
        leader: Leader,
        runner_id: int,
        model: CausalModel,
        kv: KVTensors,
        backend: AttentionBackend,
    ) -> None:
        super().__init__(model, kv, backend)
        self._leader = leader
        self.runner_id = runner_id

    def as_it_comes(
        self, inputs: InputBatch, fill_in: Callable[[InputBatch, torch.Tensor], None]
    ) -> torch.Tensor:
        """See ModelForward.

        Raises:
            RanksLostError: the ranks no longer compute together.
        """
        message = RankStep.of(self.runner_id, inputs)
        with self._leader.telling(message):
            return super().as_it_comes(inputs, fill_in)


class LeadingCopier(BlockCopier):
    """Copies blocks on all ranks."""

    def __init__(self, leader: Leader, runner_id: int, kv: KVTensors) -> None:
        super().__init__(kv)
        self._leader = leader
        self._runner_id = runner_id

    def run(self, copies: StepCopies) -> None:
        """See BlockCopier.

        Raises:
            RanksLostError: the ranks no longer compute together.
        """
        with self._leader.telling(Copies(self._runner_id, copies)):
            super().run(copies)
