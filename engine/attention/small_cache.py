"""Computes steps of given prompts over a KV cache that has room for them alone. Attention, layers
and whole models are judged by what they compute in these steps.

    prompt   0: a b c   1: d e          blocks of 2 tokens: [null] [a b] [c .] [d e]
    step     parts (0, 2, 3) (1, 0, 2)  ─▶ c d e at positions 2 0 1, rows 2 3 4 of all tokens
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from engine.attention.interface import (
    AttentionBackend,
    AttentionContext,
    BatchLayout,
    LayerCache,
    LayerShape,
)
from engine.attention.registry import CONTEXT_KEYWORD
from engine.attention.step_states import (
    NOTHING_RECURS,
    Recurrence,
    StepStates,
    allocate_states,
)
from engine.contract.adapters import Adapter, AdapterRows
from engine.native.device_copy import to_device


class Span(NamedTuple):
    """The tokens of a prompt from `start` to before `end`."""

    prompt: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class SmallStep:
    """A step.

    Attributes:
        rows: int64 [T], the index of each token among the tokens of all prompts.
        positions: int64 [T].
        last: int64 [R], the index of each part's last token in the step.
        context: what attention needs.
        keyword: the argument of the model's forward for states; "" if there are none.
    """

    rows: torch.Tensor
    positions: torch.Tensor
    last: torch.Tensor
    context: AttentionContext
    keyword: str = ""

    @torch.inference_mode()
    def logits(self, model: Callable[..., Any], token_ids: torch.Tensor) -> torch.Tensor:
        """Run a model that has our attention, and return the logits of its parts' last tokens.

        Args:
            model: see `engine.runner.forward.CausalModel`.
            token_ids: int64, of all prompts.
        """
        wants_all = len(self.last) == len(self.rows)
        cache = {self.keyword: self.context.states} if self.keyword else {}
        with self.context.backend.step_lock:
            output = model(
                input_ids=token_ids[self.rows].unsqueeze(0),
                position_ids=self.positions.unsqueeze(0),
                logits_to_keep=0 if wants_all else self.last,
                use_cache=False,
                **{CONTEXT_KEYWORD: self.context},
                **cache,
            )
        logits: torch.Tensor = output.logits[0]
        return logits


_SMALLEST = LayerShape(1, 1, 1, None)

Allocate = Callable[[LayerShape, int], tuple[torch.Tensor, torch.Tensor]]
"""Returns a layer's keys and values for a number of slots; see LayerCache."""


def zeros(dtype: torch.dtype, device: torch.device) -> Allocate:
    """Return what allocates zeros."""

    def allocate(shape: LayerShape, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
        heads = shape.num_kv_heads
        return (
            torch.zeros((slots, heads, shape.key_dim), dtype=dtype, device=device),
            torch.zeros((slots, heads, shape.value_dim), dtype=dtype, device=device),
        )

    return allocate


class SmallCache:
    """A KV cache of some layers and prompts.

    Attributes:
        caches: the caches of the layers, by index.
    """

    def __init__(
        self,
        backend: AttentionBackend,
        shapes: Mapping[int, LayerShape],
        lengths: Sequence[int],
        block_size: int,
        allocate: Allocate,
        recurrence: Recurrence = NOTHING_RECURS,
        *,
        is_null: bool = False,
    ) -> None:
        """Allocate a cache.

        Args:
            backend: computes attention.
            shapes: the shapes of the layers, by index.
            lengths: the prompts' numbers of tokens.
            block_size: tokens per block.
            allocate: allocates a layer's keys and values.
            recurrence: the layers that carry states, which have a slot for each prompt.
            is_null: whether all tokens are written to the null block, because what is read from the
                cache does not matter.
        """
        self._backend, self._block_size = backend, block_size
        self._windows = list(dict.fromkeys(shape.window for shape in shapes.values()))
        self._offsets = np.cumsum([0, *lengths])
        counts = [-(-length // block_size) for length in lengths]
        self._tables, block = np.zeros((len(lengths), max(counts)), dtype=np.int32), 1
        for table, count in zip(self._tables, [] if is_null else counts, strict=not is_null):
            table[:count] = np.arange(block, block + count)
            block += count
        self.caches = {
            layer: LayerCache(
                *allocate(shape, block * block_size), group=self._windows.index(shape.window)
            )
            for layer, shape in shapes.items()
        }
        self._device = allocate(_SMALLEST, 1)[0].device
        # The first slot is the null slot.
        self._slots = np.arange(1, len(lengths) + 1)[:, None] * (not is_null)
        self._keyword = recurrence.keyword
        slots = 1 if is_null else len(lengths) + 1
        self._states = allocate_states(recurrence.shapes, slots, self._device)

    def step(self, parts: Sequence[Span], adapters: Sequence[Adapter | None] = ()) -> SmallStep:
        """Prepare a step that computes parts of prompts. Those of one token come first. `adapters`:
        of each part; empty: none has one.
        """
        places = [np.arange(start, end) for _, start, end in parts]
        prompts, counts = [part.prompt for part in parts], np.array([len(one) for one in places])
        layout = BatchLayout(
            starts=np.array([part.start for part in parts]),
            counts=counts,
            num_decodes=int((counts == 1).sum()),
            positions=np.concatenate(places),
            tables=self._tables[prompts],
            block_size=self._block_size,
        )
        of_all = layout.positions + np.repeat(self._offsets[prompts], counts)
        metadata = []
        if self.caches:
            like = next(iter(self.caches.values())).keys
            metadata = [self._backend.prepare(layout, window, like) for window in self._windows]
        rows, positions, last = (
            to_device(one, self._device)
            for one in (of_all, layout.positions, np.cumsum(counts) - 1)
        )
        states = None
        if self._states:
            slots = self._slots[prompts]
            states = StepStates.of(self._states, slots, layout.starts, layout.counts)
        adapted = AdapterRows.of(adapters, counts) if adapters else None
        context = AttentionContext(self._backend, self.caches, metadata, states, adapted)
        return SmallStep(rows, positions, last, context, self._keyword)
