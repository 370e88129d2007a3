"""The output of a request: chunks while it runs (`Chunk`), and the complete result (`Result`)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

from headrace.messages import ToolCall
from headrace.v1 import generation_pb2


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    """A stop string, a stop token id or an end-of-sequence token was generated."""
    LENGTH = "length"
    """`max_tokens` was reached."""
    CONTEXT = "context"
    """The context is full."""
    CANCELLED = "cancelled"
    """The request was cancelled."""
    TIME_LIMIT = "time_limit"
    """The request's time limit was reached."""
    TOOL_CALLS = "tool_calls"
    """The model called tools, with complete arguments, and ended its turn."""
    UNKNOWN = "unknown"
    """A reason that this version of the client does not know."""


class CancelStatus(StrEnum):
    """The result of a cancellation."""

    CANCELLED = "cancelled"
    """The request is being ended."""
    ALREADY_FINISHED = "already_finished"
    """The request had already ended."""
    NOT_FOUND = "not_found"
    """The caller has no such request on this server."""
    UNKNOWN = "unknown"
    """An answer that this version of the client does not know."""


class HealthStatus(StrEnum):
    """The server's health status."""

    UNKNOWN = "unknown"
    SERVING = "serving"
    NOT_SERVING = "not_serving"
    SERVICE_UNKNOWN = "service_unknown"


@dataclass(frozen=True, slots=True)
class TokenCandidate:
    """A token that could have been chosen."""

    id: int
    text: str
    bytes: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenInfo:
    """One token with its details."""

    id: int
    text: str
    """The token's own text. An incomplete character shows as U+FFFD, so do not join these texts."""
    bytes: bytes
    logprob: float | None = None
    """The natural logarithm of its probability, if requested."""
    rank: int | None = None
    """Its rank among all tokens by probability; 1 is the most likely."""
    candidates: tuple[TokenCandidate, ...] = ()
    time: float | None = None
    """The number of seconds from the request's acceptance to this token, with `record_timestamps`.
    """


@dataclass(frozen=True, slots=True)
class Usage:
    """The cost of a request, in tokens."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    """The number of prompt tokens found in the prefix cache."""
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    """The number of completion tokens that were reasoning, if reasoning is separate from the text.
    """
    draft_tokens: int = 0
    """The number of guessed tokens that the server computed for it."""
    accepted_draft_tokens: int = 0
    """How many of them were right, so that they needed no step of their own."""
    prediction_draft_tokens: int = 0
    """How many of draft_tokens were guessed from the request's prediction."""
    accepted_prediction_draft_tokens: int = 0
    """How many of these were right."""

    @property
    def total_tokens(self) -> int:
        """The number of tokens of prompt and output together."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """The load of a server at one moment."""

    running: int
    """The number of choices in its batch."""
    waiting: int
    """The number of waiting requests."""
    kv_cache_usage: float
    """The fraction of the KV cache held by requests, from 0 to 1."""


@dataclass(frozen=True, slots=True)
class Timings:
    """The times of a request, in seconds since it was accepted; None if the event did not
    happen.
    """

    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    finished: float | None = None
    preemptions: int = 0
    """How often it was preempted, giving up its cache blocks to other requests."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """The acceptance of a request: its effective parameters."""

    request_id: str
    prompt_tokens: int
    queue_position: int
    """The number of requests that were waiting before it."""
    seed: int | None
    """The seed used, set by the caller or drawn by the server."""
    accepted_at: datetime | None
    """The time of acceptance by the server's clock, in UTC."""
    sampling: generation_pb2.SamplingOptions
    """The sampling parameters used, with every default filled in."""
    stop: generation_pb2.StopOptions
    """The stop limits used, with every default filled in."""
    notes: tuple[str, ...] = ()
    """Descriptions of structured output constraints that are enforced differently from how they
    were written.
    """
    adapter_digest: str = ""
    """The digest of the content of its adapter, in hexadecimal; empty if it has none."""


@dataclass(frozen=True, slots=True)
class PromptInfo:
    """The result of processing the prompt."""

    prompt_tokens: int
    cached_tokens: int
    tokens: tuple[TokenInfo, ...] = ()
    """The prompt's tokens, if `prompt_logprobs` was set. The first one has no logprob."""


