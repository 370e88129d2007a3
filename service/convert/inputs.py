"""What a request continues, as token ids: text, tokens or a conversation; then truncation.

Tokenizing a long text takes milliseconds to seconds, in which nothing else would be served: it
goes to a small pool of threads (the tokenizer releases the interpreter's lock).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from headrace.v1 import generation_pb2

from engine.errors import InvalidRequestError
from engine.text import Tokenizer
from service.convert.values import check_enum, from_struct

INLINE_CHARACTERS = 4096
"""Texts up to this length are tokenized at once, on the event loop."""
MAX_MESSAGES = 4096

_ROLES = {
    generation_pb2.CHAT_ROLE_SYSTEM: "system",
    generation_pb2.CHAT_ROLE_USER: "user",
    generation_pb2.CHAT_ROLE_ASSISTANT: "assistant",
    generation_pb2.CHAT_ROLE_TOOL: "tool",
    generation_pb2.CHAT_ROLE_DEVELOPER: "developer",
}


class InputEncoder:
    """Makes token ids of inputs."""

    def __init__(self, tokenizer: Tokenizer, pool: ThreadPoolExecutor) -> None:
        self._tokenizer = tokenizer
        self._pool = pool

    async def encode_text(self, text: generation_pb2.TextInput) -> list[int]:
        """The token ids of a text."""
        special = text.add_special_tokens if text.HasField("add_special_tokens") else True
        return await self._encode(text.text, special)

    async def encode_chat(self, chat: generation_pb2.ChatInput) -> list[int]:
        """The token ids of a conversation, laid out by the tokenizer's template."""
        messages = _messages(chat)
        arguments: dict[str, Any] = {
            "tools": [_tool(tool, index) for index, tool in enumerate(chat.tools)] or None,
            "add_generation_prompt": (
                chat.add_generation_prompt if chat.HasField("add_generation_prompt") else None
            ),
            "continue_final_message": chat.continue_final_message,
            "template_arguments": from_struct(chat.template_arguments, "chat.template_arguments"),
        }

        def render() -> str:
            return self._tokenizer.apply_chat_template(messages, **arguments)

        # A template is a program: it never runs on the event loop.
        text = await asyncio.get_running_loop().run_in_executor(self._pool, render)
        return await self._encode(text, False)

    async def _encode(self, text: str, special: bool) -> list[int]:
        if len(text) <= INLINE_CHARACTERS:
            return self._tokenizer.encode(text, add_special_tokens=special)

        def encode() -> list[int]:
            return self._tokenizer.encode(text, add_special_tokens=special)

        return await asyncio.get_running_loop().run_in_executor(self._pool, encode)

    async def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """The text of token ids."""

        def decode() -> str:
            return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

        if len(ids) <= INLINE_CHARACTERS // 4:
            return decode()
        return await asyncio.get_running_loop().run_in_executor(self._pool, decode)


@dataclass(frozen=True, slots=True)
class Truncation:
    """How an input is cut, where it is longer.

    Attributes:
        most: how many tokens are kept; None: all.
        right: whether those at the end go, else those at the beginning.
    """

    most: int | None
    right: bool

    @classmethod
    def of(cls, spec: generation_pb2.GenerationSpec) -> Truncation:
        """What a spec asks for.

        Raises:
            InvalidRequestError: it is out of its bounds.
        """
        if not spec.HasField("truncation"):
            return cls(None, right=False)
        check_enum(generation_pb2.TruncationSide, spec.truncation.side, "truncation.side")
        if spec.truncation.max_prompt_tokens == 0:
            raise InvalidRequestError("truncation.max_prompt_tokens", "is 0; it must be 1 or more")
        return cls(
            spec.truncation.max_prompt_tokens,
            right=spec.truncation.side == generation_pb2.TRUNCATION_SIDE_RIGHT,
        )

    def kept(self, length: int) -> slice:
        """Which of this many tokens are kept."""
        if self.most is None or length <= self.most:
            return slice(0, length)
        return slice(0, self.most) if self.right else slice(length - self.most, length)


def _messages(chat: generation_pb2.ChatInput) -> list[dict[str, object]]:
    if len(chat.messages) > MAX_MESSAGES:
        raise InvalidRequestError(
            "chat.messages",
            f"has {len(chat.messages)} messages; at most {MAX_MESSAGES} are allowed",
        )
    return [_message(message, f"chat.messages[{i}]") for i, message in enumerate(chat.messages)]


def _message(message: generation_pb2.ChatMessage, field: str) -> dict[str, object]:
    role = _ROLES.get(message.role)
    if role is None:
        raise InvalidRequestError(f"{field}.role", "is not set, or not a role; say who speaks")
    converted: dict[str, object] = {"role": role, "content": message.content}
    if message.name:
        converted["name"] = message.name
    if message.tool_calls:
        converted["tool_calls"] = [
            _tool_call(call, f"{field}.tool_calls[{index}]")
            for index, call in enumerate(message.tool_calls)
        ]
    if message.tool_call_id:
        if role != "tool":
            raise InvalidRequestError(
                f"{field}.tool_call_id", "is for messages of CHAT_ROLE_TOOL; leave it out here"
            )
        converted["tool_call_id"] = message.tool_call_id
    if message.reasoning_content:
        converted["reasoning_content"] = message.reasoning_content
    return converted


def _tool_call(call: generation_pb2.ToolCall, field: str) -> dict[str, object]:
    if not call.name:
        raise InvalidRequestError(f"{field}.name", "is empty; name the tool")
    function = {"name": call.name, "arguments": from_struct(call.arguments, f"{field}.arguments")}
    return {"id": call.id, "type": "function", "function": function}


def _tool(tool: generation_pb2.Tool, index: int) -> dict[str, object]:
    field = f"chat.tools[{index}]"
    if not tool.name:
        raise InvalidRequestError(f"{field}.name", "is empty; name the tool")
    return {
        "type": "function",
        "function": {
            "name": tool.name,
            "description": tool.description,
            "parameters": from_struct(tool.parameters, f"{field}.parameters"),
        },
    }
