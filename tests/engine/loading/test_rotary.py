"""Rotary modules of a view: tokens are rotated for the lengths that they carry, and frequencies
that are computed in each call are found where the model is.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from engine.contract.rope import LENGTH_SHIFT, RopeLengths
from engine.loading.rotary import follow_lengths, keep_frequencies, read_rope
from engine.loading.view import ModelView
from engine.models.describing import NotDescribedError, describe
from tests.long_rope import MODELS, ORIGINAL
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


def _lengthened(name: str) -> tuple[Any, Any, RopeLengths]:
    """A model, and the rotary module of its view, which follows lengths."""
    family, settings = MODELS[name]
    model: Any = make_model(RECIPES[family].config(**settings))
    view: Any = ModelView.of(model).model
    rope = read_rope(view)
    assert rope is not None
    assert follow_lengths(view, rope)
    return model, view, rope


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_each_token_is_rotated_as_alone(name: str, dtype: torch.dtype) -> None:
    """Short and long ones beside each other; with longrope every bit is that of transformers."""
    model, view, rope = _lengthened(name)
    x = torch.zeros(1, 1, dtype=dtype)
    lengths = [ORIGINAL, ORIGINAL + 1, 1, 100, ORIGINAL - 1, rope.longest]
    tokens = [(place, length) for length in lengths for place in {0, 1, length // 2, length - 1}]
    carried = [p + ((n if n > ORIGINAL else 0) << LENGTH_SHIFT) for p, n in tokens]
    named = {"layer_type": "full_attention"} if name.startswith("gemma3") else {}
    ours = view.model.rotary_emb(x, position_ids=torch.tensor([carried]), **named)
    for index, (place, length) in enumerate(tokens):
        alone = copy.deepcopy(model).model.rotary_emb
        theirs = alone(x, position_ids=torch.tensor([[place, length - 1]]), **named)
        bound = 0.0 if "longrope" in name else 1e-4 + 1e-6 * length
        bound = bound if dtype is torch.float32 or not bound else 1e-2
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one[:, index], other[:, 0], rtol=0.0, atol=bound)


@pytest.mark.parametrize("name", ["llama, longrope", "phimoe, longrope", "llama, dynamic"])
def test_what_the_owner_computed_last_changes_nothing(name: str) -> None:
    """Neither before the view is made nor later."""
    family, settings = MODELS[name]
    model: Any = make_model(RECIPES[family].config(**settings))
    x, long = torch.zeros(1, 1), torch.tensor([[3, 200]])
    right = [one[:, :1] for one in model.model.rotary_emb(x, position_ids=torch.tensor([[3, 9]]))]
    wrong = model.model.rotary_emb(x, position_ids=long)
    view = ModelView.of(model)
    rope = read_rope(view.model)
    assert rope is not None
    assert follow_lengths(view.model, rope)
    for _ in range(2):
        of_view: Any = view.model
        ours = of_view.model.rotary_emb(x, position_ids=torch.tensor([[3]]))
        assert all(torch.equal(*pair) for pair in zip(ours, right, strict=True))
        assert not torch.equal(ours[0], wrong[0][:, :1])
        model.model.rotary_emb(x, position_ids=long)
        view.refresh()


def test_a_view_that_cannot_follow_is_as_before() -> None:
    """Here a forward beyond the original length fails, as with parameters that are not there."""
    family, settings = MODELS["phimoe, longrope"]
    config = RECIPES[family].config(**copy.deepcopy(settings))
    del config.rope_parameters["long_mscale"]
    view: Any = ModelView.of(make_model(config)).model
    rope, rotary = read_rope(view), view.model.rotary_emb
    assert rope is not None
    before = dict(vars(rotary)), set(rotary._buffers)
    assert not follow_lengths(view, rope)
    assert (dict(vars(rotary)), set(rotary._buffers)) == before


def test_a_forward_that_the_owner_has_replaced_is_kept() -> None:
    """What it would compute for other lengths is not known, so there are none; nor is it described
    for our decoder.
    """
    family, settings = MODELS["llama, longrope"]
    model: Any = make_model(RECIPES[family].config(**settings))
    right = model.model.rotary_emb.forward
    model.model.rotary_emb.forward = lambda *given, **named: right(*given, **named)
    view: Any = ModelView.of(model).model
    rope = read_rope(view)
    assert rope is not None
    assert not follow_lengths(view, rope)
    assert view.model.rotary_emb.forward is model.model.rotary_emb.forward
    with pytest.raises(NotDescribedError, match="a forward of its own"):
        describe(view)


def test_a_module_that_rotates_otherwise_beyond_the_original_length() -> None:
    """Than by its frequencies: it is not followed, and as before."""
    family, settings = MODELS["llama, longrope"]
    view: Any = ModelView.of(make_model(RECIPES[family].config(**settings))).model
    rotary = view.model.rotary_emb
    right = type(rotary).forward

    def forward(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        cos, sin = right(self, x, position_ids)
        return (2 * cos, sin) if position_ids.max() >= ORIGINAL else (cos, sin)

    rotary.__class__ = type("Rotary", (type(rotary),), {"forward": forward})
    rope = read_rope(view)
    assert rope is not None
    assert not follow_lengths(view, rope)
    assert "forward" not in vars(rotary)
    assert not any("lengths" in buffer for buffer in rotary._buffers)
