"""What a step of our decoder launches on CUDA, traced without a device: at most ten operators a
layer, fourteen with experts, in a decode step of long contexts, whose attention has two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine.models.describing import describe
from engine.models.description import Experts
from tests.engine.cuda.launches import by_ours, count, trace
from tests.engine.models.decoders import ATTENDING
from tests.model_recipes import RECIPES
from tests.tiny_models import make_model

MOST_BESIDE = 24
"""Launches of a step beside its layers: the embedding and its factor, tables for each kind of
rotary embedding, the first norm, rows, logits and their softcap.
"""


@pytest.mark.parametrize("family", ATTENDING)
def test_launches_of_a_layer(family: str) -> None:
    served = by_ours(RECIPES[family])
    assert served is not None
    described = describe(make_model(RECIPES[family].config()))
    found = trace(served)
    decode, prefill = count(found["decode"], "decode"), count(found["prefill"], "prefill")
    # [q k v], turn, attention and what merges its parts, output, sum, [gate up], gate, down, sum;
    # what a layer adds beside attention is added in one sum.
    most = 9 if described.layers[0].parallel else 10
    if any(isinstance(one.mlp, Experts) for one in described.layers):
        most += 4  # a router, its choice, the order of pairs, the weighted sum
    assert (decode.layer, prefill.layer) == (most, most - 1)
    assert decode.step - most * len(described.layers) <= MOST_BESIDE


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_float16_launches_the_same(family: str) -> None:
    found = []
    for dtype in (torch.bfloat16, torch.float16):
        served = by_ours(RECIPES[family], dtype)
        assert served is not None
        found.append(trace(served))
    assert found[0] == found[1]


def test_constants_of_launches_are_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first of two steps; each layer has a rotation, and two sums behind the first norm."""
    from engine.models import triton_operations

    found: list[str] = []

    def counted(name: str) -> Callable[..., object]:
        find = getattr(triton_operations, name)

        def finds(*args: Any, **options: Any) -> object:
            found.append(name)
            return find(*args, **options)

        return finds

    for name in ("turn_launch", "add_norm_launch"):
        monkeypatch.setattr(triton_operations, name, counted(name))
    served = by_ours(RECIPES["qwen3"])
    assert served is not None
    trace(served)
    layers = len(describe(make_model(RECIPES["qwen3"].config())).layers)
    assert found.count("turn_launch") == layers
    assert found.count("add_norm_launch") == 1 + 2 * layers
