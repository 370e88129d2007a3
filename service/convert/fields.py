"""Errors that name a field, in the caller's words.

    engine    InvalidRequestError("cache_salt", …) ──▶ FieldError("add.spec.cache.salt", …)
    convert   FieldError("truncation.side", …) ──────▶ FieldError("add.spec.truncation.side", …)

The engine names its own fields, `CONTRACT_FIELDS` says what the contract calls them, and nothing
else knows both. What convert refuses it names by the path in the message that it reads; whoever
hands it a part of a message says where that part is.
"""

from __future__ import annotations

from collections.abc import Mapping

from engine.errors import InvalidRequestError, UnsupportedFeatureError
from service.call_errors import FieldError, UnsupportedFieldError

CONTRACT_FIELDS: Mapping[str, str] = {
    # A GenerationRequest, and the GenerationSpec of which it was made.
    "prompt": "tokens.ids",
    "sampling": "sampling",
    "stop": "stop",
    "stop_strings": "stop.stop_strings",
    "logprobs": "output.logprobs",
    "logprob_token_ids": "output.logprob_token_ids",
    "prompt_logprobs": "output.prompt_logprobs",
    "grammar": "structured_output",
    "n": "n",
    "priority": "scheduling.priority",
    "cache_salt": "cache.salt",
    "bypass_prefix_cache": "cache.bypass_prefix_cache",
    "time_limit_s": "scheduling.time_limit",
    # What the tokenizer and the chat template take.
    "text": "text.text",
    "token_ids": "token_ids",
    "conversation": "chat",
    "messages": "chat.messages",
    "tools": "chat.tools",
    "template_arguments": "chat.template_arguments_json",
    "continue_final_message": "chat.continue_final_message",
}
"""The beginnings of the engine's field paths, and what stands for each in the contract's. What
follows (an index, a field of the same name) stays.
"""

NamedError = FieldError | InvalidRequestError | UnsupportedFeatureError
"""The errors that name a field."""


def contract_path(field: str) -> str:
    """What the contract calls a field of the engine's. One that the contract lacks stays: no caller
    can be wrong about it.
    """
    names = field.split("[")[0].split(".")
    for count in range(len(names), 0, -1):
        known = ".".join(names[:count])
        if known in CONTRACT_FIELDS:
            return CONTRACT_FIELDS[known] + field.removeprefix(known)
    return field


def field_error(error: NamedError, prefix: str = "") -> FieldError:
    """An error that names a field, in the caller's words. `prefix` completes its path."""
    match error:
        case UnsupportedFieldError():
            return UnsupportedFieldError(prefix + error.path, error.description)
        case FieldError():
            return FieldError(prefix + error.path, error.description)
        case UnsupportedFeatureError():
            return UnsupportedFieldError(prefix + contract_path(error.field), error.description)
        case InvalidRequestError():
            return FieldError(prefix + contract_path(error.field), error.description)
