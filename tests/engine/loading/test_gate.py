"""The load gate catches backends and models that would give wrong tokens without an error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, PhimoeConfig
from transformers.masking_utils import sliding_window_causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb
from transformers.models.llama.modeling_llama import eager_attention_forward as llama_attention

from engine.api.offline import LoadedModel, from_model
from engine.attention.interface import (
    AttentionBackend,
    AttentionMetadata,
    AttentionParams,
    BatchLayout,
    LayerCache,
)
from engine.attention.registry import register
from engine.attention.torch_backend import TorchAttentionBackend
from engine.contract.errors import ModelRefusedError
from engine.loading import gate
from engine.loading.float32_layers import rounded_and_not
from engine.loading.gate import check_config, probe_layers, self_check
from engine.loading.loader import verify_model
from engine.loading.mask_rules import MaskWatch, UnknownMaskError
from engine.models.formats.int4 import Int4
from engine.models.formats.int8 import Int8
from engine.models.formats.native import Native
from engine.models.formats.registry import Format
from tests.tiny_models import FAMILIES, greedy_reference, make_model, make_prompts


class Broken(AttentionBackend):
    """Our backend with one mistake."""

    name = "broken"

    def __init__(
        self,
        *,
        params: Callable[[AttentionParams], AttentionParams] = lambda p: p,
        window: Callable[[int | None], int | None] = lambda w: w,
        layout: Callable[[BatchLayout], BatchLayout] = lambda b: b,
    ) -> None:
        self.inner = TorchAttentionBackend()
        self.params, self.window, self.layout = params, window, layout

    def prepare(
        self, layout: BatchLayout, window: int | None, like: torch.Tensor
    ) -> AttentionMetadata:
        return self.inner.prepare(self.layout(layout), self.window(window), like)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: LayerCache,
        metadata: Any,
        params: AttentionParams,
    ) -> torch.Tensor:
        return self.inner.forward(query, key, value, cache, metadata, self.params(params))


def _forgets_the_offset(layout: BatchLayout) -> BatchLayout:
    """Attends as if a chunk began its prompt."""
    if layout.num_decodes:
        return layout
    return replace(layout, starts=layout.starts * 0)


def _forgets_decoded_context(layout: BatchLayout) -> BatchLayout:
    """A decoding request sees all but the last token before it."""
    if not layout.num_decodes:
        return layout
    tables = layout.tables.copy()
    tables[:, 0] = 0
    return replace(layout, tables=tables)


BACKENDS: dict[str, Callable[[], AttentionBackend]] = {
    "no softcap": lambda: Broken(params=lambda p: replace(p, softcap=None)),
    "no sinks": lambda: Broken(params=lambda p: replace(p, sinks=None)),
    "no window": lambda: Broken(window=lambda w: None),
    "window too long": lambda: Broken(window=lambda w: None if w is None else w + 1),
    "window too short": lambda: Broken(window=lambda w: None if w is None else w - 1),
    "scaling": lambda: Broken(params=lambda p: replace(p, scaling=p.scaling * 1.1)),
    "chunk offset": lambda: Broken(layout=_forgets_the_offset),
    "decode table": lambda: Broken(layout=_forgets_decoded_context),
}

CAUGHT = [
    ("gemma2", "no softcap"),
    ("gpt_oss", "no sinks"),
    *(
        (family, mistake)
        for family in ("mistral", "gemma2", "gpt_oss")
        for mistake in (
            "no window",
            "window too long",
            "window too short",
            "scaling",
            "chunk offset",
            "decode table",
        )
    ),
]


def _gate(model: Any, backend: AttentionBackend) -> None:
    register()
    probe = probe_layers(model, backend)
    self_check(model, probe, backend, torch.device("cpu"))


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gpt_oss"])
def test_the_right_backend_passes(family: str) -> None:
    _gate(make_model(FAMILIES[family]()), Broken())


@pytest.mark.parametrize(("family", "mistake"), CAUGHT)
def test_a_wrong_backend_is_caught(family: str, mistake: str) -> None:
    model = make_model(FAMILIES[family]())
    with pytest.raises(ModelRefusedError, match="differ"):
        _gate(model, BACKENDS[mistake]())


@pytest.mark.parametrize(("family", "mistake"), [("gemma2", "no softcap"), ("gpt_oss", "no sinks")])
def test_small_weights_do_not_hide_a_mistake(family: str, mistake: str) -> None:
    """As in a freshly initialised model, where the scores are near zero."""
    model = make_model(FAMILIES[family]())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "norm" not in name:
                parameter.mul_(0.25)
    _gate(model, Broken())
    with pytest.raises(ModelRefusedError, match="differ"):
        _gate(model, BACKENDS[mistake]())


def test_layer_types_that_say_something_else() -> None:
    model = make_model(FAMILIES["llama"]())
    model.config.layer_types = ["full_attention", "sliding_attention", "full_attention"]
    with pytest.raises(ModelRefusedError, match="layer 1: the config says sliding_attention"):
        _gate(model, Broken())


def test_a_window_that_the_mask_does_not_have() -> None:
    model = make_model(FAMILIES["gemma2"]())
    model.config.layer_types = ["full_attention"] * 3
    with pytest.raises(ModelRefusedError, match="layer 0"):
        _gate(model, Broken())


def _phimoe(window: int) -> PhimoeConfig:
    return PhimoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=2,
        num_experts_per_tok=2,
        max_position_embeddings=256,
        sliding_window=window,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )


@pytest.mark.parametrize(("window", "seen"), [(24, 24), (100, 100), (255, 255), (256, None)])
def test_a_window_that_only_the_mask_has(window: int, seen: int | None) -> None:
    """Also one that is longer than the prompts that the gate tries; as long as the context, it
    never acts.
    """
    register()
    probe = probe_layers(make_model(_phimoe(window)), TorchAttentionBackend())
    assert [shape.window for shape in probe.shapes.values()] == [seen, seen]


def test_a_window_that_attention_is_told_and_the_mask_does_not_have() -> None:
    """Longer than the gate's prompts, so that no number tells."""
    model: Any = make_model(FAMILIES["qwen2"]())
    model.model.layers[2].self_attn.sliding_window = 100
    with pytest.raises(ModelRefusedError, match=r"told a window of 100 tokens.* is None"):
        _gate(model, Broken())


