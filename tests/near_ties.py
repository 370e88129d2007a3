"""The criterion for greedy tokens in bfloat16, of docs/promises.md: teacher-forced through the same
model in float32, almost all are its most likely tokens, and all others nearly.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from transformers import PreTrainedModel

BEST = 0.98
"""Of the tokens: so many are the judge's most likely ones."""
FEWER = 0.01
"""Of the tokens: where a model's own code in bfloat16 has fewer than `BEST`, so many less are still
enough.
"""
NEAR = 0.1
"""Of the logits' standard deviation: no token is farther below the largest."""


def check_greedy(
    judge: PreTrainedModel,
    outputs: Iterable[tuple[list[int], list[int]]],
    rival: PreTrainedModel | None = None,
    *,
    enough: float = BEST,
    near: float = NEAR,
) -> None:
    """Fail unless the tokens are greedy ones of the judge, up to near-ties.

    Args:
        judge: the model in float32.
        outputs: prompts, and what was generated for each.
        rival: the model in bfloat16, by its own code, for a model that has many near-ties.
        enough, near: in place of `BEST` and `NEAR`, for models whose weights are random and small,
            so that they have more near-ties than any that was trained.
    """
    best, rivals, worst = [], [], 0.0
    for prompt, generated in outputs:
        with torch.inference_mode():
            ids = torch.tensor([prompt + generated])
            logits = judge(ids).logits[0, len(prompt) - 1 : -1]
            if rival is not None:
                others = rival(ids).logits[0, len(prompt) - 1 : -1]
                rivals += (others.argmax(dim=-1) == logits.argmax(dim=-1)).tolist()
        chosen = logits.gather(-1, torch.tensor(generated)[:, None])[:, 0]
        gaps = (logits.max(dim=-1).values - chosen) / logits.std(dim=-1)
        best += (gaps == 0).tolist()
        worst = max(worst, gaps.max().item())
    if rivals:
        enough = min(enough, sum(rivals) / len(best) - FEWER)
    assert sum(best) / len(best) >= enough, (
        f"{sum(best)} of {len(best)} are the most likely token; the model's own code: {sum(rivals)}"
    )
    assert worst <= near, f"a token is {worst:.3f} standard deviations below the best"
