"""What a template is shown of a conversation, and how a last message is left open.

Values that come in are copied into plain JSON types, so that a template meets no object with
methods of its own and cannot change what the caller has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.errors import InvalidRequestError
from engine.text.text_errors import ChatTemplateError

MAX_DEPTH = 64
"""The deepest nesting of lists and objects in messages, tools and arguments."""
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names under which templates read the assistant's reasoning; the first is the usual one."""


def plain(value: object, field: str, depth: int = 0) -> Any:
    """A copy in plain types; InvalidRequestError for `field` where JSON has no such value."""
    if depth > MAX_DEPTH:
        raise InvalidRequestError(field, f"is nested deeper than {MAX_DEPTH} levels")
    match value:
        case None | bool():
            return value
        case str():
            return str.__str__(value)
        case int():
            return int.__int__(value)
        case float():
            return float.__float__(value)
        case Mapping() if all(isinstance(key, str) for key in value):
            return {str(key): plain(item, field, depth + 1) for key, item in value.items()}
        case list() | tuple():
            return [plain(item, field, depth + 1) for item in value]
        case _:
            raise InvalidRequestError(field, "has a value that JSON does not know")


def message_for_template(message: Mapping[str, object], field: str) -> dict[str, Any]:
    """A copy of a message without members that are None, its reasoning under all names."""
    if not isinstance(message, Mapping):
        raise InvalidRequestError(field, "is not a mapping with role and content")
    kept = {name: value for name, value in plain(message, field).items() if value is not None}
    return _with_reasoning(kept)


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """The assistant's reasoning under the names that templates read it by."""
    reasoning = next((message[name] for name in _REASONING if name in message), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def leave_open(message: dict[str, Any], mark: str, source: str) -> str:
    """Put the mark behind the last message's content; gives that content."""
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
    """The text up to the mark; trimmed before it where the template trimmed the content."""
    place = text.rfind(mark.strip())
    if place < 0 or ending.strip() not in text:
        raise ChatTemplateError(
            "the model's chat template does not keep the last message's content, "
            "so it cannot be continued"
        )
    return text[:place] if text.startswith(mark, place) else text[:place].rstrip()
