"""Expected times of steps: what is read and computed, divided by the machine's rates.

products    as measured with about as many rows; the larger of reading the weights and computing,
            where only rates were given
experts     the modules as measured; else the products of those that are chosen
attention   reading the KV of all requests, or a prompt's operations
sampling    a row for each request that gets a token
the rest    small operations, each of which costs the same however little it computes
"""

from __future__ import annotations

from engine.planning.outline import Experts, Matrices, Outline
from engine.planning.rates import Rates, between

STEP_OPERATIONS = 120
"""The engine's own work in a step (scheduling, layout), in small operations."""
REQUEST_OPERATIONS = 10
"""The same for each request."""
EXPERTS_OPERATIONS = 30
"""Those of a module of experts besides its products: sorting tokens by expert, and back."""


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
            + requests * self._rates.sampled_row_s
        )

    def prefill_s(self, tokens: int, max_batch_tokens: int) -> float:
        """Seconds of computing a prompt alone, in steps of at most so many tokens."""
        seconds = self._rates.sampled_row_s
        for start in range(0, tokens, max_batch_tokens):
            count = min(max_batch_tokens, tokens - start)
            seconds += self._products_s(count, 1 if start + count == tokens else 0)
            seconds += self._prompt_flops(start, start + count) / self._rates.attention_rate
            seconds += self._rest_s(count, 1)
        return seconds

    def _products_s(self, rows: int, sampled: int) -> float:
        outline, rates = self._outline, self._rates
        seconds = rates.packed.seconds(outline.linear, rows)
        if sampled:
            seconds += rates.packed.seconds(outline.head, sampled)
        return seconds + sum(self._experts_s(one, rows) for one in outline.experts)

    def _experts_s(self, one: Experts, rows: int) -> float:
        rates = self._rates
        if rates.experts:
            return one.weights.held * between(rates.experts, rows)
        # How many experts are chosen by any of the tokens, if all are as likely.
        hit = one.total * (1 - (1 - one.chosen / one.total) ** rows)
        read = Matrices(
            elements=round(one.weights.elements * hit / one.total),
            held=round(one.weights.held * hit / one.total),
        )
        operations = EXPERTS_OPERATIONS + 2 * hit
        return rates.plain.seconds(read, rows * one.chosen / hit) + operations * rates.operation_s

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
        moved_s = 2 * self._outline.token_bytes * tokens / self._rates.packed.bandwidth
        return operations * self._rates.operation_s + moved_s
