"""The runner interface that the core uses. Free of torch, so that a scripted runner can stand in
for a device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from engine.contract.outputs import TokenLogprobs
from engine.contract.types import RequestKey, TokenId
from engine.scheduler.scheduled_batch import ScheduledBatch

INVALID_TOKEN = TokenId(-1)
"""Marks a token that could not be sampled: the model gave no finite logits for that request.
"""


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The results of a step: one entry for each sampled row of the batch, in the batch's order.

    Attributes:
        token_ids: the sampled tokens; INVALID_TOKEN if there is none, which fails that request.
        logprobs: their log-probabilities, with None for requests that did not ask for them. None if
            no request did.
        prompt_logprobs: the prompt's log-probabilities, for requests that asked for them and had
            prompt tokens in the step. Entry i belongs to the token after the step's i-th one
            (position start + 1 + i), up to the prompt's end.
    """

    token_ids: Sequence[TokenId]
    logprobs: Sequence[TokenLogprobs | None] | None = None
    prompt_logprobs: Mapping[RequestKey, Sequence[TokenLogprobs]] = field(default_factory=dict)


class PendingStep(Protocol):
    """A step that was launched and may still be running."""

    def sample(self) -> None:
        """Choose the step's tokens, if the launch has left that to this call. Called after the
        results of the previous step were taken, and before another step is launched. May raise
        any exception; no result of the step is then used, and `result` is not called.
        """
        ...

    def result(self) -> SampledTokens:
        """Wait for the end of the step. Called once. May raise any exception; no result of the step
        is then used.
        """
        ...


class Runner(Protocol):
    """Runs steps on the device and does nothing else. Called on the engine's thread only."""

    def launch(self, batch: ScheduledBatch) -> PendingStep:
        """Start to compute a batch: make its block copies, write its KV, run the model, and sample.

        The batch's lists and tables may change as soon as this returns, so the runner must read
        what it needs before. At most one other step is pending. If a request's only token is
        PENDING_TOKEN, it stands for the token that the previous step samples for the same request;
        the runner takes it over on the device. Some requests, such as those with a grammar, need
        that token on the host before the next one is chosen. The step is still computed, and its
        tokens are chosen in `PendingStep.sample`. May raise any exception; no result of the step is
        then used.
        """
        ...

    def release(self, key: RequestKey) -> None:
        """Drop what is kept for a choice that has ended. Does nothing if nothing is kept."""
        ...

    def forget_model(self) -> None:
        """Forget everything derived from the model's attributes, hooks and tensors, because its
        owner has replaced them. Called between two steps, on any thread.
        """
        ...

    def warmup(self) -> None:
        """Run everything once that is slow the first time, without affecting any request."""
        ...
