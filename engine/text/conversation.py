"""Prepares a conversation for a template, and leaves the last message open if requested.

Incoming values are copied to plain JSON types, so that a template meets no object with methods and
cannot change the caller's data.

Templates differ in two ways that a caller cannot know. Most read the arguments of a tool call as a
mapping, but some as JSON text. Most accept a message that has tool calls and no content. Some lose
the call or fail unless the content is null, or empty. If the caller left this open (`JsonObject`, a
content of None), the variant is chosen to suit the template: `CallForm`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.contract.errors import InvalidRequestError
from engine.text.text_errors import ChatTemplateError

MAX_DEPTH = 64
"""The deepest nesting of lists and objects in messages, tools and arguments."""
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names under which templates read the assistant's reasoning, the usual one first."""


class JsonObject(dict[str, object]):
    """A JSON object together with its original text, for templates that print the text."""

    __slots__ = ("text",)

    def __init__(self, members: Mapping[str, object], text: str) -> None:
        super().__init__(members)
        self.text = text


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a template takes messages with tool calls.

    Attributes:
        arguments_as_text: whether it expects a call's arguments as JSON text rather than a mapping.
        absent_content: what it expects if there is no content: no such member (LEFT_OUT), None, or
            "".
    """

    arguments_as_text: bool
    absent_content: str | None


LEFT_OUT = "left out"
"""A message without content has no such member, as in transformers."""
CALL_FORMS = tuple(
    CallForm(arguments_as_text, absent_content)
    for absent_content in (LEFT_OUT, None, "")
    for arguments_as_text in (False, True)
)
"""All variants, the usual one first."""


def plain(value: object, field: str, depth: int = 0, *, as_text: bool = False) -> Any:
    """Copy a value to plain types. `as_text`: whether a JsonObject becomes its text.

    Raises:
        InvalidRequestError: `field` has a value that JSON does not have, or is nested too deeply.
    """
    if depth > MAX_DEPTH:
        raise InvalidRequestError(field, f"is nested deeper than {MAX_DEPTH} levels")
    match value:
        case JsonObject() if as_text:
            return value.text
        case JsonObject() if depth:  # its depth counts from itself on
            return plain(value, field, as_text=as_text)
        case None | bool():
            return value
        case str():
            return str.__str__(value)
        case int():
            return int.__int__(value)
        case float():
            return float.__float__(value)
        case Mapping() if all(isinstance(key, str) for key in value):
            return {
                str(key): plain(item, field, depth + 1, as_text=as_text)
                for key, item in value.items()
            }
        case list() | tuple():
            return [plain(item, field, depth + 1, as_text=as_text) for item in value]
        case _:
            raise InvalidRequestError(field, "has a value that JSON does not know")


def message_for_template(
    message: Mapping[str, object], field: str, form: CallForm
) -> dict[str, Any]:
    """Copy a message without members that are None, and with its reasoning under all names.

    Args:
        message: the caller's message.
        field: the name of the field, for errors.
        form: how the template takes tool calls.
    """
    if not isinstance(message, Mapping):
        raise InvalidRequestError(field, "is not a mapping with role and content")
    copied = plain(message, field, as_text=form.arguments_as_text)
    absent = form.absent_content if copied.get("tool_calls") else LEFT_OUT
    stays = {"content"} if absent is not LEFT_OUT else set()
    return _with_reasoning(
        {
            name: absent if value is None else value
            for name, value in copied.items()
            if value is not None or name in stays
        }
    )


def in_parts(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose text is a part of its content."""
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Add the assistant's reasoning under the names by which templates read it."""
    reasoning = next((message[name] for name in _REASONING if name in message), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def leave_open(message: dict[str, Any], mark: str, source: str) -> str:
    """Append the mark to the last message's content, and return the original content."""
    content = message.get("content")
    if content is None or "content" not in source:
        raise InvalidRequestError("continue_final_message", "needs a last message with content")
    if isinstance(content, str):
        message["content"] = content + mark
        return content
    for part in reversed(content) if isinstance(content, list) else ():
        if isinstance(part, dict) and isinstance(text := part.get("text"), str):
            part["text"] = text + mark
            return text
    raise InvalidRequestError("continue_final_message", "needs a last message with text")


def cut(text: str, mark: str, ending: str) -> str:
    """Return the text up to the mark, with its end trimmed if the template trimmed the content."""
    place = text.rfind(mark.strip())
    if place < 0 or ending.strip() not in text:
        raise ChatTemplateError(
            "the model's chat template does not keep the last message's content, "
            "so it cannot be continued"
        )
    return text[:place] if text.startswith(mark, place) else text[:place].rstrip()
