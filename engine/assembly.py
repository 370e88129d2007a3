"""Wires a verified model, a cache and the parts above into a manager: the one place where all of
them meet.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.admission import AdmissionLimits
from engine.config import ContinuousBatchingConfig
from engine.core import EngineCore
from engine.errors import InsufficientMemoryError
from engine.generation_options import GenerationDefaults
from engine.kv_cache.manager import KVCacheManager
from engine.manager import ContinuousBatchingManager, StepSink
from engine.results import StopFinder
from engine.runner.loader import VerifiedModel, build_runner
from engine.runner.memory import CachePlan
from engine.scheduler.registry import scheduler_class
from engine.text import TextStream, Tokenizer
from engine.types import TokenId


def build_manager(
    verified: VerifiedModel,
    config: ContinuousBatchingConfig,
    progress: Callable[[str], None],
    *,
    sink: StepSink | None = None,
    defaults: GenerationDefaults | None = None,
    tokenizer: Tokenizer | None = None,
) -> tuple[ContinuousBatchingManager, AdmissionLimits, CachePlan]:
    """Allocate the KV cache and wire a manager around it.

    Args:
        sink, defaults: see ContinuousBatchingManager.
        tokenizer: for stop strings of the offline API; None: they are refused.

    Raises:
        InsufficientMemoryError: the KV cache does not fit, or holds not even a short request.
    """
    loaded = build_runner(verified, config, progress)
    plan = loaded.plan
    kv_cache = KVCacheManager(
        loaded.groups,
        plan.num_blocks,
        plan.block_size,
        share_blocks=config.allow_block_sharing,
        host_slots=plan.host_slots,
    )
    limits = AdmissionLimits(
        vocab_size=verified.vocab_size,
        model_context=verified.context_length,
        cache_context=kv_cache.max_tokens_per_request(plan.max_batch_tokens),
    )
    if limits.max_context_tokens < 2:
        raise InsufficientMemoryError(
            "num_blocks: the KV cache holds not even a prompt of one token and one more; raise it"
        )
    scheduler = scheduler_class(config.scheduler_type)(
        kv_cache,
        max_batch_tokens=plan.max_batch_tokens,
        max_requests_per_batch=plan.max_requests,
        safety_margin=config.safety_margin,
    )
    core = EngineCore(
        scheduler,
        loaded.runner,
        max_context_tokens=limits.max_context_tokens,
        overlap=loaded.overlap,
    )
    manager = ContinuousBatchingManager(
        core,
        limits,
        max_queue_size=config.max_queue_size,
        sink=sink,
        defaults=defaults,
        per_request_processors=config.per_request_processors,
        make_stop_finder=None if tokenizer is None else _StopFinders(tokenizer),
    )
    return manager, limits, plan


class _StopFinders:
    """Makes a stop string finder for a request."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __call__(self, stop_strings: tuple[str, ...]) -> StopFinder:
        stream = TextStream(self._tokenizer, stop_strings=stop_strings)

        def find(token_ids: tuple[TokenId, ...]) -> int | None:
            stop = stream.push(token_ids).stop
            return None if stop is None else stop.num_tokens

        return find
