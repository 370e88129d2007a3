"""Plans the memory, the speed and the resulting options of a server for a model.

path ─▶ Outline ─┬─▶ MemoryPlan ─▶ Room ───────────────────┬─▶ Plan
                 └─▶ Rehearsal, or Rates ─▶ ExpectedTimes ─┘
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from engine.contract.config import ContinuousBatchingConfig, LoadConfig, block_size_on
from engine.contract.errors import ConfigError, ModelRefusedError
from engine.loading.adapters.adapter_loading import why_not_computed
from engine.loading.checkpoint import resolve_path
from engine.loading.loader import set_threads
from engine.loading.memory import CachePlan
from engine.planning.adapter_plan import AdapterPlan
from engine.planning.expected_times import ExpectedTimes, Rates
from engine.planning.memory_plan import MemoryPlan, Room, blocks_for, plan_memory, room
from engine.planning.outline import Outline, read_outline
from engine.planning.plan_request import DEFAULT_OUTPUT, DEFAULT_PROMPT, DEFAULT_RANK, Wanted
from engine.planning.rehearsal import Rehearsal

DECODES = (1, 16, 64)
"""The numbers of requests in the decode steps whose times are reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTime:
    """The time of a decode step in seconds, with its number of requests."""

    requests: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Expected times.

    Attributes:
        rates: the given rates, or None if steps were run on this machine.
        context: the number of tokens before the one that each request computes in a decode step.
        decode: the decode steps, by number of requests.
        prompt_tokens, prefill_s: the length of a prompt, and its time in seconds.
    """

    rates: Rates | None
    context: int
    decode: tuple[DecodeTime, ...]
    prompt_tokens: int
    prefill_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A plan.

    Attributes:
        config: the planned options: those that were given, and with `Wanted.requests` also the
            number of blocks and requests that follow from it.
        times: None if no rates were given and no steps were run.
        adapters: the adapters that are loaded at the same time; None: there are none.
    """

    config: ContinuousBatchingConfig
    outline: Outline
    memory: MemoryPlan
    room: Room
    times: Times | None
    adapters: AdapterPlan | None


def make_plan(
    model: str,
    config: ContinuousBatchingConfig,
    load_config: LoadConfig,
    wanted: Wanted,
    progress: Callable[[str], None],
) -> Plan:
    """Plan a server for a model.

    Args:
        model: a directory or a hub id. From the hub, only the config is downloaded.
        config, load_config: the options of the server.
        wanted: the questions that the plan answers.
        progress: receives a line for each stage.

    Raises:
        ModelRefusedError: a server would refuse the model, or it cannot be planned.
        ConfigError: an option asks for something that is not available here, or for adapters that
            this model cannot have.
        InsufficientMemoryError: the KV cache does not fit.
    """
    path = resolve_path(model, progress, needs_weights=False)
    progress(f"reading {path}")
    outline = read_outline(path, load_config)
    set_threads(load_config, outline.device, 1)
    prompt_tokens, output_tokens = _length(outline, wanted)
    if wanted.requests is not None:
        size = block_size_on(config, outline.device.type)
        config = _for_requests(config, wanted.requests, prompt_tokens + output_tokens, size)
    adapters = _adapters(outline, wanted)
    adapter_bytes = 0 if adapters is None else adapters.total_bytes
    memory = plan_memory(outline, config, wanted.memory, adapter_bytes)
    found = room(outline, memory.cache, prompt_tokens, output_tokens)
    return Plan(
        config=config,
        outline=outline,
        memory=memory,
        room=found,
        times=_times(outline, memory.cache, found, wanted, load_config, adapters, progress),
        adapters=adapters,
    )


def _adapters(outline: Outline, wanted: Wanted) -> AdapterPlan | None:
    """Return the adapters that are wanted, or None.

    Raises:
        ConfigError: a server of this model has none.
    """
    if not wanted.num_adapters:
        return None
    reason = why_not_computed(outline.device, outline.dtype)
    if reason is None and not outline.adaptable:
        reason = "the model has no linear layer that they may change"
    if reason is not None:
        raise ConfigError("num_adapters", f"cannot be served here: {reason}")
    return AdapterPlan(
        count=wanted.num_adapters,
        rank=wanted.adapter_rank or DEFAULT_RANK,
        layers=outline.adaptable,
        dtype=outline.dtype,
    )


def _for_requests(
    config: ContinuousBatchingConfig, requests: int, tokens: int, block_size: int
) -> ContinuousBatchingConfig:
    """Return options with which this number of requests can run at once.

    Raises:
        ConfigError: the options already set the number of blocks or requests.
    """
    for name in ("num_blocks", "max_requests_per_batch"):
        if getattr(config, name) is not None:
            raise ConfigError(name, "follows from requests; leave one of them out").naming(
                "requests"
            )
    blocks = blocks_for(requests, tokens, block_size)
    return replace(config, num_blocks=blocks, max_requests_per_batch=requests)


def _length(outline: Outline, wanted: Wanted) -> tuple[int, int]:
    context = outline.context_length
    prompt = wanted.prompt_tokens or min(DEFAULT_PROMPT, max(1, context // 2))
    output = wanted.output_tokens or min(DEFAULT_OUTPUT, max(1, context - prompt))
    if prompt + output > context:
        raise ConfigError(
            "prompt_tokens",
            f"is {prompt}, and with {output} of output that is more than the {context} tokens "
            "that the model allows; lower prompt_tokens or output_tokens",
        ).naming("output_tokens", "prompt_tokens")
    return prompt, output


def _times(
    outline: Outline,
    cache: CachePlan,
    found: Room,
    wanted: Wanted,
    load_config: LoadConfig,
    adapters: AdapterPlan | None,
    progress: Callable[[str], None],
) -> Times | None:
    context = found.prompt_tokens + found.output_tokens // 2
    most = max(1, found.requests)
    counts = sorted({count for count in DECODES if count < most} | {most})
    rates = None
    try:
        steps: ExpectedTimes | Rehearsal
        if wanted.bandwidth is not None and wanted.rate is not None:
            rates = Rates(wanted.bandwidth, wanted.rate)
            steps = ExpectedTimes(outline, rates, cache.max_batch_tokens, adapters)
        elif wanted.measures and outline.device.type == "cpu":
            progress("running its steps with made-up weights: some seconds")
            steps = Rehearsal(
                outline, load_config, cache.block_size, cache.max_batch_tokens, adapters
            )
        else:
            return None
        return Times(
            rates=rates,
            context=context,
            decode=tuple(
                DecodeTime(requests=count, seconds=steps.decode_s(count, context))
                for count in counts
            ),
            prompt_tokens=found.prompt_tokens,
            prefill_s=steps.prefill_s(found.prompt_tokens),
        )
    except ModelRefusedError as error:
        progress(f"no times: {error}")
        return None
