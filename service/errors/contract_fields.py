"""Translates field names in errors to those of the contract.

    engine    InvalidRequestError("cache_salt", …) ──▶ FieldError("add.spec.cache.salt", …)
    convert   FieldError("truncation.side", …) ──────▶ FieldError("add.spec.truncation.side", …)

The engine uses its own field names. Only `CONTRACT_FIELDS` maps them to the contract's. Errors of
the service have the path in the message that was read. The caller prefixes the path of that message
if it is nested in another.
"""

from __future__ import annotations

from collections.abc import Mapping

from engine.contract.errors import InvalidRequestError, UnsupportedFeatureError
from service.errors.call_errors import FieldError, UnsupportedFieldError

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
    "grammar.tool_choice": "chat.tool_choice",
    "grammar.free": "stop.max_reasoning_tokens",
    "grammar.reasoning": "stop.max_reasoning_tokens",
    "n": "n",
    "adapter": "adapter",
    "prediction": "prediction.tokens.ids",
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
"""The contract's field path for each prefix of the engine's field paths. The rest of a path (an
index, or a field with the same name) is unchanged.
"""

NamedError = FieldError | InvalidRequestError | UnsupportedFeatureError
"""The errors that name a field."""


def contract_path(field: str) -> str:
    """Return the contract's path for a field of the engine. A field that the contract lacks is
    returned unchanged; no caller can have set it.
    """
    names = field.split("[")[0].split(".")
    for count in range(len(names), 0, -1):
        known = ".".join(names[:count])
        if known in CONTRACT_FIELDS:
            return CONTRACT_FIELDS[known] + field.removeprefix(known)
    return field


def field_error(error: NamedError, prefix: str = "") -> FieldError:
    """Convert an error to one with the contract's field path, prefixed with `prefix`."""
    match error:
        case UnsupportedFieldError():
            return UnsupportedFieldError(prefix + error.path, error.description)
        case FieldError():
            return FieldError(prefix + error.path, error.description)
        case UnsupportedFeatureError():
            return UnsupportedFieldError(prefix + contract_path(error.field), error.description)
        case InvalidRequestError():
            return FieldError(prefix + contract_path(error.field), error.description)
