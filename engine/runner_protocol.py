"""What the core asks of a runner. Free of torch, so that a scripted runner can stand in for a
device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.batch import ScheduledBatch
from engine.outputs import TokenLogprobs
from engine.types import RequestId, TokenId

INVALID_TOKEN = TokenId(-1)
"""Stands for a token that could not be sampled: the model gave no finite logits for that request.
"""


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """What a runner returns: one entry for each part of the batch that samples, in the batch's
    order.

    Attributes:
        token_ids: the sampled tokens; INVALID_TOKEN where there is none, which fails that request.
        logprobs: their log-probabilities, None where the request did not ask; or None altogether.
    """

    token_ids: Sequence[TokenId]
    logprobs: Sequence[TokenLogprobs | None] | None = None


class Runner(Protocol):
    """The only door to the device."""

    def execute(self, batch: ScheduledBatch) -> SampledTokens:
        """Compute a batch: write its KV, run the model, sample. May raise anything; nothing of it
        is then used.
        """
        ...

    def release(self, request_id: RequestId) -> None:
        """Forget what is kept for a request that ended. Harmless if nothing is."""
        ...

    def warmup(self) -> None:
        """Run what is slow the first time, without touching any request."""
        ...
