"""The engine's outputs: what one step produced for each request, and how requests ended.

They are created by `engine.core.engine_core`, and by the loop for requests that never reached a
step. They are read by the sink: the result router of `engine.api.manager`, or the service's
delivery log through `engine.contract.engine_client`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

from engine.contract.token_ids import NO_VALUES, TokenValues
from engine.contract.types import RequestId, TokenId


class FinishReason(enum.Enum):
    """Why a request ended."""

    STOP = "stop"
    """A stop or end-of-sequence id was generated, or the front end found a stop string."""
    LENGTH = "length"
    """max_tokens was reached."""
    CONTEXT = "context"
    """The request is as long as the model's context allows, or as the KV cache can hold."""
    CANCELLED = "cancelled"
    """The request was cancelled."""
    TIME_LIMIT = "time_limit"
    """The request's time limit was reached."""
    ERROR = "error"
    """The request failed; `Finish.failure` says how."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log-probabilities reported with one token, taken from the model's own distribution before
    any processing.

    Attributes:
        logprob: the chosen token's log-probability.
        rank: the chosen token's rank by probability; 1 is the most likely.
        candidates: (token id, log-probability) of the most likely tokens, most likely first.
        requested: (token id, log-probability) of the ids that the request named.
    """

    logprob: float
    rank: int
    candidates: TokenValues = NO_VALUES
    requested: TokenValues = NO_VALUES


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request cost, in tokens.

    Attributes:
        cached_tokens: the number of prompt tokens that came from the prefix cache.
        draft_tokens: how many guessed tokens were computed.
        accepted_draft_tokens: how many of them were right, so that they needed no further step.
        prediction_draft_tokens, accepted_prediction_draft_tokens: of these, those that were guessed
            from the caller's prediction.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    prediction_draft_tokens: int = 0
    accepted_prediction_draft_tokens: int = 0


def without_drafts(usage: Usage) -> Usage:
    """Return the usage with no drafts in it."""
    return Usage(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)


@dataclass(frozen=True, slots=True)
class Timings:
    """When things happened, in seconds of the engine process's monotonic clock. None if something
    did not happen.
    """

    arrival: float
    first_scheduled: float | None
    first_token: float | None
    last_token: float | None
    finished: float
    preemptions: int


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """Why a request failed.

    Attributes:
        message: text that is safe to show to the caller.
        error_id: identifies the cause in the log.
        retryable: whether the same request may succeed elsewhere or later, such as when the engine
            stopped.
        field: the request field that caused the failure, if any, in engine terms (see
            InvalidRequestError). `message` then says how to change it.
    """

    message: str
    error_id: str
    retryable: bool = False
    field: str | None = None


@dataclass(frozen=True, slots=True)
class Finish:
    """How a request ended.

    Attributes:
        reason: why it ended.
        usage, timings: what it cost, and when things happened.
        stop_token_id: the token id that ended it, if the reason is STOP and it was a token id.
        failure: set if the reason is ERROR.
    """

    reason: FinishReason
    usage: Usage
    timings: Timings
    stop_token_id: TokenId | None = None
    failure: RequestFailure | None = None


class RequestOutput(NamedTuple):
    """What one step produced for one choice of a request.

    This is a tuple because one is created for every token. A tuple is faster to create than a
    frozen dataclass, and is serialized without field names.

    Attributes:
        request_id: the request.
        choice: the index of the choice.
        token_ids: the new tokens, usually one. Empty if only the prompt was finished, or the
            request just ended.
        logprobs: one entry per token if the request asked for them; otherwise None.
        prompt_done: how many prompt tokens came from the prefix cache. Set on the first output
            after the whole prompt was processed, None on all others.
        prompt_logprobs: set with prompt_done if the request asked for them: one entry for each
            prompt token from the second on.
        finish: set on the choice's last output. Each choice has one, except that an error ends the
            whole request with a single output.
        ends_request: whether this is the request's last output. Set on exactly one.
    """

    request_id: RequestId
    choice: int = 0
    token_ids: tuple[TokenId, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_done: int | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    finish: Finish | None = None
    ends_request: bool = False


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What one step did, for telemetry.

    Attributes:
        duration_s: seconds from the step's launch to its results.
        num_requests: the number of requests in the step.
        num_prompt_tokens: the number of tokens computed for prompts, or recomputed after a
            preemption.
        num_decode_tokens: the number of tokens computed in order to generate the next one, drafts
            included.
    """

    duration_s: float
    num_requests: int
    num_prompt_tokens: int
    num_decode_tokens: int


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """Everything that one step produced.

    Attributes:
        time: monotonic seconds at the step's end.
        outputs: the outputs, by request.
        step: what the step did; None if the outputs came without a step.
    """

    time: float
    outputs: tuple[RequestOutput, ...]
    step: StepRecord | None = None


def end_of_lost(
    request_id: RequestId, failure: RequestFailure, arrival: float, now: float
) -> RequestOutput:
    """Return the end of an accepted request that never reached a core, or whose core is lost.

    Its token counts are lost too: the usage is 0, and the receiver of its outputs has the true
    counts. Times are in monotonic seconds.
    """
    timings = Timings(arrival, None, None, None, now, 0)
    finish = Finish(FinishReason.ERROR, Usage(0, 0, 0), timings, failure=failure)
    return RequestOutput(request_id, finish=finish, ends_request=True)
