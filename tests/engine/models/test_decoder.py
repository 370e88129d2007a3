"""Our decoder in the place of transformers' modules: which models it takes, that nothing of them is
changed, and what it yields.
"""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook
from transformers import CompileConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaForCausalLM

from engine.attention.native_backend import NativeAttentionBackend
from engine.contract.config import LoadConfig
from engine.loading.loader import load_model
from engine.models.formats.int8 import Int8
from engine.models.formats.native import Native
from engine.models.formats.registry import Format
from engine.models.held_layer import PackedEmbedding, PackedLinear
from engine.models.native_decoder import NativeDecoder
from engine.models.table import FAMILIES as DESCRIBED
from tests.engine.models.decoders import NEW, OURS, PROMPTS, _gaps, generate, make, most_gap, verify
from tests.model_recipes import RECIPES
from tests.multimodal_recipes import SERVED


@pytest.mark.parametrize("packing", [Native, Int8])
@pytest.mark.parametrize("family", OURS)
def test_every_family_of_the_table(family: str, packing: Format) -> None:
    """It passes the comparison with itself, and chooses tokens that the model finds most likely, in
    steps of every kind.
    """
    model, lines = make(family), []
    judge = copy.deepcopy(model).float()
    verified = verify(model, packing, lines)
    assert f"decoder: our own, for {model.config.model_type}" in lines
    assert isinstance(verified.steps, NativeDecoder)
    assert len(verified.steps.layers) == model.config.num_hidden_layers
    options: list[dict[str, Any]] = [{}, {"max_batch_tokens": 16, "block_size": 8}]
    for option in options:
        for prompt, tokens in zip(PROMPTS, generate(verified, **option), strict=True):
            assert len(tokens) == NEW
            if packing is Native:
                assert _gaps(judge, prompt, tokens).max() <= most_gap(family)


def test_products_too_small_to_be_packed_are_named() -> None:
    lines: list[str] = []
    verified = verify(make("qwen3_5", linear_num_value_heads=8), lines=lines)
    assert verified.decoder is None
    reason = "model.layers.0.linear_attn.in_proj_b is not packed"
    assert f"decoder: transformers', because {reason}" in lines
    assert "recurrent modules: our kernels compute 2 of 2" in lines


@pytest.mark.parametrize("packing", [Native, Int8])
def test_a_scaled_embedding_of_tied_weights(packing: Format) -> None:
    """It is replaced, with int8 before the model's class is looked up."""
    lines: list[str] = []
    verified = verify(make("gemma3", tie_word_embeddings=True), packing, lines)
    assert isinstance(verified.model.get_input_embeddings(), PackedEmbedding)
    assert "decoder: our own, for gemma3_text" in lines
    generate(verified)


def test_nothing_of_transformers_is_changed_but_linear_layers() -> None:
    model = make()
    before = {name: type(one) for name, one in model.named_modules()}
    verified = verify(model)
    generate(verified)
    for view in (model, verified.model):
        for name, module in view.named_modules():
            assert not {"forward", "_headrace_plan"} & vars(module).keys()
            if type(module) not in (PackedLinear, PackedEmbedding):
                assert type(module) is before[name]
                assert not module._forward_hooks
                assert not module._forward_pre_hooks


def test_steps_do_not_call_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    verified = verify(make())
    expected = generate(verified)

    def fail(*_: object, **__: object) -> None:
        pytest.fail("the model was called")

    monkeypatch.setattr(verified.model, "forward", fail)
    assert generate(verified) == expected


def test_a_model_from_disk_and_the_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    make().save_pretrained(tmp_path)
    for wanted, text in (
        ("own", "decoder: our own, for qwen3"),
        ("transformers", "decoder: transformers', because our own is not asked for"),
    ):
        lines: list[str] = []
        config = LoadConfig(threads=1, pack_weights=True, decoder=wanted)  # type: ignore[arg-type]
        verified = load_model(str(tmp_path), config, lines.append)
        assert text in lines
        assert (verified.decoder is not None) == (wanted == "own")
        generate(verified)


def test_compiled_steps_run_the_model() -> None:
    verified = verify(make())
    expected = generate(verified)
    compiled = CompileConfig(backend="eager")
    found = generate(verified, varlen_compile_config=compiled, decode_compile_config=compiled)
    assert [len(tokens) for tokens in found] == [len(tokens) for tokens in expected]


def test_two_engines_of_one_model_take_turns() -> None:
    """They share scratch memory, and the library lets other threads run."""
    verified = verify(make())
    expected = generate(verified)
    with ThreadPoolExecutor(2) as threads:
        found = [threads.submit(generate, verified) for _ in range(6)]
        assert all(one.result(timeout=60) == expected for one in found)


