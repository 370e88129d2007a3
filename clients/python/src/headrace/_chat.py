"""Converts a conversation and its tools to the contract's messages.

Messages and tools are classes of `headrace.messages`, or dictionaries of the shape that OpenAI's
API and transformers' chat templates use. In a dictionary, a tool call has its name and arguments
under "function". Arguments are objects or JSON text. Content is text, a list of parts, or null.
JSON text is sent unchanged. Objects and whole tools are serialized with their members in order.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from headrace.errors import HeadraceError, invalid_argument
from headrace.messages import Message, MessageDict, Tool, ToolCall
from headrace.v1 import generation_pb2 as pb

_Kind = TypeVar("_Kind", Message, ToolCall)
_ROLES = {
    "system": pb.CHAT_ROLE_SYSTEM,
    "user": pb.CHAT_ROLE_USER,
    "assistant": pb.CHAT_ROLE_ASSISTANT,
    "tool": pb.CHAT_ROLE_TOOL,
    "developer": pb.CHAT_ROLE_DEVELOPER,
}
_REASONING_MEMBERS = ("thinking", "reasoning")
"""Other names for `reasoning_content` that transformers accepts."""
_EMPTY_MEMBERS = ("refusal", "annotations", "audio", "function_call")
"""Members that appear in OpenAI's answers and have no meaning when empty."""


def message_to_proto(message: Message | MessageDict | Mapping[str, Any]) -> pb.ChatMessage:
    """Converts a `Message` or a dictionary to a message of a conversation.

    Raises:
        InvalidArgumentError: the role or a field is unknown, or a value is invalid.
    """
    if isinstance(message, Mapping):
        message = _message(message)
    if message.role not in _ROLES:
        raise invalid_argument(
            "messages.role", f"{message.role!r} is not one of {', '.join(_ROLES)}"
        )
    try:
        made = pb.ChatMessage(
            role=_ROLES[message.role],
            name=message.name,
            tool_calls=[
                pb.ToolCall(
                    id=call.id,
                    name=call.name,
                    arguments_json=json_text(call.arguments, "messages.tool_calls.arguments"),
                )
                for call in message.tool_calls
            ],
            tool_call_id=message.tool_call_id,
            reasoning_content=message.reasoning_content,
        )
        if isinstance(message.content, str):
            made.content = message.content
        elif message.content is not None:
            made.content_parts.parts.extend(map(_part, message.content))
    except HeadraceError:  # which is a ValueError, too
        raise
    except (TypeError, ValueError) as error:
        raise invalid_argument("messages", f"a value does not fit: {error}") from None
    return made


def tools_to_proto(tools: Sequence[Tool | Mapping[str, Any]]) -> list[pb.Tool]:
    """Converts `Tool`s or dictionaries to the tools of a conversation.

    Raises:
        InvalidArgumentError: a value is invalid.
    """
    return [_tool(tool) for tool in tools]


def _tool(tool: Tool | Mapping[str, Any]) -> pb.Tool:
    if isinstance(tool, Mapping):  # the prompt shows it so: its members, and their order
        return pb.Tool(definition_json=json_text(tool, "tools"))
    try:
        made = pb.Tool(
            name=tool.name,
            parameters_json=(
                "" if tool.parameters is None else json_text(tool.parameters, "tools.parameters")
            ),
        )
        if tool.description is not None:
            made.description = tool.description
    except (AttributeError, TypeError, ValueError) as error:
        raise invalid_argument("tools", f"a value does not fit: {error}") from None
    return made


def json_text(value: Mapping[str, Any] | str, name: str) -> str:
    """Returns JSON text unchanged, or serializes an object with its members in order.

    Raises:
        InvalidArgumentError: the value cannot be represented in JSON.
    """
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise invalid_argument(name, f"is no JSON: {error}") from None


def _message(message: Mapping[str, Any]) -> Message:
    given = {
        name: value
        for name, value in message.items()
        if value is not None and (value or name not in _EMPTY_MEMBERS)
    }
    calls = [_call(call) for call in given.pop("tool_calls", ())]
    for name in _REASONING_MEMBERS:
        if name in given:
            given.setdefault("reasoning_content", given.pop(name))
    return _made(
        Message, {**given, "content": given.get("content"), "tool_calls": calls}, "messages"
    )


def _call(call: ToolCall | Mapping[str, Any]) -> ToolCall:
    if isinstance(call, ToolCall):
        return call
    if not isinstance(call, Mapping):
        raise invalid_argument("messages.tool_calls", f"{call!r} is no tool call")
    members = {"id": "", **call}
    kind, function = members.pop("type", "function"), members.pop("function", {})
    if kind != "function" or not isinstance(function, Mapping):
        raise invalid_argument("messages.tool_calls", "only calls of functions are supported")
    members.pop("index", None)  # of OpenAI's streams
    return _made(ToolCall, {**members, **function}, "messages.tool_calls")


def _part(part: str | Mapping[str, Any]) -> pb.ContentPart:
    if isinstance(part, str):
        return pb.ContentPart(text=part)
    if not isinstance(part, Mapping):
        raise invalid_argument("messages.content", f"{part!r} is no part")
    kind = part.get("type", "text")
    if kind != "text":
        raise invalid_argument(
            "messages.content", f"a part of type {kind!r} is not supported; send text"
        )
    if unknown := sorted(str(name) for name in part if name not in ("type", "text")):
        raise invalid_argument(
            "messages.content", f"a part of text has unknown members {', '.join(unknown)}"
        )
    if "text" not in part:
        raise invalid_argument("messages.content", "a part of text has no text")
    return pb.ContentPart(text=part["text"])


def _made(kind: type[_Kind], members: Mapping[str, Any], name: str) -> _Kind:
    try:
        return kind(**members)
    except TypeError:
        fields = dataclasses.fields(kind)
        known = [field.name for field in fields]
        unknown = sorted(str(member) for member in members if member not in known)
        needed = [f.name for f in fields if f.default is f.default_factory is dataclasses.MISSING]
        missing = [name for name in needed if name not in members]
        said = f"unknown members {', '.join(unknown)}" if unknown else f"no {missing[0]}"
        raise invalid_argument(
            name, f"a {kind.__name__} has {said}; it has {', '.join(known)}"
        ) from None
