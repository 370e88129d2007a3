"""The input of a request: messages of a conversation, tools, and the types of a prompt."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NotRequired, TypeAlias, TypedDict

from headrace.v1.generation_pb2 import GenerationSpec

Role: TypeAlias = Literal["system", "user", "assistant", "tool", "developer"]
"""Who speaks in a conversation."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool that the assistant made."""

    id: str
    name: str
    arguments: Mapping[str, Any] | str = field(default_factory=dict)
    """An object, or its JSON text, which is sent as it stands."""

    @property
    def arguments_json(self) -> str:
        """The arguments as JSON text; in a reply, as the model wrote them."""
        return self.arguments if isinstance(self.arguments, str) else json.dumps(self.arguments)


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | str | None = None
    """A JSON Schema object, or its JSON text, which is sent as it stands."""


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Which tools a reply calls. The model is held to it, whatever the mode: it calls these tools
    alone, and the arguments of each call satisfy the tool's schema.
    """

    mode: Literal["auto", "none", "required"] = "auto"
    """Whether the reply calls tools: as the model likes, not at all, or at least one."""
    tool_names: Sequence[str] = ()
    """Only these of the request's tools; empty: all of them."""
    parallel_calls: bool | None = None
    """Whether a reply may have several calls; None: whether the model's format has that."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation."""

    role: Role
    content: str | Sequence[str | Mapping[str, Any]] | None = ""
    """Text; or parts, each text or {"type": "text", "text": ...}; or None beside tool calls."""
    name: str = ""
    """The speaker's name, for chat templates that use it."""
    tool_calls: Sequence[ToolCall] = ()
    tool_call_id: str = ""
    """For a message of a tool: the id of the call that it answers."""
    reasoning_content: str = ""
    """The assistant's reasoning before `content`, for chat templates that replay it."""

    @classmethod
    def system(cls, content: str) -> Message:
        """Instructions by the operator of the conversation."""
        return cls("system", content)

    @classmethod
    def user(cls, content: str, *, name: str = "") -> Message:
        """A message from the human or the program that asks."""
        return cls("user", content, name=name)

    @classmethod
    def assistant(cls, content: str, *, tool_calls: Sequence[ToolCall] = ()) -> Message:
        """What the model said."""
        return cls("assistant", content, tool_calls=tool_calls)

    @classmethod
    def tool(cls, content: str, *, tool_call_id: str) -> Message:
        """The result of a tool call."""
        return cls("tool", content, tool_call_id=tool_call_id)


class MessageDict(TypedDict):
    """A message as a plain dictionary, in the shape of OpenAI's API and of chat templates."""

    role: Role
    content: NotRequired[str | Sequence[str | Mapping[str, Any]] | None]
    name: NotRequired[str]
    tool_calls: NotRequired[Sequence[Mapping[str, Any]]]
    tool_call_id: NotRequired[str]
    reasoning_content: NotRequired[str]


Conversation: TypeAlias = Sequence[Message | MessageDict | Mapping[str, Any]]
"""The messages of a conversation, in whichever form each is."""
# One sequence of all kinds of items: type checkers infer no list through a union of sequences.
Prompt: TypeAlias = str | Sequence[int | Message | MessageDict | Mapping[str, Any]] | GenerationSpec
"""A prompt: text, token ids, a conversation, or the whole request as its protobuf message.
"""
