"""Steps over a small cache compute what whole prompts do, however these are cut and mixed."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.attention.interface import AttentionParams, LayerShape
from engine.attention.small_cache import SmallCache, Span, zeros
from engine.attention.torch_backend import TorchAttentionBackend

LENGTHS = (9, 5)
SHAPES = {3: LayerShape(2, 8, 4, None), 7: LayerShape(1, 8, 8, 3)}
PARAMS = AttentionParams(scaling=0.3)
CUTS: dict[str, list[list[Span]]] = {
    "whole": [[Span(0, 0, 9), Span(1, 0, 5)]],
    "alone": [[Span(1, 0, 5)], [Span(0, 0, 9)]],
    "chunks": [[Span(0, 0, 4)], [Span(0, 4, 8), Span(1, 0, 4)], [Span(0, 8, 9), Span(1, 4, 5)]],
    "both parts in a step": [[Span(0, 4, 9), Span(0, 0, 4)], [Span(1, 0, 5)]],
}


def _given(shape: LayerShape) -> list[torch.Tensor]:
    """Queries, keys and values of all tokens."""
    generator = torch.Generator().manual_seed(0)
    heads = (2 * shape.num_kv_heads, shape.num_kv_heads, shape.num_kv_heads)
    dims = (shape.key_dim, shape.key_dim, shape.value_dim)
    return [
        torch.randn((count, sum(LENGTHS), dim), generator=generator)
        for count, dim in zip(heads, dims, strict=True)
    ]


def _expected(shape: LayerShape) -> torch.Tensor:
    made = []
    for q, k, v in zip(*(one.split(LENGTHS, 1) for one in _given(shape)), strict=True):
        count = q.shape[1]
        seen = torch.ones(count, count, dtype=torch.bool).tril()
        if shape.window is not None:
            seen &= ~seen.tril(-shape.window)
        k, v = (one.repeat_interleave(2, 0) for one in (k, v))
        scores = (q @ k.transpose(1, 2) * PARAMS.scaling).masked_fill(~seen, -torch.inf)
        made.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(made)


def _computed(shape_of: int, steps: Sequence[Sequence[Span]]) -> torch.Tensor:
    shape, cpu = SHAPES[shape_of], torch.device("cpu")
    small = SmallCache(TorchAttentionBackend(), SHAPES, LENGTHS, 4, zeros(torch.float32, cpu))
    made = torch.zeros((sum(LENGTHS), 2 * shape.num_kv_heads, shape.value_dim))
    for step in map(small.step, steps):
        q, k, v = (one[:, step.rows] for one in _given(shape))
        made[step.rows] = step.context.attend(shape_of, q, k, v, PARAMS)
    return made


@pytest.mark.parametrize("layer", SHAPES)
@pytest.mark.parametrize("cut", CUTS)
def test_attention(layer: int, cut: str) -> None:
    torch.testing.assert_close(_computed(layer, CUTS[cut]), _expected(SHAPES[layer]))


def test_what_is_not_in_the_cache_is_missed() -> None:
    assert not torch.allclose(_computed(3, [[Span(0, 4, 9)]])[4:9], _expected(SHAPES[3])[4:9])


@pytest.mark.parametrize(
    ("parts", "kept"),
    [([Span(0, 2, 4), Span(1, 0, 3)], [1, 4]), ([Span(0, 8, 9), Span(1, 4, 5)], None)],
)
def test_a_model_is_given_the_parts(parts: list[Span], kept: list[int] | None) -> None:
    """And asked for the logits of their last tokens, or of all if these are all."""
    ids = torch.arange(100, 114)

    def model(**named: Any) -> Any:
        step = [one for part in parts for one in range(part.start, part.end)]
        assert named["position_ids"].tolist() == [step]
        assert named["input_ids"].tolist() == [
            [100 + 9 * part.prompt + at for part in parts for at in range(part.start, part.end)]
        ]
        assert not named["use_cache"]
        rows = named["logits_to_keep"]
        assert (rows == 0) if kept is None else (rows.tolist() == kept)
        return SimpleNamespace(logits=torch.ones((1, 2, 50)))

    cpu = torch.device("cpu")
    small = SmallCache(TorchAttentionBackend(), SHAPES, LENGTHS, 4, zeros(torch.float32, cpu))
    assert small.step(parts).logits(model, ids).shape == (2, 50)


def test_the_null_block_takes_all() -> None:
    """Steps whose contents do not matter need no more memory than a block."""
    allocate = zeros(torch.float32, torch.device("cpu"))
    small = SmallCache(TorchAttentionBackend(), SHAPES, LENGTHS, 4, allocate, is_null=True)
    assert {len(one.keys) for one in small.caches.values()} == {4}
    step = small.step(CUTS["whole"][0])
    q, k, v = (one[:, step.rows] for one in _given(SHAPES[3]))
    assert step.context.attend(3, q, k, v, PARAMS).shape == (14, 4, 4)
