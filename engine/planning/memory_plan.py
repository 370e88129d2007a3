"""Plans how a server's memory will be used, before the server is started.

    this process, with torch and the model's modules        the engine's process without a model
    what a tokenizer and a vocabulary add to it             the same in the server's processes
    Outline ─▶ weights
    plan_cache, as the loader calls it ─▶ the KV cache

On a CPU, the system provides a KV cache's memory only when tokens are written. So a server uses
less at first, and all of it once the cache has been full (retained prefixes count).
"""

from __future__ import annotations

from dataclasses import dataclass

import psutil
import torch

from engine.contract.config import ContinuousBatchingConfig
from engine.kv_cache.groups import growth_blocks
from engine.loading.memory import CachePlan, HostLimits, plan_cache, step_limits
from engine.planning.outline import Outline
from engine.runner.buckets import MOST_MIXED_TOKENS
from engine.sampling.plain import draw_bytes
from engine.text import Tokenizer, TokenizerError

MIB = 1 << 20
FRONT_END_BYTES = 80 * MIB
"""The measured memory of the server's process without a tokenizer."""
CUDA_CONTEXT_BYTES = 512 * MIB
"""The assumed memory that a process uses on a CUDA device before it allocates anything."""
_ENGINE_BYTES = 48 * MIB
"""The memory of the engine's process beyond that of this process now: kernels, loop, buffers."""
_KERNELS = 1024
"""The maximum number of compiled matrix products in torch's cache, which is oneDNN's own limit."""
_KERNEL_BYTES = 768 << 10
"""The memory of one compiled matrix product. Measurements range from 0.3 to 1.5 MiB."""
_SAMPLED_BYTES = 14
"""The bytes per logit of a sampled row: the logit, its float32 copy, and two temporaries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """How memory will be used, in bytes. With a model on CUDA, `weights`, `step` and the cache are
    on the device.

    Attributes:
        total: the available memory: the given amount, or what is free on this machine now.
        is_given: whether the amount was given.
        front_end: the server's process.
        engine: the engine's process without the model.
        weights: the weights, as the engine stores them.
        step: the temporaries of the largest step.
        adapters: all adapters together.
        cache: the plan of the KV cache.
    """

    total: int
    is_given: bool
    front_end: int
    engine: int
    weights: int
    step: int
    adapters: int
    cache: CachePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """How many requests of a given length can run at once.

    Attributes:
        prompt_tokens, output_tokens: the length.
        request_bytes: the KV cache of one request at its end, in whole blocks.
        cache_requests: the number of requests that the cache can hold.
        requests: the same, limited by the maximum number of running requests.
    """

    prompt_tokens: int
    output_tokens: int
    request_bytes: int
    cache_requests: int
    requests: int


def own_bytes() -> int:
    """Return the memory of this process in bytes."""
    return int(psutil.Process().memory_info().rss)


def tokenizer_bytes(outline: Outline) -> tuple[int, int]:
    """Measure a tokenizer's memory in a process, and that of structured output in the engine's
    process.

    Both are measured by loading them. Return 0, 0 if there is no tokenizer.
    """
    before = own_bytes()
    try:
        tokenizer = Tokenizer.load(outline.checkpoint.path, outline.vocab_size)
    except TokenizerError:
        return 0, 0
    loaded = own_bytes()
    from engine.structured import GrammarCompiler

    compiler = GrammarCompiler(tokenizer, outline.vocab_size)
    compiler.warm_up()
    return max(0, loaded - before), max(0, own_bytes() - loaded)


def plan_memory(
    outline: Outline, config: ContinuousBatchingConfig, memory: int | None, adapters: int = 0
) -> MemoryPlan:
    """Plan a server's memory.

    Args:
        outline: the model.
        config: the engine's options.
        memory: the bytes available to the server, on the device with CUDA. None for what is free on
            this machine now.
        adapters: the bytes of all adapters together, for which the loader leaves room.

    Raises:
        InsufficientMemoryError: the KV cache does not fit.
    """
    base = own_bytes()
    tokenizer, vocabulary = tokenizer_bytes(outline)
    limits = HostLimits.read()
    host = limits.memory_available + own_bytes()
    if limits.memory_limit is not None:  # some of this process's memory counts elsewhere
        host = min(host, limits.memory_limit)
    front_end, engine = FRONT_END_BYTES + tokenizer, base + _ENGINE_BYTES + tokenizer + vocabulary
    step = step_bytes(outline, config)
    on_cuda = outline.device.type == "cuda"
    total = host if memory is None else memory
    if on_cuda:
        if memory is None:
            total = torch.cuda.mem_get_info(outline.device)[0]
        available = total - CUDA_CONTEXT_BYTES - outline.weight_bytes
        host_available = host - front_end - engine
    else:
        # The loader sizes the cache before it reads the vocabulary.
        available = total - front_end - (engine - vocabulary) - outline.weight_bytes - adapters
        # Nor does it know of kernels, which come with prompts.
        engine += kernel_bytes(outline)
        host_available = available
    cache = plan_cache(
        config,
        outline.groups,
        device=outline.device,
        model_context=outline.context_length,
        available=max(0, available),
        host_available=max(0, host_available),
        step_bytes=step if on_cuda else 0,
    )
    return MemoryPlan(
        total=total,
        is_given=memory is not None,
        front_end=front_end,
        engine=engine,
        weights=outline.weight_bytes,
        step=step,
        adapters=adapters,
        cache=cache,
    )


def kernel_bytes(outline: Outline) -> int:
    """Return the memory of the compiled matrix products that torch keeps in the engine's process.

    For bfloat16 on a CPU, torch keeps one for each shape and number of rows, unless our kernels
    compute the products. The number of rows varies freely for experts and for the chunks of
    prompts.
    """
    ours = outline.packing is not None and outline.packing.is_ours and not outline.experts
    if outline.device.type != "cpu" or outline.dtype is not torch.bfloat16 or ours:
        return 0
    return _KERNELS * _KERNEL_BYTES


def step_bytes(outline: Outline, config: ContinuousBatchingConfig) -> int:
    """Estimate what the largest step needs in addition to weights and KV cache, in bytes."""
    limits = step_limits(config, outline.device)
    widest = max(outline.widest, outline.hidden)
    tokens, logits = limits.max_batch_tokens, limits.max_requests * outline.vocab_size
    size = outline.dtype.itemsize
    graphs = 0
    if outline.device.type == "cuda" and config.use_cuda_graph in (None, True):
        # Captured steps have their own results, a place for their logits, and what draws need.
        graphs = logits * 2 * size + draw_bytes(
            limits.max_requests, outline.vocab_size, outline.dtype
        )
        tokens += min(tokens, MOST_MIXED_TOKENS)
    return tokens * (2 * outline.hidden + 3 * widest) * size + logits * _SAMPLED_BYTES + graphs


def room(outline: Outline, cache: CachePlan, prompt_tokens: int, output_tokens: int) -> Room:
    """Return how many requests of a given length can run at once."""
    tokens = prompt_tokens + output_tokens
    fits, held, smallest = [], 0, _smallest_pool(outline, cache)
    for group, count in zip(outline.groups, cache.num_blocks, strict=True):
        need = group.kind.most_blocks(tokens, 1, cache.block_size)
        held += need * group.block_bytes(cache.block_size)
        found = count // need
        while (
            group.kind.grows
            and found > 1
            and (found * need + growth_blocks(found - 1, smallest) > count)
        ):
            found -= 1
        fits.append(found)
    return Room(
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        request_bytes=held,
        cache_requests=min(fits),
        requests=min(*fits, cache.max_requests),
    )


def _smallest_pool(outline: Outline, cache: CachePlan) -> int:
    counts = zip(outline.groups, cache.num_blocks, strict=True)
    return min((count for group, count in counts if group.kind.grows), default=0)


def blocks_for(requests: int, tokens: int, block_size: int) -> int:
    """Return how many blocks are needed to run these requests at once, each ending with `tokens`
    tokens.
    """
    blocks = requests * -(-tokens // block_size)
    # A ninth of these is a tenth of all.
    return blocks + min(requests - 1, -(-blocks // 9))
