"""Recurrences as their tests see them: rows of requests, the operation, and what it should compute.

A form is what one operation computes. A reference computes one request at a time, token by token,
in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import silu

from engine.models.recurrence import gated_delta_rule, short_convolution

Rows = tuple[torch.Tensor, ...]
"""What an operation reads of each row, [T, ...] each."""


@dataclass(frozen=True, slots=True)
class Where:
    """Where a step's requests are: int64 [R] each; see `short_convolution`."""

    starts: torch.Tensor
    counts: torch.Tensor
    slots: torch.Tensor

    @property
    def places(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The same, as an operation's last arguments."""
        return self.starts, self.counts, self.slots


@dataclass(frozen=True, slots=True)
class Form:
    """A recurrence of some size.

    Attributes:
        name: for a test's id.
        shape: of a request's state.
        make: the rows of so many tokens, by a seed.
        compute: the operation: rows, state [slots, *shape], requests → [T, ...].
        reference: all rows of a request, float64 → its results and its last state.
    """

    name: str
    shape: tuple[int, ...]
    make: Callable[[int, int], Rows]
    compute: Callable[[Rows, torch.Tensor, Where], torch.Tensor]
    reference: Callable[[Rows], tuple[torch.Tensor, torch.Tensor]]


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def convolution(
    channels: int, width: int, kept: int, *, has_bias: bool = True, has_silu: bool = True
) -> Form:
    """A short convolution with a state of `kept` inputs."""
    weight = random(1, channels, width)
    bias = random(2, channels) if has_bias else None

    def compute(rows: Rows, state: torch.Tensor, where: Where) -> torch.Tensor:
        return short_convolution(rows[0], weight, bias, has_silu, state, *where.places)

    def reference(rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        before = torch.zeros(max(kept, width - 1), channels, dtype=torch.float64)
        x = torch.cat([before, rows[0]])
        taps = x[len(before) - width + 1 :].unfold(0, width, 1)  # [T, C, width]
        y = (taps * weight.double()).sum(dim=-1) + (0 if bias is None else bias.double())
        return (silu(y) if has_silu else y), x[len(x) - kept :].T

    name = f"convolution-{channels}x{width}-{kept}"
    return Form(name, (channels, kept), lambda n, s: (random(s, n, channels),), compute, reference)


def delta_rule(
    key_heads: int,
    heads: int,
    key_dim: int,
    value_dim: int,
    *,
    normed: bool = True,
    by_channel: bool = False,
) -> Form:
    """A gated delta rule, with a decay for each head, or for each channel of keys."""

    def make(count: int, seed: int) -> Rows:
        decays = (count, heads, key_dim) if by_channel else (count, heads)
        keys = random(seed + 1, count, key_heads, key_dim)
        return (
            random(seed, count, key_heads, key_dim),
            keys if normed else keys / keys.norm(dim=-1, keepdim=True),
            random(seed + 2, count, heads, value_dim),
            -random(seed + 3, *decays).abs() * 0.3,
            random(seed + 4, count, heads).sigmoid(),
        )

    def compute(rows: Rows, state: torch.Tensor, where: Where) -> torch.Tensor:
        query, key, value, decay, beta = rows
        return gated_delta_rule(query, key, value, decay, beta, normed, state, *where.places)

    def reference(rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        query, key, value, decay, beta = rows
        if normed:
            query, key = (
                x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key)
            )
        query, key = (x.repeat_interleave(heads // key_heads, dim=1) for x in (query, key))
        query = query * key_dim**-0.5
        state = torch.zeros(heads, key_dim, value_dim, dtype=torch.float64)
        results = []
        for q, k, v, g, b in zip(query, key, value, decay, beta, strict=True):
            state = state * (g if by_channel else g[:, None]).exp()[:, :, None]
            delta = b[:, None] * (v - torch.einsum("hk,hkv->hv", k, state))
            state = state + k[:, :, None] * delta[:, None]
            results.append(torch.einsum("hk,hkv->hv", q, state))
        return torch.stack(results), state

    name = f"delta-{key_heads}-{heads}x{key_dim}x{value_dim}{'-by-channel' if by_channel else ''}"
    return Form(name, (heads, key_dim, value_dim), make, compute, reference)


FORMS = (
    convolution(70, 4, 4),
    convolution(9, 3, 2, has_silu=False),
    delta_rule(2, 4, 32, 72),
    delta_rule(1, 2, 9, 13),
    delta_rule(2, 2, 24, 16, by_channel=True),
)

Step = Sequence[tuple[int, int]]
"""The parts of a step: a request's index, and how many of its rows are computed."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What steps made of some requests.

    Attributes:
        results: each request's results, one after the other.
        states: each request's last state.
        state: of all slots.
    """

    results: list[torch.Tensor]
    states: list[torch.Tensor]
    state: torch.Tensor


def run(
    form: Form, requests: Sequence[Rows], steps: Sequence[Step], slots: Sequence[int], size: int = 0
) -> Outcome:
    """Compute requests in steps. The state begins as NaN, as a slot's last holder may leave it.

    Args:
        form: the recurrence.
        requests: all rows of each request.
        steps: which rows each step computes, in order.
        slots: each request's slot.
        size: the number of slots; 0 for one more than the largest.
    """
    state = torch.full((size or max(slots) + 2, *form.shape), torch.nan)
    done = [0] * len(requests)
    results: list[list[torch.Tensor]] = [[] for _ in requests]
    for step in steps:
        parts = [[x[done[r] : done[r] + n] for x in requests[r]] for r, n in step]
        where = Where(
            starts=torch.tensor([done[r] for r, _ in step]),
            counts=torch.tensor([n for _, n in step]),
            slots=torch.tensor([slots[r] for r, _ in step]),
        )
        rows = tuple(torch.cat(column) for column in zip(*parts, strict=True))
        made = torch.split(form.compute(rows, state, where), [n for _, n in step])
        for (r, n), one in zip(step, made, strict=True):
            results[r].append(one)
            done[r] += n
    joined = [torch.cat(one) if one else torch.empty(0) for one in results]
    return Outcome(joined, [state[slot].clone() for slot in slots], state)


def check(form: Form, requests: Sequence[Rows], outcome: Outcome, tolerance: float = 1e-5) -> None:
    """Assert that results and states are those of the reference, relative to the largest."""
    for index, rows in enumerate(requests):
        expected = form.reference(tuple(x.double() for x in rows))
        found = (outcome.results[index], outcome.states[index])
        for what, one, other in zip(("results", "state"), found, expected, strict=True):
            error = (one.double() - other).abs().max() / other.abs().max().clamp(min=1e-3)
            assert error <= tolerance, f"request {index}, {what}: {error:.1e}"
