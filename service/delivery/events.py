"""The events of a request and the answers to a session's commands, as plain data.

`log.EventLog` makes the events, and the command handler of `service.servicers` makes the answers.
`service.convert.response` converts both to messages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import msgspec

from engine.contract.errors import HeadraceError
from engine.contract.outputs import Finish, FinishReason, TokenLogprobs, Usage
from engine.contract.sampling_params import SamplingParams, StopParams
from engine.contract.token_ids import NO_IDS, TokenIds
from engine.contract.types import TokenId
from service.errors.call_errors import FieldError
from service.replies.reply_text import Apart

MAX_DELTA_BYTES = 1 << 20
"""A delta larger than about this is split, so that clients can receive the messages."""
EVENT_BYTES = 96
"""The approximate number of bytes that an event takes in a message, without the fields that grow.
"""
_TOKEN_BYTES = 6
_TEXT_BYTES = 6
_DETAIL_BYTES = 48

HELD_EVENT_BYTES = 400
"""The approximate number of bytes that an event takes in memory, without the fields that grow; see
`held_per_token`.
"""
HELD_TEXT_BYTES = 100
"""The approximate number of bytes of memory that a token's text takes while it is a separate
string.
"""
_HELD_TOKEN_BYTES = 48
_HELD_TIME_BYTES = 32
_HELD_LOGPROB_BYTES = 310
_HELD_CANDIDATE_BYTES = 13


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryOptions:
    """How a request's results are delivered.

    Attributes:
        final: whether everything is delivered at the end, in one delta.
        min_tokens_per_delta: a delta waits for this many tokens, or for the end. At least 1.
        token_details: whether each token is described separately.
        candidates: the number of candidates that come with each token, or None for no
            log-probabilities. Only used to estimate sizes.
        describe_prompt, prompt_candidates: whether the prompt's tokens are described too, and with
            how many candidates each.
        record_times: whether each token carries the time when it was made.
        has_text: whether tokens come with text. Only used to estimate sizes.
    """

    final: bool = False
    min_tokens_per_delta: int = 1
    token_details: bool = False
    candidates: int | None = None
    describe_prompt: bool = False
    prompt_candidates: int = 0
    record_times: bool = False
    has_text: bool = True

    @property
    def bytes_per_token(self) -> int:
        """The approximate number of bytes that one token takes in a message."""
        if not self.token_details:
            return _TOKEN_BYTES
        return detail_bytes(self.candidates or 0)

    @property
    def sent_per_token(self) -> int:
        """The approximate number of bytes that one token with its text takes in a message."""
        return self.bytes_per_token + (_TEXT_BYTES if self.has_text else 0)

    @property
    def held_per_token(self) -> int:
        """The approximate number of bytes of memory that one token takes until it is read, without
        its text. This differs from its size in a message: it counts Python's objects (CPython
        3.11).
        """
        held = _HELD_TOKEN_BYTES + (_HELD_TIME_BYTES if self.record_times else 0)
        return held if self.candidates is None else held + held_logprobs(self.candidates)

    @property
    def unread_per_token(self) -> int:
        """The most bytes that a token takes until it has been sent: in memory with its text as a
        separate string, or in its message if that is more.
        """
        held = self.held_per_token + (HELD_TEXT_BYTES if self.has_text else 0)
        return max(held, self.sent_per_token)

    def check_prompt(self, tokens: int, max_send_bytes: int) -> None:
        """Check that the PromptProcessed event of a prompt of `tokens` tokens fits in one message,
        with room for other fields and for longer tokens than usual. This event cannot be split.

        Raises:
            FieldError: it does not fit.
        """
        size, most = prompt_size(tokens, self), max_send_bytes // 2
        if size > most:
            raise FieldError(
                "output.prompt_logprobs",
                f"asks for about {size} bytes with a prompt of {tokens} tokens; at most "
                f"{most} are allowed, half of what the server sends in one message (its option "
                "max_send_bytes): ask for fewer candidates, or shorten the prompt",
            )


def detail_bytes(candidates: int) -> int:
    """Return the approximate number of bytes that one described token takes in a message."""
    return _DETAIL_BYTES * (1 + candidates)


def held_logprobs(candidates: int) -> int:
    """Return the approximate number of bytes of memory that a token's log-probabilities take."""
    return _HELD_LOGPROB_BYTES + _HELD_CANDIDATE_BYTES * candidates


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """The request was accepted, with the effective parameters. `accepted_at`: wall-clock seconds.
    `notes`: constraints that are enforced differently from how they were written. `adapter_digest`:
    the content of its adapter, in hexadecimal; empty: none.
    """

    request_id: str
    sampling: SamplingParams
    stop: StopParams
    stop_strings: tuple[str, ...]
    include_stop: bool
    max_reasoning_tokens: int | None
    prompt_tokens: int
    queue_position: int
    command_id: int
    accepted_at: float
    n: int = 1
    notes: tuple[str, ...] = ()
    adapter_digest: str = ""

    @property
    def size(self) -> int:
        """The approximate number of bytes that the event takes in a message."""
        sampling, stop = self.sampling, self.stop
        ids = (
            len(sampling.allowed_token_ids)
            + len(sampling.banned_token_ids)
            + len(stop.stop_token_ids)
            + len(stop.eos_token_ids)
        )
        entries = 2 * len(sampling.logit_bias) + ids
        texts = sum(map(len, (*self.stop_strings, *self.notes, self.adapter_digest)))
        return EVENT_BYTES + entries * _TOKEN_BYTES + texts

    @property
    def held(self) -> int:
        """The approximate number of bytes of memory that the event takes."""
        sampling, stop = self.sampling, self.stop
        biases = sampling.logit_bias
        packed = (
            sampling.allowed_token_ids.packed,
            sampling.banned_token_ids.packed,
            stop.stop_token_ids.packed,
            stop.eos_token_ids.packed,
            biases.ids.packed,
            biases.packed,
        )
        texts = sum(map(len, (*self.stop_strings, *self.notes, self.adapter_digest)))
        return 2 * HELD_EVENT_BYTES + sum(map(len, packed)) + texts


