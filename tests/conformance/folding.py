"""What a driver must tell of the events that a server has sent: results, chunks and errors in the
form of README.md, made here once more from the contract alone (no client's code), and compared.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterable, Sequence
from typing import Any

from google.rpc import code_pb2, error_details_pb2, status_pb2
from headrace.v1 import generation_pb2 as g
from headrace.v1 import generation_service_pb2 as s

_REASONS = {
    g.FINISH_REASON_STOP: "stop",
    g.FINISH_REASON_LENGTH: "length",
    g.FINISH_REASON_CONTEXT: "context",
    g.FINISH_REASON_CANCELLED: "cancelled",
    g.FINISH_REASON_TIME_LIMIT: "time_limit",
    g.FINISH_REASON_TOOL_CALLS: "tool_calls",
}
_OF_PROMPT = ("prompt_tokens", "cached_tokens")
_OF_CHOICES = (
    "completion_tokens",
    "reasoning_tokens",
    "draft_tokens",
    "accepted_draft_tokens",
    "prediction_draft_tokens",
    "accepted_prediction_draft_tokens",
)
_USAGE = (*_OF_PROMPT, *_OF_CHOICES)


def told_float(value: float) -> str:
    """A float32 as its bits."""
    return struct.pack(">f", value).hex()


def told_token(token: g.TokenInfo) -> dict[str, Any]:
    """TOKEN."""
    return {
        "id": token.id,
        "text": token.text,
        "bytes": base64.b64encode(token.bytes).decode(),
        "logprob": told_float(token.logprob) if token.HasField("logprob") else None,
        "rank": token.rank if token.HasField("rank") else None,
        "candidates": [
            {
                "id": one.id,
                "text": one.text,
                "bytes": base64.b64encode(one.bytes).decode(),
                "logprob": told_float(one.logprob),
            }
            for one in token.candidates
        ],
    }


def told_chunk(event: g.ResultEvent) -> dict[str, Any]:
    """CHUNK, of a delta."""
    delta = event.delta
    ids = [one.id for one in delta.tokens] or list(delta.token_ids)
    return {
        "choice": event.choice_index,
        "text": delta.text,
        "token_ids": ids,
        "reasoning": delta.reasoning,
        "tool_calls": [
            {"index": c.index, "id": c.id, "name": c.name, "arguments": c.arguments_json}
            for c in delta.tool_calls
        ],
        "tokens": [told_token(token) for token in delta.tokens],
    }


def chunks_of(log: Iterable[g.ResultEvent]) -> list[dict[str, Any]]:
    """The chunks of a request's events."""
    return [told_chunk(event) for event in log if event.HasField("delta")]


def told_usage(usage: g.Usage) -> dict[str, int]:
    """USAGE."""
    return {name: getattr(usage, name) for name in _USAGE}


def told_result(log: Sequence[g.ResultEvent], request_id: str, n: int) -> dict[str, Any]:
    """RESULT, of the events so far."""
    accepted = next((e.accepted for e in log if e.HasField("accepted")), None)
    prompt = next((e.prompt for e in log if e.HasField("prompt")), g.PromptProcessed())
    finished = {e.choice_index: e.finished for e in log if e.HasField("finished")}
    choices = []
    for index in range(n):
        own = [told_chunk(e) for e in log if e.HasField("delta") and e.choice_index == index]
        calls: dict[int, dict[str, str]] = {}
        for part in (one for chunk in own for one in chunk["tool_calls"]):
            call = calls.setdefault(
                part["index"], {"id": part["id"], "name": part["name"], "arguments": ""}
            )
            call["arguments"] += part["arguments"]
        end = finished.get(index, g.Finished())
        matched = end.WhichOneof("matched")
        choices.append(
            {
                "index": index,
                "text": "".join(one["text"] for one in own),
                "token_ids": [one for chunk in own for one in chunk["token_ids"]],
                "reasoning": "".join(one["reasoning"] for one in own),
                "tool_calls": list(calls.values()),
                "tokens": [one for chunk in own for one in chunk["tokens"]],
                "finish_reason": _REASONS.get(end.reason, "unknown"),
                "stop_string": end.stop_string if matched == "stop_string" else None,
                "stop_token_id": end.stop_token_id if matched == "stop_token_id" else None,
                "usage": told_usage(end.usage),
            }
        )
    usages = [choice["usage"] for choice in choices]
    usage = {name: max(getattr(prompt, name), *(u[name] for u in usages)) for name in _OF_PROMPT}
    usage |= {name: sum(u[name] for u in usages) for name in _OF_CHOICES}
    has_seed = accepted is not None and accepted.sampling.HasField("seed")
    seed = str(accepted.sampling.seed) if accepted is not None and has_seed else None
    digest = accepted.adapter_digest if accepted is not None else ""
    found = {"request_id": request_id, "seed": seed, "adapter_digest": digest}
    return {**found, "usage": usage, "choices": choices}


