"""Requests of vectors: what a driver is told of one, and what its library must then have sent."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.duration_pb2 import Duration
from headrace.v1 import generation_pb2 as g

from tests.conformance.chance import Chance
from tests.conformance.folding import difference

_OWN = ("name", "no_id", "echo")
_ROLES = {"system": 1, "user": 2, "assistant": 3, "tool": 4}
_CHOICES = {"none": g.TOOL_CHOICE_MODE_NONE, "required": g.TOOL_CHOICE_MODE_REQUIRED}


def make_request(told: Mapping[str, Any], request_id: str, chance: Chance) -> dict[str, Any]:
    """REQUEST, of what a vector says."""
    request = {key: value for key, value in told.items() if key not in _OWN}
    if not any(name in request for name in ("text", "token_ids", "messages")):
        request["text"] = chance.text("$w $w $w")
    if not told.get("no_id"):
        request["id"] = request_id
    made: dict[str, Any] = json.loads(chance.text(json.dumps(request, ensure_ascii=False)))
    if "echo" in told:  # so many times its own text, of a real server
        made["max_tokens"] = told["echo"] * len(made["text"].encode())
    return made


def fault_of_spec(
    request: Mapping[str, Any], spec: g.GenerationSpec, required: Sequence[str]
) -> str:
    """What is wrong with what came for a request; empty: nothing."""
    wanted: dict[str, Any] = {}
    told: dict[str, Any] = {}

    def check(name: str, value: Any) -> None:
        if name in request:
            wanted[name], told[name] = request[name], value

    check("id", spec.request_id)
    check("text", spec.text.text)
    check("token_ids", list(spec.tokens.ids))
    check("max_tokens", spec.stop.max_tokens if spec.stop.HasField("max_tokens") else None)
    check("stop", list(spec.stop.stop_strings))
    check("n", spec.n)
    check("logprobs", spec.output.logprobs if spec.output.HasField("logprobs") else None)
    check("seed", str(spec.sampling.seed) if spec.sampling.HasField("seed") else None)
    check("json_schema", spec.structured_output.json_schema)
    check("structural_tag", spec.structured_output.structural_tag)
    check("priority", spec.scheduling.priority)
    check("max_reasoning_tokens", spec.stop.max_reasoning_tokens)
    check("prediction", spec.prediction.text)
    check("adapter", spec.adapter)
    if "time_limit_ms" in request:
        limit = Duration(seconds=0)
        limit.FromMilliseconds(request["time_limit_ms"])
        wanted["time_limit"] = str(limit)
        told["time_limit"] = str(spec.scheduling.time_limit)
    if "messages" in request:
        wanted["messages"] = [_wanted_message(one) for one in request["messages"]]
        told["messages"] = [_told_message(one) for one in spec.chat.messages]
    if "tools" in request:
        wanted["tools"] = request["tools"]
        told["tools"] = [_told_tool(one) for one in spec.chat.tools]
    if request.get("tool_choice") in _CHOICES:
        wanted["tool_choice"] = _CHOICES[request["tool_choice"]]
        told["tool_choice"] = spec.chat.tool_choice.mode
    wanted["required_capabilities"] = _capabilities(request)
    told["required_capabilities"] = list(required)
    return difference(wanted, told, "the request's ")


def _capabilities(request: Mapping[str, Any]) -> list[str]:
    found = set()
    marks = {
        "messages": "chat",
        "tools": "tools",
        "json_schema": "structured_output",
        "priority": "priorities",
        "max_reasoning_tokens": "reasoning_budget",
        "prediction": "prediction",
        "adapter": "adapters",
    }
    found |= {mark for name, mark in marks.items() if name in request}
    if request.get("tool_choice") in _CHOICES:
        found.add("tool_choice")
    if "structural_tag" in request:
        found |= {"structured_output", "structural_tag"}
    if any(one.get("tool_calls") for one in request.get("messages", ())):
        found.add("tools")
    return sorted(found)


def _wanted_message(told: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "role": _ROLES[told["role"]],
        "content": told.get("content") or "",
        "tool_call_id": told.get("tool_call_id", ""),
        "tool_calls": [_loose(one) for one in told.get("tool_calls", ())],
    }


def _told_message(message: g.ChatMessage) -> dict[str, Any]:
    parts = "".join(part.text for part in message.content_parts.parts)
    return {
        "role": message.role,
        "content": message.content or parts,
        "tool_call_id": message.tool_call_id,
        "tool_calls": [
            {"id": one.id, "name": one.name, "arguments": one.arguments_json}
            for one in message.tool_calls
        ],
    }


def _loose(call: Mapping[str, Any]) -> dict[str, Any]:
    return {name: call[name] for name in ("id", "name", "arguments")}


def _told_tool(tool: g.Tool) -> dict[str, Any]:
    if tool.definition_json:
        function = json.loads(tool.definition_json)["function"]
        return {
            "name": function["name"],
            "description": function.get("description"),
            "parameters": json.dumps(function.get("parameters")),
        }
    return {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters_json,
    }
