"""Builds a runner around a verified model: measures its largest step, and sizes and allocates the
cache.

    VerifiedModel ─▶ measure_step ─▶ plan_cache ─▶ KVTensors ─▶ ModelRunner

If the model is split (`engine.parallel.ranks`), rank 0 builds the runner, and the others follow it.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

from engine.attention.registry import (
    check_block_size,
)
from engine.contract.config import (
    ContinuousBatchingConfig,
    block_size_on,
)
from engine.contract.errors import ConfigError
from engine.contract.startup import CACHE, enter
from engine.drafts.row_costs import RowTimes
from engine.kv_cache.groups import LayerGroup
from engine.loading.compile import compile_model, compile_options
from engine.loading.kv_memory import allocate_kv, make_groups
from engine.loading.memory import (
    CachePlan,
    HostLimits,
    StepLimits,
    cache_sizes,
    plan_cache,
    step_limits,
)
from engine.loading.profiling import (
    DeviceMemory,
    device_memory,
    fitting_step,
    measure_graphs,
    measure_rows,
    measure_step,
)
from engine.loading.verified import VerifiedModel
from engine.runner.buckets import Sizes
from engine.runner.cuda_graph import CapturingBackend, CudaCapture, GraphBackend
from engine.runner.forward import ModelForward
from engine.runner.kv_tensors import KVTensors
from engine.runner.model_runner import ModelRunner
from engine.runner.runner_options import resolve_options
from engine.sampling.sampler import Sampler


@dataclass(frozen=True, slots=True)
class LoadedRunner:
    """A runner around a verified model, with its KV cache's groups and size.

    Attributes:
        overlap: whether the runner has two sets of input buffers, so that the core may launch a
            step before it collects the previous one.
        padded_sizes: the sizes in tokens to which steps with prompts are padded, or None if they
            are not padded.
    """

    runner: ModelRunner
    groups: tuple[LayerGroup, ...]
    plan: CachePlan
    overlap: bool
    padded_sizes: Sizes | None


def build_runner(
    verified: VerifiedModel,
    config: ContinuousBatchingConfig,
    progress: Callable[[str], None],
    *,
    graphs: GraphBackend | None = None,
    memory: DeviceMemory | None = None,
) -> LoadedRunner:
    """Size and allocate the KV cache, and build a runner around a verified model.

    Args:
        verified: the model.
        config: the options.
        progress: receives one line for each stage.
        graphs: captures steps. If None, CUDA graphs are used for a model on CUDA.
        memory: the memory of the model's device. If None, it is read from the device.

    Raises:
        ConfigError: an option requests something that the device does not support.
        InsufficientMemoryError: the KV cache, or even a single step, does not fit.
        RanksLostError: the model is split, and another rank has ended.
    """
    enter(progress, CACHE)
    probe, device, leader = verified.probe, verified.device, verified.leader
    check_block_size(verified.backend, block_size_on(config, device.type))
    groups = make_groups(probe.shapes, probe.dtype, probe.recurrence)
    can_capture = not probe.recurrence.shapes and (graphs is not None or device.type == "cuda")
    runner_id, step_bytes = 0, 0
    if leader is None:
        memory = memory or device_memory(device)
        config, step_bytes = _largest_step(verified, config, memory)
        step_bytes += _graph_bytes(verified, config, groups, memory, can_capture=can_capture)
        available, host_available = memory.available(), HostLimits.read().memory_available
    else:
        # No step is measured, because the other ranks can only follow one when they have a cache.
        config = leader.config(config)
        runner_id, available, host_available = leader.begin(*free_memory(verified))
    plan = plan_cache(
        config,
        groups,
        device=device,
        model_context=verified.context_length,
        available=available,
        host_available=host_available,
        step_bytes=step_bytes,
    )
    options = resolve_options(
        config,
        device=device.type,
        can_capture=can_capture,
        max_blocks=_longest_in_blocks(groups, plan, verified.context_length),
        max_tokens=plan.max_batch_tokens,
        max_requests=plan.max_requests,
    )

    def allocate() -> KVTensors:
        return allocate_kv(probe.shapes, groups, plan, probe.dtype, device, probe.recurrence)

    kv = allocate() if leader is None else leader.allocate(runner_id, plan, allocate)
    _report_sizes(plan, groups, progress)
    if graphs is None and device.type == "cuda" and options.captured_paths:
        graphs = CapturingBackend(CudaCapture(device))
    runner = ModelRunner(
        _compiled_forward(verified, config, kv)
        if leader is None
        else leader.forward(runner_id, verified.model, kv, verified.backend),
        sampler=Sampler(probe.logits[0].shape[-1], device),
        options=options,
        rope=verified.rope,
        copier=None if leader is None else leader.copier(runner_id, kv),
        graphs=graphs,
        progress=progress,
    )
    return LoadedRunner(
        runner,
        groups,
        plan,
        overlap=options.num_input_buffers > 1,
        padded_sizes=options.padded_sizes,
    )


def _report_sizes(
    plan: CachePlan, groups: tuple[LayerGroup, ...], progress: Callable[[str], None]
) -> None:
    progress(
        f"KV cache: {plan.total_bytes / 2**20:.0f} MiB, "
        + cache_sizes(groups, plan.num_blocks, plan.block_size)
    )
    if plan.host_bytes:
        progress(
            f"KV offload: {plan.host_bytes / 2**20:.0f} MiB of host memory, "
            + cache_sizes(groups, plan.host_blocks, plan.block_size)
        )


def _largest_step(
    verified: VerifiedModel,
    config: ContinuousBatchingConfig,
    memory: DeviceMemory,
) -> tuple[ContinuousBatchingConfig, int]:
    """Return the config and the memory of the largest step.

    The memory is measured once for each model and step size. If the config leaves max_batch_tokens
    open, the returned config has as many as the memory allows.
    """
    device = verified.device
    block_size = block_size_on(config, device.type)

    def measure(limits: StepLimits) -> int:
        measured = (limits, block_size)
        if measured not in verified.step_bytes:
            verified.step_bytes[measured] = measure_step(
                memory,
                verified.steps,
                verified.backend,
                verified.probe,
                device=device,
                limits=limits,
                block_size=block_size,
                model_context=verified.context_length,
            )
        return verified.step_bytes[measured]

    limits = step_limits(config, device)
    if config.max_batch_tokens is not None:
        return config, measure(limits)
    limits, step_bytes = fitting_step(measure, limits, memory.available())
    return replace(config, max_batch_tokens=limits.max_batch_tokens), step_bytes


def row_times(verified: VerifiedModel, config: ContinuousBatchingConfig) -> RowTimes:
    """Return the times of decode steps, measured once for each model and block size."""
    block_size = block_size_on(config, verified.device.type)
    if block_size not in verified.row_times:
        measure = partial(
            measure_rows,
            verified.steps,
            verified.backend,
            verified.probe,
            device=verified.device,
            block_size=block_size,
            model_context=verified.context_length,
        )
        # In a thread that ends. Each thread that computes has OpenMP threads of its own as long as
        # it lives, and once there are more of them than CPUs, all of them sleep between two
        # products: steps on another thread than this one took 1.7 times as long.
        with ThreadPoolExecutor(1) as thread:
            verified.row_times[block_size] = thread.submit(measure).result()
    return verified.row_times[block_size]


def _graph_bytes(
    verified: VerifiedModel,
    config: ContinuousBatchingConfig,
    groups: tuple[LayerGroup, ...],
    memory: DeviceMemory,
    *,
    can_capture: bool,
) -> int:
    """Return the memory of captured steps, measured once for each model and its options."""
    limits = step_limits(config, verified.device)
    block_size = block_size_on(config, verified.device.type)
    options = resolve_options(
        config,
        device=verified.device.type,
        can_capture=can_capture,
        max_blocks=-(-verified.context_length // block_size),
        max_tokens=limits.max_batch_tokens,
        max_requests=limits.max_requests,
    )
    measured = (options, block_size)
    if measured not in verified.step_bytes:
        verified.step_bytes[measured] = measure_graphs(
            memory,
            verified.steps,
            verified.backend,
            verified.probe,
            groups,
            device=verified.device,
            options=options,
            block_size=block_size,
        )
    return verified.step_bytes[measured]


def free_memory(verified: VerifiedModel) -> tuple[int, int]:
    """Return the bytes that a KV cache could take now on this process's device and on its host.

    Processes on the same host share its memory evenly.
    """
    sharers = 1 if verified.ranks is None else verified.ranks.place.local_world_size
    device_sharers = sharers if verified.device.type == "cpu" else 1
    # Adapters that may come later have their part.
    host = HostLimits.read().memory_available - verified.adapters.awaited_bytes
    device = device_memory(verified.device).available() - verified.adapters.awaited_bytes
    return max(device, 0) // device_sharers, max(host, 0) // sharers


def _compiled_forward(
    verified: VerifiedModel, config: ContinuousBatchingConfig, kv: KVTensors
) -> ModelForward:
    fallback = getattr(verified.original.generation_config, "compile_config", None)
    options = compile_options(config, fallback)
    if options and verified.adapters.are_served:
        source = next(iter(options.values())).source
        raise ConfigError(source, "models with adapters are not compiled; leave one of them out")
    if options and verified.probe.recurrence.shapes:
        source = next(iter(options.values())).source
        raise ConfigError(source, "models with recurrent layers are not compiled; leave it out")
    compiled = compile_model(verified.model, options, verified.device)
    return ModelForward(verified.steps, kv, verified.backend, compiled)


def _longest_in_blocks(groups: tuple[LayerGroup, ...], plan: CachePlan, context: int) -> int:
    """Return the number of blocks of the longest request that model and cache allow."""
    full = [
        count
        for count, group in zip(plan.num_blocks, groups, strict=True)
        if group.window is None and group.kind.grows
    ]
    return min([-(-context // plan.block_size), *full])
