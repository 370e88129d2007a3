"""Rotary modules that compute their frequencies in each call find them where the model is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.loading.rotary import keep_frequencies
from engine.loading.view import ModelView
from tests.model_recipes import RECIPES
from tests.tiny_models import make_model


def test_frequencies_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the view, which stays so; the owner's module is as it was."""
    model: Any = make_model(RECIPES["phimoe"].config()).bfloat16()
    view = ModelView.of(model)
    of_view: Any = view.model
    made = 0

    def counted(*given: Any, right: Any = model.model.rotary_emb.rope_init_fn) -> Any:
        nonlocal made
        made += 1
        return right(*given)

    monkeypatch.setattr(model.model.rotary_emb, "rope_init_fn", counted)
    view.refresh()
    assert keep_frequencies(of_view) == 1
    made = 0
    x, positions = torch.zeros(1, 1, dtype=torch.bfloat16), torch.tensor([[0, 7, 300]])
    for _ in range(2):
        ours = of_view.model.rotary_emb(x, position_ids=positions)
        view.refresh()
    assert made == 0
    theirs = model.model.rotary_emb(x, position_ids=positions)
    assert made == 1
    assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_others_are_left(family: str) -> None:
    model = ModelView.of(make_model(RECIPES[family].config())).model
    assert keep_frequencies(model) == 0
    assert not any("forward" in vars(one) for one in model.modules())
