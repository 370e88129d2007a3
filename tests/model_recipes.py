"""Recipes of tiny models, one a family: what is served, what is refused and why. docs/models.md is
written from here (`make model-table`), and tests/engine/test_families.py proves every line.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from packaging.version import Version
from transformers import AutoConfig, PreTrainedConfig, __version__
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.recurrent_recipes import RECURRENT, REFUSED

VOCAB = 128
CONTEXT = 512
WINDOW = 24

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,  # with tied ones, random models repeat their input
}
_HEADS = {"head_dim": 16}
_ONE_KV_HEAD = {"num_key_value_heads": 1}
_SLIDING = {"sliding_window": WINDOW}
_MIXED = {
    **_SLIDING,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
_EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}
_SMALL_EXPERTS = {**_EXPERTS, "moe_intermediate_size": 32}
_ROUTED = {
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 20,
}
_GPT = {
    "vocab_size": VOCAB,
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": CONTEXT,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_PARTIAL_GPT = {**_GPT, "rotary_dim": 8}
_GEMMA4 = {
    **_HEADS,
    **_SLIDING,
    "num_hidden_layers": 4,
    "global_head_dim": 32,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}

_DECODER = {"is_decoder": True}
_FROM_ZERO = "learned positions, counted from 0 as `generate` counts them"

MODES = ("together", "chunked", "paced", "preempted", "prefix shared", "offloaded", "overlapped")
"""What each family is put through; see tests/engine/test_families.py."""

Attention = Literal["full", "sliding", "sliding and full", "none"]


@dataclass(frozen=True, slots=True)
class Recipe:
    """A tiny model of a family.

    Attributes:
        model_type: transformers' name of the family.
        settings: of its config, over COMMON.
        attention: what the layers do: the test compares it with what the load gate saw.
        special: what the family has that others do not, for the table.
        common: whether COMMON is used.
        since: the first version of transformers with which the family is served, where older ones
            have it and it is refused there: it is in REFUSALS too.
    """

    model_type: str
    settings: dict[str, Any] = field(default_factory=dict)
    attention: Attention = "full"
    special: str = ""
    common: bool = True
    since: str | None = None

    @property
    def is_known(self) -> bool:
        """Whether this version of transformers has the family, as it is served."""
        is_old = self.since is not None and Version(__version__) < Version(self.since)
        return self.model_type in CONFIG_MAPPING and not is_old

    def config(self, **changes: Any) -> PreTrainedConfig:
        """The tiny config."""
        base = COMMON if self.common else {}
        return AutoConfig.for_model(self.model_type, **{**base, **self.settings, **changes})


@dataclass(frozen=True, slots=True)
class Refusal:
    """A family, or a use of one, that the load gate refuses.

    Attributes:
        recipe: a tiny model of it.
        reason: a part of the gate's message.
        why: the reason in the table's words.
        older_reason: a part of its message with older versions of transformers, where that is
            another.
        until: the first version of transformers with which it is served; None: there is none.
    """

    recipe: Recipe
    reason: str
    why: str
    older_reason: str | None = None
    until: str | None = None

    @property
    def is_known(self) -> bool:
        """Whether this version of transformers has the family, and it is refused there."""
        is_over = self.until is not None and Version(__version__) >= Version(self.until)
        return self.recipe.is_known and not is_over


def _mixed(model_type: str, special: str = "", **settings: Any) -> Recipe:
    return Recipe(model_type, {**_HEADS, **_MIXED, **settings}, "sliding and full", special)


def _experts(model_type: str, special: str = "experts", **settings: Any) -> Recipe:
    return Recipe(model_type, {**_HEADS, **_SMALL_EXPERTS, **settings}, "full", special)


def _latent(model_type: str, special: str, **settings: Any) -> Recipe:
    return Recipe(model_type, {**_ROUTED, **_LATENT, **settings}, "full", special)


YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 32.0,
    "original_max_position_embeddings": 16,
    "llama_4_scaling_beta": 0.5,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}

RECIPES: dict[str, Recipe] = {
    "afmoe": _mixed("afmoe", "experts, gated attention", **_SMALL_EXPERTS),
    "apertus": Recipe("apertus", special="QK norms, xIELU"),
    "arcee": Recipe("arcee"),
    "aria_text": Recipe("aria_text", {"moe_num_experts": 4, "moe_topk": 2}, special="experts"),
    "axk1": _latent("axk1", "experts, multi-head latent attention"),
    "beam": _mixed("beam", "experts, QK norms", **_SMALL_EXPERTS),
    "bert": Recipe("bert", _DECODER, special="learned positions, norms after the blocks"),
    "bert-generation": Recipe("bert-generation", _DECODER, special="learned positions"),
    "biogpt": Recipe("biogpt", special="learned positions that begin at 2"),
    "bitnet": Recipe("bitnet"),
    "camembert": Recipe("camembert", _DECODER, special=_FROM_ZERO),
    "codegen": Recipe(
        "codegen",
        _PARTIAL_GPT,
        special="partial rotary embeddings, parallel blocks",
        common=False,
        since="5.24",
    ),
    "cohere": Recipe("cohere", special="layer norms, scaled logits, parallel blocks"),
    "cohere2": _mixed("cohere2", "layers without positions"),
    "cohere2_moe": _mixed("cohere2_moe", "experts, layers without positions", **_SMALL_EXPERTS),
    "ctrl": Recipe(
        "ctrl",
        {
            "vocab_size": VOCAB,
            "n_embd": 64,
            "n_layer": 3,
            "n_head": 4,
            "n_positions": CONTEXT,
            "dff": 96,
        },
        special="sinusoidal positions",
        common=False,
    ),
    "cwm": _mixed("cwm"),
    "data2vec-text": Recipe("data2vec-text", _DECODER, special=_FROM_ZERO),
    "dbrx": Recipe(
        "dbrx",
        {
            "vocab_size": VOCAB,
            "d_model": 64,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": CONTEXT,
            "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
            "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
        },
        special="experts, clipped queries, keys and values",
        common=False,
    ),
    "deepseek_v2": _latent("deepseek_v2", "experts, multi-head latent attention"),
    "deepseek_v3": _latent("deepseek_v3", "experts, multi-head latent attention"),
    "dots1": Recipe("dots1", {**_HEADS, **_ROUTED, "n_shared_experts": 1}, special="experts"),
    "electra": Recipe("electra", _DECODER, special="learned positions"),
    "ernie": Recipe("ernie", _DECODER, special="learned positions"),
    "ernie4_5": Recipe("ernie4_5", _HEADS),
    "ernie4_5_moe": _experts("ernie4_5_moe", moe_num_experts=4, moe_k=2),
    "exaone4": _mixed("exaone4", "QK norms, full layers without positions"),
    "exaone_moe": _mixed("exaone_moe", "experts, QK norms", **_SMALL_EXPERTS),
    "flex_olmo": Recipe("flex_olmo", _SMALL_EXPERTS, special="experts, QK norms"),
    "gemma": Recipe("gemma", _HEADS, special="one norm more, scaled embeddings"),
    "gemma2": _mixed("gemma2", "softcaps", query_pre_attn_scalar=16),
    "gemma3": Recipe(
        "gemma3_text",
        {**_HEADS, **_SLIDING, "num_hidden_layers": 6, "query_pre_attn_scalar": 16},
        "sliding and full",
        "five sliding layers to a full one, rotary bases by kind of layer",
    ),
    "gemma3 with a softcap": Recipe(
        "gemma3_text",
        {**_HEADS, **_SLIDING, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 0.5},
        "sliding",
        "a softcap in the config, which its own code ignores",
    ),
    "gemma3n": _mixed(
        "gemma3n_text",
        "layers that reuse others' keys and values, embeddings per layer",
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        hidden_size_per_layer_input=16,
        vocab_size_per_layer_input=VOCAB,
        laurel_rank=8,
        num_kv_shared_layers=2,
        activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0],
    ),
    "gemma4": Recipe(
        "gemma4_text",
        {
            **_GEMMA4,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": VOCAB,
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "num_kv_shared_layers": 2,
        },
        "sliding and full",
        "head sizes by kind of layer, layers that reuse others' keys and values",
    ),
    "gemma4 with experts": Recipe(
        "gemma4_text",
        {
            **_GEMMA4,
            **_SMALL_EXPERTS,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "enable_moe_block": True,
            "top_k_experts": 2,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
        },
        "sliding and full",
        "experts, keys that are the values, KV heads by kind of layer",
    ),
    "gemma4_unified": Recipe(
        "gemma4_unified_text",
        {**_GEMMA4, "num_kv_shared_layers": 0},
        "sliding and full",
        "head sizes by kind of layer",
    ),
    "glm": Recipe("glm", _HEADS, special="partial rotary embeddings"),
    "glm4": Recipe("glm4", _HEADS, special="partial rotary embeddings"),
    "glm4_moe": Recipe("glm4_moe", {**_HEADS, **_ROUTED, "n_shared_experts": 1}, special="experts"),
    "glm4_moe_lite": _latent("glm4_moe_lite", "experts, multi-head latent attention"),
    "gpt2": Recipe("gpt2", _GPT, special="learned positions", common=False),
    "gpt_bigcode": Recipe(
        "gpt_bigcode", _GPT, special="learned positions, one KV head", common=False
    ),
    "gptj": Recipe(
        "gptj",
        _PARTIAL_GPT,
        special="partial rotary embeddings, parallel blocks",
        common=False,
        since="5.24",
    ),
    "gpt_neox": Recipe("gpt_neox", special="partial rotary embeddings, parallel blocks"),
    "gpt_oss": _mixed("gpt_oss", "experts, attention sinks", **_EXPERTS),
    "granite": Recipe(
        "granite",
        {"logits_scaling": 4.0, "attention_multiplier": 0.1},
        special="scaled attention, residuals and logits",
    ),
    "granite_swa": _mixed("granite_swa", "scaled attention, residuals and logits"),
    "granitemoe": Recipe("granitemoe", _EXPERTS, special="experts"),
    "granitemoeshared": Recipe(
        "granitemoeshared", {**_EXPERTS, "shared_intermediate_size": 32}, special="experts"
    ),
    "granitemoe_swa": _mixed("granitemoe_swa", "experts", **_EXPERTS),
    "helium": Recipe("helium", _HEADS),
    "hunyuan_v1_dense": Recipe("hunyuan_v1_dense", _HEADS, special="QK norms"),
    "hunyuan_v1_moe": _experts("hunyuan_v1_moe", "experts, QK norms", moe_topk=2),
    "hy_v3": _experts("hy_v3", "experts, QK norms"),
    "hyperclovax": Recipe("hyperclovax", special="scaled attention, residuals and logits"),
    "internlm3": Recipe("internlm3", _HEADS),
    "iquestcoder": Recipe("iquestcoder"),
    "jais2": Recipe("jais2", _HEADS),
    "jetmoe": Recipe(
        "jetmoe",
        {"kv_channels": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
        special="experts in attention too",
    ),
    "laguna": _mixed(
        "laguna", "experts, gated attention", **_SMALL_EXPERTS, shared_expert_intermediate_size=32
    ),
    "llama": Recipe("llama"),
    "longcat_flash": Recipe(
        "longcat_flash",
        {
            **_LATENT,
            "v_head_dim": 16,
            "head_dim": 8,
            "num_layers": 2,
            "num_hidden_layers": 4,
            "ffn_hidden_size": 96,
            "expert_ffn_hidden_size": 32,
            "n_routed_experts": 8,
            "zero_expert_num": 2,
            "moe_topk": 2,
        },
        special="two attentions a layer, experts that do nothing, multi-head latent attention",
    ),
    "mellum": _experts("mellum", "experts, QK norms"),
    "mimo_v2_flash": _mixed("mimo_v2_flash", "experts, attention sinks", **_ROUTED),
    "minicpm3": _latent("minicpm3", "multi-head latent attention"),
    "minimax_m2": _experts("minimax_m2", "experts, QK norms"),
    "ministral": _mixed("ministral"),
    "ministral3": Recipe(
        "ministral3",
        {**_HEADS, "rope_parameters": YARN},
        special="YaRN, queries scaled by position",
    ),
    "mistral": Recipe("mistral", _SLIDING, "sliding"),
    "mixtral": Recipe("mixtral", _EXPERTS, special="experts"),
    "modernbert-decoder": Recipe(
        "modernbert-decoder",
        {
            "local_attention": 2 * WINDOW,
            "global_attn_every_n_layers": 3,
            "cls_token_id": 1,
            "sep_token_id": 2,
        },
        "sliding and full",
    ),
    "nanochat": Recipe("nanochat", special="QK norms, softcapped logits"),
    "olmo": Recipe("olmo", {"clip_qkv": 8.0}, special="clipped queries, keys and values"),
    "olmo2": Recipe("olmo2", special="QK norms"),
    "olmo2 with one KV head": Recipe("olmo2", _ONE_KV_HEAD, special="QK norms"),
    "olmo3": Recipe("olmo3", _MIXED, "sliding and full", "QK norms"),
    "olmo3 with one KV head": _mixed("olmo3", "QK norms", **_ONE_KV_HEAD),
    "olmoe": Recipe("olmoe", _EXPERTS, special="experts, QK norms"),
    "olmoe with one KV head": Recipe(
        "olmoe", {**_EXPERTS, **_ONE_KV_HEAD}, special="experts, QK norms"
    ),
    "opt": Recipe(
        "opt",
        {"ffn_dim": 96, "word_embed_proj_dim": 64},
        special="learned positions that begin at 2",
    ),
    "persimmon": Recipe("persimmon", special="QK norms, partial rotary embeddings"),
    "phi": Recipe("phi", special="partial rotary embeddings, parallel blocks"),
    "phi3": Recipe("phi3", {"sliding_window": None}, special="fused projections"),
    "phi3 with a window": Recipe("phi3", _SLIDING, "sliding"),
    "phimoe": Recipe(
        "phimoe",
        {**_EXPERTS, **_SLIDING, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        "sliding",
        "experts, a window that only the mask has",
    ),
    "qwen2": Recipe("qwen2", special="attention bias"),
    "qwen2 with windows": Recipe(
        "qwen2",
        {**_SLIDING, "use_sliding_window": True, "max_window_layers": 1},
        "sliding and full",
        "the first layers full, the others sliding",
    ),
    "qwen2_moe": _experts("qwen2_moe", shared_expert_intermediate_size=32),
    "qwen3": Recipe("qwen3", _HEADS, special="QK norms"),
    "qwen3_moe": _experts("qwen3_moe", "experts, QK norms"),
    "roberta": Recipe("roberta", _DECODER, special=_FROM_ZERO),
    "roberta-prelayernorm": Recipe("roberta-prelayernorm", _DECODER, special=_FROM_ZERO),
    "roc_bert": Recipe("roc_bert", _DECODER, special="learned positions"),
    "seed_oss": Recipe("seed_oss", _HEADS, special="attention bias"),
    "smollm3": Recipe(
        "smollm3", {"num_hidden_layers": 4}, special="every fourth layer without positions"
    ),
    "solar_open": Recipe(
        "solar_open", {**_HEADS, **_ROUTED, "n_shared_experts": 1}, special="experts"
    ),
    "starcoder2": Recipe("starcoder2", _SLIDING, "sliding"),
    "vaultgemma": _mixed("vaultgemma", query_pre_attn_scalar=16),
    "xlm-roberta": Recipe("xlm-roberta", _DECODER, special=_FROM_ZERO),
    "xlm-roberta-xl": Recipe(
        "xlm-roberta-xl", {**_DECODER, "initializer_range": 0.1}, special=_FROM_ZERO
    ),
    "xmod": Recipe(
        "xmod",
        {**_DECODER, "languages": ["en_XX"], "default_language": "en_XX"},
        special=f"{_FROM_ZERO}; an adapter by language",
    ),
    "youtu": _latent("youtu", "multi-head latent attention"),
    **{
        name: Recipe(one.model_type or name, one.settings, one.attention, one.special)
        for name, one in RECURRENT.items()
    },
}

FAST = ("llama", "gemma2", "gpt_oss", "deepseek_v3", "gemma4", "phimoe", "roberta")
"""Families that are swept in every run of the tests; together they have what is special."""

_NO_INTERFACE = "does not route its attention through"
_NO_INTERFACE_WHY = "attention does not go through `AttentionInterface`"
_INDEXED_WHY = "layers that choose the tokens to attend to (sparse attention)"
_NO_KEYWORDS = "does not hand the keyword arguments"
_NO_KEYWORDS_WHY = "its layers do not hand keywords on to their attention"


REFUSALS: dict[str, Refusal] = {
    "bloom": Refusal(
        Recipe("bloom", {"n_layer": 2, "n_head": 4}), _NO_INTERFACE, _NO_INTERFACE_WHY
    ),
    "codegen": Refusal(
        Recipe("codegen", _PARTIAL_GPT, common=False),
        _NO_INTERFACE,
        _NO_INTERFACE_WHY,
        until="5.24",
    ),
    "falcon": Refusal(
        Recipe(
            "falcon",
            {
                "vocab_size": VOCAB,
                "hidden_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
            },
            common=False,
        ),
        _NO_INTERFACE,
        _NO_INTERFACE_WHY,
    ),
    "gpt_neo": Refusal(
        Recipe(
            "gpt_neo",
            {
                "vocab_size": VOCAB,
                "hidden_size": 64,
                "num_layers": 2,
                "num_heads": 4,
                "attention_types": [[["global", "local"], 1]],
                "bos_token_id": 1,
                "eos_token_id": 2,
            },
            common=False,
        ),
        _NO_INTERFACE,
        _NO_INTERFACE_WHY,
    ),
    "gptj": Refusal(
        Recipe("gptj", _PARTIAL_GPT, common=False),
        _NO_INTERFACE,
        _NO_INTERFACE_WHY,
        until="5.24",
    ),
    "mpt": Refusal(
        Recipe(
            "mpt", {"vocab_size": VOCAB, "d_model": 64, "n_heads": 4, "n_layers": 2}, common=False
        ),
        _NO_INTERFACE,
        _NO_INTERFACE_WHY,
    ),
    "stablelm": Refusal(Recipe("stablelm"), _NO_KEYWORDS, _NO_KEYWORDS_WHY),
    "xglm": Refusal(
        Recipe(
            "xglm",
            {
                "vocab_size": VOCAB,
                "d_model": 64,
                "num_layers": 2,
                "attention_heads": 4,
                "ffn_dim": 96,
            },
            common=False,
        ),
        _NO_INTERFACE,
        _NO_INTERFACE_WHY,
    ),
    "deepseek_v32": Refusal(
        _latent("deepseek_v32", "", index_topk=8, index_n_heads=2, index_head_dim=16),
        "layers of kind",
        _INDEXED_WHY,
    ),
    "diffllama": Refusal(
        Recipe("diffllama"), "each layer must attend once", "two attention calls a layer"
    ),
    "doge": Refusal(
        Recipe("doge"), "changes the attention mask itself", "makes its attention mask itself"
    ),
    "llama4": Refusal(
        Recipe(
            "llama4_text",
            {
                **_HEADS,
                "intermediate_size_mlp": 96,
                "num_local_experts": 2,
                "attention_chunk_size": 32,
            },
        ),
        "layers of kind chunked_attention",
        "layers with chunked attention",
    ),
    "llama4 without chunks": Refusal(
        Recipe(
            "llama4_text",
            {
                **_HEADS,
                "intermediate_size_mlp": 96,
                "num_local_experts": 2,
                "layer_types": ["full_attention"] * 3,
                "no_rope_layers": [0, 0, 0],
                "floor_scale": 8192,
            },
        ),
        "attn_temperature_tuning",
        "scales queries by their place in the row, which in a ragged batch is not their position",
    ),
    "llama with a window": Refusal(
        Recipe("llama", {"sliding_window": 100}),
        "sliding_window is 100 in the config",
        "the layers ignore the config's window, `generate`'s cache does not",
    ),
    "llama with chunks": Refusal(
        Recipe("llama", {"attention_chunk_size": 100}),
        "attention_chunk_size is 100 in the config",
        "the layers ignore the config's chunks, `generate`'s cache does not",
    ),
    "minimax": Refusal(
        Recipe(
            "minimax",
            {
                **_EXPERTS,
                **_HEADS,
                "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            },
        ),
        "states in a cache of their own",
        "keep states in a cache of their own",
    ),
    "nemotron": Refusal(Recipe("nemotron"), _NO_KEYWORDS, _NO_KEYWORDS_WHY),
    "recurrent_gemma": Refusal(
        Recipe("recurrent_gemma", {**_HEADS, "attention_window_size": WINDOW}),
        "states in a cache of their own",
        "keep states in a cache of their own",
        "each layer must attend once",  # whose config does not tell the layers' kinds
    ),
    "bert as an encoder": Refusal(
        Recipe("bert", {"is_decoder": False}),
        "tokens see those after them",
        "attends to later tokens, too",
    ),
    "gemma3, bidirectional": Refusal(
        Recipe("gemma3_text", {**_HEADS, **_SLIDING, "use_bidirectional_attention": True}),
        "neither causal nor a sliding window",
        "attends to later tokens, too",
    ),
    **{
        name: Refusal(
            Recipe(one.model_type or name, one.settings, one.attention), one.reason, one.special
        )
        for name, one in REFUSED.items()
    },
}