def generate_response(log: Sequence[g.ResultEvent], n: int, instance_id: str) -> s.GenerateResponse:
    """The answer of Generate."""
    response = s.GenerateResponse(instance_id=instance_id)
    for event in log:
        if event.HasField("accepted"):
            response.accepted.CopyFrom(event.accepted)
            response.request_id = event.accepted.request_id
        elif event.HasField("prompt"):
            response.prompt.CopyFrom(event.prompt)
    told = told_result(log, response.request_id, n)
    for index, choice in enumerate(told["choices"]):
        one = response.choices.add(
            index=index,
            text=choice["text"],
            token_ids=choice["token_ids"],
            reasoning=choice["reasoning"],
        )
        for call in choice["tool_calls"]:
            one.tool_calls.add(id=call["id"], name=call["name"], arguments_json=call["arguments"])
        for event in log:
            if event.choice_index == index and event.HasField("delta"):
                one.tokens.extend(event.delta.tokens)
            if event.choice_index == index and event.HasField("finished"):
                one.finished.CopyFrom(event.finished)
    for name, value in told["usage"].items():
        setattr(response.usage, name, value)
    return response


def told_error(status: status_pb2.Status) -> dict[str, Any]:
    """ERROR, of a status; without what a library adds (the request's id, what had arrived)."""
    found: dict[str, Any] = {"code": code_pb2.Code.Name(status.code), "message": status.message}
    found |= {"reason": "", "metadata": {}, "fields": [], "retry_after_ms": None}
    for detail in status.details:
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        if detail.Unpack(info):
            found |= {"reason": info.reason, "metadata": dict(info.metadata)}
        elif detail.Unpack(retry):
            found["retry_after_ms"] = retry.retry_delay.ToMilliseconds()
    return found


# ---- what a driver tells, with all its members ---------------------------------------------------


def whole_token(told: dict[str, Any]) -> dict[str, Any]:
    """A driver's TOKEN."""
    return {
        "id": told["id"],
        "text": told.get("text") or "",
        "bytes": told.get("bytes") or "",
        "logprob": told.get("logprob"),
        "rank": told.get("rank"),
        "candidates": [
            {
                "id": one["id"],
                "text": one.get("text") or "",
                "bytes": one.get("bytes") or "",
                "logprob": one.get("logprob"),
            }
            for one in told.get("candidates") or []
        ],
    }


def whole_chunk(told: dict[str, Any]) -> dict[str, Any]:
    """A driver's CHUNK."""
    return {
        "choice": told.get("choice") or 0,
        "text": told.get("text") or "",
        "token_ids": told.get("token_ids") or [],
        "reasoning": told.get("reasoning") or "",
        "tool_calls": [
            {
                "index": one.get("index") or 0,
                "id": one.get("id") or "",
                "name": one.get("name") or "",
                "arguments": one.get("arguments") or "",
            }
            for one in told.get("tool_calls") or []
        ],
        "tokens": [whole_token(one) for one in told.get("tokens") or []],
    }


def whole_result(told: dict[str, Any]) -> dict[str, Any]:
    """A driver's RESULT."""

    def usage(one: dict[str, Any] | None) -> dict[str, int]:
        return {name: (one or {}).get(name) or 0 for name in _USAGE}

    choices = []
    for one in told.get("choices") or []:
        chunk = whole_chunk({**one, "tool_calls": []})
        choices.append(
            {
                "index": one.get("index") or 0,
                **{name: chunk[name] for name in ("text", "token_ids", "reasoning", "tokens")},
                "tool_calls": [
                    {
                        "id": call.get("id") or "",
                        "name": call.get("name") or "",
                        "arguments": call.get("arguments") or "",
                    }
                    for call in one.get("tool_calls") or []
                ],
                "finish_reason": one.get("finish_reason"),
                "stop_string": one.get("stop_string"),
                "stop_token_id": one.get("stop_token_id"),
                "usage": usage(one.get("usage")),
            }
        )
    return {
        "request_id": told.get("request_id"),
        "seed": told.get("seed"),
        "adapter_digest": told.get("adapter_digest") or "",
        "usage": usage(told.get("usage")),
        "choices": choices,
    }


def difference(wanted: Any, told: Any, path: str = "") -> str:
    """Where two values differ first; empty: nowhere."""
    if isinstance(wanted, dict) and isinstance(told, dict):
        for key in wanted:
            if found := difference(wanted[key], told.get(key), f"{path}.{key}"):
                return found
        return ""
    if isinstance(wanted, list) and isinstance(told, list):
        for index, (one, other) in enumerate(zip(wanted, told, strict=False)):
            if found := difference(one, other, f"{path}[{index}]"):
                return found
        if len(wanted) != len(told):
            return f"{path} has {len(told)} elements; {len(wanted)} are right"
        return ""
    if wanted != told or isinstance(wanted, bool) != isinstance(told, bool):
        return f"{path} is {told!r}; {wanted!r} is right"
    return ""