def test_more_scratch_is_had_when_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention says so in the middle of a layer, which then begins anew."""
    needed: list[int] = []
    right = NativeAttentionBackend.grow_scratch

    def watch(self: Any, floats: int) -> None:
        needed.append(floats)
        right(self, floats)

    monkeypatch.setattr(NativeAttentionBackend, "grow_scratch", watch)
    generate(verify(make()))
    assert needed


@pytest.mark.parametrize("family", ["gemma2", "granite", "cohere"])
def test_logits_are_finished_as_they_are_stored(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit by bit as the model's code has it, and without another pass over them."""
    verified = verify(make(family))
    expected = generate(verified)
    decoder = verified.steps
    assert isinstance(decoder, NativeDecoder)
    one = decoder.description
    x = torch.randn(9, one.norm.width, generator=torch.Generator().manual_seed(0)).bfloat16()
    product = decoder.output(x * 20)  # where a softcap bends
    logits = product if one.logits_factor is None else product * one.logits_factor
    logits = logits if one.logits_divisor is None else logits / one.logits_divisor
    if one.logits_softcap is not None:
        logits = torch.tanh(logits / one.logits_softcap) * one.logits_softcap
    assert not torch.equal(logits, product)
    for made in (decoder.logits(x * 20), decoder.finish(product)):
        torch.testing.assert_close(made, logits, rtol=0, atol=0)

    def fail(*_: object) -> None:
        pytest.fail("logits were finished in a pass of their own")

    monkeypatch.setattr(NativeDecoder, "finish", fail)
    assert generate(verified) == expected


# ---- which models it takes, and why not --------------------------------------------------------


class _Own(LlamaForCausalLM):
    """A user's class."""


def _hooked(model: PreTrainedModel) -> None:
    model.get_submodule("model.layers.1.mlp").register_forward_hook(lambda *_: None)


def _hooked_everywhere(_: PreTrainedModel) -> None:
    register_module_forward_hook(lambda *_: None)


def _patched(model: PreTrainedModel) -> None:
    module = model.get_submodule("model.layers.1.mlp")
    module.forward = type(module).forward.__get__(module)


def _of_another_class(model: PreTrainedModel) -> None:
    model.__class__ = _Own


def _with_another_part(model: PreTrainedModel) -> None:
    norm: Any = model.get_submodule("model.layers.1.input_layernorm")
    norm.__class__ = type("Norm", (type(norm),), {"forward": _norm_with_a_clamp})


def _norm_with_a_clamp(self: Any, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = type(self).__mro__[1].forward(self, x).clamp(max=1e9)
    return result


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_hooked, "model.layers.1.mlp has hooks, or a forward of its own"),
        (_patched, "model.layers.1.mlp has hooks, or a forward of its own"),
        (_of_another_class, "_Own is not in the table of decoders"),
        (_with_another_part, "forward of Norm was replaced, and is not the library's own"),
        (_hooked_everywhere, "all modules have hooks"),
    ],
)
def test_another_model_runs_as_it_was_written(
    change: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.nn.modules.module, "_global_forward_hooks", OrderedDict())
    model, lines = make("llama"), []
    change(model)
    verified = verify(model, lines=lines)
    assert verified.decoder is None
    (line,) = (line for line in lines if line.startswith("decoder: "))
    assert line.startswith("decoder: transformers', because ")
    assert line.endswith(reason)
    generate(verified)


@pytest.mark.parametrize(
    ("family", "settings", "reason"),
    [
        ("gpt2", {}, "GPT2LMHeadModel is not in the table of decoders"),
        ("olmoe", {"clip_qkv": 8.0}, "it clips queries, keys and values"),
        ("llama", {"hidden_act": "relu"}, "its activation is relu"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4}},
            "its rotary embeddings are proportional",
        ),
        ("llama", {"intermediate_size": 8}, "model.layers.0.mlp.gate_proj is not packed"),
    ],
)
def test_what_a_description_cannot_say(family: str, settings: dict[str, Any], reason: str) -> None:
    lines: list[str] = []
    assert verify(make(family, **settings), lines=lines).decoder is None
    assert f"decoder: transformers', because {reason}" in lines


def test_without_packed_weights(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    lines: list[str] = []
    assert verify(make(), None, lines).decoder is None
    reason = "oneDNN or torch computes its linear layers, not our kernels"
    assert f"decoder: transformers', because {reason}" in lines


def test_every_family_of_the_table_has_a_recipe() -> None:
    found = {recipe.model_type for recipe in RECIPES.values()}
    found |= {whole.text_type for whole in SERVED.values()}
    assert found >= DESCRIBED.keys()


def test_sinks_that_are_written_in_place_are_computed() -> None:
    """The kernels read a copy of them in float32."""

    def drown(model: PreTrainedModel) -> None:
        with torch.no_grad():
            for path, parameter in model.named_parameters():
                if path.endswith("sinks"):
                    parameter.fill_(9.0)

    model, other = make("gpt_oss"), make("gpt_oss")
    verified = verify(model)
    before = generate(verified)
    drown(model)
    drown(other)
    expected = generate(verify(other))
    assert expected != before
    verified.refresh()
    assert generate(verified) == expected


def test_the_page_names_every_family_of_the_table() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "models.md").read_text(encoding="utf-8")
    sentence = " ".join(page.split("#our-decoder)): ")[1].split(". ")[0].split())
    assert sentence.split(", ") == sorted(DESCRIBED)
