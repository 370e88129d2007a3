"""Parses what a body asks for: the requests of the contract, and the format of their answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from headrace._chat import message_to_proto
from headrace.errors import HeadraceError, invalid_argument
from headrace.openai.bodies import type_name
from headrace.openai.errors import ApiError, from_headrace, invalid
from headrace.openai.fields import FIELDS, Route, check, check_kind
from headrace.options import GenerationOptions, build_spec
from headrace.v1.generation_pb2 import GenerationSpec

MAX_PROMPTS = 1_024
MAX_CHOICES = 1_024
MAX_MESSAGES = 4_096
"""The maximum numbers of prompts, choices and messages in one body. The servers' own limits are not
higher.
"""
COMPLETION_TOKENS = 16
"""OpenAI's default `max_tokens` for completions."""
_SEEDS = (1 << 63) - 1
_NAMES = {
    **{one.option: name for name, one in FIELDS.items() if one.option},
    "stop_strings": "stop",
    "max_prompt_tokens": "truncate_prompt_tokens",
    "salt": "cache_salt",
    "template_arguments_json": "chat_template_kwargs",
    "parallel_calls": "parallel_tool_calls",
    "text": "prompt",
    "tokens": "prompt",
    "ids": "prompt",
    "chat": "messages",
}
"""Fields of the contract, with their names in a body."""
_FORMS = {
    "json": "json_schema",
    "json_object": "json_object",
    "regex": "regex",
    "choice": "choices",
    "grammar": "grammar",
    "structural_tag": "structural_tag",
}
"""Members of vLLM's structured_outputs, with the corresponding options of the client."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A parsed body.

    Attributes:
        route: determines the format of the answer.
        model: the requested model; empty for the only one.
        specs: the requests, one for each prompt.
        n: the number of choices of each request.
        logprobs: the number of candidates of each token; None for no log-probabilities.
        has_prompt: whether the answer has the prompt's log-probabilities in vLLM's format.
        names: fields of the contract, with their names in the body.
    """

    route: Route
    model: str
    specs: list[GenerationSpec]
    n: int = 1
    is_stream: bool = False
    wants_usage: bool = False
    logprobs: int | None = None
    echo: bool = False
    is_forced: bool = False
    """Whether the model must call one particular function. OpenAI's finish reason is then "stop".
    """
    wants_reasoning: bool = True
    wants_ids: bool = False
    has_prompt: bool = False
    names: Mapping[str, str] = field(default_factory=dict)


def read(body: Mapping[str, Any], route: Route, *, ignore_unknown: bool) -> Asked:
    """Parses a body.

    Raises:
        ApiError: something in the body is invalid or unsupported; the error names the member.
    """
    given = check(body, route, ignore_unknown=ignore_unknown)
    names = dict(_NAMES)
    options = {
        one.option: given[name] for name, one in FIELDS.items() if one.option and name in given
    }
    _common(given, options, names)
    is_forced = False
    if route == "chat":
        is_forced = _chat(given, options)
        top = _chat_logprobs(given)
        inputs: list[GenerationSpec | str | list[int]] = [_conversation(given.get("messages"))]
    else:
        top = given.get("logprobs")
        if top is not None:
            check_kind("logprobs", top, "an integer")
        inputs = list(_prompts(given.get("prompt")))
    options["logprobs"] = top
    echo = bool(given.get("echo"))
    if echo:
        options["echo"] = True
        if top is not None:
            options["prompt_logprobs"] = top
    if top is not None or "prompt_logprobs" in options:
        names["logprobs"] = "top_logprobs" if route == "chat" else "logprobs"
    try:
        specs = [build_spec(one, cast("GenerationOptions", options)) for one in inputs]
    except HeadraceError as error:
        raise from_headrace(error, names) from None
    stream_options = _stream_options(given)
    if given.get("stream") and "prompt_logprobs" in given:
        raise invalid("prompt_logprobs", "comes with a whole answer; leave stream out")
    return Asked(
        route,
        given.get("model", ""),
        specs,
        n=given.get("n", 1),
        is_stream=bool(given.get("stream")),
        wants_usage=bool(stream_options.get("include_usage")),
        logprobs=top,
        echo=echo,
        is_forced=is_forced,
        wants_reasoning=given.get("include_reasoning", True),
        wants_ids=bool(given.get("return_token_ids")),
        has_prompt="prompt_logprobs" in given,
        names=names,
    )


