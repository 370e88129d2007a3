"""Whole decoder layers in one call: which are, that they compute what their modules do, and when
the layer's class takes over.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from engine.native.library import NativeLibrary
from engine.offline import LoadedModel
from engine.runner import fused_layer, fusing
from engine.runner.fused import PLAN, is_exchanged, restore
from engine.runner.fused_layer import layer_forward
from engine.runner.fusing import fuse_model
from engine.runner.loader import verify_model
from engine.runner.packing import Packing, pack_model
from tests.model_recipes import RECIPES
from tests.tiny_models import FAMILIES, make_model

# Family, settings, and how many layers are exchanged. Weights lie side by side where there are
# multiples of 64 outputs.
WHOLE: dict[str, tuple[dict[str, Any], int]] = {
    "llama": ({}, 3),
    "mistral": ({}, 3),
    "qwen2": ({}, 3),
    "qwen3": ({}, 3),
    "gemma": ({}, 3),
    "gemma2": ({}, 0),  # norms behind attention and the gated layer, too
    "granite": ({}, 0),  # what is added is multiplied before
    "cohere": ({}, 0),
    "olmo2": ({}, 0),
    "phi3": ({}, 0),
    "smollm3": ({}, 4),  # some of its layers turn nothing
    "qwen3, wide heads": ({"num_key_value_heads": 4, "head_dim": 80}, 3),
    "qwen3, an odd head": ({"head_dim": 24}, 0),  # 4 x 24 are no whole panels
}


def _model(name: str = "qwen3", seed: int = 0) -> PreTrainedModel:
    family, settings = name.split(",")[0], {"head_dim": 32, **WHOLE[name][0]}
    if family in ("phi3", "cohere", "olmo2", "granite", "qwen2", "smollm3"):
        settings = {"hidden_size": 128, **WHOLE[name][0]}
    config = FAMILIES[family](
        **settings, intermediate_size=128, num_attention_heads=4,
        **({} if "num_key_value_heads" in settings else {"num_key_value_heads": 2}),
    )  # fmt: skip
    model = make_model(config, seed).to(torch.bfloat16)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() == 1:  # norms and biases
                noise = torch.randn_like(parameter) * 0.3
                parameter.add_(noise if "norm" in parameter_name else noise * 0.1)
    return model


def _layers(model: PreTrainedModel) -> list[Any]:
    return [
        one
        for one in model.modules()
        if is_exchanged(one) and getattr(one.forward, "__func__", None) is layer_forward
    ]


@pytest.mark.parametrize("packing", ["native", "int8"])
@pytest.mark.parametrize("name", WHOLE)
def test_which_are_exchanged(name: str, packing: Packing) -> None:
    if not RECIPES[name.split(",")[0]].is_known:
        pytest.skip("this version of transformers does not know it")
    model = _model(name)
    pack_model(model, packing)
    report = fuse_model(model)
    assert report.layers == len(_layers(model)) == WHOLE[name][1]
    assert ("whole layers" in str(report)) == (report.layers > 0)
    assert fuse_model(model) == report, "a second time, nothing changes"


PROMPTS = ([5], list(range(3, 40)), [7, 7, 7], list(range(60, 20, -3)))


def _generate(model: PreTrainedModel) -> list[list[float]]:
    """The log-probabilities of what the engine generates, in steps of all kinds."""
    verified = verify_model(model, Path(), lambda line: None, packing="native", fuse="kernels")
    outputs = LoadedModel(verified).generate_batch(
        PROMPTS, max_new_tokens=9, return_logprobs=True, progress_bar=False
    )
    return [outputs[f"req_{i}"].logprobs for i in range(len(PROMPTS))]


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "gemma", "smollm3"])
def test_the_engine_yields_the_same_to_the_last_bit(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not RECIPES[name].is_known:
        pytest.skip("this version of transformers does not know it")
    whole = _model(name)
    actual = _generate(whole)
    assert len(_layers(whole)) == WHOLE[name][1]
    monkeypatch.setattr(fusing, "fuse_layers", lambda model, likeness: 0)
    parts = _model(name)
    expected = _generate(parts)
    assert not _layers(parts)
    assert actual == expected


def test_layers_are_what_the_engine_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = _model(), []
    run = fused_layer._run

    def watch(*arguments: Any) -> torch.Tensor:
        calls.append(arguments[0].index)
        return run(*arguments)

    monkeypatch.setattr(fused_layer, "_run", watch)
    _generate(model)
    assert len(calls) > 30
    assert calls[-3:] == [0, 1, 2]


def test_any_other_call_goes_to_the_class() -> None:
    model = _model()
    pack_model(model, "native")
    fuse_model(model)
    ids = torch.arange(3, 30).unsqueeze(0)
    with torch.inference_mode():
        whole = model(input_ids=ids).logits
        for layer in _layers(model):
            restore(layer)
        assert torch.equal(model(input_ids=ids).logits, whole)


def test_a_copy_has_no_plan() -> None:
    model = _model()
    pack_model(model, "native")
    fuse_model(model)
    other = copy.deepcopy(model)
    assert [vars(layer)[PLAN] for layer in _layers(other)] == [None] * 3
    assert all(vars(layer)[PLAN] is not None for layer in _layers(model))
    ids = torch.arange(3, 30).unsqueeze(0)
    with torch.inference_mode():
        assert torch.equal(other(input_ids=ids).logits, model(input_ids=ids).logits)


def test_more_scratch_is_had_when_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention says so in the middle of a layer, which then begins anew."""
    needed: list[int] = []
    right = fused_layer.NativeAttentionBackend.grow_scratch

    def watch(self: Any, floats: int) -> None:
        needed.append(floats)
        right(self, floats)

    monkeypatch.setattr(fused_layer.NativeAttentionBackend, "grow_scratch", watch)
    _generate(_model())
    assert needed
    assert needed == sorted(needed)