@dataclass(frozen=True, slots=True)
class PromptProcessed:
    """The prompt was processed.

    Attributes:
        prompt_tokens, cached_tokens: its length, and how many of its tokens came from the prefix
            cache.
        token_ids: its tokens if they are described separately, otherwise empty.
        logprobs: one entry for each of token_ids except the first.
        size, held: the approximate number of bytes that the event takes in a message, and in
            memory.
    """

    prompt_tokens: int
    cached_tokens: int
    token_ids: TokenIds = NO_IDS
    logprobs: tuple[TokenLogprobs, ...] = ()
    size: int = EVENT_BYTES
    held: int = HELD_EVENT_BYTES


class Delta(msgspec.Struct, frozen=True, gc=False):
    """New output of one choice. This is a struct, like `NumberedEvent`, because both are made for
    every token. A named tuple takes four times as long to make, and a frozen dataclass ten times.

    Attributes:
        token_ids, text: the new tokens, and the new text (which may belong to earlier tokens).
        detailed: whether the tokens are described separately.
        logprobs: one entry per token, if requested.
        times: for each token, the seconds since the request was accepted, if requested.
        size, held: the approximate number of bytes that the event takes in a message, and in
            memory.
        choice: the index of the choice.
        apart: the reasoning and tool calls, if the reply is parsed.
    """

    token_ids: tuple[TokenId, ...]
    text: str
    detailed: bool
    logprobs: tuple[TokenLogprobs, ...] | None
    times: tuple[float, ...] | None
    size: int
    held: int
    choice: int = 0
    apart: Apart | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """The normal end of one choice. `reason` is never ERROR. `size`, `held`: see
    PromptProcessed. `calls_tools`: whether it ended by itself and calls tools.
    `reasoning_tokens`: the number of its tokens that were reasoning.
    """

    size: ClassVar[int] = EVENT_BYTES
    held: ClassVar[int] = 2 * HELD_EVENT_BYTES

    reason: FinishReason
    stop_string: str | None
    finish: Finish
    usage: Usage
    last_token: float | None
    choice: int = 0
    calls_tools: bool = False
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Failed:
    """The end of the whole request by a failure, which `finish.failure` describes. `error`: set if
    the front end ended the request, not the engine. `size`, `held`: see PromptProcessed.
    `reasoning_tokens`: the number of reasoning tokens in all choices that the failure ends.
    """

    size: ClassVar[int] = EVENT_BYTES
    held: ClassVar[int] = 2 * HELD_EVENT_BYTES

    finish: Finish
    error: HeadraceError | None = None
    reasoning_tokens: int = 0


Event = Accepted | PromptProcessed | Delta | Finished | Failed


def in_flight(event: Event) -> int:
    """Return the approximate number of bytes of memory that an event takes while it is being sent:
    the larger of its size in memory and its size in the message.
    """
    return max(event.held, event.size)


def num_tokens(event: Event) -> int:
    """Return the number of output tokens in an event."""
    return len(event.token_ids) if isinstance(event, Delta) else 0


class NumberedEvent(msgspec.Struct, frozen=True, gc=False):
    """An event with its number in its request; the pair never changes."""

    seq: int
    event: Event


@dataclass(frozen=True, slots=True)
class ReadResult:
    """Some of a request's events, read by number.

    Attributes:
        events: as many events as fit in one message.
        next_seq: the number after the last of them.
        done: whether these are the last events.
    """

    events: list[NumberedEvent]
    next_seq: int
    done: bool


def at_most(run: list[NumberedEvent], limit: int) -> list[NumberedEvent]:
    """Return the first events that fit in a message of about `limit` bytes, and at least one."""
    size = 0
    for index, numbered in enumerate(run):
        size += numbered.event.size
        if size > limit:
            return run[: max(index, 1)]
    return run


def prompt_size(tokens: int, options: DeliveryOptions) -> int:
    """Return the approximate size of a PromptProcessed with this many described tokens."""
    return EVENT_BYTES + tokens * detail_bytes(options.prompt_candidates)


@dataclass(frozen=True, slots=True)
class Rejected:
    """The answer to a refused command."""

    command_id: int
    request_id: str
    error: Exception


@dataclass(frozen=True, slots=True)
class Opened:
    """The session was set up."""

    command_id: int
    lease_s: float


@dataclass(frozen=True, slots=True)
class Attached:
    """A request's results continue on this session."""

    command_id: int
    request_id: str
    from_seq: int
    number: int


@dataclass(frozen=True, slots=True)
class CancelAnswered:
    """The answer to a cancel."""

    command_id: int
    request_id: str
    outcome: str


@dataclass(frozen=True, slots=True)
class Detached:
    """A request's results now go to another stream."""

    request_id: str
    number: int


CANCELLED = "cancelled"
ALREADY_FINISHED = "already_finished"
NOT_FOUND = "not_found"

Reply = Rejected | Opened | Attached | Detached | CancelAnswered
