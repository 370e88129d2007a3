"""Assembles an engine from a verified model, a KV cache, a scheduler and a loop. No other module
knows all of these components.

    build_core ─┬─▶ build_loop              for the service: outputs go to a sink
                └─▶ api.build_manager       for the Python API
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from engine.contract.config import ContinuousBatchingConfig, target_step_time
from engine.contract.errors import InsufficientMemoryError
from engine.contract.startup import VOCABULARY, enter
from engine.core.admission import AdmissionLimits
from engine.core.engine_core import EngineCore
from engine.core.loop import EngineLoop, StepSink
from engine.drafts.drafter import DEFAULT_DRAFTS, SOURCES, Drafter
from engine.kv_cache.kv_cache_manager import KVCacheManager
from engine.loading.memory import CachePlan
from engine.loading.running import build_runner, row_times
from engine.loading.verified import VerifiedModel
from engine.scheduler.pace import StepPace
from engine.scheduler.policies import scheduler_class
from engine.text import Tokenizer

if TYPE_CHECKING:
    from engine.structured import GrammarCompiler


def build_core(
    verified: VerifiedModel,
    config: ContinuousBatchingConfig,
    progress: Callable[[str], None],
) -> tuple[EngineCore, AdmissionLimits, CachePlan]:
    """Allocate the KV cache and build an engine around it.

    Raises:
        ConfigError: the scheduler_type is unknown.
        InsufficientMemoryError: the KV cache does not fit, or is too small even for a short
            request.
    """
    loaded = build_runner(verified, config, progress)
    plan = loaded.plan
    kv_cache = KVCacheManager(
        loaded.groups,
        plan.num_blocks,
        plan.block_size,
        share_blocks=config.allow_block_sharing,
        host_blocks=plan.host_blocks,
    )
    policy = scheduler_class(config.scheduler_type)
    limits = AdmissionLimits(
        vocab_size=verified.vocab_size,
        model_context=verified.context_length,
        cache_context=kv_cache.max_tokens_per_request(plan.max_batch_tokens),
        heeds_priorities=policy.heeds_priorities,
        adapters=verified.adapters,
    )
    if limits.max_context_tokens < 2:
        raise InsufficientMemoryError(
            "num_blocks: the KV cache holds not even a prompt of one token and one more; raise it"
        ).naming("num_blocks")
    scheduler = policy(
        kv_cache,
        max_batch_tokens=plan.max_batch_tokens,
        max_requests_per_batch=plan.max_requests,
        safety_margin=config.safety_margin,
    )
    target_s = target_step_time(config, verified.device.type)
    if target_s > 0:
        sizes = loaded.padded_sizes
        scheduler.pace = StepPace(
            target_s, plan.block_size, None if sizes is None else sizes.at_most
        )
        progress(f"steps in which requests decode aim at {target_s * 1e3:g} ms")
    scheduler.drafter = _drafter(verified, config, loaded.overlap, target_s, progress)
    core = EngineCore(
        scheduler,
        loaded.runner,
        max_context_tokens=limits.max_context_tokens,
        overlap=loaded.overlap,
        rope=verified.rope,
        adapters=verified.adapters,
    )
    return core, limits, plan


def _drafter(
    verified: VerifiedModel,
    config: ContinuousBatchingConfig,
    overlap: bool,
    target_s: float,
    progress: Callable[[str], None],
) -> Drafter | None:
    """Return what guesses tokens, or None, with a line in the log that says why."""
    if config.speculation == "off":
        return None
    reason = why_no_drafts(verified, is_asked=config.speculation != "auto", overlap=overlap)
    if reason is not None:
        progress(f"no speculation: {reason}")
        return None
    times = row_times(verified, config)
    free = max(count for count, seconds in zip(times.counts, times.seconds, strict=True)
               if seconds <= 1.05 * times.seconds[0])  # fmt: skip
    progress(f"speculation: a step of {free} rows takes hardly longer than one of one")
    return Drafter(
        times,
        sources=tuple(SOURCES) if config.speculation == "auto" else (config.speculation,),
        max_drafts=config.max_drafts or DEFAULT_DRAFTS,
        target_s=target_s,
    )


def why_no_drafts(verified: VerifiedModel, *, is_asked: bool, overlap: bool) -> str | None:
    """Return why drafts would not help or would change tokens, or None if they may be tried.

    Args:
        verified: the model.
        is_asked: whether the option names a source.
        overlap: whether the next step is launched before the last one's tokens are known.
    """
    if verified.leader is not None:
        return "the model is divided among processes"
    if verified.probe.recurrence.shapes:
        return "its recurrent layers cannot go back behind a wrong guess"
    if overlap:
        return "the next step is launched before the tokens of the last one are known"
    if verified.device.type != "cpu":
        told = f"it is not measured on {verified.device.type}; name a source to have it"
        return None if is_asked else told
    if verified.decoder is None and verified.dtype is not torch.float32:
        return (
            f"products of {verified.dtype} in torch depend on how many rows are computed together"
        )
    return None


def build_loop(
    verified: VerifiedModel,
    config: ContinuousBatchingConfig,
    progress: Callable[[str], None],
    *,
    sink: StepSink,
    tokenizer: Tokenizer | None = None,
) -> tuple[EngineLoop, AdmissionLimits, CachePlan]:
    """Build an engine whose outputs go to `sink`.

    The other arguments are those of `build_core` and EngineLoop.

    Args:
        tokenizer: used for structured output. If None, structured output is refused.
    """
    core, limits, plan = build_core(verified, config, progress)
    compiler = grammar_compiler(verified, tokenizer)
    if compiler is not None:
        enter(progress, VOCABULARY)
        progress("reading the vocabulary")  # load it now: later, running requests would wait for it
        compiler.warm_up()
    loop = EngineLoop(
        core,
        limits,
        sink=sink,
        max_queue_size=config.max_queue_size,
        compile_grammar=None if compiler is None else compiler.begin,
    )
    return loop, limits, plan


def grammar_compiler(
    verified: VerifiedModel, tokenizer: Tokenizer | None
) -> GrammarCompiler | None:
    """Return the grammar compiler, or None if there is no tokenizer."""
    if tokenizer is None:
        return None
    from engine.structured import GrammarCompiler  # without a tokenizer llguidance is not needed

    return GrammarCompiler(tokenizer, verified.vocab_size)
