"""Measures the memory that a step needs besides weights and KV cache, before the cache is sized;
and what rows of drafts cost.

    largest step (max_batch_tokens, max_requests_per_batch) ─▶ run, with a cache of one block
        ─▶ its peak memory ─▶ is left free (`engine.loading.memory.plan_cache`)

    the largest captured steps ─▶ run in the same way: graphs have separate memory

If max_batch_tokens is not given, smaller steps are tried until one leaves most of the memory free.

On CUDA, the cache takes nearly all free memory, so the needs of a step must be known. On a CPU, the
cache is sized for the allowed concurrency and leaves half of the memory free, so no step is run.

    decode steps with 1, 2, 3, … rows ─▶ RowTimes: how many drafts are free, how many may pay
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from typing_extensions import override

from engine.attention.interface import AttentionBackend
from engine.attention.small_cache import SmallCache, Span, zeros
from engine.contract.errors import InsufficientMemoryError
from engine.contract.request import Request
from engine.contract.sampling_params import SamplingParams
from engine.contract.token_ids import TokenIds
from engine.contract.types import TokenId
from engine.drafts.row_costs import RowTimes
from engine.kv_cache.groups import LayerGroup
from engine.loading.kv_memory import allocate_caches
from engine.loading.memory import GIB, HostLimits, StepLimits
from engine.models.recording import Observation
from engine.runner.captured import CapturedSteps
from engine.runner.cuda_graph import GraphBackend
from engine.runner.device import step_device
from engine.runner.forward import CausalModel, ModelForward
from engine.runner.kv_tensors import KVTensors
from engine.runner.runner_options import RunnerOptions
from engine.sampling.sampler import Sampler

_SAMPLING = SamplingParams(temperature=1.0, top_k=1000, top_p=0.9, repetition_penalty=1.1)
"""The common sampling that needs the most memory, because it processes whole rows and counts
tokens. It also compiles the sampling kernels before the first request needs them.
"""

_STEP_SHARE = 0.25
"""The share of free memory that a step may take if its size is not given. The rest is for the KV
cache, without which a large step would have nothing to compute.
"""
_LEAST_BATCH_TOKENS = 512

_ROWS = (1, 2, 4, 5, 6, 7, 8, 9, 12, 13, 16, 18, 20, 24, 32, 64)
"""The numbers of rows that are measured. Kernels compute rows in tiles of four, six or more."""
_FAR_ROWS = (1, 6)
"""The numbers of rows that are measured with much context."""
_FAR = 512
"""That context, in tokens."""
_PASSES = 8
"""The most times that each is measured; the shortest time counts, because delays only add."""
_MOST_SECONDS = 1.5
"""No further pass is begun after this time, from the third on. The first one also warms up."""


class DeviceMemory(Protocol):
    """A device's memory, as seen by one process."""

    def available(self) -> int:
        """Return the bytes that a cache could take now."""

    def peak(self, run: Callable[[], None]) -> int:
        """Return the peak increase of memory use in bytes while `run` runs.

        Returns 0, without calling `run`, if the device's memory is not measured.

        Raises:
            torch.OutOfMemoryError: there was not enough memory.
        """


class HostMemory(DeviceMemory):
    """The memory of the host, within the container's limit."""

    @override
    def available(self) -> int:
        return HostLimits.read().memory_available

    def peak(self, run: Callable[[], None]) -> int:
        """Return 0, because nothing is measured."""
        return 0


class CudaMemory:
    """The memory of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def available(self) -> int:
        """See DeviceMemory. Unused memory that torch has cached is freed first."""
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self._device)
        return int(free)

    def peak(self, run: Callable[[], None]) -> int:
        """See DeviceMemory. Counts what torch allocates from the device, including
        fragmentation.
        """
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        run()
        torch.cuda.synchronize(self._device)
        return int(torch.cuda.max_memory_reserved(self._device)) - before


def device_memory(device: torch.device) -> DeviceMemory:
    """Return an object that measures a device's memory."""
    return CudaMemory(device) if device.type == "cuda" else HostMemory()


def measure_step(
    memory: DeviceMemory,
    model: CausalModel,
    backend: AttentionBackend,
    probe: Observation,
    *,
    device: torch.device,
    limits: StepLimits,
    block_size: int,
    model_context: int,
) -> int:
    """Return how many bytes the largest step takes, besides weights and cache.

    Args:
        memory: the device's memory.
        model, backend, probe: the verified model.
        device: the model's device.
        limits: the largest step.
        block_size: tokens per block.
        model_context: the longest request that the model allows, in tokens.

    Raises:
        InsufficientMemoryError: there is not enough memory for the step.
    """
    available = memory.available()

    vocab_size = len(probe.logits[0])

    @torch.inference_mode()
    def run() -> None:
        requests = largest_requests(limits, model_context, vocab_size)
        lengths = [request.num_tokens for request in requests]
        small = SmallCache(
            backend,
            probe.shapes,
            lengths,
            block_size,
            zeros(probe.dtype, device),
            probe.recurrence,
            is_null=True,
        )
        ids = itertools.chain(*(request.spec.prompt for request in requests))
        parts = [Span(index, 0, length) for index, length in enumerate(lengths)]
        logits = small.step(parts).logits(model, torch.tensor(list(ids), device=device))
        Sampler(vocab_size, device).begin(logits, requests)

    try:
        return memory.peak(run)
    except torch.OutOfMemoryError as error:
        raise InsufficientMemoryError(
            f"a step of {limits.max_batch_tokens} tokens of {limits.max_requests} requests needs "
            f"more than the {available / GIB:.2f} GiB that are free on {device} beside the model, "
            "before there is any KV cache; lower max_batch_tokens or max_requests_per_batch"
        ).naming("max_batch_tokens", "max_requests_per_batch") from error


