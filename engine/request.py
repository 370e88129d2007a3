"""A request on its way through the engine: what the caller asked for, and the state that the
scheduler keeps.

`GenerationRequest` is what crosses the seam: immutable, complete, free of protobuf and torch.
`Request` is the engine's own record of it, changed only on the engine's thread, by the scheduler
and the core.
"""

from __future__ import annotations

import enum
from array import array
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from engine.outputs import TokenLogprobs
from engine.sampling_params import (
    GrammarParams,
    LogprobParams,
    SamplingParams,
    SamplingSteps,
    StopParams,
)
from engine.token_ids import TokenIds
from engine.types import NO_CALLER, CallerKey, RequestId, RequestKey, TokenId

PENDING_TOKEN = TokenId(-2)
"""Stands in token_ids for a token that is being computed: its step was launched, its value is not
on the host yet.
"""


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
        prompt: the prompt's token ids; at least one. May be given as any sequence; kept packed.
        sampling, stop: how tokens are chosen and when to stop.
        logprobs: which log-probabilities to report; None: none.
        prompt_logprobs: how many candidates to report with each prompt token's log-probability;
            None: nothing of the prompt is reported.
        grammar: a form that the output must have; None: any.
        n: how many independent continuations (choices) to make, 1 to MAX_CHOICES.
        priority: higher numbers run first; -100 to 100. Only for schedulers that heed priorities.
        cache_salt: cached prefixes are shared only among requests with the same salt.
        bypass_prefix_cache: neither use nor leave cached prefixes.
        time_limit_s: seconds from arrival after which the request ends with TIME_LIMIT; None: no
            limit. Above zero.
        caller: for whom its service is counted; NO_CALLER: nobody was named, and all such requests
            are one caller's. Only for schedulers that share service among callers.
        caller_group: of the queue the callers of one group have one share together; NO_CALLER: the
            caller is a group by itself.
        weight: how much service the caller is due beside others, MIN_WEIGHT to MAX_WEIGHT. Of a
            caller whose requests differ in it, the latest counts.
    """

    request_id: RequestId
    prompt: TokenIds
    sampling: SamplingParams
    stop: StopParams
    logprobs: LogprobParams | None = None
    prompt_logprobs: int | None = None
    grammar: GrammarParams | None = None
    n: int = 1
    priority: int = 0
    cache_salt: bytes = b""
    bypass_prefix_cache: bool = False
    time_limit_s: float | None = None
    caller: CallerKey = NO_CALLER
    caller_group: CallerKey = NO_CALLER
    weight: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt", TokenIds.of(self.prompt, "prompt"))


class TokenMatcher(Protocol):
    """Follows one choice's output through a grammar. Made by `engine.structured`, used on the
    engine's thread.
    """

    def fill_mask(self, row: npt.NDArray[np.int32]) -> None:
        """Write which tokens may come next: bit i of the row, little end first, is token i.

        row: int32 [ceil(V / 32)], overwritten whole.
        """
        ...

    def accept(self, token: TokenId) -> bool:
        """Go on with a token. False: the grammar does not allow it; the state is unchanged."""
        ...

    @property
    def is_complete(self) -> bool:
        """Whether the output is whole and nothing can follow it."""
        ...

    @property
    def expected_s(self) -> float:
        """What a token is expected to cost before one is known, in seconds of the processor."""
        ...

    @property
    def spent_s(self) -> float:
        """What following the output has cost so far, in seconds of the processor; never less than
        before.
        """
        ...

    @property
    def failure(self) -> str | None:
        """Why it cannot be followed any more, to be told to whoever sent the grammar; None: it can.
        Then no token is in the mask, and none is accepted.
        """
        ...


_NO_KEY = RequestKey(0)
"""Of a record that no engine knows; real keys begin at 1."""


@dataclass(slots=True, eq=False)
class Request:
    """The engine's record of one choice of a live request.

    Attributes:
        spec: what was asked for.
        key: its name in the engine.
        choice: which of the request's n choices it is.
        matcher: follows its grammar; None: there is none.
        arrival: monotonic seconds, set at admission.
        token_ids: prompt, then output, as C integers: four bytes each; appended to by the core.
        num_computed_tokens: how many of token_ids have their KV in the cache; set by the scheduler.
        num_pending_tokens: how many of token_ids, at their end, are PENDING_TOKEN.
        num_cached_tokens: how many prompt tokens came from the prefix cache when it was first
            scheduled.
        num_counted_tokens: how many of token_ids, from the first on, its caller's service has been
            counted for; set by the scheduler.
        block_hashes: of its full blocks, as far as they were needed; kept by the KV cache.
        prompt_logprobs: of the prompt's tokens from the second on, as far as they are known.
        sampling_steps: what choosing its tokens takes; kept by the sampler.
        ending_token_ids: the ids that end its output; the choices of a request share one set.
        form_spent_s, form_cost_s, form_debt_s, form_waits: of its matcher's cost, in seconds: all
            that was counted, what a token costs now, what its tokens cost beyond their share, and
            for how many steps it has waited on that account; kept by `engine.form_budget`.
        max_total_tokens: the length at which the request must stop: prompt + max_tokens, or the
            context if less.
        request_id, num_prompt_tokens: the request's id, and the prompt's length; kept, since they
            are read for every token.
    """

    spec: GenerationRequest
    arrival: float
    max_total_tokens: int
    key: RequestKey = _NO_KEY
    choice: int = 0
    matcher: TokenMatcher | None = None
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    num_computed_tokens: int = 0
    num_pending_tokens: int = 0
    num_cached_tokens: int = 0
    num_counted_tokens: int = 0
    block_hashes: list[bytes] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    sampling_steps: SamplingSteps | None = None
    form_spent_s: float = 0.0
    form_cost_s: float = 0.0
    form_debt_s: float = 0.0
    form_waits: int = 0
    status: RequestStatus = RequestStatus.WAITING
    preemptions: int = 0
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    ending_token_ids: frozenset[TokenId] = frozenset()
    request_id: RequestId = field(init=False)
    num_prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.request_id = self.spec.request_id
        self.num_prompt_tokens = len(self.spec.prompt)
        self.token_ids = array("i", self.spec.prompt.packed)
        if not self.ending_token_ids:
            self.ending_token_ids = self.spec.stop.ending_token_ids

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far, in tokens."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """The output so far, in tokens; the pending ones too."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_generated(self) -> bool:
        """Whether the tokens that are there or pending are all that it may have, so that nothing is
        left to schedule.
        """
        return self.num_pending_tokens > 0 and len(self.token_ids) >= self.max_total_tokens

    @property
    def needs_host_tokens(self) -> bool:
        """Whether its next token can only be chosen when the ones before it are on the host."""
        return self.matcher is not None or self.spec.sampling.needs_history

    @property
    def num_tokens_to_compute(self) -> int:
        """Tokens whose KV is not in the cache yet: 1 for a decoding request, more while it
        prefills.
        """
        return len(self.token_ids) - self.num_computed_tokens
