"""A request on its way through the engine: what the caller asked for, and the state that the
scheduler keeps.

`GenerationRequest` is what crosses the seam: immutable, complete, free of protobuf and torch.
`Request` is the engine's own record of it, changed only on the engine's thread, by the scheduler
and the core.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from engine.sampling_params import LogprobParams, SamplingParams, StopParams
from engine.types import RequestId, TokenId


class RequestStatus(enum.IntEnum):
    """Where a request is. Ordered: everything from FINISHED on is an end."""

    WAITING = 0
    """In the queue, with nothing computed."""
    PREFILLING = 1
    """In the batch, with prompt tokens (or, after a preemption, output tokens) still to compute."""
    DECODING = 2
    """In the batch, one new token a step."""
    FINISHED = 3
    """Ended as it should."""
    CANCELLED = 4
    """Ended because somebody asked for it, or its time limit was reached."""
    FAILED = 5
    """Ended by an error."""

    @property
    def is_terminal(self) -> bool:
        """Whether the request has ended."""
        return self >= RequestStatus.FINISHED


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """What the caller asked for, every default filled in.

    Attributes:
        request_id: unique among live requests.
        prompt: the prompt's token ids; at least one.
        sampling, stop: how tokens are chosen and when to stop.
        logprobs: which log-probabilities to report; None: none.
        time_limit_s: seconds from arrival after which the request ends with TIME_LIMIT; None: no
            limit. Above zero.
    """

    request_id: RequestId
    prompt: tuple[TokenId, ...]
    sampling: SamplingParams
    stop: StopParams
    logprobs: LogprobParams | None = None
    time_limit_s: float | None = None


@dataclass(slots=True, eq=False)
class Request:
    """The engine's record of a live request.

    Attributes:
        spec: what was asked for.
        arrival: monotonic seconds, set at admission.
        token_ids: prompt, then output; appended to by the core.
        num_computed_tokens: how many of token_ids have their KV in the cache; set by the scheduler.
        max_total_tokens: the length at which the request must stop: prompt + max_tokens, or the
            context if less.
    """

    spec: GenerationRequest
    arrival: float
    max_total_tokens: int
    token_ids: list[TokenId] = field(default_factory=list)
    num_computed_tokens: int = 0
    status: RequestStatus = RequestStatus.WAITING
    preemptions: int = 0
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    prompt_reported: bool = False
    ending_token_ids: frozenset[TokenId] = frozenset()

    def __post_init__(self) -> None:
        self.token_ids = list(self.spec.prompt)
        self.ending_token_ids = self.spec.stop.ending_token_ids

    @property
    def request_id(self) -> RequestId:
        """The request's id."""
        return self.spec.request_id

    @property
    def num_prompt_tokens(self) -> int:
        """The prompt's length in tokens."""
        return len(self.spec.prompt)

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far, in tokens."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """The output so far, in tokens."""
        return len(self.token_ids) - len(self.spec.prompt)

    @property
    def num_tokens_to_compute(self) -> int:
        """Tokens whose KV is not in the cache yet: 1 for a decoding request, more while it
        prefills.
        """
        return len(self.token_ids) - self.num_computed_tokens
