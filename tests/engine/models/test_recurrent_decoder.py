"""Our decoder's recurrent layers: with each instruction set and packing, and that a request's
results depend on no neighbour, on no thread, and on no schedule that keeps the grid.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from engine.attention.small_cache import SmallCache, Span, zeros
from engine.loading.verified import VerifiedModel
from engine.models.formats.int4 import Int4
from engine.models.formats.int8 import Int8
from engine.models.formats.native import Native
from engine.models.formats.registry import Format
from engine.models.native_decoder import NativeDecoder
from engine.models.recurrence import GRID
from tests.engine.models.decoders import generate, make, verify
from tests.tiny_models import make_prompts

FAMILIES = ("lfm2", "olmo_hybrid", "qwen3_5", "qwen3_next")
LENGTHS = (2 * GRID + 3, 1, 37, GRID)
Steps = Sequence[Sequence[Span]]


def _without_experts(family: str) -> PreTrainedModel:
    """A model whose layers are all ours: the order of sums of its own experts depends on others."""
    return make(family, **({"num_experts": 0} if family == "qwen3_next" else {}))


def _results(
    verified: VerifiedModel, prompts: list[list[int]], steps: Steps
) -> tuple[dict[tuple[int, int], torch.Tensor], list[torch.Tensor]]:
    """The logits after each part, by prompt and end, and the states in the end, [prompts, ...]."""
    decoder, probe = verified.steps, verified.probe
    assert isinstance(decoder, NativeDecoder)
    small = SmallCache(
        decoder.backend, probe.shapes, list(map(len, prompts)), 8,
        zeros(decoder.dtype, decoder.device), probe.recurrence,
    )  # fmt: skip
    ids = torch.tensor([token for prompt in prompts for token in prompt])
    logits: dict[tuple[int, int], torch.Tensor] = {}
    states: list[torch.Tensor] = []
    for parts in steps:
        step = small.step(parts)
        made = step.logits(decoder, ids)
        if len(made) != len(parts):
            made = made[step.last]
        logits |= {(part.prompt, part.end): one for part, one in zip(parts, made, strict=True)}
        assert step.context.states is not None
        states = [one[1:].clone() for one in step.context.states.tensors.values()]
    return logits, states


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_neighbours_and_threads_change_nothing(family: str, dtype: torch.dtype) -> None:
    verified, prompts = verify(_without_experts(family).to(dtype)), make_prompts(LENGTHS)
    last = [len(one) - 1 for one in prompts]
    together: Steps = (
        [Span(i, 0, end) for i, end in enumerate(last) if end],
        [Span(i, end, end + 1) for i, end in enumerate(last)],
    )
    logits, states = _results(verified, prompts, together)
    for threads in (1, 2):
        with _threads(threads):
            for i, prompt in enumerate(prompts):
                parts = [[Span(0, *one[1:])] for step in together for one in step if one[0] == i]
                alone, own = _results(verified, [prompt], parts)
                assert all(torch.equal(logits[i, end], one) for (_, end), one in alone.items())
                assert all(torch.equal(x[i], y[0]) for x, y in zip(states, own, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_schedules_that_keep_the_grid_change_nothing(family: str) -> None:
    """Of the states before the first attention, whose sums are cut elsewhere."""
    verified, prompts = verify(_without_experts(family)), make_prompts(LENGTHS[:1])
    tokens = len(prompts[0])
    first = [one.layer == 0 for one in verified.probe.recurrence.shapes]
    assert any(first)
    _, expected = _results(verified, prompts, [[Span(0, 0, tokens)]])
    for cuts in ((GRID,), (2 * GRID,), (GRID, 2 * GRID)):
        ends = (0, *cuts, tokens)
        steps = [[Span(0, *one)] for one in itertools.pairwise(ends)]
        _, found = _results(verified, prompts, steps)
        for is_first, x, y in zip(first, found, expected, strict=True):
            assert torch.equal(x, y) or not is_first, cuts


@pytest.mark.parametrize("family", FAMILIES)
def test_every_instruction_set(isa: str, family: str) -> None:
    """It computes the parts as the model does, and steps of every kind."""
    if isa == "portable":
        pytest.skip("nothing is packed for it")
    for dtype in (torch.bfloat16, torch.float32):
        lines: list[str] = []
        verified = verify(make(family).to(dtype), lines=lines)
        assert verified.decoder is not None, lines
        assert generate(verified, max_batch_tokens=16) == generate(verified)


@pytest.mark.parametrize("packing", [Native, Int8, Int4])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_packing(family: str, packing: Format) -> None:
    """The load gate compares it with the model's own code, for integers with the packed weights."""
    lines: list[str] = []
    verified = verify(make(family, hidden_size=64), packing, lines)
    assert verified.decoder is not None, lines
    assert all(len(tokens) for tokens in generate(verified))


ROPE = {"rope_type": "default", "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen3_next", {"mlp_only_layers": [0, 1]}),
        ("qwen3_next", {"num_experts": 0}),
        ("qwen3_next", {"linear_num_key_heads": 16}),
        ("qwen3_next", {"linear_num_value_heads": 24, "linear_value_head_dim": 20}),
        ("olmo_hybrid", {"rope_parameters": ROPE}),
        ("olmo_hybrid", {"rope_parameters": None}),
        ("olmo_hybrid", {"linear_allow_neg_eigval": False, "linear_num_key_heads": 16}),
    ],
)
def test_other_settings(family: str, settings: dict[str, Any]) -> None:
    """Some layers without experts, other numbers of heads, with and without rotary embeddings."""
    for dtype in (torch.bfloat16, torch.float32):
        lines: list[str] = []
        verified = verify(make(family, **settings).to(dtype), lines=lines)
        assert verified.decoder is not None, lines
        assert generate(verified, max_batch_tokens=16) == generate(verified)
