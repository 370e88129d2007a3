"""The members that a body may have, in one table that says how each is handled.

A member is an option of the client with the same meaning, is read by `asked`, which makes the
request, is accepted without effect, or is refused with a note on what to send instead. A member
without a row is refused, with a suggestion of what may be meant. docs/openai.md shows this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal

from headrace.openai.bodies import type_name
from headrace.openai.errors import ApiError, invalid

Route = Literal["chat", "completions"]
ROUTES: tuple[Route, Route] = ("chat", "completions")


@dataclass(frozen=True, slots=True)
class Field:
    """How a member is handled.

    Attributes:
        kind: the type of its value, a key of `_KINDS`.
        option: the client's option that takes the value unchanged; empty if there is none.
        note: a note for the documentation; for a refused member, what to use instead.
        use: "obeyed", "ignored" or "refused".
        routes: the routes that accept it.
    """

    kind: str
    option: str = ""
    note: str = ""
    use: Literal["obeyed", "ignored", "refused"] = "obeyed"
    routes: tuple[Route, ...] = ROUTES


_CHAT: tuple[Route, ...] = ("chat",)
_TEXT: tuple[Route, ...] = ("completions",)
_KINDS = {
    "a number": (int, float),
    "an integer": (int,),
    "true or false": (bool,),
    "a string": (str,),
    "an array": (list,),
    "an object": (dict,),
    "a string or an array": (str, list),
    "a string or an object": (str, dict),
    "anything": (object,),
}


def _ignored(kind: str, note: str, routes: tuple[Route, ...] = ROUTES) -> Field:
    return Field(kind, note=note, use="ignored", routes=routes)


def _refused(remedy: str, routes: tuple[Route, ...] = ROUTES) -> Field:
    return Field("anything", note=remedy, use="refused", routes=routes)


FIELDS: dict[str, Field] = {
    # OpenAI's
    "model": Field("a string", note="a name of /v1/models; absent: the only model"),
    "messages": Field("an array", note="parts of content are text alone", routes=_CHAT),
    "prompt": Field(
        "a string or an array",
        note="a text, token ids, or a list of either: a choice (or n) for each",
        routes=_TEXT,
    ),
    "temperature": Field("a number", "temperature"),
    "top_p": Field("a number", "top_p"),
    "n": Field("an integer", "n", "choices of one prompt"),
    "seed": Field("an integer", note="its lowest 63 bits count"),
    "stop": Field("a string or an array", "stop"),
    "max_tokens": Field("an integer", note="absent: 16 for completions, as OpenAI has it"),
    "max_completion_tokens": Field(
        "an integer", note="the same as max_tokens, reasoning included", routes=_CHAT
    ),
    "presence_penalty": Field("a number", "presence_penalty"),
    "frequency_penalty": Field("a number", "frequency_penalty"),
    "logit_bias": Field("an object", note="token ids as text, each with -100 to 100"),
    "logprobs": Field("anything", note="chat: true or false; completions: how many candidates"),
    "top_logprobs": Field("an integer", note="candidates; needs logprobs", routes=_CHAT),
    "stream": Field("true or false"),
    "stream_options": Field("an object", note="include_usage; include_obfuscation is ignored"),
    "tools": Field("an array", note="functions", routes=_CHAT),
    "tool_choice": Field("a string or an object", note="all of OpenAI's forms", routes=_CHAT),
    "parallel_tool_calls": Field("true or false", note="false holds to one call", routes=_CHAT),
    "response_format": Field("an object", note="text, json_object, json_schema"),
    "reasoning_effort": Field(
        "a string", note="the chat template sees it as reasoning_effort", routes=_CHAT
    ),
    "modalities": Field("an array", note='["text"]', routes=_CHAT),
    "echo": Field("true or false", note="text and logprobs begin with the prompt's", routes=_TEXT),
    "user": _ignored("a string", "callers are told apart by token or address"),
    "store": _ignored("true or false", "nothing is stored", _CHAT),
    "metadata": _ignored("an object", "of stored completions", _CHAT),
    "service_tier": _ignored("a string", "priority is vLLM's member for that"),
    "safety_identifier": _ignored("a string", "of OpenAI's policy"),
    "prompt_cache_key": _ignored("a string", "prefixes are found by their tokens"),
    "prompt_cache_retention": _ignored("a string", "the cache keeps what has room"),
    "verbosity": _ignored("a string", "of OpenAI's models", _CHAT),
    "prediction": Field("an object", note="the text expected; changes no token", routes=_CHAT),
    "audio": _refused("the output is text", _CHAT),
    "functions": _refused("use tools", _CHAT),
    "function_call": _refused("use tool_choice", _CHAT),
    "web_search_options": _refused("nothing is searched here; give a tool", _CHAT),
    "best_of": _refused("use n, and choose by logprobs", _TEXT),
    "suffix": _refused("put it in the prompt, with the model's own marks for infilling", _TEXT),
    # vLLM's, which clients send by extra_body
    "top_k": Field("an integer", note="-1 or 0: all"),
    "min_p": Field("a number", "min_p"),
    "typical_p": Field("a number", "typical_p"),
    "repetition_penalty": Field("a number", "repetition_penalty"),
    "no_repeat_ngram_size": Field("an integer", "no_repeat_ngram_size"),
    "ignore_eos": Field("true or false", "ignore_eos"),
    "min_tokens": Field("an integer", "min_tokens"),
    "stop_token_ids": Field("an array", "stop_token_ids"),
    "include_stop_str_in_output": Field("true or false", "include_stop"),
    "skip_special_tokens": Field("true or false", "skip_special_tokens"),
    "allowed_token_ids": Field("an array", "allowed_token_ids"),
    "logprob_token_ids": Field("an array", "logprob_token_ids"),
    "prompt_logprobs": Field("an integer", "prompt_logprobs", "not in streams"),
    "truncate_prompt_tokens": Field("an integer", "truncate_prompt_to", "the oldest are cut"),
    "add_special_tokens": Field(
        "true or false", "add_special_tokens", "of a text prompt", routes=_TEXT
    ),
    "structured_outputs": Field(
        "an object", note="json, json_object, regex, choice, grammar (Lark), structural_tag"
    ),
    "chat_template_kwargs": Field("an object", note="values for the template", routes=_CHAT),
    "add_generation_prompt": Field("true or false", "add_generation_prompt", routes=_CHAT),
    "continue_final_message": Field("true or false", "continue_final_message", routes=_CHAT),
    "include_reasoning": Field("true or false", note="false leaves it out", routes=_CHAT),
    "thinking_token_budget": Field("an integer", "max_reasoning_tokens", routes=_CHAT),
    "priority": Field("an integer", note="lower runs first, as in vLLM"),
    "cache_salt": Field("a string", "cache_salt"),
    "return_token_ids": Field("true or false", note="prompt_token_ids (not in streams), token_ids"),
    "use_beam_search": _refused("use n and a temperature"),
    "length_penalty": _refused("it belongs to beam search"),
    "bad_words": _refused("use logit_bias with their token ids"),
    "chat_template": _refused("the model's own template is used; it is the operator's", _CHAT),
    "documents": _refused("put them in chat_template_kwargs, if the template has them", _CHAT),
}
_MEANT = {
    "max_new_tokens": "max_tokens",
    "max_output_tokens": "max_completion_tokens",
    "input": "messages or prompt",
    "guided_json": "structured_outputs",
    "guided_regex": "structured_outputs",
    "guided_choice": "structured_outputs",
    "guided_grammar": "structured_outputs",
    "stop_sequences": "stop",
    "enable_thinking": "chat_template_kwargs",
}
"""Members' names in other APIs, with their names here."""


