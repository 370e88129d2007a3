"""Times a model's steps before its weights are available, by running them with made-up weights.

    path ─▶ the model on the meta device ─▶ make_up ─▶ our decoder, or the model ─▶ ModelRunner
         ─▶ EngineCore ─▶ steps of some requests ─▶ seconds

The server's own code runs the steps, so they include everything that a real step does: products of
the same size, small operations, mixtures of experts, attention over the context, sampling and
scheduling. The tokens before a step are not computed, because its time does not depend on the
contents of the KV cache. The time of a step that would take too long or too much memory is
extrapolated linearly from two smaller ones.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial

import numpy as np
import torch
from transformers import PreTrainedModel
from typing_extensions import override

from engine.attention.interface import AttentionBackend, AttentionParams, LayerCache
from engine.attention.registry import (
    ATTENTION_NAME,
    AttentionUnavailableError,
    choose_backend,
    fall_back,
    register,
)
from engine.contract.config import LoadConfig
from engine.contract.errors import ModelRefusedError
from engine.contract.request import GenerationRequest
from engine.contract.sampling_params import SamplingParams, StopParams
from engine.contract.token_ids import TokenIds
from engine.contract.types import RequestId, RequestKey, TokenId
from engine.core.engine_core import EngineCore
from engine.kv_cache.kv_cache_manager import KVCacheManager
from engine.loading.kv_memory import allocate_caches
from engine.loading.memory import HostLimits
from engine.models.choosing import bind, describe_steps
from engine.models.layer_parts import UnboundError
from engine.planning.memory_plan import blocks_for
from engine.planning.outline import FAILURES, Outline, model_without_weights
from engine.planning.synthetic_weights import Numbers, Rings, TooLargeError, make_up
from engine.runner.forward import CausalModel, ModelForward
from engine.runner.kv_tensors import KVTensors
from engine.runner.model_runner import ModelRunner
from engine.sampling.sampler import Sampler
from engine.scheduler.fifo import FIFOScheduler
from engine.scheduler.runner_protocol import PendingStep, Runner, SampledTokens
from engine.scheduler.scheduled_batch import ScheduledBatch, ScheduledRequest

_LAYER_BYTES = 256 << 20
"""The maximum size of one layer's KV cache in bytes."""
_MOST_REQUESTS = 64
_FIRST_TOKENS = 128
"""The number of prompt tokens that are timed first, to decide whether a larger chunk can be run."""
_PROMPT_S = 4.0
"""The maximum expected time of a larger chunk of a prompt, in seconds."""
_MOST_STEPS = 64
_LONG = ((0.6, 4), (2.0, 2))
"""Pairs of seconds and a number of steps. Timing ends when both values of any pair are reached."""


class _Told:
    """A step that is skipped."""

    def __init__(self, batch: ScheduledBatch) -> None:
        self._count = sum(part.num_sampled for part in batch.requests)

    def sample(self) -> None:
        """Do nothing."""

    def result(self) -> SampledTokens:
        """Return a different token for each request, because equal ones would choose the same
        experts.
        """
        return SampledTokens(tuple(map(TokenId, range(self._count))))


class _Skipping(Runner):
    """A runner that computes only selected steps.

    Attributes:
        has_computed: whether the last step was computed.
    """

    def __init__(self, runner: ModelRunner, wants: Callable[[ScheduledRequest], bool]) -> None:
        self._runner = runner
        self._wants = wants
        self.has_computed = False

    def launch(self, batch: ScheduledBatch) -> PendingStep:
        """Compute a step if it is wanted, otherwise skip it."""
        self.has_computed = all(map(self._wants, batch.requests))
        return self._runner.launch(batch) if self.has_computed else _Told(batch)

    @override
    def release(self, key: RequestKey) -> None:
        self._runner.release(key)

    @override
    def forget_model(self) -> None:
        self._runner.forget_model()

    @override
    def warmup(self) -> None:
        self._runner.warmup()


