"""Exactness in bfloat16: produced tokens are judged by the same model in float32."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

import engine
from engine.config import ContinuousBatchingConfig
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
    best, worst = [], 0.0
    for prompt, output in zip(prompts, outputs.values(), strict=True):
        tokens = torch.tensor(output.generated_tokens)
        assert len(tokens) == 32
        with torch.inference_mode():
            ids = torch.tensor([prompt + output.generated_tokens])
            logits = judge(ids).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(-1, tokens[:, None])[:, 0]
        gaps = (logits.max(dim=-1).values - chosen) / logits.std(dim=-1)
        best += (gaps == 0).tolist()
        worst = max(worst, gaps.max().item())
    assert sum(best) / len(best) >= 0.98, f"{sum(best)} of {len(best)} are the most likely token"
    assert worst <= 0.1, f"a token is {worst:.3f} standard deviations below the best"
