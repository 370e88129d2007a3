"""Recipes of tiny models whose class has towers: what is served of them, what is refused and why.
docs/models.md is written from here, too (`make model-table`), and tests/engine/test_text_parts.py
proves every line.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING

from tests.model_recipes import COMMON, VOCAB, WINDOW, YARN, Attention
from tests.tiny_models import enlarged

_TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_AUDIO_TOWER = {
    "d_model": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "output_dim": 64,
}
_QWEN_TOWER = {"depth": 2, "num_heads": 2, "out_hidden_size": 64}
_DEEP_TOWER = {**_QWEN_TOWER, "deepstack_visual_indexes": [0]}
_QWEN25_TOWER = {**_QWEN_TOWER, "fullatt_block_indexes": [0]}
_PIXTRAL = {"model_type": "pixtral", "head_dim": 16}
_CLIP = {"model_type": "clip_vision_model"}
_SIGLIP = {"model_type": "siglip_vision_model"}
_LISTED = {"image_size": [28, 28], "patch_size": [14, 14]}

_LLAMA, _QWEN2 = {"model_type": "llama"}, {"model_type": "qwen2"}
_HEADS = {"head_dim": 16}
_QWEN3 = {"model_type": "qwen3", **_HEADS}
_MIXED = {
    **_HEADS,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
_COHERE2 = {"model_type": "cohere2", **_MIXED}
_GEMMA4 = {
    **_MIXED,
    "num_hidden_layers": 4,
    "global_head_dim": 32,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 0,
}
_EXPERTS = {
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
_ROUTED = {
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 20,
}
_DELTA = {
    **_HEADS,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_value_heads": 16,
    "linear_num_key_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_HYBRID = {
    **_HEADS,
    **_ROUTED,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 16,
}


def _axes(*sections: int, **more: Any) -> dict[str, Any]:
    """Rotary positions of three parts."""
    rotary = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(sections)}
    return {"rope_parameters": {**rotary, **more}}


@dataclass(frozen=True, slots=True)
class Whole:
    """A tiny model with towers.

    Attributes:
        model_type: transformers' name of the whole model.
        text: settings of its text config, over COMMON.
        vision: settings of its vision config, over _TOWER.
        settings: of its own config.
        attention: what its text layers do; the test compares it with what the load gate saw.
        special: what its text layers have that others do not, for the table.
        reason: a part of the message with which it is refused. "": it is served.
        why: the reason in the table's words.
        own_only: a part of the message with which it is refused where our decoder is not used.
        is_flat: whether the settings of text are those of the model's own config.
    """

    model_type: str
    text: dict[str, Any] = field(default_factory=dict)
    vision: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    attention: Attention = "full"
    special: str = ""
    reason: str = ""
    why: str = ""
    own_only: str = ""
    is_flat: bool = False

    @property
    def is_known(self) -> bool:
        """Whether this version of transformers has the model."""
        return self.model_type in CONFIG_MAPPING

    def config(self, **changes: Any) -> PreTrainedConfig:
        """The tiny config. `changes` are of its text config."""
        text = {**COMMON, **self.text, **changes}
        parts = {
            **(text if self.is_flat else {"text_config": text}),
            "vision_config": {**_TOWER, **self.vision},
            "tie_word_embeddings": False,
        }
        # A config changes what it is given.
        return AutoConfig.for_model(self.model_type, **copy.deepcopy({**parts, **self.settings}))

    @property
    def text_type(self) -> str:
        """transformers' name of the text part."""
        usual = self.model_type if self.is_flat else f"{self.model_type}_text"
        found: str = self.text.get("model_type", usual)
        return found