def check(body: Mapping[str, Any], route: Route, *, ignore_unknown: bool) -> dict[str, Any]:
    """Returns the members that are obeyed, without those that are null.

    Raises:
        ApiError: a member is unknown (unless unknown members are ignored), is refused, belongs to
            the other route, or has a value of the wrong type.
    """
    found = {}
    for name, value in body.items():
        field = FIELDS.get(name)
        if value is None and field is not None:
            continue
        if field is None or route not in field.routes:
            if not ignore_unknown:
                raise _unknown(name, route)
            continue
        if field.use == "refused":
            if value is False or value in ([], {}, ""):
                continue
            raise ApiError(
                400, f"{name} is not supported: {field.note}", param=name, code="unsupported_field"
            )
        check_kind(name, value, field.kind)
        if field.use == "obeyed":
            found[name] = value
    return found


def check_kind(name: str, value: Any, kind: str) -> None:
    """Raises ApiError if a member's value has the wrong type."""
    kinds = _KINDS[kind]
    is_number = isinstance(value, bool) and bool not in kinds and object not in kinds
    if is_number or not isinstance(value, kinds):
        raise invalid(name, f"is {type_name(value)}; it must be {kind}", "invalid_type")


def _unknown(name: str, route: Route) -> ApiError:
    shown = name[:100]
    if name in FIELDS:
        message = f"{shown} does not belong to this route"
    else:
        known = [one for one, field in FIELDS.items() if route in field.routes]
        meant = [_MEANT[name]] if name in _MEANT else get_close_matches(name[:100], known, 1)
        message = f"there is no {shown}" + (f"; is it {meant[0]}?" if meant else "")
    return ApiError(400, message, param=shown, code="unknown_field")
