"""Whole decoder layers in one call: which are, that they compute what their modules do, and when
the layer's class takes over.
"""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from engine.attention.registry import ATTENTION_NAME, CONTEXT_KEYWORD
from engine.native.library import NativeLibrary
from engine.offline import LoadedModel
from engine.runner import fused_layer, fusing
from engine.runner.fused import PLAN, is_exchanged, restore
from engine.runner.fused_layer import LayerRun, layer_forward
from engine.runner.fusing import fuse_model
from engine.runner.fusing_layers import small_context, small_step
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
    "smollm3": ({}, 4),  # some of its layers rotate nothing
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
    assert report.layers == report.chained == len(_layers(model)) == WHOLE[name][1]
    assert ("whole layers" in str(report)) == (report.layers > 0)
    assert fuse_model(model) == report, "a second time, nothing changes"


PROMPTS = ([5], list(range(3, 40)), [7, 7, 7], list(range(60, 20, -3)))


def _generate(model: PreTrainedModel) -> tuple[list[list[float]], PreTrainedModel]:
    """The log-probabilities of what the engine generates, in steps of all kinds; and what steps run
    on.
    """
    verified = verify_model(model, Path(), lambda line: None, packing="native", fuse="kernels")
    outputs = LoadedModel(verified).generate_batch(
        PROMPTS, max_new_tokens=9, return_logprobs=True, progress_bar=False
    )
    return [outputs[f"req_{i}"].logprobs for i in range(len(PROMPTS))], verified.model


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "gemma", "smollm3"])
def test_the_engine_yields_the_same_to_the_last_bit(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not RECIPES[name].is_known:
        pytest.skip("this version of transformers does not know it")
    actual, whole = _generate(_model(name))
    assert len(_layers(whole)) == WHOLE[name][1]
    monkeypatch.setattr(fusing, "fuse_layers", lambda model, likeness: 0)
    expected, parts = _generate(_model(name))
    assert not _layers(parts)
    assert actual == expected


def test_layers_are_what_the_engine_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = _model(), []
    compute = LayerRun.compute

    def watch(self: LayerRun, *arguments: Any) -> torch.Tensor:
        calls.append([plan.index for plan in self.plans])
        return compute(self, *arguments)

    monkeypatch.setattr(LayerRun, "compute", watch)
    _generate(model)
    assert len(calls) > 10
    assert calls[:3] == [[0], [0], [0]], "as it is compared"
    assert calls[-10:] == [[0, 1, 2]] * 10


def test_a_hook_on_a_layer_sees_what_that_layer_makes() -> None:
    model: Any = _with_decoder("plain")
    assert fuse_model(model).chained == 3
    model.set_attn_implementation(ATTENTION_NAME)
    plans = [vars(layer)[PLAN].alone.plans[0] for layer in model.model.layers]
    expected, seen = _step(model, plans), []
    hooks = [
        layer.register_forward_hook(lambda _, given, made: seen.append((given[0], made)))
        for layer in model.model.layers
    ]
    assert torch.equal(_step(model, plans), expected)
    assert len(seen) == 3
    assert all(not torch.equal(given, made) for given, made in seen)
    for hook in hooks:
        hook.remove()
    assert torch.equal(_step(model, plans), expected)
    assert len(seen) == 3


def test_two_engines_of_one_model_take_turns() -> None:
    """Their layers share scratch memory, and the library lets other threads run."""
    verified = verify_model(_model(), Path(), lambda line: None, packing="native", fuse="kernels")
    loaded = LoadedModel(verified)

    def generate() -> list[Any]:
        outputs = loaded.generate_batch(PROMPTS, max_new_tokens=60, progress_bar=False)
        return [outputs[f"req_{i}"].generated_tokens for i in range(len(PROMPTS))]

    expected = generate()
    with ThreadPoolExecutor(2) as threads:
        found = [threads.submit(generate) for _ in range(8)]
        assert all(one.result(timeout=60) == expected for one in found)


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

    def __init__(self, library: NativeLibrary, least: int) -> None:
        """least: of how many layers at least."""
        self._library = library
        self._least = least

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def layers(self, reference: Any) -> int:
        result: int = self._library.layers(reference)
        call = reference._obj
        if call.count >= self._least:
            place = (ctypes.c_uint16 * 4).from_address(call.y)
            torch.frombuffer(place, dtype=torch.int16)[0] ^= 1
        return result


@pytest.mark.parametrize(("least", "layers"), [(1, 0), (2, 3)])
def test_a_wrong_kernel_is_found(least: int, layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = _Wrong(fused_layer.native_library(), least)
    monkeypatch.setattr(fused_layer, "native_library", lambda: wrong)
    model = _model()
    pack_model(model, "native")
    report = fuse_model(model)
    assert (report.layers, report.chained) == (layers, 0)
    assert len(_layers(model)) == layers
    assert all(vars(layer)[PLAN].chain is None for layer in _layers(model))


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
    report = fuse_model(model)
    assert (report.layers, report.chained) == (2, 0)
    assert not is_exchanged(layers[1])


@pytest.mark.parametrize("part", ["mlp", "self_attn.o_proj", "input_layernorm"])
def test_a_layer_with_a_hook_is_left_alone(part: str) -> None:
    model = _model()
    pack_model(model, "native")
    layers: Sequence[Any] = model.model.layers
    layers[0].get_submodule(part).register_forward_hook(lambda *_: None)
    assert fuse_model(model).layers == 2
    assert not is_exchanged(layers[0])


# ---- layers in one call ------------------------------------------------------------------------


class _Decoder(torch.nn.Module):
    """A model's decoder, with its parts, that goes through its layers in a way of its own."""

    def __init__(self, decoder: Any, way: str) -> None:
        super().__init__()
        self._modules = decoder._modules
        self.config = decoder.config
        self.way = way

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, **named: Any) -> Any:
        x = self.embed_tokens(input_ids)
        embeddings = self.rotary_emb(x, position_ids)
        first = x
        order = {"backwards": [2, 1, 0], "one twice": [0, 1, 1, 2], "one never": [0, 1]}
        for index in order.get(self.way, [0, 1, 2]):
            if index == 1 and self.way == "scaled":
                x = x * 1.0
            if index == 1 and self.way == "scaled in place":
                x.mul_(1.0)
            if index == 1 and self.way == "copied":
                x = x.clone()
            if index == 1 and self.way == "viewed":
                x = x.view(x.shape)
            if index == 1 and self.way == "turned otherwise":
                embeddings = (embeddings[0], embeddings[1])
            if index == 2 and self.way == "an earlier one":
                x = first
            x = self.layers[index](x, position_embeddings=embeddings, **named)
            first = x if index == 0 else first
        return BaseModelOutputWithPast(last_hidden_state=self.norm(x))


def _with_decoder(way: str) -> Any:
    model: Any = _model("llama")
    model.model = _Decoder(model.model, way)
    pack_model(model, "native")
    return model


@pytest.mark.parametrize(
    ("way", "layers"),
    [
        *((way, 3) for way in ("scaled", "scaled in place", "copied", "viewed")),
        *((way, 3) for way in ("turned otherwise", "backwards", "one twice", "an earlier one")),
        ("one never", 2),  # its attention is not called, and cannot be compared
    ],
)
def test_layers_with_something_between_them_are_computed_one_by_one(way: str, layers: int) -> None:
    report = fuse_model(_with_decoder(way))
    assert (report.layers, report.chained) == (layers, 0)
    assert "in one call" not in str(report)


def _step(model: Any, plans: Sequence[Any]) -> torch.Tensor:
    """A step through a decoder."""
    context, positions = small_context(plans), torch.from_numpy(small_step().positions)
    ids = torch.arange(3, 3 + len(positions)).unsqueeze(0)
    with torch.inference_mode():
        output = model.model(
            input_ids=ids, position_ids=positions.unsqueeze(0), **{CONTEXT_KEYWORD: context}
        )
    result: torch.Tensor = output.last_hidden_state
    return result


def test_a_model_that_begins_to_do_something_between_its_layers_fails() -> None:
    model = _with_decoder("plain")
    report = fuse_model(model)
    assert (report.layers, report.chained) == (3, 3)
    assert str(report).endswith("3 whole layers (3 of them in one call)")
    model.set_attn_implementation(ATTENTION_NAME)
    plans = [vars(layer)[PLAN].alone.plans[0] for layer in model.model.layers]
    expected = _step(model, plans)
    for way in ("scaled", "copied", "viewed"):
        model.model.way = way
        with pytest.raises(RuntimeError, match="changed what its layers hand on"):
            _step(model, plans)
        model.model.way = "plain"
        assert torch.equal(_step(model, plans), expected)
    chain = vars(model.model.layers[0])[PLAN].chain
    assert chain.result is None, "nothing is kept"
    for _ in range(2):
        chain.result = expected  # as if a step had failed between two layers
        assert torch.equal(_step(model, plans), expected)
        chain.result = expected
        model.set_attn_implementation("eager")  # any other call
        assert _step(model, plans).shape == expected.shape
        model.set_attn_implementation(ATTENTION_NAME)
