"""The input of a request: messages of a conversation, tools, and the types of a prompt."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NotRequired, TypeAlias, TypedDict

from headrace.v1.generation_pb2 import GenerationSpec

Role: TypeAlias = Literal["system", "user", "assistant", "tool", "developer"]
"""The role of a message's author in a conversation."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call made by the assistant."""

    id: str
    name: str
    arguments: Mapping[str, Any] | str = field(default_factory=dict)
    """An object, or JSON text, which is sent unchanged."""

    @property
    def arguments_json(self) -> str:
        """The arguments as JSON text. In a reply, this is the text the model wrote."""
        return self.arguments if isinstance(self.arguments, str) else json.dumps(self.arguments)


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | str | None = None
    """A JSON Schema object, or JSON text, which is sent unchanged."""


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Which tools a reply calls.

    In every mode the model is constrained: it calls only these tools, and the arguments of each
    call satisfy the tool's schema.
    """

    mode: Literal["auto", "none", "required"] = "auto"
    """Whether the model may call tools, calls none, or must call at least one."""
    tool_names: Sequence[str] = ()
    """The tools of the request that may be called; empty for all of them."""
    parallel_calls: bool | None = None
    """Whether a reply may have several calls; None to allow them if the model's format does."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation."""

    role: Role
    content: str | Sequence[str | Mapping[str, Any]] | None = ""
    """Text; or parts, each text or {"type": "text", "text": ...}; or None alongside tool calls."""
    name: str = ""
    """The speaker's name, for chat templates that use it."""
    tool_calls: Sequence[ToolCall] = ()
    tool_call_id: str = ""
    """In a tool message, the id of the call that it answers."""
    reasoning_content: str = ""
    """The assistant's reasoning before `content`, for chat templates that replay it."""

    @classmethod
    def system(cls, content: str) -> Message:
        """Creates a message with instructions from the operator of the conversation."""
        return cls("system", content)

    @classmethod
    def user(cls, content: str, *, name: str = "") -> Message:
        """Creates a message from the person or program asking."""
        return cls("user", content, name=name)

    @classmethod
    def assistant(cls, content: str, *, tool_calls: Sequence[ToolCall] = ()) -> Message:
        """Creates a message with what the model said."""
        return cls("assistant", content, tool_calls=tool_calls)

    @classmethod
    def tool(cls, content: str, *, tool_call_id: str) -> Message:
        """Creates a message with the result of a tool call."""
        return cls("tool", content, tool_call_id=tool_call_id)


class MessageDict(TypedDict):
    """A message as a plain dictionary, in the format of OpenAI's API and of chat templates."""

    role: Role
    content: NotRequired[str | Sequence[str | Mapping[str, Any]] | None]
    name: NotRequired[str]
    tool_calls: NotRequired[Sequence[Mapping[str, Any]]]
    tool_call_id: NotRequired[str]
    reasoning_content: NotRequired[str]


Conversation: TypeAlias = Sequence[Message | MessageDict | Mapping[str, Any]]
"""The messages of a conversation, each in any of these forms."""
# One sequence of all kinds of items: type checkers infer no list through a union of sequences.
Prompt: TypeAlias = str | Sequence[int | Message | MessageDict | Mapping[str, Any]] | GenerationSpec
"""A prompt: text, token ids, a conversation, or the whole request as its protobuf message.
"""
