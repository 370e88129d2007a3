"""Tiny random models, float32, one recipe a family: what `model.generate` is compared with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTJConfig,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    StableLmConfig,
)

VOCAB = 128
CONTEXT = 512
WINDOW = 24

_COMMON: dict[str, Any] = {
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
}

FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_COMMON),
    "qwen2": lambda: Qwen2Config(**_COMMON),
    "qwen3": lambda: Qwen3Config(**_COMMON, head_dim=16),
    "mistral": lambda: MistralConfig(**_COMMON, sliding_window=WINDOW),
    "gemma2": lambda: Gemma2Config(
        **_COMMON, head_dim=16, sliding_window=WINDOW, query_pre_attn_scalar=16
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **{**_COMMON, "num_hidden_layers": 6},
        head_dim=16,
        sliding_window=WINDOW,
        query_pre_attn_scalar=16,
    ),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCAB,
        n_embd=64,
        n_layer=3,
        n_head=4,
        n_positions=CONTEXT,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "phi3": lambda: Phi3Config(**_COMMON, sliding_window=None),
    "mixtral": lambda: MixtralConfig(**_COMMON, num_local_experts=4, num_experts_per_tok=2),
    "olmo2": lambda: Olmo2Config(**_COMMON),
    "gpt_oss": lambda: GptOssConfig(
        **_COMMON,
        head_dim=16,
        sliding_window=WINDOW,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    "deepseek_v3": lambda: DeepseekV3Config(
        **{**_COMMON, "num_key_value_heads": 4},
        moe_intermediate_size=32,
        first_k_dense_replace=1,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        q_lora_rank=24,
        kv_lora_rank=32,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=20,
    ),
}

REFUSED: dict[str, Callable[[], PreTrainedConfig]] = {
    "falcon": lambda: FalconConfig(
        vocab_size=VOCAB, hidden_size=64, num_hidden_layers=2, num_attention_heads=4
    ),
    "gptj": lambda: GPTJConfig(
        vocab_size=VOCAB, n_embd=64, n_layer=2, n_head=4, n_positions=CONTEXT, rotary_dim=8
    ),
    "stablelm": lambda: StableLmConfig(**_COMMON),
    "llama4": lambda: Llama4TextConfig(
        **_COMMON,
        head_dim=16,
        intermediate_size_mlp=96,
        num_local_experts=2,
        attention_chunk_size=32,
    ),
}


def make_model(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A model with random float32 weights, large enough that outputs differ between prompts."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "norm" not in name:
                parameter.mul_(4.0)
    model.eval()
    assert isinstance(model, PreTrainedModel)
    return model


def make_prompts(lengths: tuple[int, ...], seed: int = 1) -> list[list[int]]:
    """Random prompts without special ids."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in lengths]


def greedy_reference(model: PreTrainedModel, prompt: list[int], max_new_tokens: int) -> list[int]:
    """What `model.generate` gives, with its eager attention, alone."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        ids = torch.tensor([prompt])
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            pad_token_id=0,
        )
    finally:
        model.set_attn_implementation(before)
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens
