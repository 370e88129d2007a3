"""The criterion for greedy tokens in bfloat16, of docs/promises.md: teacher-forced through the same
model in float32, almost all are its most likely tokens, and all others nearly.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from transformers import PreTrainedModel

BEST = 0.98
"""Of the tokens: so many are the judge's most likely ones."""
NEAR = 0.1
"""Of the logits' standard deviation: no token is farther below the largest."""


def check_greedy(judge: PreTrainedModel, outputs: Iterable[tuple[list[int], list[int]]]) -> None:
    """Fail unless the tokens are greedy ones of the judge, up to near-ties.

    Args:
        judge: the model in float32.
        outputs: prompts, and what was generated for each.
    """
    best, worst = [], 0.0
    for prompt, generated in outputs:
        with torch.inference_mode():
            logits = judge(torch.tensor([prompt + generated])).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(-1, torch.tensor(generated)[:, None])[:, 0]
        gaps = (logits.max(dim=-1).values - chosen) / logits.std(dim=-1)
        best += (gaps == 0).tolist()
        worst = max(worst, gaps.max().item())
    assert sum(best) / len(best) >= BEST, f"{sum(best)} of {len(best)} are the most likely token"
    assert worst <= NEAR, f"a token is {worst:.3f} standard deviations below the best"
