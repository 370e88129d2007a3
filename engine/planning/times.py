"""Expected times of steps: what is read and computed, divided by the machine's rates.

products    the larger of reading the weights and computing, somewhat more where both take long
attention   reading the KV of all requests, or a prompt's operations
the rest    small operations, each of which costs the same however little it computes
"""

from __future__ import annotations

import math

from engine.planning.outline import Matrices, Outline
from engine.planning.rates import Products, Rates

STEP_OPERATIONS = 120
"""The engine's own work in a step (scheduling, layout, sampling), in small operations."""
REQUEST_OPERATIONS = 10
"""The same for each request."""


class StepTimes:
    """Computes the times of a model's steps."""

    def __init__(self, outline: Outline, rates: Rates) -> None:
        self._outline = outline
        self._rates = rates

    def decode_s(self, requests: int, context: int) -> float:
        """Seconds of a step in which each of some requests computes one token behind `context`
        others.
        """
        kv_bytes = sum(
            shape.elements_per_token * self._outline.kv_dtype.itemsize * min(context, shape.window)
            if shape.window is not None
            else shape.elements_per_token * self._outline.kv_dtype.itemsize * context
            for shape in self._outline.shapes
        )
        return (
            self._products_s(requests, requests)
            + requests * kv_bytes / self._rates.kv_bandwidth
            + self._rest_s(requests, requests)
        )

    def prefill_s(self, tokens: int, max_batch_tokens: int) -> float:
        """Seconds of computing a prompt alone, in steps of at most so many tokens."""
        seconds = 0.0
        for start in range(0, tokens, max_batch_tokens):
            count = min(max_batch_tokens, tokens - start)
            seconds += self._products_s(count, 1 if start + count == tokens else 0)
            seconds += self._prompt_flops(start, start + count) / self._rates.attention_rate
            seconds += self._rest_s(count, 1)
        return seconds

    def _products_s(self, rows: int, sampled: int) -> float:
        outline, rates = self._outline, self._rates
        seconds = _product_s(outline.linear, rows, rates.packed)
        if sampled:
            seconds += _product_s(outline.head, sampled, rates.packed)
        for one in outline.experts:
            # How many experts are chosen by any of the tokens, if all are as likely.
            hit = one.total * (1 - (1 - one.chosen / one.total) ** rows)
            read_s = one.weights.held * hit / one.total / rates.plain.bandwidth
            elements = one.weights.elements / one.total
            compute_s = 2 * elements * one.chosen * rows / rates.plain.rate
            seconds += math.hypot(read_s, compute_s)
        return seconds

    def _prompt_flops(self, start: int, end: int) -> float:
        flops = 0.0
        for shape, heads in zip(self._outline.shapes, self._outline.heads, strict=True):
            pairs = (end * (end + 1) - start * (start + 1)) / 2
            if shape.window is not None:
                pairs = min(pairs, (end - start) * shape.window)
            flops += 2 * heads * (shape.key_dim + shape.value_dim) * pairs
        return flops

    def _rest_s(self, tokens: int, requests: int) -> float:
        operations = self._outline.operations + STEP_OPERATIONS + REQUEST_OPERATIONS * requests
        # What they write is read again by the next one.
        moved_s = 2 * self._outline.token_bytes * tokens / self._rates.plain.bandwidth
        return operations * self._rates.operation_s + moved_s


def _product_s(matrices: Matrices, rows: int, products: Products) -> float:
    """Seconds of products with so many rows. Reading and computing overlap, but not entirely."""
    return math.hypot(
        matrices.held / products.bandwidth, 2 * matrices.elements * rows / products.rate
    )
