"""The output of a request: pieces while it runs (`Chunk`), and the whole (`Result`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from google.protobuf.duration_pb2 import Duration

from headrace.messages import ToolCall
from headrace.v1 import generation_pb2, generation_service_pb2


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    """A stop string, a stop id or an end-of-sequence token."""
    LENGTH = "length"
    """`max_tokens` was reached."""
    CONTEXT = "context"
    """The context is full."""
    CANCELLED = "cancelled"
    """It was cancelled."""
    TIME_LIMIT = "time_limit"
    """Its time limit was reached."""
    TOOL_CALLS = "tool_calls"
    """The model called tools, whose arguments are whole, and ended its turn."""
    UNKNOWN = "unknown"
    """A reason that this version of the client does not know."""


class CancelStatus(StrEnum):
    """The result of a cancel."""

    CANCELLED = "cancelled"
    """The request is being ended."""
    ALREADY_FINISHED = "already_finished"
    """It had already ended."""
    NOT_FOUND = "not_found"
    """No such request of this caller is on this server."""
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
    """The token's own text; a part of a character shows as U+FFFD. Do not join these."""
    bytes: bytes
    logprob: float | None = None
    """The natural logarithm of its probability, if requested."""
    rank: int | None = None
    """Its rank among all tokens by probability; 1 is the most likely."""
    candidates: tuple[TokenCandidate, ...] = ()
    time: float | None = None
    """Seconds from the request's acceptance to this token, with `record_timestamps`."""


@dataclass(frozen=True, slots=True)
class Usage:
    """The cost of a request, in tokens."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    """How many of the prompt's tokens were found in the prefix cache."""
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    """How many of the completion's tokens were reasoning, where that comes apart from the text."""

    @property
    def total_tokens(self) -> int:
        """Prompt and output together."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """How much a server had to do at a moment."""

    running: int
    """Choices in its batch."""
    waiting: int
    """Requests that waited."""
    kv_cache_usage: float
    """How much of the KV cache requests held, from 0 to 1."""


@dataclass(frozen=True, slots=True)
class Timings:
    """Times of a request, in seconds since it was accepted; None if the event did not happen."""

    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    finished: float | None = None
    preemptions: int = 0
    """How often it was preempted: gave up its cache blocks to others."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """The acceptance of a request: its effective parameters."""

    request_id: str
    prompt_tokens: int
    queue_position: int
    """How many requests were waiting before it."""
    seed: int | None
    """The seed in force, set by the caller or drawn by the server."""
    accepted_at: datetime | None
    """By the server's clock, in UTC."""
    sampling: generation_pb2.SamplingOptions
    """The parameters in force, with every default filled in."""
    stop: generation_pb2.StopOptions
    """The limits in force, with every default filled in."""


@dataclass(frozen=True, slots=True)
class PromptInfo:
    """The result of processing the prompt."""

    prompt_tokens: int
    cached_tokens: int
    tokens: tuple[TokenInfo, ...] = ()
    """The prompt's tokens, if `prompt_logprobs` was set; the first has no logprob."""


