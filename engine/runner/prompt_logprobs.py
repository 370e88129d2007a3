"""Log-probabilities of prompt tokens, from the logits of the tokens before them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from engine.contract.outputs import TokenLogprobs
from engine.contract.types import RequestKey
from engine.runner.input_batch import PromptRows
from engine.sampling.logprobs import GivenLogprobs
from engine.sampling.sampler import Sampler


class PromptReport:
    """What a step reports about its requests' prompts, which may still be being computed."""

    __slots__ = ("_found",)

    def __init__(self, found: Mapping[RequestKey, GivenLogprobs]) -> None:
        self._found = found

    def copied(self, copy: Callable[[torch.Tensor], torch.Tensor]) -> PromptReport:
        """Return the same report with every tensor replaced by its copy on the host."""
        return PromptReport({key: found.copied(copy) for key, found in self._found.items()})

    def result(self) -> dict[RequestKey, list[TokenLogprobs]]:
        """Wait for the device; see SampledTokens.prompt_logprobs."""
        return {key: found.entries() for key, found in self._found.items()}


def report_prompts(
    sampler: Sampler, logits: torch.Tensor, prompts: Sequence[PromptRows]
) -> PromptReport:
    """Queue what a step reports about its requests' prompts.

    Args:
        sampler: computes log-probabilities for a limited number of rows at a time.
        logits: [P, V] in the model's dtype, the prompts' rows one after another.
        prompts: the requests of the P rows.
    """
    found: dict[RequestKey, GivenLogprobs] = {}
    begin = 0
    for prompt in prompts:
        end = begin + len(prompt.targets)
        found[prompt.key] = sampler.token_logprobs(logits[begin:end], prompt.targets, prompt.top_n)
        begin = end
    return PromptReport(found)
