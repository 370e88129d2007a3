"""A request in the engine: what the caller asked for, and the state that the scheduler keeps.

`GenerationRequest` is what the service passes to the engine. It is immutable, complete, and
independent of protobuf and torch. `Request` is the engine's own record of it, changed only on the
engine's thread, by the scheduler and the core.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt

from engine.contract.adapters import Adapter
from engine.contract.outputs import TokenLogprobs
from engine.contract.sampling_params import (
    GrammarParams,
    LogprobParams,
    SamplingParams,
    SamplingSteps,
    StopParams,
)
from engine.contract.token_ids import NO_IDS, TokenIds
from engine.contract.types import NO_CALLER, CallerKey, RequestId, RequestKey, TokenId

MAX_PRIORITY = 100
"""The highest priority; the lowest is its negative."""
MAX_CACHE_SALT_BYTES = 256
"""The maximum length of a cache salt, in bytes."""
MAX_CALLER_CHARS = 512
"""The maximum length of a caller's name, in characters."""
MIN_WEIGHT, MAX_WEIGHT = 1 / 1000, 1000.0
"""The bounds of a caller's weight; the default weight is 1."""
PENDING_TOKEN = TokenId(-2)
"""A placeholder in token_ids for a token being computed: its step was launched, but its value is
not on the host yet.
"""


class RequestStatus(enum.IntEnum):
    """The state of a request. The values are ordered: every value from FINISHED on is terminal."""

    WAITING = 0
    """In the queue, with nothing computed."""
    PREFILLING = 1
    """In the batch, with prompt tokens (or, after a preemption, output tokens) still to compute."""
    DECODING = 2
    """In the batch, generating one new token per step."""
    FINISHED = 3
    """Ended normally."""
    CANCELLED = 4
    """Cancelled, or its time limit was reached."""
    FAILED = 5
    """Ended by an error."""

    @property
    def is_terminal(self) -> bool:
        """Whether the request has ended."""
        return self >= RequestStatus.FINISHED


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """What the caller asked for, with all defaults filled in.

    Attributes:
        request_id: unique among live requests.
        prompt: the prompt's token ids; at least one. Any sequence is accepted, and stored packed.
        sampling, stop: how tokens are chosen and when to stop.
        logprobs: which log-probabilities to report; None: none.
        prompt_logprobs: how many candidates to report with each prompt token's log-probability;
            None: nothing is reported for the prompt.
        grammar: the grammar that the output must follow; None: any output.
        prediction: tokens that the output is expected to resemble, such as those of a file that
            is to be edited. It changes no token, only how many steps they take. Empty: nothing is
            expected.
        adapter: the name of the adapter that is applied to the model; empty: none.
        n: the number of independent continuations (choices) to generate, 1 to MAX_CHOICES.
        priority: requests with a higher priority run first; -100 to 100. Only for schedulers that
            use priorities.
        cache_salt: cached prefixes are shared only among requests with the same salt.
        bypass_prefix_cache: whether to neither use cached prefixes nor leave any.
        time_limit_s: seconds from arrival after which the request ends with TIME_LIMIT; above zero.
            None: no limit.
        caller: who is charged for the request's service. NO_CALLER: no caller was named, and all
            such requests count as one caller's. Only for schedulers that share service among
            callers.
        caller_group: callers in the same group share one portion of the queue. NO_CALLER: the
            caller is a group by itself.
        weight: how much service the caller is due relative to others, MIN_WEIGHT to MAX_WEIGHT. If
            a caller's requests have different weights, the latest counts.
        ticket: identifies a retry of a request that was refused because the queue was full
            (`engine.fairness.retry_tickets`). Empty: retries are not recognized.
    """

    request_id: RequestId
    prompt: TokenIds
    sampling: SamplingParams
    stop: StopParams
    logprobs: LogprobParams | None = None
    prompt_logprobs: int | None = None
    grammar: GrammarParams | None = None
    prediction: TokenIds = NO_IDS
    adapter: str = ""
    n: int = 1
    priority: int = 0
    cache_salt: bytes = b""
    bypass_prefix_cache: bool = False
    time_limit_s: float | None = None
    caller: CallerKey = NO_CALLER
    caller_group: CallerKey = NO_CALLER
    weight: float = 1.0
    ticket: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt", TokenIds.of(self.prompt, "prompt"))
        object.__setattr__(self, "prediction", TokenIds.of(self.prediction, "prediction"))

    @property
    def logged(self) -> str:
        """What the log calls the request: its id, and the adapter that it names."""
        return f"{self.request_id} (adapter {self.adapter})" if self.adapter else self.request_id