@dataclass(frozen=True, slots=True)
class ToolCallChunk:
    """A part of a tool call."""

    index: int
    """Which of the reply's calls."""
    id: str
    """In the call's first part; else empty."""
    name: str
    """The tool's, in the call's first part; else empty."""
    arguments: str
    """The next part of the arguments; all parts, joined, are the text of a JSON object."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """New output of one choice. Texts and ids of all chunks, joined, are the exact output; in the
    reply to a conversation, what the model thought and the tools that it calls come apart.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    tokens: tuple[TokenInfo, ...] = ()
    choice_index: int = 0
    token_offset: int = 0
    """How many tokens of this choice came before."""
    seq: int = 0
    """The event's number in its request."""
    reasoning: str = ""
    tool_calls: tuple[ToolCallChunk, ...] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """One whole output of a request (it has `n` of them)."""

    index: int
    text: str
    """Empty if the model has no tokenizer: its output is `token_ids` alone."""
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_string: str | None = None
    """The stop string that was found, if one was."""
    stop_token_id: int | None = None
    """The stop or end-of-sequence id that was generated, if one was."""
    tokens: tuple[TokenInfo, ...] = ()
    usage: Usage = Usage()
    timings: Timings = Timings()
    reasoning: str = ""
    """What the model thought before it answered, where that comes apart from the text."""
    tool_calls: tuple[ToolCall, ...] = ()
    """The tools that it called, their arguments as JSON text; not whole where it was cut."""

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
    """The whole result of a request. The plain properties are those of the first choice."""

    request_id: str
    choices: tuple[Choice, ...]
    usage: Usage
    """Its cost in tokens, all choices together."""
    prompt: PromptInfo | None = None
    accepted: Accepted | None = None

    @property
    def text(self) -> str:
        """The text of the first choice. Empty if the model has no tokenizer: read `token_ids`."""
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The token ids of the first choice."""
        return self.choices[0].token_ids

    @property
    def tokens(self) -> tuple[TokenInfo, ...]:
        """The first choice's tokens with their details, if they were requested."""
        return self.choices[0].tokens

    @property
    def logprobs(self) -> tuple[float | None, ...]:
        """The log-probabilities of the first choice's tokens, if they were requested."""
        return self.choices[0].logprobs

    @property
    def reasoning(self) -> str:
        """What the model thought before the first choice's text, where that comes apart."""
        return self.choices[0].reasoning

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The tools that the first choice calls."""
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
        """How long the first choice took, in seconds."""
        return self.choices[0].timings

    @property
    def seed(self) -> int | None:
        """The seed that was used."""
        return self.accepted.seed if self.accepted else None

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON-ready values: one choice's fields in place, or `choices` if there
        are more.
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


# ---- from the messages of the contract -----------------------------------------------------------


def _seconds(duration: Duration) -> float:
    return duration.seconds + duration.nanos / 1e9


def token_from_proto(message: generation_pb2.TokenInfo) -> TokenInfo:
    """A token of an answer."""
    return TokenInfo(
        id=message.id,
        text=message.text,
        bytes=message.bytes,
        logprob=message.logprob if message.HasField("logprob") else None,
        rank=message.rank if message.HasField("rank") else None,
        candidates=tuple(
            TokenCandidate(one.id, one.text, one.bytes, one.logprob) for one in message.candidates
        ),
        time=(_seconds(message.elapsed_duration) if message.HasField("elapsed_duration") else None),
    )


def tokens_from_proto(messages: Iterable[generation_pb2.TokenInfo]) -> tuple[TokenInfo, ...]:
    """The tokens of an answer."""
    return tuple(token_from_proto(message) for message in messages)


def usage_from_proto(message: generation_pb2.Usage) -> Usage:
    """The cost of a request."""
    return Usage(
        message.prompt_tokens,
        message.cached_tokens,
        message.completion_tokens,
        message.reasoning_tokens,
    )


def timings_from_proto(message: generation_pb2.Timings) -> Timings:
    """How long a request took."""

    def optional(name: str, duration: Duration) -> float | None:
        return _seconds(duration) if message.HasField(name) else None  # type: ignore[arg-type]

    return Timings(
        first_scheduled=optional("first_scheduled_duration", message.first_scheduled_duration),
        first_token=optional("first_token_duration", message.first_token_duration),
        last_token=optional("last_token_duration", message.last_token_duration),
        finished=optional("finished_duration", message.finished_duration),
        preemptions=message.preemptions,
    )


def accepted_from_proto(request_id: str, message: generation_pb2.Accepted) -> Accepted:
    """The acceptance of a request: its effective parameters."""
    return Accepted(
        request_id=request_id,
        prompt_tokens=message.prompt_tokens,
        queue_position=message.queue_position,
        seed=message.sampling.seed if message.sampling.HasField("seed") else None,
        accepted_at=(
            message.accept_time.ToDatetime(tzinfo=UTC) if message.HasField("accept_time") else None
        ),
        sampling=message.sampling,
        stop=message.stop,
    )


def prompt_from_proto(message: generation_pb2.PromptProcessed) -> PromptInfo:
    """The result of processing the prompt."""
    return PromptInfo(
        message.prompt_tokens, message.cached_tokens, tokens_from_proto(message.tokens)
    )


def finish_reason_from_proto(reason: generation_pb2.FinishReason.ValueType) -> FinishReason:
    """Why a request ended; a reason that is newer than this client is UNKNOWN."""
    return _FINISH_REASONS.get(reason, FinishReason.UNKNOWN)


def call_chunks_from_proto(
    messages: Iterable[generation_pb2.ToolCallDelta],
) -> tuple[ToolCallChunk, ...]:
    """The parts of tool calls of a delta."""
    return tuple(
        ToolCallChunk(part.index, part.id, part.name, part.arguments_json) for part in messages
    )


def joined_calls(parts: Iterable[ToolCallChunk]) -> tuple[ToolCall, ...]:
    """Whole calls of their parts, which come in order."""
    own: dict[int, list[ToolCallChunk]] = {}
    for part in parts:
        own.setdefault(part.index, []).append(part)
    return tuple(
        ToolCall(some[0].id, some[0].name, "".join([part.arguments for part in some]))
        for some in own.values()
    )


def choice_from_proto(
    index: int,
    text: str,
    token_ids: tuple[int, ...],
    tokens: tuple[TokenInfo, ...],
    finished: generation_pb2.Finished,
    reasoning: str = "",
    tool_calls: tuple[ToolCall, ...] = (),
) -> Choice:
    """One whole output and how it ended."""
    matched = finished.WhichOneof("matched")
    return Choice(
        index=index,
        text=text,
        token_ids=token_ids,
        tokens=tokens,
        finish_reason=finish_reason_from_proto(finished.reason),
        stop_string=finished.stop_string if matched == "stop_string" else None,
        stop_token_id=finished.stop_token_id if matched == "stop_token_id" else None,
        usage=usage_from_proto(finished.usage),
        timings=timings_from_proto(finished.timings),
        reasoning=reasoning,
        tool_calls=tool_calls,
    )


def result_from_proto(message: generation_service_pb2.GenerateResponse) -> Result:
    """The answer of the unary `Generate`."""
    return Result(
        request_id=message.request_id,
        choices=tuple(
            choice_from_proto(
                choice.index,
                choice.text,
                tuple(choice.token_ids),
                tokens_from_proto(choice.tokens),
                choice.finished,
                choice.reasoning,
                tuple(
                    ToolCall(call.id, call.name, call.arguments_json) for call in choice.tool_calls
                ),
            )
            for choice in message.choices
        ),
        usage=usage_from_proto(message.usage),
        prompt=prompt_from_proto(message.prompt) if message.HasField("prompt") else None,
        accepted=(
            accepted_from_proto(message.request_id, message.accepted)
            if message.HasField("accepted")
            else None
        ),
    )


def cancel_status_from_proto(status: generation_service_pb2.CancelStatus.ValueType) -> CancelStatus:
    """The result of a cancel."""
    return _CANCEL_STATUSES.get(status, CancelStatus.UNKNOWN)


_FINISH_REASONS: dict[int, FinishReason] = {
    generation_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    generation_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    generation_pb2.FINISH_REASON_CONTEXT: FinishReason.CONTEXT,
    generation_pb2.FINISH_REASON_CANCELLED: FinishReason.CANCELLED,
    generation_pb2.FINISH_REASON_TIME_LIMIT: FinishReason.TIME_LIMIT,
    generation_pb2.FINISH_REASON_TOOL_CALLS: FinishReason.TOOL_CALLS,
}
_CANCEL_STATUSES: dict[int, CancelStatus] = {
    generation_service_pb2.CANCEL_STATUS_CANCELLED: CancelStatus.CANCELLED,
    generation_service_pb2.CANCEL_STATUS_ALREADY_FINISHED: CancelStatus.ALREADY_FINISHED,
    generation_service_pb2.CANCEL_STATUS_NOT_FOUND: CancelStatus.NOT_FOUND,
}
