"""What the core asks of a runner. Free of torch, so that a scripted runner can stand in for a
device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from engine.batch import ScheduledBatch
from engine.outputs import TokenLogprobs
from engine.types import RequestKey, TokenId

INVALID_TOKEN = TokenId(-1)
"""Stands for a token that could not be sampled: the model gave no finite logits for that request.
"""


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """What a step gives: one entry for each part of the batch that samples, in the batch's order.

    Attributes:
        token_ids: the sampled tokens; INVALID_TOKEN where there is none, which fails that request.
        logprobs: their log-probabilities, None where the request did not ask; or None altogether.
        prompt_logprobs: for the requests that asked and whose prompt tokens the step computed:
            entry i belongs to the token behind the step's i-th one (position start + 1 + i), as far
            as the prompt goes.
    """

    token_ids: Sequence[TokenId]
    logprobs: Sequence[TokenLogprobs | None] | None = None
    prompt_logprobs: Mapping[RequestKey, Sequence[TokenLogprobs]] = field(default_factory=dict)


class PendingStep(Protocol):
    """A step that was launched and may still be running."""

    def result(self) -> SampledTokens:
        """Wait for the step's end. Called once. May raise anything; nothing of the step is then
        used.
        """
        ...


class Runner(Protocol):
    """The only door to the device. Called on the engine's thread only."""

    def launch(self, batch: ScheduledBatch) -> PendingStep:
        """Begin to compute a batch: make its block copies, write its KV, run the model, sample.

        The batch's lists and tables may change as soon as this returns: what is needed of them is
        read before. At most one other step is pending. Where a part's only token is PENDING_TOKEN,
        it is the one that the step launched before this one samples for the same request: it is
        taken over on the device. May raise anything; nothing of the step is then used.
        """
        ...

    def release(self, key: RequestKey) -> None:
        """Forget what is kept for a choice that ended. Harmless if nothing is."""
        ...

    def warmup(self) -> None:
        """Run what is slow the first time, without touching any request."""
        ...
