"""What both Python drivers share: a REQUEST as the library's prompt and options, and its public
results and errors as README.md has them.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import headrace
from headrace.v1 import control_service_pb2, model_service_pb2
from opentelemetry import context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

_PLAIN = (
    "max_tokens", "n", "logprobs", "priority", "max_reasoning_tokens", "stop", "json_schema",
    "structural_tag", "tool_choice", "prediction", "adapter",
)  # fmt: skip


@contextmanager
def traced(command: dict[str, Any]) -> Iterator[None]:
    """What is done within has the command's trace context as its current one."""
    if command.get("traceparent") is None:
        yield
        return
    carrier = {"traceparent": command["traceparent"]}
    token = context.attach(TraceContextTextMapPropagator().extract(carrier))
    try:
        yield
    finally:
        context.detach(token)


def prompt_of(request: dict[str, Any]) -> Any:
    """The prompt."""
    if "messages" not in request:
        return request.get("text", request.get("token_ids"))
    return [
        headrace.Message(
            one["role"],
            one.get("content"),
            tool_calls=[
                headrace.ToolCall(call["id"], call["name"], call["arguments"])
                for call in one.get("tool_calls", ())
            ],
            tool_call_id=one.get("tool_call_id", ""),
        )
        for one in request["messages"]
    ]


def options_of(request: dict[str, Any]) -> dict[str, Any]:
    """The options."""
    options = {name: request[name] for name in _PLAIN if request.get(name) is not None}
    if "id" in request:
        options["request_id"] = request["id"]
    if "seed" in request:
        options["seed"] = int(request["seed"])
    if "time_limit_ms" in request:
        options["time_limit"] = request["time_limit_ms"] / 1000
    if "tools" in request:
        options["tools"] = [
            headrace.Tool(one["name"], one["description"], one["parameters"])
            for one in request["tools"]
        ]
    return options


def connect_options(command: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The targets and the options of a client."""
    targets = command["targets"]
    names = ("token", "ca", "server_name", "metadata", "retries", "max_message_bytes")
    options = {name: command[name] for name in names if command.get(name) is not None}
    return (targets[0] if len(targets) == 1 else targets), options


def session_options(command: dict[str, Any]) -> dict[str, Any]:
    """The options of a session."""
    options: dict[str, Any] = {}
    if command.get("lease_ms") is not None:
        options["lease"] = command["lease_ms"] / 1000
    if command.get("initial_credit") is not None:
        options["initial_credit"] = command["initial_credit"]
    if command.get("room_timeout_ms") is not None:
        options["room_timeout"] = command["room_timeout_ms"] / 1000
    return options


def tell_session(session: Any) -> dict[str, Any]:
    """What a session says of itself."""
    lease = session.lease
    return {"lease_ms": None if lease is None else round(lease * 1000), "live": session.live}


def _bits(value: float | None) -> str | None:
    return None if value is None else struct.pack(">f", value).hex()


def tell_token(token: headrace.TokenInfo) -> dict[str, Any]:
    """TOKEN."""
    return {
        "id": token.id,
        "text": token.text,
        "bytes": base64.b64encode(token.bytes).decode(),
        "logprob": _bits(token.logprob),
        "rank": token.rank,
        "candidates": [
            {
                "id": one.id,
                "text": one.text,
                "bytes": base64.b64encode(one.bytes).decode(),
                "logprob": _bits(one.logprob),
            }
            for one in token.candidates
        ],
    }


def tell_chunk(chunk: headrace.Chunk) -> dict[str, Any]:
    """CHUNK."""
    return {
        "choice": chunk.choice_index,
        "text": chunk.text,
        "token_ids": list(chunk.token_ids),
        "reasoning": chunk.reasoning,
        "tool_calls": [
            {"index": one.index, "id": one.id, "name": one.name, "arguments": one.arguments}
            for one in chunk.tool_calls
        ],
        "tokens": [tell_token(one) for one in chunk.tokens],
    }


def tell_usage(usage: headrace.Usage) -> dict[str, int]:
    """USAGE."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "completion_tokens": usage.completion_tokens,
        "reasoning_tokens": usage.reasoning_tokens,
        "draft_tokens": usage.draft_tokens,
        "accepted_draft_tokens": usage.accepted_draft_tokens,
        "prediction_draft_tokens": usage.prediction_draft_tokens,
        "accepted_prediction_draft_tokens": usage.accepted_prediction_draft_tokens,
    }


def tell_result(result: headrace.Result) -> dict[str, Any]:
    """RESULT."""
    return {
        "request_id": result.request_id,
        "seed": None if result.seed is None else str(result.seed),
        "adapter_digest": result.accepted.adapter_digest if result.accepted else None,
        "usage": tell_usage(result.usage),
        "choices": [
            {
                "index": one.index,
                "text": one.text,
                "token_ids": list(one.token_ids),
                "reasoning": one.reasoning,
                "tool_calls": [
                    {"id": call.id, "name": call.name, "arguments": call.arguments}
                    for call in one.tool_calls
                ],
                "tokens": [tell_token(token) for token in one.tokens],
                "finish_reason": str(one.finish_reason),
                "stop_string": one.stop_string,
                "stop_token_id": one.stop_token_id,
                "usage": tell_usage(one.usage),
            }
            for one in result.choices
        ],
    }


def tell_adapter(adapter: model_service_pb2.Adapter) -> dict[str, Any]:
    """ADAPTER."""
    state = model_service_pb2.AdapterState.Name(adapter.state)
    return {
        "name": adapter.name,
        "digest": adapter.digest,
        "rank": adapter.rank,
        "bytes": adapter.size_bytes,
        "modules": adapter.modules,
        "state": state.removeprefix("ADAPTER_STATE_").lower(),
        "pinned": adapter.pinned,
        "live": adapter.live_requests,
        "base_model": adapter.base_model,
    }


def tell_loaded(answer: control_service_pb2.LoadAdapterResponse) -> dict[str, Any]:
    """What LoadAdapter has answered."""
    return {"adapter": tell_adapter(answer.adapter), "evicted": list(answer.evicted)}


def load_options(command: dict[str, Any]) -> dict[str, Any]:
    """The members of `load_adapter`."""
    return {
        "name": command["name"],
        "source": command["source"],
        "pinned": bool(command.get("pinned")),
        "replace": bool(command.get("replace")),
    }


def tell_error(error: BaseException) -> dict[str, Any]:
    """ERROR."""
    if not isinstance(error, headrace.HeadraceError):
        return {"foreign": f"{type(error).__name__}: {error}"}
    after = error.retry_after
    return {
        "code": error.code.name,
        "reason": error.reason,
        "message": error.message,
        "metadata": dict(error.metadata),
        "fields": [{"field": one.field, "description": one.description} for one in error.fields],
        "retry_after_ms": None if after is None else round(after * 1000),
        "request_id": error.request_id,
        "partial": None if error.partial is None else tell_result(error.partial),
    }


def tell_outcomes(outcomes: list[tuple[int, Any]]) -> dict[str, Any]:
    """The outcomes of a batch."""
    told: list[dict[str, Any]] = []
    for index, outcome in outcomes:
        if isinstance(outcome, headrace.Result):
            told.append({"index": index, "result": tell_result(outcome)})
        else:
            told.append({"index": index, "error": tell_error(outcome)})
    return {"outcomes": told}
