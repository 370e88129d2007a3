"""Captures steps once for each shape, and then replays them.

    InputBatch ─▶ its shape, padded ─▶ captured? ──no──▶ capture it, with the null block for a cache
                                           │yes                    │
                                           ▼                       ▼
                                    fill the inputs ─▶ replay ─▶ logits

Other steps are computed directly, without capture: steps with prompt log-probabilities, steps that
would need too much memory when padded, and steps that could not be captured.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch

from engine.attention.base import StaticShape
from engine.runner.buckets import context_sizes, token_sizes
from engine.runner.cuda_graph import CapturedStep, GraphBackend, GraphCache
from engine.runner.device import StepDevice
from engine.runner.forward import ModelForward
from engine.runner.input_batch import InputBatch
from engine.runner.runner_options import RunnerOptions, StepPath
from engine.runner.static_inputs import StaticInputs
from engine.startup import CAPTURE, enter

logger = logging.getLogger(__name__)


class CapturedSteps:
    """Captures steps and finds them again. All calls are made in inference mode."""

    def __init__(
        self,
        forward: ModelForward,
        graphs: GraphBackend,
        options: RunnerOptions,
        device: StepDevice,
    ) -> None:
        self._forward = forward
        self._kv = forward.kv
        self._attention = forward.backend
        self._graphs = graphs
        self._options = options
        self._device = device
        self._tokens = token_sizes(options.q_interval)
        self._contexts = context_sizes(options.kv_interval)
        self._paths = set(options.captured_paths)
        self._too_large: set[StaticShape] = set()
        self.cache = GraphCache(options.max_graphs)

    def shape_of(self, inputs: InputBatch) -> StaticShape | None:
        """The shape to which a step is padded; None: it is computed without capture."""
        layout = inputs.layouts[0]
        if inputs.path not in self._paths or inputs.prompts:
            return None
        if inputs.path is StepPath.DECODE:
            return self._decode_shape(inputs.num_tokens, int(layout.starts.max()) + 1)
        if len(layout.counts) > self._options.max_requests:
            return None
        context = int((layout.starts + layout.counts).sum())
        return self._usable(
            StaticShape(
                is_decode=False,
                tokens=self._tokens.at_least(inputs.num_tokens),
                requests=self._options.max_requests,
                context=self._contexts.at_least(context),
                block_size=self._kv.block_size,
            )
        )

    def find(self, inputs: InputBatch) -> CapturedStep | None:
        """The captured step for these inputs, captured now if necessary; None: there is none."""
        shape = self.shape_of(inputs)
        if shape is None:
            return None
        return self.cache.get(shape) or self._capture(shape, inputs.path)

    def warmup(self, progress: Callable[[str], None]) -> None:
        """Capture the decode path's shapes, the smallest first, up to the number that is kept."""
        options, path = self._options, StepPath.DECODE
        if path in options.captured_paths:
            enter(progress, CAPTURE)
        started = time.monotonic()
        longest = options.max_decode_blocks * self._kv.block_size
        for context in self._contexts.up_to(longest):
            for tokens in self._tokens.up_to(options.max_requests):
                if path not in self._paths or len(self.cache) >= self.cache.limit:
                    break
                shape = self._decode_shape(tokens, min(context, longest))
                if shape is not None and shape not in self.cache:
                    self._capture(shape, path)
        if path in options.captured_paths:
            seconds = time.monotonic() - started
            progress(f"captured {len(self.cache)} shapes of decode steps in {seconds:.1f} s")

    def _decode_shape(self, tokens: int, context: int) -> StaticShape | None:
        size = self._kv.block_size
        padded = self._tokens.at_least(tokens)
        blocks = -(-self._contexts.at_least(context) // size)
        return self._usable(
            StaticShape(
                is_decode=True,
                tokens=padded,
                requests=padded,
                context=min(blocks, self._options.max_decode_blocks) * size,
                block_size=size,
            )
        )

    def _usable(self, shape: StaticShape) -> StaticShape | None:
        if shape in self._too_large or not self._attention.fits_static(shape):
            return None
        return shape

    def _capture(self, shape: StaticShape, path: StepPath) -> CapturedStep | None:
        """Capture a shape. Its inputs are zeros, so only the null block is written."""
        inputs = StaticInputs(
            shape, self._attention, self._kv, self._device, self._options.num_input_buffers
        )

        def run() -> torch.Tensor:
            return self._forward(
                path, inputs.token_ids, inputs.positions, inputs.logit_rows, inputs.metadata()
            )

        try:
            step = CapturedStep(inputs, self._graphs.capture(run))
        except torch.OutOfMemoryError:
            self._too_large.add(shape)
            logger.warning("not enough memory to capture %s; such steps run as they come", shape)
            return None
        except RuntimeError as error:
            self._paths.discard(path)
            logger.warning(
                "steps of the %s path run as they come: the forward cannot be captured (%s)",
                path.value,
                str(error).partition("\n")[0],
            )
            return None
        self.cache.put(shape, step)
        return step