def measure_rows(
    model: CausalModel,
    backend: AttentionBackend,
    probe: Observation,
    *,
    device: torch.device,
    block_size: int,
    model_context: int,
) -> RowTimes:
    """Return how long decode steps of one request with different numbers of rows take.

    For the arguments, see `measure_step`.
    """
    vocab_size = len(probe.logits[0])
    counts = [count for count in _ROWS if count < model_context]
    far = min(_FAR, model_context - max(_FAR_ROWS))
    length = max(far + max(_FAR_ROWS), max(counts))
    small = SmallCache(backend, probe.shapes, [length], block_size, zeros(probe.dtype, device))
    ids = torch.arange(length, device=device) % vocab_size
    sampler = Sampler(vocab_size, device)
    greedy = SamplingParams(temperature=0.0)
    request = Request.trial(TokenIds.of((TokenId(0),)), greedy, 0)

    def seconds(start: int, count: int) -> float:
        began = time.perf_counter()
        step = small.step([Span(0, start + row, start + row + 1) for row in range(count)])
        logits = step.logits(model, ids)
        with torch.inference_mode():
            sampler.begin(logits, [request] * count, [1] * count).token_ids.tolist()
        return time.perf_counter() - began

    began, wanted = time.perf_counter(), [(0, count) for count in counts]
    wanted += [(far, count) for count in _FAR_ROWS]
    best = dict.fromkeys(wanted, float("inf"))
    for index in range(_PASSES):
        for place in list(best):
            best[place] = min(best[place], seconds(*place))
            took = time.perf_counter() - began
            if not index and place[1] > max(_FAR_ROWS) and took > _MOST_SECONDS:
                # A large model: more rows than these are not measured.
                counts = [count for count in counts if count <= place[1]]
                best = {at: least for at, least in best.items() if at[1] <= place[1]}
                break
        if index and time.perf_counter() - began > _MOST_SECONDS:
            break
    for more, fewer in itertools.pairwise(reversed(counts)):  # more rows take no less time
        best[0, fewer] = min(best[0, fewer], best[0, more])
    one, many = (
        min(max(best[far, count] - best[0, count], 0.0), best[0, count]) / max(far, 1)
        for count in _FAR_ROWS
    )
    return RowTimes(
        tuple(counts),
        tuple(best[0, count] for count in counts),
        token_s=one,
        draft_token_s=max(0.0, many - one) / (_FAR_ROWS[1] - 1),
    )


def measure_graphs(
    memory: DeviceMemory,
    model: CausalModel,
    backend: AttentionBackend,
    probe: Observation,
    groups: tuple[LayerGroup, ...],
    *,
    device: torch.device,
    options: RunnerOptions,
    block_size: int,
) -> int:
    """Return how many bytes captured steps take in addition to everything else.

    They need memory for inputs, logits, and the results of the largest step of each path. The other
    steps share that memory.

    Args:
        memory, model, backend, probe, device, block_size: see `measure_step`.
        groups: the model's layer groups.
        options: which steps are captured.
    """

    def run() -> None:
        ones = (1,) * len(groups)
        caches = allocate_caches(probe.shapes, groups, ones, block_size, probe.dtype, device)
        kv = KVTensors(groups, caches, {}, block_size)
        largest = replace(options, max_graphs=len(options.captured_paths))
        steps = CapturedSteps(
            ModelForward(model, kv, backend), _Rehearsal(), largest, step_device(device)
        )
        with torch.inference_mode():
            steps.warmup(lambda line: None)

    return memory.peak(run) if options.captured_paths else 0


class _Rehearsal(GraphBackend):
    """Runs the steps that would be captured."""

    @override
    def capture(self, run: Callable[[], torch.Tensor]) -> _Rehearsed:
        return _Rehearsed(run())


@dataclass(frozen=True, slots=True)
class _Rehearsed:
    output: torch.Tensor

    def replay(self) -> torch.Tensor:
        return self.output


def fitting_step(
    measure: Callable[[StepLimits], int], limits: StepLimits, available: int
) -> tuple[StepLimits, int]:
    """Halve the number of tokens until the largest step takes at most a quarter of the free memory.

    A step of 512 tokens may take more; there are never fewer.

    Args:
        measure: returns how many bytes the largest step takes. Raises InsufficientMemoryError if
            there is not enough memory for it.
        limits: the largest step to begin with.
        available: free bytes on the device.

    Returns:
        The largest step, and how many bytes it takes.

    Raises:
        InsufficientMemoryError: there is not enough memory for a step of 512 tokens.
    """
    tokens = limits.max_batch_tokens
    while True:
        fewer = max(tokens // 2, _LEAST_BATCH_TOKENS)
        fitting = replace(limits, max_batch_tokens=tokens)
        try:
            needed = measure(fitting)
        except InsufficientMemoryError:
            if fewer >= tokens:
                raise
        else:
            if fewer >= tokens or needed <= _STEP_SHARE * available:
                return fitting, needed
        tokens = fewer


def largest_requests(limits: StepLimits, model_context: int, vocab_size: int) -> list[Request]:
    """Return the maximum number of requests, whose prompts have the maximum number of tokens.

    Those with one token come first, and then the longest.
    """
    left, count = limits.max_batch_tokens, min(limits.max_requests, limits.max_batch_tokens)
    requests = []
    for index in range(count):
        length = max(1, min(model_context, left - (count - 1 - index)))
        left -= length
        # Many different tokens, so that they are spread over the experts.
        prompt = tuple(TokenId(token % vocab_size) for token in range(index, index + length))
        requests.append(Request.trial(TokenIds.of(prompt), _SAMPLING, index))
    return sorted(requests, key=lambda request: request.num_tokens > 1)
