"""Times a model's steps before its weights are available, by running them with made-up weights.

    path ─▶ the model on the meta device ─▶ make_up ─▶ our decoder, or the model
         ─▶ SmallCache ─▶ steps of some requests, sampled ─▶ seconds

The server's own code computes the steps, so they include everything that a real step does: products
of the same size, small operations, mixtures of experts, attention over the context and sampling.
The tokens before a step are not computed, because its time does not depend on the contents of the
KV cache. The time of a step that would take too long or too much memory is extrapolated linearly
from two smaller ones.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from engine.attention.interface import AttentionBackend, AttentionParams, LayerShape
from engine.attention.registry import (
    ATTENTION_NAME,
    AttentionUnavailableError,
    choose_backend,
    fall_back,
    register,
)
from engine.attention.small_cache import SmallCache, Span
from engine.contract.adapters import Adapter
from engine.contract.config import LoadConfig
from engine.contract.errors import ModelRefusedError
from engine.contract.request import Request
from engine.contract.sampling_params import SamplingParams
from engine.contract.token_ids import TokenIds
from engine.loading.adapters.adapted_modules import AdaptedModules
from engine.loading.kv_memory import zeros_on_demand
from engine.loading.memory import HostLimits
from engine.loading.recurrent import follow_states
from engine.loading.recurrent_kernels import use_kernels
from engine.loading.weights import model_without_weights
from engine.models.choosing import NOT_ASKED, CausalDecoder, describe_steps, make_decoder
from engine.planning.adapter_plan import AdapterPlan
from engine.planning.outline import FAILURES, Outline
from engine.planning.synthetic_weights import Numbers, Rings, TooLargeError, make_up
from engine.runner.forward import CausalModel
from engine.sampling.sampler import Sampler

_CPU = torch.device("cpu")
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


class Rehearsal:
    """A model with made-up weights, whose steps can be timed.

    Attributes:
        model: the model.
        steps: what computes its steps: our decoder, or the model.
        backend: computes attention.
    """

    def __init__(
        self,
        outline: Outline,
        load_config: LoadConfig,
        block_size: int,
        max_batch_tokens: int,
        adapters: AdapterPlan | None = None,
    ) -> None:
        """Make the model and what computes its steps.

        Args:
            outline: the model, for a CPU. The number of torch threads must have been set.
            load_config: how it would be loaded.
            block_size: the number of tokens in a block of the KV cache.
            max_batch_tokens: the maximum number of tokens in a step.
            adapters: those that the requests have, each another one as long as there are some;
                None: they have none.

        Raises:
            ModelRefusedError: the model cannot be made without its weights.
        """
        self._outline, self._block_size = outline, block_size
        self._max_batch_tokens = max_batch_tokens
        self.backend = _backend(outline, load_config)
        try:
            self.model, decoder = _model(outline, load_config, self.backend)
        except TooLargeError as error:
            raise ModelRefusedError(
                "a few weights of each shape take more than half of the memory that is free here"
            ) from error
        except FAILURES as error:
            raise _cannot_be_run(outline) from error
        self.steps: CausalModel = decoder or self.model
        self.adapters: list[Adapter] = []
        if adapters is not None:
            self._adapt(adapters, decoder)
        elements = max((one.elements_per_token for one in outline.shapes.values()), default=1)
        largest = elements * outline.kv_dtype.itemsize
        self._most_tokens = _LAYER_BYTES // largest
        self._chance = np.random.default_rng(0)
        self._numbers = Numbers()

    def _adapt(self, adapters: AdapterPlan, decoder: CausalDecoder | None) -> None:
        """Let adapters that are made up be computed, as a server does."""
        described = None if decoder is None else decoder.description
        adapted = AdaptedModules(self.model, self.steps, described, self.backend, None)
        adapted.stand_in(adapters.layers)
        self.adapters = adapters.made_up(_MOST_REQUESTS, adapted.places, adapted.num_layers)
        if adapted.has_stand_ins:
            self.steps = adapted

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
        ends = range(context + 1, 1 + min(context + _MOST_STEPS, self._outline.context_length))
        steps = ([Span(index, end - 1, end) for index in range(requests)] for end in ends)
        return _settled(self._times(requests, ends[-1], steps))

    def _chunk_s(self, tokens: int, start: int) -> float:
        """Return the seconds of a step that computes `tokens` tokens of a prompt, beginning at
        `start`.
        """
        end = start + tokens
        return _settled(self._times(1, end, itertools.repeat([Span(0, start, end)])))

    @torch.inference_mode()
    def _times(
        self, requests: int, tokens: int, steps: Iterable[Sequence[Span]]
    ) -> Iterator[float]:
        """Yield the seconds of each step of some requests, which have up to `tokens` tokens."""
        one = self._outline
        small, sampler = self._small_cache(requests, tokens), Sampler(one.vocab_size, _CPU)
        # Different tokens for each request, because equal ones would choose the same experts.
        ids = torch.from_numpy(self._chance.integers(0, one.vocab_size, requests * tokens))
        sampled = [
            Request.trial(TokenIds.of((0,)), SamplingParams(temperature=1.0, seed=index), index)
            for index in range(requests)
        ]
        adapters = [one for one, _ in zip(itertools.cycle(self.adapters), range(requests))]
        for parts in steps:
            started = time.perf_counter()
            try:
                logits = small.step(parts, adapters).logits(self.steps, ids)
            except FAILURES as error:
                raise _cannot_be_run(one) from error
            sampler.begin(logits, sampled, [part.end for part in parts]).token_ids.tolist()
            yield time.perf_counter() - started

    def _small_cache(self, requests: int, tokens: int) -> SmallCache:
        rings, dtype = Rings(), self._outline.kv_dtype

        def allocate(shape: LayerShape, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
            heads, dims = shape.num_kv_heads, (shape.key_dim, shape.value_dim)

            def made() -> tuple[torch.Tensor, torch.Tensor]:
                keys, values = (zeros_on_demand((slots, heads, dim), dtype) for dim in dims)
                # Not a constant, which would make all requests alike.
                self._numbers.fill(keys.view(-1))
                self._numbers.fill(values.view(-1))
                return keys, values

            return rings.take((heads, *dims), slots * heads * sum(dims) * dtype.itemsize, made)

        one, lengths = self._outline, [tokens] * requests
        return SmallCache(
            self.backend, one.shapes, lengths, self._block_size, allocate, one.recurrence
        )


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
    for shape in outline.shapes.values():
        reason = backend.why_not(shape, AttentionParams(scaling=shape.key_dim**-0.5))
        if reason is not None:
            return fall_back(load_config.attention, AttentionUnavailableError(reason))
    return backend


def _model(
    outline: Outline, load_config: LoadConfig, backend: AttentionBackend
) -> tuple[PreTrainedModel, CausalDecoder | None]:
    """Return the model with made-up weights, and our decoder if that would compute its steps."""
    model = model_without_weights(outline.checkpoint, outline.dtype)
    plan = NOT_ASKED
    if load_config.decoder == "own":
        is_packed = outline.packing is not None and outline.packing.is_ours
        plan = describe_steps(model, outline.device, backend, is_packed=is_packed)
    make_up(model, outline.packing, HostLimits.read().memory_available // 2)
    model.set_attn_implementation(ATTENTION_NAME)
    decoder = make_decoder(model, plan, backend, None, lambda line: None)
    if decoder is None and outline.recurrence.shapes:
        follow_states(model, outline.recurrence)
        use_kernels(model, outline.recurrence)
    return model, decoder


def _cannot_be_run(outline: Outline) -> ModelRefusedError:
    return ModelRefusedError(f"{outline.name} cannot be run without its weights")