def rendered(body: Mapping[str, Any], route: Route, *, ignore_unknown: bool) -> Asked:
    """Parses a body when only its prompt is used. The values of other members are not checked."""
    wanted = (
        "model", "messages", "prompt", "tools", "chat_template_kwargs", "reasoning_effort",
        "add_generation_prompt", "continue_final_message", "add_special_tokens",
    )  # fmt: skip
    check(body, route, ignore_unknown=ignore_unknown)
    found = read({name: body[name] for name in wanted if name in body}, route, ignore_unknown=True)
    for spec in found.specs:  # a tool that is strict holds the reply, which there is none of
        if spec.WhichOneof("input") == "chat":
            spec.chat.ClearField("tool_choice")
    return found


# ---- parts of a body -----------------------------------------------------------------------------


def _common(given: dict[str, Any], options: dict[str, Any], names: dict[str, str]) -> None:
    if not 1 <= given.get("n", 1) <= MAX_CHOICES:
        raise invalid("n", f"is {given['n']}; it must be 1 to {MAX_CHOICES}")
    limits = {
        name: given[name] for name in ("max_completion_tokens", "max_tokens") if name in given
    }
    if len(set(limits.values())) > 1:
        raise invalid("max_tokens", "contradicts max_completion_tokens; send one of them")
    if limits:
        names["max_tokens"], options["max_tokens"] = next(iter(limits.items()))
    elif "prompt" in given:
        options["max_tokens"] = COMPLETION_TOKENS
    if "seed" in given:
        check_kind("seed", given["seed"], "an integer")
        options["seed"] = given["seed"] & _SEEDS
    if "top_k" in given:
        options["top_k"] = max(0, given["top_k"]) if given["top_k"] >= -1 else given["top_k"]
    if "priority" in given:
        options["priority"] = -given["priority"]
    if "logit_bias" in given:
        options["logit_bias"] = _logit_bias(given["logit_bias"])
    for name in ("stop", "stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
        if isinstance(given.get(name), list):
            kind = "a string" if name == "stop" else "an integer"
            for i, one in enumerate(given[name]):
                check_kind(f"{name}[{i}]", one, kind)
    _form(given, options, names)


def _logit_bias(bias: Mapping[str, Any]) -> dict[int, float]:
    found = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 9):
            raise invalid(
                "logit_bias", f"{key[:40]!r} is no token id; keys are ids as text, such as '1234'"
            )
        check_kind(f"logit_bias.{key}", value, "a number")
        found[int(key)] = value
    return found


def _form(given: dict[str, Any], options: dict[str, Any], names: dict[str, str]) -> None:
    """Sets the options for the output format, from response_format or structured_outputs."""
    asked: Mapping[str, Any] = given.get("response_format", {})
    kind = asked.get("type", "text") if asked else "text"
    if kind == "json_object":
        options["json_object"] = True
    elif kind == "json_schema":
        schema: dict[str, Any] = asked.get("json_schema", {})
        check_kind("response_format.json_schema", schema, "an object")
        inner = schema.get("schema", {})
        check_kind("response_format.json_schema.schema", inner, "an object")
        options["json_schema"] = inner
    elif kind != "text":
        raise invalid("response_format.type", f"{kind!r} is none of text, json_object, json_schema")
    names["structured_output"] = "response_format"
    if "structured_outputs" not in given:
        return
    if kind != "text":
        raise invalid("structured_outputs", "cannot be combined with response_format")
    names["structured_output"] = "structured_outputs"
    for name, value in given["structured_outputs"].items():
        if value is None or value is False:
            continue
        if name not in _FORMS:
            raise invalid(
                f"structured_outputs.{name[:100]}",
                f"there is none; it is one of {', '.join(_FORMS)}",
            )
        options[_FORMS[name]] = value
        names[_FORMS[name]] = names[f"structured_output.{_FORMS[name]}"] = (
            f"structured_outputs.{name}"
        )