def make_whole(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A model with its towers and random float32 weights, as `make_model` makes one of text."""
    torch.manual_seed(seed)
    found = MODEL_FOR_MULTIMODAL_LM_MAPPING[type(config)]
    return enlarged(found._from_config(config, dtype=torch.float32, attn_implementation="eager"))


_TIMES = "queries scaled by position"
_THREE = "three-part positions"
_LATENT_TEXT = "experts, multi-head latent attention"
_NO_KEEPING = "it does not know logits_to_keep"
_NO_KEEPING_WHY = "computes the logits of all tokens"
_LINEAR = "gated delta rule"
_CONV = "short convolutions"
_INDEXED = "layers of kind .*indexed_attention"
_INDEXED_WHY = "layers that choose the tokens to attend to (sparse attention)"
_HYBRID_KIND = "differs from the model's own"
_HYBRID_WHY = "adds position biases to scores"


def _mixed(model_type: str, text: dict[str, Any], vision: dict[str, Any], **more: Any) -> Whole:
    return Whole(model_type, text, vision, attention="sliding and full", **more)


_RECIPES = {
    "aria": Whole(
        "aria",
        {
            "model_type": "aria_text",
            "moe_num_experts": 4,
            "moe_topk": 2,
            "moe_num_shared_experts": 1,
        },
        {"model_type": "idefics3_vision"},
        special="experts",
    ),
    "aya_vision": _mixed("aya_vision", _COHERE2, _SIGLIP, special="layers without positions"),
    "blip-2": Whole(
        "blip-2",
        {"model_type": "opt", "ffn_dim": 96, "word_embed_proj_dim": 64},
        reason="missing 1 required positional argument: 'pixel_values'",
        why="wants an image with each prompt",
    ),
    "cohere2_vision": _mixed("cohere2_vision", _COHERE2, _SIGLIP),
    "deepseek_vl": Whole("deepseek_vl", _LLAMA),
    "ernie4_5_vl_moe": Whole(
        "ernie4_5_vl_moe",
        {
            **_axes(3, 3, 2),
            "moe_intermediate_size": [32, 16],
            "moe_num_experts": 4,
            "moe_k": 2,
        },
        _QWEN_TOWER,
        special=f"experts, {_THREE}",
    ),
    "exaone4_5": _mixed("exaone4_5", {"model_type": "exaone4", **_MIXED}, _QWEN_TOWER),
    "fuyu": Whole("fuyu", {"model_type": "persimmon"}),
    "gemma3": _mixed(
        "gemma3",
        {**_MIXED, "query_pre_attn_scalar": 16},
        {},
        settings={"mm_tokens_per_image": 4},
    ),
    "gemma4": _mixed(
        "gemma4",
        {
            **_GEMMA4,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": VOCAB,
            "num_kv_shared_layers": 2,
        },
        _HEADS,
        special="layers that reuse others' keys and values, embeddings per layer",
    ),
    "gemma4 that attends to all of an image": _mixed(
        "gemma4",
        {**_GEMMA4, "hidden_size_per_layer_input": 0, "use_bidirectional_attention": "vision"},
        _HEADS,
    ),
    "gemma4_unified": _mixed("gemma4_unified", _GEMMA4, {}, special="runs as its text class"),
    "glm46v": Whole(
        "glm46v",
        {"model_type": "glm4v_text", **_axes(1, 1, 2, partial_rotary_factor=0.5)},
        {"model_type": "glm4v_vision", **_QWEN_TOWER},
        special=_THREE,
    ),
    "glm4v": Whole("glm4v", _axes(1, 1, 2, partial_rotary_factor=0.5), _QWEN_TOWER, special=_THREE),
    "glm4v_moe": Whole(
        "glm4v_moe",
        {**_ROUTED, **_axes(1, 1, 2, partial_rotary_factor=0.5)},
        _QWEN_TOWER,
        special=f"experts, {_THREE}",
    ),
    "glm5_next": Whole(
        "glm5_next",
        {
            **_HEADS,
            **_ROUTED,
            **_LATENT,
            "qk_rope_head_dim": 0,
            "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
        },
        _QWEN_TOWER,
        reason=_INDEXED,
        why=_INDEXED_WHY,
    ),
    "glm_ocr": Whole("glm_ocr", {**_HEADS, **_axes(2, 3, 3)}, _QWEN_TOWER, special=_THREE),
    "got_ocr2": Whole(
        "got_ocr2",
        _QWEN2,
        {"output_channels": 16, "window_size": 2, "global_attn_indexes": [0], "mlp_dim": 48},
    ),
    "granite_speech": Whole(
        "granite_speech",
        {"model_type": "granite", "logits_scaling": 4.0},
        settings={"encoder_config": {"hidden_dim": 32, "num_layers": 2, "num_heads": 2}},
        special="scaled attention and residuals",
    ),
    "hunyuan_vl": Whole("hunyuan_vl", {**_HEADS, **_axes(2, 2, 2, 2)}, special=_THREE),
    "idefics3": Whole("idefics3", _LLAMA, {"model_type": "idefics3_vision"}),
    "inkling": Whole(
        "inkling_mm_model",
        _HYBRID,
        {"text_hidden_size": 64},
        {"audio_config": {"text_hidden_size": 64}},
        reason=f"{_HYBRID_KIND}|No module named 'scipy'",
        why=_HYBRID_WHY,
    ),
    "inkling2": Whole(
        "inkling2", _HYBRID, {"text_hidden_size": 64}, reason=_HYBRID_KIND, why=_HYBRID_WHY
    ),
    "internvl": Whole("internvl", _QWEN2, _LISTED),
    "internvl over qwen3": Whole("internvl", _QWEN3, _LISTED, special="QK norms"),
    "janus": Whole("janus", _LLAMA, {"projection_dim": 64}),
    "kimi_k25": Whole(
        "kimi_k25",
        {"model_type": "deepseek_v3", **_LATENT, **_ROUTED},
        special=_LATENT_TEXT,
    ),
    "lfm2_vl": Whole(
        "lfm2_vl",
        {"model_type": "lfm2", "layer_types": ["conv", "full_attention", "conv"]},
        {"model_type": "siglip2_vision_model"},
        special=_CONV,
    ),
    "lfm3_vl": Whole("lfm3_vl", {"model_type": "lfm3"}, special=_CONV),
    "lighton_ocr": Whole("lighton_ocr", _QWEN3, _PIXTRAL, special="QK norms"),
    "llama4": Whole(
        "llama4",
        {**_HEADS, "intermediate_size_mlp": 96, "num_local_experts": 2, "attention_chunk_size": 32},
        {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
        reason="layers of kind chunked_attention",
        why="layers with chunked attention",
    ),
    "llava": Whole("llava", _LLAMA, _CLIP),
    "llava_next": Whole("llava_next", {"model_type": "mistral", "sliding_window": None}, _CLIP),
    "llava_onevision": Whole("llava_onevision", _QWEN2, _SIGLIP),
    "minicpmv4_6": Whole(
        "minicpmv4_6",
        {"model_type": "qwen3_5_text", **_DELTA},
        special="served by our decoder alone, as its own modules compute the logits of all tokens",
        own_only=_NO_KEEPING,
    ),
    "minimax_m3_vl": Whole(
        "minimax_m3_vl",
        {
            **_HEADS,
            **_EXPERTS,
            "rotary_dim": 8,
            "dense_intermediate_size": 96,
            "shared_intermediate_size": 32,
        },
        special="experts, QK norms",
    ),
    "mistral3": Whole("mistral3", {"model_type": "mistral", **_HEADS}, _PIXTRAL),
    "mistral3 over ministral3": Whole(
        "mistral3",
        {"model_type": "ministral3", **_HEADS, "rope_parameters": YARN},
        _PIXTRAL,
        special=f"YaRN, {_TIMES}",
    ),
    "mistral3 over mistral4": Whole(
        "mistral3",
        {"model_type": "mistral4", **_LATENT, **_ROUTED, "rope_parameters": YARN},
        _PIXTRAL,
        special=f"{_LATENT_TEXT}, {_TIMES}",
    ),
    "mistral_large4": Whole(
        "mistral_large4", {**_LATENT, **_ROUTED}, _HEADS, reason=_INDEXED, why=_INDEXED_WHY
    ),
    "mllama": Whole(
        "mllama",
        {"cross_attention_layers": [1]},
        reason="each layer must attend once",
        why="layers that attend to images alone",
    ),
    "molmo2": Whole(
        "molmo2",
        _HEADS,
        {"image_size": [28, 28], **_HEADS, "num_key_value_heads": 2},
        {
            "adapter_config": {
                "hidden_size": 32,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "intermediate_size": 48,
                "text_hidden_size": 64,
                "vision_feature_layer": [-1],
            }
        },
        special="QK norms, fused projections",
    ),
    "muse_glimmer": _mixed("muse_glimmer", _MIXED, {}, special="softcapped logits"),
    "muse_spark": _mixed(
        "muse_spark",
        {**_MIXED, **_EXPERTS, "moe_hidden_size": 32},
        {},
        settings={"audio_config": {"hidden_sizes": (16, 16, 16, 32), "out_hidden_size": 64}},
        special="experts, softcapped logits",
    ),
    "nemotron_h_omni": Whole(
        "nemotron_h_omni",
        {"model_type": "nemotron_h"},
        {"video_temporal_patch_size": 2},
        special="Mamba-2, experts",
    ),
    "ovis2": Whole("ovis2", _QWEN2, {"vocab_size": 32}, {"vocab_size": VOCAB, "hidden_size": 64}),
    "paddleocr_vl": Whole("paddleocr_vl", {**_HEADS, **_axes(2, 3, 3)}, special=_THREE),
    "paligemma": Whole(
        "paligemma",
        {"model_type": "gemma", **_HEADS},
        {**_SIGLIP, "projection_dim": 64},
        {"projection_dim": 64},
    ),
    "phi4_multimodal": Whole(
        "phi4_multimodal",
        {"sliding_window": None},
        {"image_token_id": 100, "crop_size": 28, "feature_layer": -2},
        {
            "audio_config": {
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_blocks": 2,
                "num_attention_heads": 2,
                "audio_token_id": 101,
                "ext_pw_out_channel": 32,
                "depthwise_seperable_out_channel": 32,
                "nemo_conv_channels": 32,
                "input_size": 16,
            }
        },
        special="fused projections",
        is_flat=True,
    ),
    "qwen2_5_omni_thinker": Whole(
        "qwen2_5_omni_thinker",
        _axes(2, 3, 3),
        _QWEN25_TOWER,
        {"audio_config": _AUDIO_TOWER},
        reason=_NO_KEEPING,
        why=_NO_KEEPING_WHY,
    ),
    "qwen2_5_vl": Whole("qwen2_5_vl", _axes(2, 3, 3), _QWEN25_TOWER, special=_THREE),
    "qwen2_audio": Whole(
        "qwen2_audio",
        _QWEN2,
        settings={"audio_config": _AUDIO_TOWER},
        special="runs as its text class",
    ),
    "qwen2_vl": Whole(
        "qwen2_vl",
        _axes(2, 3, 3),
        {"depth": 2, "num_heads": 2, "embed_dim": 32, "hidden_size": 64},
        special=_THREE,
    ),
    "qwen3_5": Whole("qwen3_5", _DELTA, _QWEN_TOWER, special=_LINEAR),
    "qwen3_5_moe": Whole(
        "qwen3_5_moe",
        {**_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 32},
        _QWEN_TOWER,
        special=f"{_LINEAR}, experts",
    ),
    "qwen3_omni_moe_thinker": Whole(
        "qwen3_omni_moe_thinker",
        {**_HEADS, **_EXPERTS, **_axes(2, 3, 3, mrope_interleaved=True)},
        _DEEP_TOWER,
        {"audio_config": _AUDIO_TOWER},
        reason=_NO_KEEPING,
        why=_NO_KEEPING_WHY,
    ),
    "qwen3_vl": Whole(
        "qwen3_vl",
        {**_HEADS, **_axes(2, 3, 3, mrope_interleaved=True)},
        _DEEP_TOWER,
        special=f"QK norms, {_THREE}",
    ),
    "qwen3_vl_moe": Whole(
        "qwen3_vl_moe",
        {**_HEADS, **_EXPERTS, **_axes(2, 3, 3, mrope_interleaved=True)},
        _DEEP_TOWER,
        special=f"experts, QK norms, {_THREE}",
    ),
    "qwen4_exp": Whole(
        "qwen4_exp",
        {
            **_DELTA,
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 16,
            "indexer_budget": 16,
            "indexer_compress_ratio": 4,
        },
        _QWEN_TOWER,
        reason=_INDEXED,
        why=_INDEXED_WHY,
    ),
    "smolvlm": Whole("smolvlm", _LLAMA),
    "step3p7": _mixed(
        "step3p7", {"model_type": "step3p5", **_MIXED, **_ROUTED}, {}, special="experts"
    ),
    "video_llama_3": Whole("video_llama_3", _QWEN2, special="runs as its text class"),
    "vipllava": Whole("vipllava", _LLAMA, _CLIP, {"vision_feature_layers": [-1]}),
    "voxtral": Whole(
        "voxtral", _LLAMA, settings={"audio_config": {**_TOWER, "intermediate_size": 128}}
    ),
}
SERVED = {name: one for name, one in _RECIPES.items() if not one.reason}
REFUSED = {name: one for name, one in _RECIPES.items() if one.reason}
FAST = ("gemma3", "qwen3_vl")
"""Models that are swept in every run of the tests."""
