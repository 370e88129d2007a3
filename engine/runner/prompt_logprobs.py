"""Log-probabilities of prompt tokens, from the logits of the tokens before them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.outputs import TokenLogprobs
from engine.runner.input_batch import PromptRows
from engine.sampling.sampler import Sampler
from engine.types import RequestKey


def report_prompts(
    sampler: Sampler, logits: torch.Tensor, prompts: Sequence[PromptRows]
) -> dict[RequestKey, list[TokenLogprobs]]:
    """What a step reports about its requests' prompts; see SampledTokens.prompt_logprobs.

    Args:
        sampler: computes log-probabilities, of a bounded number of rows at a time.
        logits: [P, V] in the model's dtype, the prompts' rows one after the other.
        prompts: the requests of the P rows.
    """
    report: dict[RequestKey, list[TokenLogprobs]] = {}
    begin = 0
    for prompt in prompts:
        end = begin + len(prompt.targets)
        rows = logits[begin:end]
        report[prompt.key] = sampler.token_logprobs(rows, prompt.targets, prompt.top_n)
        begin = end
    return report
