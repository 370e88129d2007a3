"""Converts the contract's messages to the user-facing types of `headrace.results`."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC

from google.protobuf.duration_pb2 import Duration

from headrace.messages import ToolCall
from headrace.results import (
    Accepted,
    CancelStatus,
    Choice,
    FinishReason,
    PromptInfo,
    Result,
    Timings,
    TokenCandidate,
    TokenInfo,
    ToolCallChunk,
    Usage,
)
from headrace.v1 import generation_pb2, generation_service_pb2

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


def _seconds(duration: Duration) -> float:
    return duration.seconds + duration.nanos / 1e9


def token_from_proto(message: generation_pb2.TokenInfo) -> TokenInfo:
    """Converts one token."""
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
    """Converts a sequence of tokens."""
    return tuple(token_from_proto(message) for message in messages)


def usage_from_proto(message: generation_pb2.Usage) -> Usage:
    """Converts the token usage of a request."""
    return Usage(
        message.prompt_tokens,
        message.cached_tokens,
        message.completion_tokens,
        message.reasoning_tokens,
        message.draft_tokens,
        message.accepted_draft_tokens,
        message.prediction_draft_tokens,
        message.accepted_prediction_draft_tokens,
    )


def timings_from_proto(message: generation_pb2.Timings) -> Timings:
    """Converts the timings of a request."""

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
    """Converts the acceptance of a request, with its effective parameters."""
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
        notes=tuple(message.notes),
        adapter_digest=message.adapter_digest,
    )


def prompt_from_proto(message: generation_pb2.PromptProcessed) -> PromptInfo:
    """Converts the result of processing the prompt."""
    return PromptInfo(
        message.prompt_tokens, message.cached_tokens, tokens_from_proto(message.tokens)
    )


def finish_reason_from_proto(reason: generation_pb2.FinishReason.ValueType) -> FinishReason:
    """Converts a finish reason. A reason that this client does not know becomes UNKNOWN."""
    return _FINISH_REASONS.get(reason, FinishReason.UNKNOWN)


def call_chunks_from_proto(
    messages: Iterable[generation_pb2.ToolCallDelta],
) -> tuple[ToolCallChunk, ...]:
    """Converts the tool call chunks of a delta."""
    return tuple(
        ToolCallChunk(part.index, part.id, part.name, part.arguments_json) for part in messages
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
    """Builds one choice: its whole output and how it ended."""
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
    """Converts the response of the unary `Generate`."""
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
    """Converts the status of a cancellation."""
    return _CANCEL_STATUSES.get(status, CancelStatus.UNKNOWN)
