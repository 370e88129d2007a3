"""Runs batches: prepares their inputs, computes them on one of the paths, and samples.

ScheduledBatch ─▶ block copies ─▶ InputBatch ─┬─▶ ModelForward, as it comes ──┬─▶ logits ─▶ Sampler
                                              └─▶ CapturedSteps, replayed ──┬─┘               │
                                                                            └─▶ plain tokens ─┤
                  SampledTokens ◀── LaunchedStep.result ◀── queued copy to the host ◀─────────┘

The sampler is called at the launch. If a request's options need a token that the previous step is
still computing, it is called in LaunchedStep.sample instead.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from engine.contract.errors import ConfigError
from engine.contract.request import Request
from engine.contract.rope import RopeLengths
from engine.contract.sampling_params import SamplingParams
from engine.contract.token_ids import TokenIds
from engine.contract.types import RequestKey
from engine.kv_cache.kv_cache_manager import KVCacheManager
from engine.runner.block_copies import BlockCopier
from engine.runner.captured import CapturedSteps
from engine.runner.cuda_graph import GraphBackend
from engine.runner.device import StepDevice, step_device
from engine.runner.forward import ModelForward, one_line
from engine.runner.input_batch import InputBatch, InputBatchBuilder
from engine.runner.launched import CarriedTokens, InputBuffers, LaunchedStep
from engine.runner.prompt_logprobs import report_prompts
from engine.runner.runner_options import PLAIN, RunnerOptions, StepPath
from engine.sampling.sampler import SampledRows, Sampler
from engine.scheduler.runner_protocol import PendingStep, SampledTokens
from engine.scheduler.scheduled_batch import ScheduledBatch, ScheduledRequest

logger = logging.getLogger(__name__)


_COMPILE_FAILED = (
    "the model's first step fails as it is compiled (varlen_compile_config, decode_compile_config, "
    "default_compile_level): {error}; leave fullgraph off, or compilation out"
)


class StepKind(NamedTuple):
    """How a step was computed."""

    path: StepPath
    is_replayed: bool


class _NothingSampled:
    """A step that only has copies. They are queued before any later work."""

    def sample(self) -> None:
        """Do nothing."""

    def result(self) -> SampledTokens:
        """Return an empty result."""
        return SampledTokens(token_ids=())


class ModelRunner:
    """The runner for real models. See `engine.scheduler.runner_protocol.Runner`.

    Attributes:
        kv: the cache.
        options: how steps are computed.
        steps: the number of computed steps, by path and by whether they were replayed.
    """

    def __init__(
        self,
        forward: ModelForward,
        *,
        sampler: Sampler,
        options: RunnerOptions = PLAIN,
        rope: RopeLengths | None = None,
        copier: BlockCopier | None = None,
        device: StepDevice | None = None,
        graphs: GraphBackend | None = None,
        progress: Callable[[str], None] = logger.info,
    ) -> None:
        """Create a runner.

        Args:
            forward: the model, with its cache.
            sampler: chooses tokens.
            options: how steps are computed.
            rope: how rotary frequencies depend on a request's length, or None if they do not.
            copier: makes block copies. None for a new copier for the forward's cache.
            device: queues copies. None for a new one for the cache's device.
            graphs: captures steps. None to capture nothing.
            progress: receives a line for each slow stage of `warmup`.
        """
        kv = forward.kv
        self.kv = kv
        self.options = options
        self.steps: Counter[StepKind] = Counter()
        self._forward = forward
        self._sampler = sampler
        self._copier = copier or BlockCopier(kv)
        self._device = device or step_device(kv.device)
        self._builder = InputBatchBuilder(len(kv.groups), kv.block_size, options, rope)
        self._buffers = InputBuffers(options.num_input_buffers)
        self._carried = CarriedTokens()
        self._progress = progress
        self._captured = None
        if graphs is not None and options.captured_paths:
            self._captured = CapturedSteps(forward, graphs, options, self._device)

    def launch(self, batch: ScheduledBatch) -> PendingStep:
        """Start computing a batch and sampling from it. Raises whatever the model or the device
        raises.

        On an asynchronous device this does not wait for the step.
        """
        with torch.inference_mode():
            if not batch.copies.is_empty:
                self._copier.run(batch.copies)
            if not batch.requests:
                return _NothingSampled()
            buffers = self._buffers.take()
            try:
                inputs = self._builder.build(batch)
                step = self._compute(inputs, buffers)
            except BaseException:
                self._buffers.free(buffers)
                raise
            if not any(map(self._lacks_tokens, inputs.sampling)):
                step.sample()
            return step

    def _lacks_tokens(self, request: Request) -> bool:
        """Return whether choosing a request's next token needs one that is still being computed."""
        return request.num_pending_tokens > 0 and self._sampler.needs_host_tokens(request)

    def _compute(self, inputs: InputBatch, buffers: int) -> LaunchedStep:
        """Queue a step's work up to its logits."""
        requests = inputs.sampling
        count, lengths = len(requests), inputs.lengths
        logits, tokens = self._run(inputs, buffers, lengths)
        prompts = report_prompts(self._sampler, logits[count:], inputs.prompts)
        logits = logits[:count]

        def choose() -> SampledRows:
            if tokens is not None:
                rows = SampledRows(tokens, ())
            else:
                rows = self._sampler.begin(logits, requests, lengths)
                if self._captured is not None:
                    self._captured.keep(rows.token_ids)
            self._carried.keep(requests, rows.token_ids)
            return rows

        return LaunchedStep(self._buffers, buffers, self._device, choose, prompts)

    def _run(
        self, inputs: InputBatch, buffers: int, lengths: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the logits [S + P, V] of a step, and its tokens [S] if captured work has chosen
        them.

        lengths: see `Sampler.begin`.
        """
        step = None if self._captured is None else self._captured.find(inputs)
        self.steps[StepKind(inputs.path, is_replayed=step is not None)] += 1
        if step is None:
            return self._forward.as_it_comes(inputs, self._carried.fill_in), None
        choice = self._sampler.plain(inputs.sampling, lengths)
        return step.run(inputs, buffers, self._carried.places(inputs), choice)

    def release(self, key: RequestKey) -> None:
        """Drop the sampling state of a choice."""
        self._sampler.release(key)

    def forget_model(self) -> None:
        """See `engine.scheduler.runner_protocol.Runner`. The next `warmup` captures steps again."""
        if self._captured is not None and self._captured.steps:
            self._captured.steps = []
            self._progress("captured steps are forgotten: they computed the model as it was")
        if self._forward.is_compiled:
            torch.compiler.reset()  # compiled code does not look whether hooks are others

    def warmup(self) -> None:
        """Run one prefill and one decode step of a dummy request, in the null block's slots, and
        capture steps for replay.

        The null block belongs to no request, so no request's cache is changed.

        Raises:
            ConfigError: the model cannot be compiled with these options.
        """
        count = min(self.kv.block_size, 16)
        request = Request.trial(TokenIds.of((0,) * count), SamplingParams(), 0)
        manager = KVCacheManager(self.kv.groups, [1] * len(self.kv.groups), self.kv.block_size)
        manager.allocate(request.key, count)
        tables = manager.tables(request.key)
        for table in tables:
            table.blocks[:] = 0
        for start, end in ((0, count), (count - 1, count)):
            part = ScheduledRequest(request, start, end - start, tables, num_sampled=1)
            try:
                self.launch(ScheduledBatch((part,), end - start)).result()
            except (RuntimeError, NotImplementedError) as error:
                if not self._forward.is_compiled:
                    raise
                message = _COMPILE_FAILED.format(error=one_line(error))
                raise ConfigError("compile_config", message) from error
        if self._captured is not None:
            with torch.inference_mode():
                self._captured.warmup(self._progress)
