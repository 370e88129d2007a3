"""Estimates the times of steps on a machine with two given rates: memory bandwidth and operations
per second. Each time is an amount of data or operations, divided by its rate.

products    the larger of reading the weights and computing; only the chosen experts count
adapters    reading those of a step once, and computing the rows of all
attention   reading the KV cache of all requests, or a prompt's operations
sampling    a row for each request that gets a token
the rest    small operations, each of which takes the same time, however little it computes

If the model can be run, its steps are timed instead; see `engine.planning.rehearsal`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.planning.adapter_plan import AdapterPlan
from engine.planning.outline import Matrices, Outline, OutlineExperts

OPERATION_S = 5e-6
"""The time of a small operation, in seconds."""
STEP_OPERATIONS = 122
"""The engine's own work per step (scheduling, layout, inputs), expressed in small operations."""
REQUEST_OPERATIONS = 10
"""The engine's own work per request, expressed in small operations."""
EXPERTS_OPERATIONS = 30
"""The small operations of a module of experts besides its products: sorting tokens by expert and
back.
"""


@dataclass(frozen=True, slots=True)
class Rates:
    """The rates of a machine.

    Attributes:
        bandwidth: bytes read from memory per second.
        rate: floating-point operations of matrix products per second, in the model's dtype.
    """

    bandwidth: float
    rate: float


class ExpectedTimes:
    """Estimates the times of a model's steps."""

    def __init__(
        self,
        outline: Outline,
        rates: Rates,
        max_batch_tokens: int,
        adapters: AdapterPlan | None = None,
    ) -> None:
        """`adapters`: those that the requests have, each another one as long as there are some;
        None: they have none.
        """
        self._outline = outline
        self._adapters = adapters
        self._rates = rates
        self._max_batch_tokens = max_batch_tokens
        # Sampling reads a row of logits twice.
        row_bytes = outline.vocab_size * outline.dtype.itemsize
        self._sampled_row_s = 2 * row_bytes / rates.bandwidth

    def decode_s(self, requests: int, context: int) -> float:
        """Return the seconds of a step in which each request computes one token after `context`
        others.
        """
        kv_bytes = sum(
            shape.elements_per_token
            * self._outline.kv_dtype.itemsize
            * min(context, shape.window or context)
            for shape in self._outline.shapes.values()
        )
        kv_bytes += 2 * self._outline.recurrence.slot_bytes  # read and written
        return (
            self._products_s(requests, requests)
            + self._adapters_s(requests, requests)
            + requests * kv_bytes / self._rates.bandwidth
            + self._rest_s(requests, requests)
            + requests * self._sampled_row_s
        )

    def prefill_s(self, tokens: int) -> float:
        """Return the seconds to compute a prompt alone, in steps of at most max_batch_tokens."""
        seconds = self._sampled_row_s
        for start in range(0, tokens, self._max_batch_tokens):
            count = min(self._max_batch_tokens, tokens - start)
            seconds += self._products_s(count, 1 if start + count == tokens else 0)
            seconds += self._adapters_s(1, count)
            seconds += self._prompt_flops(start, start + count) / self._rates.rate
            seconds += self._rest_s(count, 1)
        return seconds

    def _products_s(self, rows: int, sampled: int) -> float:
        outline = self._outline
        seconds = self._matrices_s(outline.linear, rows)
        if sampled:
            seconds += self._matrices_s(outline.head, sampled)
        return seconds + sum(self._experts_s(one, rows) for one in outline.experts)

    def _adapters_s(self, requests: int, rows: int) -> float:
        one, rates = self._adapters, self._rates
        if one is None:
            return 0.0
        read = min(requests, one.count) * one.each_bytes
        computed_s = 2 * one.elements * rows / rates.rate
        return math.hypot(read / rates.bandwidth, computed_s) + len(one.layers) * OPERATION_S

    def _matrices_s(self, matrices: Matrices, rows: float) -> float:
        # Reading and computing overlap, but not entirely.
        rates = self._rates
        return math.hypot(
            matrices.held / rates.bandwidth, 2 * matrices.elements * rows / rates.rate
        )

    def _experts_s(self, one: OutlineExperts, rows: int) -> float:
        # How many experts are chosen by any of the tokens, if all are as likely.
        hit = one.total * (1 - (1 - one.chosen / one.total) ** rows)
        read = Matrices(
            elements=round(one.weights.elements * hit / one.total),
            held=round(one.weights.held * hit / one.total),
        )
        operations = EXPERTS_OPERATIONS + 2 * hit
        return self._matrices_s(read, rows * one.chosen / hit) + operations * OPERATION_S

    def _prompt_flops(self, start: int, end: int) -> float:
        flops = 0.0
        for layer, shape in self._outline.shapes.items():
            heads = self._outline.heads[layer]
            pairs = (end * (end + 1) - start * (start + 1)) / 2
            if shape.window is not None:
                pairs = min(pairs, (end - start) * shape.window)
            flops += 2 * heads * (shape.key_dim + shape.value_dim) * pairs
        return flops

    def _rest_s(self, tokens: int, requests: int) -> float:
        operations = self._outline.operations + STEP_OPERATIONS + REQUEST_OPERATIONS * requests
        # What they write is read again by the next one.
        moved_s = 2 * self._outline.token_bytes * tokens / self._rates.bandwidth
        return operations * OPERATION_S + moved_s
