"""The settings of tiny models with recurrent layers, for tests/model_recipes.py: what is recurrent
in them, what attends, and their configs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

WINDOW = 24
_HEADS = {"head_dim": 16}
_THREE = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
_DELTA = {
    **_HEADS,
    **_THREE,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_MANY = {"linear_num_value_heads": 16, "linear_num_key_heads": 8}
"""With fewer heads, the products that make decays and betas are too small to be packed."""
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 20,
}
_SSD = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_chunk_size": 16,
}
_MAMBA1 = {"mamba_d_state": 8, "mamba_dt_rank": 8}

Attention = Literal["full", "sliding", "sliding and full", "none"]


@dataclass(frozen=True, slots=True)
class Recurrent:
    """A tiny model's config.

    Attributes:
        settings: over tests.model_recipes.COMMON.
        special: what recurs.
        attention: what attends.
        model_type: transformers' name, if it is not the family's.
        reason: a part of the message with which it is refused; `special` is the table's word.
    """

    special: str
    settings: dict[str, Any] = field(default_factory=dict)
    attention: Attention = "full"
    model_type: str = ""
    reason: str = ""


RECURRENT = {
    "bailing_hybrid": Recurrent("KDA, multi-head latent attention, experts", {
        **_LATENT, **_THREE, **_EXPERTS, "q_lora_rank": 24, "linear_head_dim": 16,
        "linear_num_heads": 4, "num_local_experts": 4, "first_k_dense_replace": 1,
        "n_group": 1, "topk_group": 1,
    }),
    "bamba": Recurrent("Mamba-2", {**_SSD, "attn_layer_indices": [1]}),
    "falcon_h1": Recurrent("Mamba-2 beside attention in each layer", {
        **_SSD, **_HEADS, "mamba_d_ssm": 128,
    }),
    "falcon_mamba": Recurrent("Mamba-1", {"state_size": 8}, "none"),
    "granitemoehybrid": Recurrent("Mamba-2, experts", {
        **_SSD, **_THREE, "num_local_experts": 4, "num_experts_per_tok": 2,
        "shared_intermediate_size": 32,
    }),
    "jamba": Recurrent("Mamba-1, experts", {
        **_MAMBA1, "num_experts": 4, "attn_layer_period": 3, "attn_layer_offset": 1,
    }),
    "kimi_linear": Recurrent("KDA, multi-head latent attention, experts", {
        **_LATENT, **_THREE, "linear_head_dim": 16, "linear_num_heads": 4,
        "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    }),
    "lfm2": Recurrent("short convolutions", {"layer_types": ["conv", "full_attention", "conv"]}),
    "lfm2_moe": Recurrent("short convolutions, experts", {
        "layer_types": ["conv", "full_attention", "conv"], "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_dense_layers": 1,
    }),
    "lfm3": Recurrent("short convolutions", {
        **_HEADS, "num_hidden_layers": 4, "sliding_window": WINDOW,
        "layer_types": ["conv", "sliding_attention", "full_attention", "conv"],
    }, "sliding and full"),
    "mamba": Recurrent("Mamba-1", {"state_size": 8}, "none"),
    "mamba2": Recurrent("Mamba-2", {
        "state_size": 16, "num_heads": 8, "head_dim": 16, "n_groups": 2, "chunk_size": 16,
    }, "none"),
    "nemotron_h": Recurrent("Mamba-2, layers of an MLP alone, experts", {
        **_HEADS, "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "ssm_state_size": 16, "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2,
        "chunk_size": 16, "n_routed_experts": 4, "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32,
    }),
    "olmo_hybrid": Recurrent("gated delta rule", {**_DELTA, **_MANY}),
    "qwen3_5": Recurrent("gated delta rule", {**_DELTA, **_MANY}, model_type="qwen3_5_text"),
    "qwen3_5_moe": Recurrent("gated delta rule, experts", {**_DELTA, **_MANY, **_EXPERTS},
                             model_type="qwen3_5_moe_text"),
    "qwen3_next": Recurrent("gated delta rule, experts", {**_DELTA, **_MANY, **_EXPERTS}),
    "zamba": Recurrent("Mamba-1, shared attention", {
        **_MAMBA1, "num_hidden_layers": 4, "num_key_value_heads": 4, "attention_head_dim": 32,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
    }),
    "zamba2": Recurrent("Mamba-2, shared attention", {
        "num_hidden_layers": 4, "num_key_value_heads": 4, "mamba_d_state": 16, "chunk_size": 16,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
    }),
    "zaya": Recurrent("convolutions before attention, experts", {
        **_HEADS, "num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 32,
        "router_hidden_size": 16,
    }),
}  # fmt: skip

REFUSED = {
    "inkling": Recurrent("adds position biases to scores", {
        **_HEADS, "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"],
    }, "sliding and full", "inkling_text",
    "differs from the model's own"),
    "qwen4_exp": Recurrent("layers that choose the tokens to attend to (sparse attention)", {
        **_DELTA, **_EXPERTS, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16,
        "indexer_budget": 16, "indexer_compress_ratio": 4,
    }, model_type="qwen4_exp_text", reason="layers of kind indexed_attention"),
}  # fmt: skip
