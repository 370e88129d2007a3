"""How a conversation and its tools become the contract's messages.

Messages and tools are taken as classes of `headrace.messages`, or as dictionaries of the shape that
OpenAI's API and transformers' chat templates use, as they are: a tool call's name and arguments
under "function", arguments and schemas as objects or as JSON text, content as text, as parts or
null. JSON text is sent as it stands; an object is written with its members in their order.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard, TypeVar

from headrace.errors import invalid_argument
from headrace.messages import Message, MessageDict, Tool, ToolCall
from headrace.v1 import generation_pb2 as pb

_Kind = TypeVar("_Kind", Message, Tool, ToolCall)
_ROLES = {
    "system": pb.CHAT_ROLE_SYSTEM,
    "user": pb.CHAT_ROLE_USER,
    "assistant": pb.CHAT_ROLE_ASSISTANT,
    "tool": pb.CHAT_ROLE_TOOL,
    "developer": pb.CHAT_ROLE_DEVELOPER,
}
_MESSAGE_MEMBERS = (
    "role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content",
)  # fmt: skip
_FUNCTION_MEMBERS = ("name", "description", "parameters")
_EMPTY_MEMBERS = ("refusal", "annotations", "audio", "function_call")
"""Members that OpenAI's answers have, and that say nothing as long as they are empty."""


def message_to_proto(message: Message | MessageDict | Mapping[str, Any]) -> pb.ChatMessage:
    """A message of a conversation, from a `Message` or a dictionary.

    Raises:
        InvalidArgumentError: the role or a field is unknown, or a value does not fit.
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
    except (TypeError, ValueError) as error:
        raise invalid_argument("messages", f"a value does not fit: {error}") from None
    return made


def tools_to_proto(tools: Sequence[Tool | Mapping[str, Any]]) -> list[pb.Tool]:
    """The tools of a conversation, from `Tool`s or dictionaries.

    Raises:
        InvalidArgumentError: a value does not fit.
    """
    return [_tool(tool) for tool in tools]


def _tool(tool: Tool | Mapping[str, Any]) -> pb.Tool:
    if not isinstance(tool, Tool):
        function = tool.get("function")
        if function is None and "type" not in tool:  # the function alone
            made_of = _made(Tool, tool, "tools")
        elif list(tool) == ["type", "function"] and _is_plain(function):
            made_of = Tool(**function)
        else:  # other members, or in another order: the prompt is to show them so
            return pb.Tool(definition_json=json_text(tool, "tools"))
        tool = made_of
    try:
        made = pb.Tool(
            name=tool.name,
            parameters_json=(
                "" if tool.parameters is None else json_text(tool.parameters, "tools.parameters")
            ),
        )
        if tool.description is not None:
            made.description = tool.description
    except (TypeError, ValueError) as error:
        raise invalid_argument("tools", f"a value does not fit: {error}") from None
    return made


def _is_plain(function: Any) -> TypeGuard[dict[str, Any]]:
    """Whether it has the members of `Tool` alone, in their order."""
    return (
        isinstance(function, Mapping)
        and list(function) == [name for name in _FUNCTION_MEMBERS if name in function]
        and None not in function.values()
        and not isinstance(function.get("parameters"), str)
    )


def json_text(value: Mapping[str, Any] | str, name: str) -> str:
    """JSON text as it is; an object as its text, its members in their order.

    Raises:
        InvalidArgumentError: JSON has no such value.
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
        if name in _MESSAGE_MEMBERS or not (name in _EMPTY_MEMBERS and not value)
    }
    calls = [_call(call) for call in given.pop("tool_calls", None) or ()]
    content = given.pop("content", None if calls else "")
    if content is None and not calls:
        content = ""
    given = {name: value for name, value in given.items() if value is not None}
    return _made(Message, {**given, "content": content, "tool_calls": calls}, "messages")


def _call(call: ToolCall | Mapping[str, Any]) -> ToolCall:
    if isinstance(call, ToolCall):
        return call
    if not isinstance(call, Mapping):
        raise invalid_argument("messages.tool_calls", f"{call!r} is no tool call")
    members = dict(call)
    function = members.pop("function", None)
    if function is None:
        return _made(ToolCall, members, "messages.tool_calls")
    if members.pop("type", "function") != "function" or not isinstance(function, Mapping):
        raise invalid_argument("messages.tool_calls", "only calls of functions are supported")
    members.pop("index", None)  # of OpenAI's streams
    return _made(ToolCall, {**members, **function}, "messages.tool_calls")


def _part(part: str | Mapping[str, Any]) -> pb.ContentPart:
    if isinstance(part, str):
        return pb.ContentPart(text=part)
    kind = part.get("type", "text")
    if kind != "text":
        raise invalid_argument(
            "messages.content", f"a part of type {kind!r} is not supported; send text"
        )
    return pb.ContentPart(text=part["text"] if "text" in part else part["content"])


def _made(kind: type[_Kind], members: Mapping[str, Any], name: str) -> _Kind:
    try:
        return kind(**members)
    except TypeError:
        known = [field.name for field in dataclasses.fields(kind)]
        unknown = sorted(str(member) for member in members if member not in known)
        missing = sorted({"role", "name"} & set(known) - set(members))
        said = f"unknown members {', '.join(unknown)}" if unknown else f"no {missing[0]}"
        raise invalid_argument(
            name, f"a {kind.__name__} has {said}; it has {', '.join(known)}"
        ) from None