@dataclass(frozen=True, slots=True)
class ToolCallChunk:
    """A chunk of a tool call."""

    index: int
    """The index of the call within the reply."""
    id: str
    """The call's id in its first chunk; otherwise empty."""
    name: str
    """The tool's name in the call's first chunk; otherwise empty."""
    arguments: str
    """The next chunk of the arguments. All chunks joined are the text of a JSON object."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """New output of one choice.

    The texts and ids of all chunks, joined, are the exact output. In the reply to a conversation,
    reasoning and tool calls are separate from the text.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    tokens: tuple[TokenInfo, ...] = ()
    choice_index: int = 0
    token_offset: int = 0
    """The number of earlier tokens of this choice."""
    seq: int = 0
    """The number of the event within its request."""
    reasoning: str = ""
    tool_calls: tuple[ToolCallChunk, ...] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """One complete output of a request, which has `n` of them."""

    index: int
    text: str
    """Empty if the model has no tokenizer; then the output is only in `token_ids`."""
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_string: str | None = None
    """The stop string that was found, if any."""
    stop_token_id: int | None = None
    """The stop or end-of-sequence id that was generated, if any."""
    tokens: tuple[TokenInfo, ...] = ()
    usage: Usage = Usage()
    timings: Timings = Timings()
    reasoning: str = ""
    """The model's reasoning before its answer, if it is separate from the text."""
    tool_calls: tuple[ToolCall, ...] = ()
    """The tool calls, with their arguments as JSON text; incomplete if the output was cut off."""

    @property
    def message(self) -> dict[str, Any]:
        """The reply as a message for the conversation's next turn, in the shape of OpenAI's API."""
        found: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            found["reasoning_content"] = self.reasoning
        if self.tool_calls:
            found["content"] = self.text or None
            found["tool_calls"] = [_call_dict(call) for call in self.tool_calls]
        return found

    @property
    def logprobs(self) -> tuple[float | None, ...]:
        """Each token's log-probability; empty unless `logprobs` was set."""
        return tuple(token.logprob for token in self.tokens)


@dataclass(frozen=True, slots=True)
class Result:
    """The complete result of a request. The plain properties are those of the first choice."""

    request_id: str
    choices: tuple[Choice, ...]
    usage: Usage
    """The token usage of all choices together."""
    prompt: PromptInfo | None = None
    accepted: Accepted | None = None

    @property
    def text(self) -> str:
        """The text of the first choice. Empty if the model has no tokenizer; then use
        `token_ids`.
        """
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The token ids of the first choice."""
        return self.choices[0].token_ids

    @property
    def tokens(self) -> tuple[TokenInfo, ...]:
        """The first choice's tokens with their details, if requested."""
        return self.choices[0].tokens

    @property
    def logprobs(self) -> tuple[float | None, ...]:
        """The log-probabilities of the first choice's tokens, if requested."""
        return self.choices[0].logprobs

    @property
    def reasoning(self) -> str:
        """The model's reasoning before the first choice's text, if it is separate from the text."""
        return self.choices[0].reasoning

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The tool calls of the first choice."""
        return self.choices[0].tool_calls

    @property
    def message(self) -> dict[str, Any]:
        """The first choice as a message for the conversation's next turn."""
        return self.choices[0].message

    @property
    def finish_reason(self) -> FinishReason:
        """Why the first choice ended."""
        return self.choices[0].finish_reason

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the first choice, if one did."""
        return self.choices[0].stop_string

    @property
    def stop_token_id(self) -> int | None:
        """The token id that ended the first choice, if one did."""
        return self.choices[0].stop_token_id

    @property
    def timings(self) -> Timings:
        """The timings of the first choice, in seconds."""
        return self.choices[0].timings

    @property
    def seed(self) -> int | None:
        """The seed that was used."""
        return self.accepted.seed if self.accepted else None

    def to_dict(self) -> dict[str, Any]:
        """Returns the result as JSON-ready values.

        The fields of a single choice are at the top level. Several choices are in `choices`.
        """
        found: dict[str, Any] = {"request_id": self.request_id}
        if len(self.choices) == 1:
            found |= _choice_dict(self.choices[0])
            del found["index"]
        else:
            found["choices"] = [_choice_dict(choice) for choice in self.choices]
        found["usage"] = dataclasses.asdict(self.usage)
        if self.seed is not None:
            found["seed"] = self.seed
        if self.prompt is not None and self.prompt.tokens:
            found["prompt_tokens"] = [_token_dict(token) for token in self.prompt.tokens]
        return found

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Tokenization:
    """The tokens of a text or a conversation."""

    token_ids: tuple[int, ...]
    tokens: tuple[TokenInfo, ...] = ()
    """The tokens with their text and bytes, if requested."""

    def __len__(self) -> int:
        return len(self.token_ids)


def _choice_dict(choice: Choice) -> dict[str, Any]:
    found: dict[str, Any] = {
        "index": choice.index,
        "text": choice.text,
        "token_ids": list(choice.token_ids),
        "finish_reason": str(choice.finish_reason),
    }
    if choice.reasoning:
        found["reasoning"] = choice.reasoning
    if choice.tool_calls:
        found["tool_calls"] = [_call_dict(call) for call in choice.tool_calls]
    if choice.stop_string is not None:
        found["stop_string"] = choice.stop_string
    if choice.stop_token_id is not None:
        found["stop_token_id"] = choice.stop_token_id
    if choice.tokens:
        found["tokens"] = [_token_dict(token) for token in choice.tokens]
    found["timings"] = dataclasses.asdict(choice.timings)
    return found


def _call_dict(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _token_dict(token: TokenInfo) -> dict[str, Any]:
    found: dict[str, Any] = {"id": token.id, "text": token.text, "bytes": list(token.bytes)}
    if token.logprob is not None:
        found["logprob"] = token.logprob
    if token.rank is not None:
        found["rank"] = token.rank
    if token.candidates:
        found["candidates"] = [
            {"id": one.id, "text": one.text, "bytes": list(one.bytes), "logprob": one.logprob}
            for one in token.candidates
        ]
    if token.time is not None:
        found["time"] = token.time
    return found
