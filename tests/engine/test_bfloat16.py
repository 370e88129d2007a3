"""Exactness in bfloat16: produced tokens are judged by the same model in float32."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

import engine
from engine.contract.config import ContinuousBatchingConfig
from tests.near_ties import check_greedy
from tests.tiny_models import make_prompts

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"


def test_bfloat16_tokens_are_float32s_up_to_near_ties() -> None:
    prompts = make_prompts((3, 17, 40, 90, 150, 200, 260, 300))
    model = engine.load(str(DEMO), dtype="bfloat16")
    outputs = model.generate_batch(
        prompts,
        GenerationConfig(do_sample=False, max_new_tokens=32),
        ContinuousBatchingConfig(block_size=16, num_blocks=96, max_batch_tokens=128),
        eos_token_id=-1,
        progress_bar=False,
    )
    judge = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
    generated = [output.generated_tokens for output in outputs.values()]
    assert [len(tokens) for tokens in generated] == [32] * len(prompts)
    check_greedy(judge, zip(prompts, generated, strict=True))
