"""Captures steps when an engine starts, and replays them.

    InputBatch ─▶ the smallest shape that has room for it, if there is one
                      │                      ╎
                      ▼                      ▼
    fill the inputs ─▶ replay ─▶ logits      computed directly, without capture
                              └▶ the most likely tokens, or those drawn (`captured_choices`)

A shape is a number of tokens and a number of requests. Lengths are read on the device, so a graph
works for contexts of any length. All shapes are captured at warm-up, and none while requests wait.
The largest is captured first, because all shapes share its memory, its inputs and the memory of its
logits.

Steps are computed directly if they have prompt log-probabilities, if no shape has room for them, or
if their kind cannot be captured.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.attention.interface import StaticShape
from engine.contract.startup import CAPTURE, enter
from engine.native.device_copy import to_device
from engine.runner.buckets import (
    MOST_MIXED_TOKENS,
    decode_sizes,
    mixed_sizes,
    request_sizes,
)
from engine.runner.captured_choices import CapturedChoices
from engine.runner.cuda_graph import CapturedGraph, GraphBackend
from engine.runner.device import StepDevice
from engine.runner.forward import ModelForward
from engine.runner.input_batch import InputBatch
from engine.runner.runner_options import RunnerOptions, StepPath
from engine.runner.static_inputs import InputMemory, StaticInputs
from engine.sampling.plain import MostLikely, PlainChoice, choose_most_likely, write_most_likely

logger = logging.getLogger(__name__)

_MOST_TABLE_ENTRIES = 1 << 20
"""The maximum number of block table entries of a captured step: 8 MiB of memory."""


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """A captured forward pass with its inputs, and what chooses its tokens."""

    inputs: StaticInputs
    graph: CapturedGraph
    choices: CapturedChoices

    def run(
        self,
        inputs: InputBatch,
        buffers: int,
        carried: tuple[Sequence[int], Sequence[int]],
        choice: PlainChoice | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Copy a step's inputs in and replay it.

        Args:
            inputs, buffers, carried: see `StaticInputs.fill`.
            choice: how captured work chooses the tokens, or None if it does not.

        Returns:
            The logits [S, V] of the needed rows, and the tokens, int64 [S], or None if they have
            not been chosen. The next step overwrites both.
        """
        rows = inputs.logit_rows
        in_order = not self.inputs.shape.is_decode or np.array_equal(rows, np.arange(len(rows)))
        if choice is not None and not (in_order and self.choices.has(choice, len(rows))):
            choice = None
        self.inputs.fill(inputs, buffers, carried, choice)
        logits = self.graph.replay()
        if not in_order:
            return logits.index_select(0, to_device(rows, logits.device)), None
        tokens = None if choice is None else self.choices.choose(choice, len(rows))
        return logits[: len(rows)], tokens


class CapturedSteps:
    """Captures steps, and finds the captured step for given inputs. All calls are made in inference
    mode.

    Attributes:
        steps: the captured steps, the smallest first.
    """

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
        self._logits = torch.empty(0)
        self._most_likely: MostLikely = write_most_likely
        self.steps: list[CapturedStep] = []
        self._told: set[StepPath] = set()

    def find(self, inputs: InputBatch) -> CapturedStep | None:
        """Return the captured step for these inputs, or None if there is none."""
        layout, is_decode = inputs.layouts[0], inputs.path is StepPath.DECODE
        rows, width = layout.tables.shape
        if inputs.prompts:
            return None
        for step in self.steps:
            shape = step.inputs.shape
            if (
                shape.is_decode == is_decode
                and inputs.num_tokens <= shape.tokens
                and rows <= shape.requests
                and width <= shape.blocks
            ):
                return step
        if self.steps and inputs.path not in self._told:
            self._told.add(inputs.path)
            logger.info(
                "a step of %d tokens of %d requests, the longest of %d blocks, is computed without "
                "a graph, as are all for which none was captured",
                *(inputs.num_tokens, rows, width),
            )
        return None

    def keep(self, token_ids: torch.Tensor) -> None:
        """Store a step's tokens, int64 [S], for the next captured step. Not needed if captured work
        has chosen them.
        """
        if self.steps:
            self.steps[0].choices.keep(token_ids)

    def warmup(self, progress: Callable[[str], None]) -> None:
        """Capture all shapes, the largest first. Later calls do nothing."""
        shapes = planned_shapes(self._options, self._kv.block_size)
        if not shapes or self.steps or not self._attention.can_capture:
            return
        enter(progress, CAPTURE)
        started = time.monotonic()
        most_rows = max(self._options.max_requests, *(one.requests for one in shapes))
        memory = InputMemory(
            *(shapes, self._attention, self._kv, self._device),
            *(self._options.num_input_buffers, most_rows),
        )
        choices = CapturedChoices(memory, self._graphs)
        given_up: set[bool] = set()
        for shape in shapes:
            if shape.is_decode in given_up:
                continue
            inputs = StaticInputs(shape, self._attention, self._kv, memory)
            try:
                self.steps.insert(0, self._capture(inputs, memory, choices))
            except torch.OutOfMemoryError:
                logger.warning(
                    "not enough memory to capture %s; such steps run as they come", shape
                )
            except RuntimeError as error:
                given_up.add(shape.is_decode)
                logger.warning(
                    "%s steps run as they come: the forward cannot be captured (%s)",
                    "decode" if shape.is_decode else "mixed",
                    str(error).partition("\n")[0],
                )
        choices.capture(self._logits, {step.inputs.shape.requests for step in self.steps})
        seconds = time.monotonic() - started
        progress(f"captured {len(self.steps)} shapes of steps in {seconds:.1f} s")

    def _capture(
        self, inputs: StaticInputs, memory: InputMemory, choices: CapturedChoices
    ) -> CapturedStep:
        """Capture a shape. Raises whatever the forward pass or the capture raises."""
        shape = inputs.shape
        path = StepPath.DECODE if shape.is_decode else StepPath.VARLEN

        def compute() -> torch.Tensor:
            return self._forward(
                path, inputs.token_ids(), inputs.positions, inputs.logit_rows, inputs.metadata()
            )

        def run() -> torch.Tensor:
            logits = self._logits[: shape.requests].copy_(compute())
            self._most_likely(logits, memory.tokens[: shape.requests])
            return logits

        inputs.clear()
        if not len(self._logits):
            logits = compute()
            self._logits = logits.new_empty((len(memory.tokens), logits.shape[-1]))
            self._most_likely = choose_most_likely(self._logits)
        return CapturedStep(inputs, self._graphs.capture(run), choices)


def planned_shapes(options: RunnerOptions, block_size: int) -> list[StaticShape]:
    """Return the shapes to capture, the largest first.

    If there are more than `max_graphs`, every other one is left out, and its steps are padded to
    the next larger one.
    """
    interval, paths = options.q_interval, options.captured_paths
    decode: list[tuple[bool, int, int]] = []
    mixed: list[tuple[bool, int, int]] = []
    if StepPath.DECODE in paths and options.max_decode_blocks:
        decode = [(True, n, n) for n in decode_sizes(interval).up_to(options.max_requests)]
    if StepPath.VARLEN in paths:
        limit = min(MOST_MIXED_TOKENS, options.max_tokens)
        mixed = [
            (False, tokens, requests)
            for tokens in mixed_sizes(interval).up_to(limit)
            for requests in request_sizes(options.max_requests)
            if requests <= tokens
        ]
    decode.sort(reverse=True)
    mixed.sort(reverse=True)
    while len(decode) + len(mixed) > options.max_graphs:
        if len(mixed) > len(decode) or len(decode) <= 1:
            mixed = mixed[::2] if len(mixed) > 1 else []
        else:
            decode = decode[::2]
    return [
        StaticShape(
            is_decode=is_decode,
            tokens=tokens,
            requests=requests,
            blocks=min(options.max_blocks, _MOST_TABLE_ENTRIES // requests),
            block_size=block_size,
        )
        for is_decode, tokens, requests in sorted(
            decode + mixed, key=lambda one: (one[1], one[2], one[0]), reverse=True
        )
    ]
