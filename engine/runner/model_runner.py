"""Runs a batch: inputs to the device, the unmodified model with our attention, one sampled token a
request.

block copies ─▶
ScheduledBatch ─▶ InputBatch ─▶ AttentionContext ─▶ model(...) ─▶ logits of the sampled rows ─▶
Sampler
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.attention.base import AttentionBackend, AttentionContext
from engine.attention.registry import CONTEXT_KEYWORD
from engine.batch import ScheduledBatch, ScheduledRequest
from engine.kv_cache.manager import KVCacheManager
from engine.request import GenerationRequest, Request
from engine.runner.block_copies import BlockCopier
from engine.runner.input_batch import InputBatch, StepPath, build_input_batch
from engine.runner.kv_tensors import KVTensors
from engine.runner.options import PLAIN, RunnerOptions
from engine.runner.prompt_logprobs import report_prompts
from engine.runner_protocol import PendingStep, SampledTokens
from engine.sampling.sampler import Sampler
from engine.sampling_params import SamplingParams, StopParams
from engine.types import RequestId, RequestKey, TokenId


class CausalModel(Protocol):
    """What the runner needs of a transformers model whose attention implementation is ours."""

    def __call__(self, **inputs: object) -> object:
        """The forward pass; its result has `logits` [1, S, V]."""
        ...


@dataclass(frozen=True, slots=True)
class _ComputedStep:
    """A step that was over when it was launched."""

    sampled: SampledTokens

    def result(self) -> SampledTokens:
        """Its results."""
        return self.sampled


class ModelRunner:
    """The runner for real models. See `engine.runner_protocol.Runner`.

    Attributes:
        kv: the cache.
        options: how steps are computed.
        steps: how many were computed on each path.
    """

    def __init__(
        self,
        model: CausalModel,
        kv: KVTensors,
        *,
        backend: AttentionBackend,
        sampler: Sampler,
        options: RunnerOptions = PLAIN,
    ) -> None:
        self._model = model
        self.kv = kv
        self.options = options
        self.steps: Counter[StepPath] = Counter()
        self._backend = backend
        self._sampler = sampler
        self._copier = BlockCopier(kv.groups, kv.caches, kv.host_caches, kv.block_size)

    def launch(self, batch: ScheduledBatch) -> PendingStep:
        """Compute a batch and sample. Raises whatever the model or the device raises."""
        return _ComputedStep(self._compute(batch))

    def _compute(self, batch: ScheduledBatch) -> SampledTokens:
        with torch.inference_mode():
            if not batch.copies.is_empty:
                self._copier.run(batch.copies)
            if not batch.requests:
                return SampledTokens(token_ids=())
            inputs = self._lay_out(batch)
            logits = self._forward(inputs)
            num_sampled = len(inputs.sampling)
            prompt_logprobs = report_prompts(self._sampler, logits[num_sampled:], inputs.prompts)
            if not inputs.sampling:
                return SampledTokens(token_ids=(), prompt_logprobs=prompt_logprobs)
            token_ids, logprobs = self._sampler.sample(logits[:num_sampled], inputs.sampling)
        return SampledTokens(token_ids, logprobs, prompt_logprobs)

    def logits(self, batch: ScheduledBatch) -> torch.Tensor:
        """Compute a batch and return the logits [S, V] of its sampled rows, for the load gate."""
        with torch.inference_mode():
            return self._forward(self._lay_out(batch))

    def release(self, key: RequestKey) -> None:
        """Forget what sampling keeps for a choice."""
        self._sampler.release(key)

    def warmup(self) -> None:
        """Run one prefill and one decode step of a request of its own, in the null block's slots.

        The null block belongs to nobody, so no request's cache is touched.
        """
        spec = GenerationRequest(
            request_id=RequestId("warmup"),
            prompt=(TokenId(0),) * min(self.kv.block_size, 16),
            sampling=SamplingParams(),
            stop=StopParams(max_tokens=1),
        )
        request = Request(spec=spec, arrival=0.0, max_total_tokens=len(spec.prompt) + 1)
        manager = KVCacheManager(self.kv.groups, [1] * len(self.kv.groups), self.kv.block_size)
        manager.allocate(request.key, len(spec.prompt))
        tables = manager.tables(request.key)
        for table in tables:
            table.blocks[:] = 0
        count = len(spec.prompt)
        self._compute(ScheduledBatch((ScheduledRequest(request, 0, count, tables, True),), count))
        self._compute(ScheduledBatch((ScheduledRequest(request, count - 1, 1, tables, True),), 1))

    def _lay_out(self, batch: ScheduledBatch) -> InputBatch:
        return build_input_batch(batch, len(self.kv.groups), self.kv.block_size, self.options)

    def _forward(self, inputs: InputBatch) -> torch.Tensor:
        self.steps[inputs.path] += 1
        metadata = [
            self._backend.prepare(layout, group.window, self.kv.caches[group.layers[0]].keys)
            for group, layout in zip(self.kv.groups, inputs.layouts, strict=True)
        ]
        context = AttentionContext(self._backend, self.kv.caches, metadata)
        output = self._model(
            input_ids=torch.from_numpy(inputs.token_ids).to(self.kv.device).unsqueeze(0),
            position_ids=torch.from_numpy(inputs.positions).to(self.kv.device).unsqueeze(0),
            logits_to_keep=torch.from_numpy(inputs.logit_rows).to(self.kv.device),
            use_cache=False,
            **{CONTEXT_KEYWORD: context},
        )
        logits: torch.Tensor = output.logits  # type: ignore[attr-defined]  # a ModelOutput
        return logits[0]