class Rehearsal:
    """A model with made-up weights, whose steps can be timed.

    Attributes:
        model: the model.
        steps: what computes its steps: our decoder, or the model.
        backend: computes attention.
    """

    def __init__(
        self, outline: Outline, load_config: LoadConfig, block_size: int, max_batch_tokens: int
    ) -> None:
        """Make the model and what computes its steps.

        Args:
            outline: the model, for a CPU. The number of torch threads must have been set.
            load_config: how it would be loaded.
            block_size: the number of tokens in a block of the KV cache.
            max_batch_tokens: the maximum number of tokens in a step.

        Raises:
            ModelRefusedError: the model cannot be made without its weights.
        """
        self._outline, self._block_size = outline, block_size
        self._max_batch_tokens = max_batch_tokens
        self.backend = _backend(outline, load_config)
        try:
            self.model, self.steps = _model(outline, load_config, self.backend)
        except TooLargeError as error:
            raise ModelRefusedError(
                "a few weights of each shape take more than half of the memory that is free here"
            ) from error
        except FAILURES as error:
            raise _cannot_be_run(outline) from error
        largest = max(one.elements_per_token for one in outline.shapes) * outline.kv_dtype.itemsize
        self._most_tokens = _LAYER_BYTES // largest
        self._chance = np.random.default_rng(0)
        self._numbers = Numbers()

    def decode_s(self, requests: int, context: int) -> float:
        """Return the seconds of a step in which each request computes one token after `context`
        others.

        Raises:
            ModelRefusedError: the model cannot be run without its weights.
        """
        if requests > _MOST_REQUESTS:
            return _on_line(lambda count: self.decode_s(count, context), _MOST_REQUESTS, requests)
        most = max(2, self._most_tokens // requests)
        if context > most:
            return _on_line(lambda tokens: self._decode_s(requests, tokens), most, context)
        return self._decode_s(requests, context)

    def prefill_s(self, tokens: int) -> float:
        """Return the seconds to compute a prompt alone, in steps of at most max_batch_tokens.

        Raises:
            ModelRefusedError: the model cannot be run without its weights.
        """
        few = min(tokens, self._max_batch_tokens, _FIRST_TOKENS)
        chunk = min(tokens, self._max_batch_tokens, self._most_tokens)
        seconds = self._chunk_s(few, 0)
        if seconds * chunk / few > _PROMPT_S:
            chunk = few
        elif chunk > few:
            seconds = self._chunk_s(chunk, 0)
        if chunk == tokens:
            return seconds
        # A part also reads what is in front of it: the last one takes longest.
        start = max(chunk, min(tokens, self._most_tokens) - chunk) // chunk * chunk
        more = (self._chunk_s(chunk, start) - seconds) / start
        return (seconds + more * (tokens - chunk) / 2) * tokens / chunk

    def _decode_s(self, requests: int, context: int) -> float:
        context = max(1, min(context, self._outline.context_length - _MOST_STEPS))
        most = min(_MOST_STEPS, self._outline.context_length - context)
        runner = self._runner(requests, context + most)
        return _settled(
            self._times(
                runner,
                requests=requests,
                prompt=context,
                output=most,
                max_batch_tokens=requests * (context + 1),
                wants=lambda part: part.start >= context,
            )
        )

    def _chunk_s(self, tokens: int, start: int) -> float:
        """Return the seconds of a step that computes `tokens` tokens of a prompt, beginning at
        `start`.

        `start` is a multiple of `tokens`.
        """
        runner = self._runner(1, start + tokens + 1)

        def times() -> Iterator[float]:
            while True:
                yield from self._times(
                    runner,
                    requests=1,
                    prompt=start + tokens,
                    output=1,
                    max_batch_tokens=tokens,
                    wants=lambda part: part.start == start,
                )

        return _settled(times())

    def _times(
        self,
        runner: ModelRunner,
        *,
        requests: int,
        prompt: int,
        output: int,
        max_batch_tokens: int,
        wants: Callable[[ScheduledRequest], bool],
    ) -> Iterator[float]:
        """Yield the seconds of each wanted step of some requests, as the engine reports them."""
        kv = runner.kv
        blocks = [len(one.keys) // kv.block_size - 1 for one in _of_groups(kv)]
        skipping = _Skipping(runner, wants)
        core = EngineCore(
            FIFOScheduler(
                KVCacheManager(kv.groups, blocks, kv.block_size, share_blocks=True),
                max_batch_tokens=max_batch_tokens,
                max_requests_per_batch=requests,
            ),
            skipping,
            max_context_tokens=prompt + output,
        )
        for index in range(requests):
            ids = self._chance.integers(0, self._outline.vocab_size, prompt, dtype=np.int32)
            spec = GenerationRequest(
                request_id=RequestId(f"rehearsed-{index}"),
                prompt=TokenIds(ids.tobytes()),
                sampling=SamplingParams(temperature=1.0, seed=index),
                stop=StopParams(max_tokens=output),
            )
            core.add(spec, core.clock())
        while core.has_work:
            done = core.step()
            if any(one.finish and one.finish.failure for one in done.outputs):
                raise _cannot_be_run(self._outline)
            if skipping.has_computed and done.step is not None:
                yield done.step.duration_s

    def _runner(self, requests: int, tokens: int) -> ModelRunner:
        """Return a runner with room for `requests` requests of `tokens` tokens each."""
        one = self._outline
        blocks = [blocks_for(requests, tokens, self._block_size)] * len(one.groups)
        # Only those that are written take memory.
        caches = allocate_caches(
            one.shapes, one.groups, blocks, self._block_size, one.kv_dtype, torch.device("cpu")
        )
        rings = Rings()

        def written(cache: LayerCache) -> LayerCache:
            # Not a constant, which would make all requests alike.
            self._numbers.fill(cache.keys.view(-1))
            self._numbers.fill(cache.values.view(-1))
            return cache

        used = [
            rings.take(
                (cache.group, cache.keys.shape, cache.values.shape),
                cache.keys.nbytes + cache.values.nbytes,
                partial(written, cache),
            )
            for cache in caches
        ]
        kv = KVTensors(one.groups, tuple(used), (), self._block_size)
        forward = ModelForward(self.steps, kv, self.backend)
        return ModelRunner(forward, sampler=Sampler(one.vocab_size, kv.device))


def _of_groups(kv: KVTensors) -> Iterator[LayerCache]:
    """Return one cache of each group."""
    return (kv.caches[group.layers[0]] for group in kv.groups)


def _on_line(seconds: Callable[[int], float], most: int, wanted: int) -> float:
    """Extrapolate to `wanted` linearly from the times for `most` and half of it."""
    half, whole = seconds(most // 2), seconds(most)
    return whole + (whole - half) * (wanted - most) / (most - most // 2)


def _settled(times: Iterator[float]) -> float:
    """Take times until there are enough (see _LONG), and return the median of the later half."""
    found: list[float] = []
    for seconds in times:
        found.append(seconds)
        if any(sum(found) >= long and len(found) >= few for long, few in _LONG):
            break
    return statistics.median(found[len(found) // 2 :])


def _backend(outline: Outline, load_config: LoadConfig) -> AttentionBackend:
    register()
    backend = choose_backend(outline.device, outline.kv_dtype, load_config.attention)
    for shape in outline.shapes:
        reason = backend.why_not(shape, AttentionParams(scaling=shape.key_dim**-0.5))
        if reason is not None:
            return fall_back(load_config.attention, AttentionUnavailableError(reason))
    return backend


def _model(
    outline: Outline, load_config: LoadConfig, backend: AttentionBackend
) -> tuple[PreTrainedModel, CausalModel]:
    """Return the model with made-up weights, and what would compute its steps."""
    model = model_without_weights(outline.checkpoint, outline.dtype)
    is_packed = outline.packing is not None and outline.packing.is_ours
    described = describe_steps(model, backend, is_packed=is_packed)
    make_up(model, outline.packing, HostLimits.read().memory_available // 2)
    model.set_attn_implementation(ATTENTION_NAME)
    steps: CausalModel = model
    if load_config.decoder == "own" and not isinstance(described, str):
        with suppress(UnboundError):
            steps = bind(model, described, backend)
    return model, steps


def _cannot_be_run(outline: Outline) -> ModelRefusedError:
    return ModelRefusedError(f"{outline.name} cannot be run without its weights")