@pytest.mark.parametrize("option", ["sliding_window", "attention_chunk_size"])
def test_a_window_that_only_generates_cache_has(option: str) -> None:
    model = make_model(FAMILIES["llama"](**{option: 100}))
    with pytest.raises(ModelRefusedError, match=f"{option} is 100 in the config, but layer 0"):
        _gate(model, Broken())


def test_a_mask_that_the_model_changes() -> None:
    """Far away tokens are hidden by a mask that the model makes: the prompts do not show it."""
    model: Any = make_model(FAMILIES["llama"]())
    attention = model.model.layers[1].self_attn
    forward = attention.forward

    def hide_the_past(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("attention_mask") is not None:
            mask = kwargs["attention_mask"]
            hidden = torch.ones_like(mask, dtype=torch.bool).tril(-100)
            kwargs["attention_mask"] = mask.masked_fill(hidden, torch.finfo(mask.dtype).min)
        return forward(*args, **kwargs)

    attention.forward = hide_the_past
    with pytest.raises(ModelRefusedError, match=r"layer 1: .* changes the attention mask itself"):
        _gate(model, Broken())


def test_a_model_that_ignores_which_logits_are_asked_for() -> None:
    model: Any = make_model(FAMILIES["llama"]())
    forward = model.forward

    def all_logits(*args: Any, logits_to_keep: object = 0, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    model.forward = all_logits
    with pytest.raises(ModelRefusedError, match="does not know logits_to_keep"):
        _gate(model, Broken())


def test_a_rule_is_asked_over_the_whole_context() -> None:
    def chunked(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return (key <= query) & (key // 300 == query // 300)

    def of_the_tokens(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return (key <= query) & torch.ones(43, dtype=torch.bool)[key]

    for rule, reason in ((chunked, "neither causal"), (of_the_tokens, "more than positions")):
        watch = MaskWatch(1024)
        mask = watch(batch_size=1, q_length=43, kv_length=43, mask_function=rule)
        with pytest.raises(UnknownMaskError, match=reason):
            watch.window(mask)


@pytest.mark.parametrize(("window", "seen"), [(1, 1), (2, 2), (1023, 1023), (1024, None)])
def test_windows_of_any_length_are_found(window: int, seen: int | None) -> None:
    watch = MaskWatch(1024)
    rule = sliding_window_causal_mask_function(window)
    mask = watch(batch_size=1, q_length=43, kv_length=43, mask_function=rule)
    assert mask is not None
    assert watch.window(mask[:, :, :, :40]) == seen
    with pytest.raises(UnknownMaskError, match="has no mask"):
        watch.window(None)


def test_a_context_shorter_than_the_probe() -> None:
    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2, n_positions=32)
    with pytest.raises(ModelRefusedError, match="fails on a prompt of 43 tokens"):
        _gate(make_model(config), Broken())


def test_unknown_layer_types() -> None:
    config = FAMILIES["llama"]()
    config.layer_types = ["full_attention", "linear_attention", "full_attention"]
    with pytest.raises(ModelRefusedError, match="linear_attention"):
        check_config(config, type(make_model(FAMILIES["llama"]())))


def test_a_layer_that_never_attends() -> None:
    model: Any = make_model(FAMILIES["llama"]())

    def skip(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return hidden_states, None

    model.model.layers[1].self_attn.forward = skip
    with pytest.raises(ModelRefusedError, match="each layer must attend once"):
        _gate(model, Broken())


def test_a_model_of_nan_is_refused() -> None:
    model = make_model(FAMILIES["llama"]())
    with torch.no_grad():
        model.get_input_embeddings().weight[:] = float("nan")
    with pytest.raises(ModelRefusedError):
        _gate(model, Broken())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_half_precision_passes(family: str, dtype: torch.dtype) -> None:
    _gate(make_model(FAMILIES[family]()).to(dtype), Broken())


# ---- models that round more than the bound allows -----------------------------------------------

ROUGH = [
    ("gpt_oss", 2, 5),
    ("mellum", 3, 0),
    ("gemma4 with experts", 1, 1),
    ("phimoe", 2, 1),
    ("granitemoe", 2, 2),
    ("gemma4_unified", 5, 10),
    ("minicpm3", 3, 5),
    ("youtu", 3, 3),
    ("olmoe with one KV head", 1, 1),
]
"""Families, how much larger their weights are, and their seeds."""


def _rough(family: str, factor: int, seed: int) -> Any:
    model = make_model(FAMILIES[family](), seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "norm" not in name and "embed" not in name:
                parameter.mul_(factor)
    return model.to(torch.bfloat16)


@pytest.mark.parametrize("packing", [None, Native, Int8])
@pytest.mark.parametrize(("family", "factor", "seed"), ROUGH)
def test_a_model_is_judged_by_how_it_rounds(
    family: str, factor: int, seed: int, packing: Format | None
) -> None:
    model = _rough(family, factor, seed)
    types = {one.dtype for one in model.parameters()}
    verified = verify_model(model, Path(), lambda line: None, packing=packing, own_decoder=True)
    for view in (model, verified.model):
        assert {one.dtype for one in view.parameters()} <= types
        assert not any(one._forward_hooks or one._forward_pre_hooks for one in view.modules())


def _ignores_positions(model: Any) -> None:
    """Rotates tokens by their places in the row, which a prompt alone does not show."""
    for one in model.modules():
        if type(one).__name__.endswith("RotaryEmbedding"):
            right = one.forward
            one.forward = lambda x, position_ids, *given, right=right, **named: right(
                x, torch.arange(x.shape[1])[None], *given, **named
            )


@pytest.mark.parametrize("mistake", ["chunk offset", "decode table", "rotary"])
@pytest.mark.parametrize(("family", "factor", "seed"), ROUGH)
def test_a_mistake_is_not_taken_for_rounding(
    family: str, factor: int, seed: int, mistake: str
) -> None:
    model, backend = _rough(family, factor, seed), BACKENDS.get(mistake, Broken)()
    if mistake == "rotary":
        _ignores_positions(model)
    with pytest.raises(ModelRefusedError, match="differ"):
        _gate(model, backend)


def test_no_other_model_is_computed_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "rounded_and_not", lambda *_: pytest.fail("it was asked"))
    _gate(make_model(FAMILIES["llama"]()).to(torch.bfloat16), Broken())


def test_one_layer_at_a_time_is_in_float32() -> None:
    model = make_model(FAMILIES["gpt_oss"]()).to(torch.bfloat16)
    most, layers = [], model.model.layers
    for layer in layers:
        layer.register_forward_hook(
            lambda *_: most.append(
                sum(one.numel() for one in model.parameters() if one.dtype is torch.float32)
            )
        )
    rounded, wide = rounded_and_not(model, [(5, 6, 7), (8, 9)])
    assert rounded.shape == wide.shape == (5, 128)
    sizes = [sum(one.numel() for one in layer.parameters()) for layer in layers]
    assert sorted(set(most)) == [0, max(sizes)]
    right = make_model(FAMILIES["gpt_oss"]()).to(torch.bfloat16).float()
    expected = right(input_ids=torch.tensor([[5, 6, 7]])).logits[0]
    torch.testing.assert_close(wide[:3], expected, atol=0.03, rtol=0.01)


# ---- attention classes of the user's own -----------------------------------------------------


class _Inherited(LlamaAttention):
    """Its forward is written in another file, and names the eager attention of that file."""


class _Scaled(LlamaAttention):
    """Its own forward names no eager attention, the one that it calls does."""

    def forward(self, *arguments: Any, **named: Any) -> Any:
        output, weights = super().forward(*arguments, **named)
        return output * 2, weights


def _capped_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, *arguments: Any, **named: Any
) -> Any:
    return llama_attention(module, 2 * torch.tanh(query / 2), key, *arguments, **named)


class _Capped(LlamaAttention):
    """Its own forward hands over an attention of its own."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        **named: Any,
    ) -> Any:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query = self.q_proj(hidden_states).view(shape).transpose(1, 2)
        key = self.k_proj(hidden_states).view(shape).transpose(1, 2)
        value = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, _capped_attention
        )
        output, weights = attend(
            self, query, key, value, attention_mask, scaling=self.scaling, **named
        )
        return self.o_proj(output.reshape(*shape[:2], -1)), weights


class _Alone(torch.nn.Module):
    """Derives from no class of the library's."""

    forward = _Capped.forward

    def __init__(self, like: LlamaAttention) -> None:
        super().__init__()
        self.__dict__.update(like.__dict__)


def _with(attention: type[LlamaAttention]) -> Any:
    model: Any = make_model(FAMILIES["llama"]())
    for layer in model.model.layers:
        layer.self_attn.__class__ = attention
    return model


@pytest.mark.parametrize("attention", [_Inherited, _Scaled])
def test_a_class_of_the_users_own_is_compared_with_what_it_inherits(
    attention: type[LlamaAttention],
) -> None:
    model = _with(attention)
    prompts = make_prompts((9, 30))
    right = [greedy_reference(model, prompt, 8) for prompt in prompts]
    assert right != [greedy_reference(_with(LlamaAttention), prompt, 8) for prompt in prompts] or (
        attention is _Inherited
    )
    outputs = from_model(model).generate_batch(prompts, max_new_tokens=8, progress_bar=False)
    assert [output.generated_tokens for output in outputs.values()] == right


def test_a_class_of_the_users_own_with_another_attention_is_refused() -> None:
    """Though it inherits one that could be compared."""
    with pytest.raises(ModelRefusedError, match="_Capped computes with another attention than the"):
        from_model(_with(_Capped))


def test_a_forward_without_an_eager_attention_is_refused() -> None:
    model: Any = make_model(FAMILIES["llama"]())
    for layer in model.model.layers:
        layer.self_attn = _Alone(layer.self_attn)
    with pytest.raises(ModelRefusedError, match=r"_Alone has no eager.*eager_attention_forward"):
        from_model(model)


def test_products_are_summed_in_float32_while_results_are_compared() -> None:
    """On CUDA in both ways; what is in use afterwards is the owner's choice."""
    matmul = torch.backends.cuda.matmul
    names = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
    model, found = make_model(FAMILIES["llama"]()), []

    def note(*_: object) -> None:
        found.extend(getattr(matmul, name) for name in names)

    before = [getattr(matmul, name) for name in names]
    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.register_forward_hook(note)
    verify_model(model, Path(), lambda line: None)
    assert found
    assert not any(found)
    assert [getattr(matmul, name) for name in names] == before == [True, True]


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("packing", [None, Native, Int8, Int4])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize(
    "name",
    ["model.norm.weight", "model.layers.1.mlp.down_proj.weight", "lm_head.weight"],
)
def test_a_weight_that_is_not_finite_is_named(
    name: str, value: float, packing: Format | None
) -> None:
    model = make_model(FAMILIES["llama"]())
    if packing in (Int8, Int4):
        model = model.to(torch.bfloat16)
    with torch.no_grad():
        model.get_parameter(name)[-1] = value
    with pytest.raises(ModelRefusedError, match=f"^{name} has elements that are NaN or infinite"):
        verify_model(model, Path(), lambda line: None, packing=packing, own_decoder=True)


def test_attention_sinks_that_are_not_finite_are_named() -> None:
    model, name = make_model(FAMILIES["gpt_oss"]()), "model.layers.1.self_attn.sinks"
    with torch.no_grad():
        model.get_parameter(name)[2] = NAN
    with pytest.raises(ModelRefusedError, match=f"^{name} has elements that are NaN or infinite"):
        from_model(model)


def test_results_that_are_not_finite_though_weights_are() -> None:
    model = make_model(FAMILIES["llama"]())
    with torch.no_grad():
        model.get_parameter("model.layers.0.mlp.down_proj.weight").fill_(1e38)
    with pytest.raises(
        ModelRefusedError, match="in the model's own code, though its weights are not"
    ):
        from_model(model)


@pytest.mark.parametrize("packing", [None, Native])
def test_a_bias_may_mask_tokens_by_minus_infinity(packing: Format | None) -> None:
    model = make_model(FAMILIES["phi"]())
    with torch.no_grad():
        model.get_parameter("lm_head.bias")[100:] = -INF
    prompt = make_prompts((20,))[0]
    right = greedy_reference(model, prompt, 5)
    loaded = LoadedModel(verify_model(model, Path(), lambda line: None, packing=packing))
    made = loaded.generate_batch([prompt], max_new_tokens=5, eos_token_id=-1, progress_bar=False)
    assert made["req_0"].generated_tokens == right