def _stream_options(given: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = given.get("stream_options", {})
    if found and not given.get("stream"):
        raise invalid("stream_options", "belongs to stream: true")
    for name, value in found.items():
        if name not in ("include_usage", "include_obfuscation"):
            raise invalid(
                f"stream_options.{name[:100]}",
                "there is none; it has include_usage",
                "unknown_field",
            )
        if value is not None:
            check_kind(f"stream_options.{name}", value, "true or false")
    return found


def _chat_logprobs(given: Mapping[str, Any]) -> int | None:
    wanted = given.get("logprobs", False)
    check_kind("logprobs", wanted, "true or false")
    if not wanted:
        if given.get("top_logprobs"):
            raise invalid("top_logprobs", "needs logprobs: true")
        return None
    top: int = given.get("top_logprobs", 0)
    return top


def _chat(given: Mapping[str, Any], options: dict[str, Any]) -> bool:
    """Sets the tools and the template's values. Returns whether one function must be called."""
    if given.get("modalities", ["text"]) != ["text"]:
        raise invalid("modalities", 'the output is text: ["text"]', "unsupported_value")
    if expected := _expected(given.get("prediction", {})):
        options["prediction"] = expected
    template = dict(given.get("chat_template_kwargs", {}))
    if "reasoning_effort" in given:
        template.setdefault("reasoning_effort", given["reasoning_effort"])
    if template:
        options["template_arguments"] = template
    choice = given.get("tool_choice")
    tools = given.get("tools", [])
    for i, tool in enumerate(tools):
        check_kind(f"tools[{i}]", tool, "an object")
        if tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
            raise invalid(f"tools[{i}]", 'is no function: {"type": "function", "function": {…}}')
    if not tools:
        if choice not in (None, "auto", "none"):
            raise invalid("tool_choice", "needs tools")
        return False
    options |= {"tools": tools, "tool_choice": choice}
    if given.get("parallel_tool_calls") is False:  # true is what is done anyway
        options["parallel_tool_calls"] = False
    return isinstance(choice, dict) and choice.get("type") == "function"


def _expected(prediction: Mapping[str, Any]) -> str:
    """Returns the text of a prediction, whose content is a text or text parts."""
    if prediction.get("type", "content") != "content":
        raise invalid("prediction.type", 'must be "content"', "unsupported_value")
    content = prediction.get("content", "")
    if isinstance(content, str):
        return content
    check_kind("prediction.content", content, "a string or an array")
    texts = []
    for i, part in enumerate(content):
        check_kind(f"prediction.content[{i}]", part, "an object")
        check_kind(f"prediction.content[{i}].text", part.get("text"), "a string")
        texts.append(part["text"])
    return "".join(texts)


def _conversation(messages: Any) -> GenerationSpec:
    """Returns a request with only the messages."""
    if messages is None:
        raise ApiError(400, "messages is missing", param="messages", code="missing_field")
    if not messages:
        raise invalid("messages", "is empty; it must have at least one message")
    if len(messages) > MAX_MESSAGES:
        raise invalid("messages", f"has {len(messages)} messages; at most {MAX_MESSAGES}")
    spec = GenerationSpec()
    for i, message in enumerate(messages):
        place = f"messages[{i}]"
        check_kind(place, message, "an object")
        if "role" not in message:
            raise ApiError(400, f"{place} has no role", param=f"{place}.role", code="missing_field")
        content = message.get("content")
        if content is not None and not isinstance(content, (str, list)):
            raise invalid(f"{place}.content", f"is {type_name(content)}", "invalid_type")
        try:
            spec.chat.messages.append(message_to_proto(message))
        except HeadraceError as error:
            raise _at(place, error) from None
        except (TypeError, AttributeError, ValueError):
            raise invalid(place, "has a member of another type", "invalid_type") from None
    return spec


def _at(place: str, error: HeadraceError) -> ApiError:
    """Returns the error of one message, with the message's location in the body."""
    violation = error.fields[0]
    field = place + violation.field.removeprefix("messages")
    return from_headrace(invalid_argument(field, violation.description), {})


def _prompts(prompt: Any) -> list[str | list[int]]:
    """Returns the prompts: a text, token ids, or a list of either."""
    if prompt is None:
        raise ApiError(400, "prompt is missing", param="prompt", code="missing_field")
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise invalid("prompt", "is empty")
    if all(type(one) is int for one in prompt):
        return [prompt]
    if len(prompt) > MAX_PROMPTS:
        raise invalid("prompt", f"has {len(prompt)} prompts; at most {MAX_PROMPTS}")
    for i, one in enumerate(prompt):
        is_ids = isinstance(one, list) and one and all(type(id_) is int for id_ in one)
        if not is_ids and not isinstance(one, str):
            raise invalid(f"prompt[{i}]", "is neither a text nor a list of token ids")
    return list(prompt)
