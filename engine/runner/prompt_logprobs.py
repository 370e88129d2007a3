"""Log-probabilities of prompt tokens, from the logits of the tokens before them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.outputs import TokenLogprobs
from engine.runner.input_batch import PromptRows
from engine.sampling.sampler import Sampler
from engine.types import RequestKey

_SLICE_NUMBERS = 1 << 24
"""Logits that are turned to log-probabilities at a time: 64 MiB in float32, and as much again."""


def report_prompts(
    sampler: Sampler, logits: torch.Tensor, prompts: Sequence[PromptRows]
) -> dict[RequestKey, list[TokenLogprobs]]:
    """What a step reports of its requests' prompts; see SampledTokens.prompt_logprobs.

    Args:
        sampler: computes log-probabilities.
        logits: [P, V] in the model's dtype, the prompts' rows one after the other.
        prompts: what the P rows belong to.
    """
    report: dict[RequestKey, list[TokenLogprobs]] = {}
    first = 0
    for prompt in prompts:
        size = max(1, _SLICE_NUMBERS // logits.shape[-1])
        found: list[TokenLogprobs] = []
        for begin in range(0, len(prompt.targets), size):
            targets = prompt.targets[begin : begin + size]
            rows = logits[first + begin : first + begin + len(targets)]
            found.extend(sampler.token_logprobs(rows, targets, prompt.top_n))
        report[prompt.key] = found
        first += len(prompt.targets)
    return report