class TokenMatcher(Protocol):
    """Follows one choice's output through a grammar. Made by `engine.structured`, used on the
    engine's thread.
    """

    def fill_mask(self, row: npt.NDArray[np.int32]) -> None:
        """Write the mask of tokens that may come next. Bit i of the row, least significant bit
        first, is token i.

        Args:
            row: int32 [ceil(V / 32)], completely overwritten.
        """
        ...

    def fitting(self) -> Sequence[int]:
        """Return the ids that may come next, in order. Slow; used for the rare case that needs an
        explanation.
        """
        ...

    def accept(self, token: TokenId) -> bool:
        """Advance by a token. Return False, with the state unchanged, if the grammar does not allow
        it.
        """
        ...

    def copy(self) -> Self:
        """Return a matcher in the same state, to look ahead with. What it costs is not counted here
        unless that is said (`charge`).
        """
        ...

    def charge(self, seconds: float) -> None:
        """Count what a copy has cost."""
        ...

    def num_fitting(self, tokens: Sequence[int]) -> int:
        """Return how many of some tokens, from the first on, may come next, as far as that is
        cheaply known. The state is unchanged.
        """
        ...

    def forced(self, most: int) -> Sequence[int]:
        """Return up to `most` tokens whose text must come next. The output may divide that text
        into other tokens.
        """
        ...

    @property
    def is_complete(self) -> bool:
        """Whether the output is complete and nothing can follow it."""
        ...

    @property
    def is_free(self) -> bool:
        """Whether any output is allowed from now on, so that the matcher is no longer needed."""
        ...

    @property
    def expected_s(self) -> float:
        """The expected cost of a token before any cost was measured, in seconds of CPU time."""
        ...

    @property
    def spent_s(self) -> float:
        """The cost of following the output so far, in seconds of CPU time; never decreases."""
        ...

    @property
    def failure(self) -> str | None:
        """Why the grammar can no longer be followed, in words for the caller, or None if it can.

        After a failure the mask is empty, and no token is accepted.
        """
        ...


@dataclass(frozen=True, slots=True)
class MatcherFactory:
    """A compiled grammar, ready for one request.

    Attributes:
        make: makes a matcher at the grammar's start; called once for each choice.
        notes: messages for the caller about how the enforced grammar differs from the one given.
    """

    make: Callable[[], TokenMatcher]
    notes: tuple[str, ...] = ()

    def __call__(self) -> TokenMatcher:
        return self.make()


_NO_KEY = RequestKey(0)
"""The key of a record that is not in an engine; real keys begin at 1."""