class _Wrong:
    """The library, one of whose results is not what it was."""

    def __init__(self, library: NativeLibrary) -> None:
        self._library = library

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def layer(self, reference: Any) -> int:
        result: int = self._library.layer(reference)
        call = reference._obj
        torch.frombuffer((fused_layer.ctypes.c_uint16 * 4).from_address(call.y), dtype=torch.int16)[
            0
        ] ^= 1
        return result


def test_a_wrong_kernel_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = _Wrong(fused_layer.native_library())
    monkeypatch.setattr(fused_layer, "native_library", lambda: wrong)
    model = _model()
    pack_model(model, "native")
    assert fuse_model(model).layers == 0
    assert not _layers(model)


def _scaled(self: Any, x: torch.Tensor, *arguments: Any, **kwargs: Any) -> torch.Tensor:
    result: torch.Tensor = type(self).__mro__[1].forward(self, x, *arguments, **kwargs)
    return result * 1.0


def _doubled(self: Any, x: torch.Tensor, *arguments: Any, **kwargs: Any) -> torch.Tensor:
    kwargs["position_embeddings"] = kwargs["position_embeddings"][::-1]
    result: torch.Tensor = type(self).__mro__[1].forward(self, x, *arguments, **kwargs)
    return result


@pytest.mark.parametrize("forward", [_scaled, _doubled])
def test_a_layer_that_does_something_else_is_left_alone(forward: Any) -> None:
    model = _model()
    pack_model(model, "native")
    layers: Sequence[Any] = model.model.layers
    kind = type(layers[1])
    layers[1].__class__ = type("Other", (kind,), {"forward": forward})
    assert fuse_model(model).layers == 2
    assert not is_exchanged(layers[1])


@pytest.mark.parametrize("part", ["mlp", "self_attn.o_proj", "input_layernorm"])
def test_a_layer_with_a_hook_is_left_alone(part: str) -> None:
    model = _model()
    pack_model(model, "native")
    layers: Sequence[Any] = model.model.layers
    layers[0].get_submodule(part).register_forward_hook(lambda *_: None)
    assert fuse_model(model).layers == 2
    assert not is_exchanged(layers[0])