@dataclass(slots=True, eq=False)
class Request:
    """The engine's record of one choice of a live request.

    Attributes:
        spec: what was asked for.
        key: the choice's identifier in the engine.
        choice: the index of the choice in the request.
        adapter: what is applied to the model, from the first step to the last. None: nothing.
        matcher: follows the grammar. None if there is no grammar, or it no longer restricts the
            output.
        arrival: monotonic seconds, set at admission.
        token_ids: the prompt, then the output, as C integers of four bytes; appended to by the
            core.
        num_computed_tokens: how many of token_ids have their KV in the cache; set by the scheduler.
        num_pending_tokens: how many of token_ids, at the end, are PENDING_TOKEN.
        drafts: guesses at the tokens after token_ids. The next step that computes the last of
            token_ids tries as many as there is room for, and drops the others.
        max_drafted_tokens: drafts are tried only as far as the output then still ends below this
            length; 0: never, because choosing a token needs all that stand before it.
        is_verifying: whether a pending step computes drafts, so that the number of tokens that it
            gives is not known.
        num_draft_tokens, num_accepted_draft_tokens: how many drafts were computed, and how many
            tokens they saved a step for.
        num_prediction_draft_tokens, num_accepted_prediction_draft_tokens: the same of those that
            were guessed from the caller's prediction.
        num_cached_tokens: how many prompt tokens came from the prefix cache when the request was
            first scheduled.
        num_counted_tokens: how many of token_ids, from the first on, have been charged to the
            caller; set by the scheduler.
        block_hashes: the hashes of the full blocks, as far as they were needed; kept by the KV
            cache.
        prompt_logprobs: the log-probabilities of the prompt's tokens from the second on, as far as
            they are known.
        sampling_steps: which operations choosing the tokens needs; kept by the sampler.
        ending_token_ids: the ids that end the output; the choices of a request share one set.
        grammar_spent_s, grammar_cost_s, grammar_debt_s: the matcher's total cost, the current cost
            of a token, and the cost of the tokens beyond their allowance, in seconds; kept by
            `engine.core.grammar_budget`.
        grammar_waits: the number of steps the request has waited because of these costs; kept by
            the same module.
        max_total_tokens: the length at which the request must stop: prompt + max_tokens, or the
            context if that is less.
        rope_length: the tokens are rotated for at least this length (see `engine.contract.rope`).
        rope_group: only requests of the same group may share prefixes; set by the core.
        request_id, num_prompt_tokens: the request's id and the prompt's length; stored because they
            are read for every token.
    """

    spec: GenerationRequest
    arrival: float
    max_total_tokens: int
    key: RequestKey = _NO_KEY
    choice: int = 0
    adapter: Adapter | None = None
    matcher: TokenMatcher | None = None
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    num_computed_tokens: int = 0
    num_pending_tokens: int = 0
    drafts: tuple[TokenId, ...] = ()
    max_drafted_tokens: int = 0
    is_verifying: bool = False
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    num_prediction_draft_tokens: int = 0
    num_accepted_prediction_draft_tokens: int = 0
    num_cached_tokens: int = 0
    num_counted_tokens: int = 0
    block_hashes: list[bytes] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    sampling_steps: SamplingSteps | None = None
    grammar_spent_s: float = 0.0
    grammar_cost_s: float = 0.0
    grammar_debt_s: float = 0.0
    grammar_waits: int = 0
    status: RequestStatus = RequestStatus.WAITING
    preemptions: int = 0
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    ending_token_ids: frozenset[TokenId] = frozenset()
    rope_group: int = 0
    request_id: RequestId = field(init=False)
    num_prompt_tokens: int = field(init=False)
    rope_length: int = field(init=False)

    @classmethod
    def trial(cls, prompt: TokenIds, sampling: SamplingParams, index: int) -> Request:
        """Create a request for one token that no caller asked for."""
        spec = GenerationRequest(
            request_id=RequestId(f"trial-{index}"),
            prompt=prompt,
            sampling=sampling,
            stop=StopParams(max_tokens=1),
        )
        return cls(spec, arrival=0.0, max_total_tokens=len(prompt) + 1, key=RequestKey(index))

    def __post_init__(self) -> None:
        self.request_id = self.spec.request_id
        self.num_prompt_tokens = self.rope_length = len(self.spec.prompt)
        self.token_ids = array("i", self.spec.prompt.packed)
        if not self.ending_token_ids:
            self.ending_token_ids = self.spec.stop.ending_token_ids

    @property
    def num_tokens(self) -> int:
        """The number of tokens in the prompt and the output so far."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """The number of output tokens so far, including pending ones."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def awaits_results(self) -> bool:
        """Whether nothing can be scheduled before a pending step's results: the request has all the
        tokens it may have, or how many it has is not known.
        """
        return self.num_pending_tokens > 0 and (
            self.is_verifying or len(self.token_ids) >= self.max_total_tokens
        )

    @property
    def num_tokens_to_compute(self) -> int:
        """The number of tokens without KV in the cache: 1 for a decoding request, more during
        prefill.
        """
        return len(self.token_ids) - self.num_computed_tokens
