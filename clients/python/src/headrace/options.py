"""The options of a request, and how a prompt and its options become the contract's
`GenerationSpec`.

An option that is left out (or None) is absent from the message, and the server's documented default
applies. The server checks ranges. The client refuses a value only if it cannot be put in the
message at all.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from difflib import get_close_matches
from typing import Any, Literal, TypedDict, Unpack, cast

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message as ProtoMessage

from headrace._chat import json_text, message_to_proto, tools_to_proto
from headrace._tool_choice import choice_to_proto
from headrace.errors import HeadraceError, invalid_argument
from headrace.messages import Message, MessageDict, Prompt, Tool, ToolChoice
from headrace.v1 import generation_pb2 as pb


class TurnOptions(TypedDict, total=False):
    """The options of a request that can also be used in a tool run (`Client.run_tools`)."""

    adapter: str | None
    """The name of an adapter (such as a LoRA) to apply."""

    temperature: float | None
    """Divides the logits; 0 is greedy."""
    top_k: int | None
    top_p: float | None
    min_p: float | None
    typical_p: float | None
    """Keeps the most typical tokens, up to this cumulative probability (typical sampling)."""
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    no_repeat_ngram_size: int | None
    """No sequence of this many tokens occurs twice in prompt and output; 0 to disable."""
    logit_bias: Mapping[int, float] | None
    """Added to the logits of single tokens, by id."""
    allowed_token_ids: Sequence[int] | None
    """If given, only these ids are generated (include an end-of-sequence id, or the output ends
    only at `max_tokens`).
    """
    banned_token_ids: Sequence[int] | None
    """These ids are never generated."""
    seed: int | None
    """Makes sampling reproducible; 0 to 2**63 - 1."""

    max_tokens: int | None
    """The maximum number of tokens to generate; 0 only processes the prompt."""
    min_tokens: int | None
    stop: str | Sequence[str] | None
    """Strings that end the output where they first appear."""
    stop_token_ids: Sequence[int] | None
    eos_token_ids: Sequence[int] | None
    """Replaces the model's own end-of-sequence ids."""
    ignore_eos: bool | None
    include_stop: bool | None
    """Whether to include the text that ended the output; the default is no."""
    max_reasoning_tokens: int | None
    """For a conversation: the number of reasoning tokens after which reasoning is ended; 0 to end
    it immediately.
    """

    delivery: Literal["stream", "final"] | None
    """With `final`, everything is sent in one chunk at the end."""
    min_tokens_per_delta: int | None
    """A chunk is sent once it has this many tokens."""
    logprobs: int | None
    """Log-probabilities with this many candidates per token; 0 for only the token's own."""
    prompt_logprobs: int | None
    """Like `logprobs`, for the prompt's tokens; returned in `Result.prompt.tokens`."""
    logprob_token_ids: Sequence[int] | None
    """Token ids to report after the candidates of every token, in this order."""
    echo: bool | None
    """Whether the text starts with the text of the prompt."""
    token_details: bool | None
    record_timestamps: bool | None
    skip_special_tokens: bool | None
    omit_text: bool | None

    json_schema: str | Mapping[str, Any] | None
    """The output must be a JSON value that satisfies this schema: a dict, or JSON text."""
    json_object: bool | None
    """The output must be a JSON object."""
    regex: str | None
    """The entire output must match this regular expression."""
    grammar: str | None
    """The output must be derived from this grammar, in Lark syntax."""
    choices: Sequence[str] | None
    """The output must be one of these strings."""
    structural_tag: str | Mapping[str, Any] | None
    """The output must have this structure: {"type": "structural_tag", "format": …}, or JSON text.
    """
    flexible_whitespace: bool | None
    """For JSON: whether to allow any spaces and line breaks; the default is a single line."""

    priority: int | None
    """Requests with a higher number run first; -100 to 100, default 0."""
    time_limit: float | timedelta | None
    """The time limit of the request, in seconds or as a timedelta. Then it ends with TIME_LIMIT."""
    cache_salt: str | None
    """Cached prefixes are shared only among requests with the same salt."""
    bypass_prefix_cache: bool | None
    """Whether to neither use cached prefixes nor cache this request's prefixes."""
    prediction: str | Sequence[int] | None
    """What the output is expected to be like, such as a file that is to be edited: text, or token
    ids. It changes no token, only how fast they come.
    """
    truncate_prompt_to: int | None
    """Cuts a longer prompt to this many tokens."""
    truncation_side: Literal["left", "right"] | None
    """Which end `truncate_prompt_to` cuts; the default is the left, with the oldest tokens."""

    add_special_tokens: bool | None
    """For a text prompt: whether the tokenizer adds its special tokens; the default is yes."""
    tool_choice: str | Mapping[str, Any] | ToolChoice | None
    """Which of the tools the model may or must call: "auto", "none", "required", OpenAI's
    dictionaries for one function or for allowed tools, or `ToolChoice`. The model is constrained to
    the choice and to the tools' schemas. With "auto" alone it is not, unless a tool has "strict":
    true.
    """
    parallel_tool_calls: bool | None
    """Whether a reply may have several calls. If given, the model is constrained as with
    `tool_choice`.
    """
    add_generation_prompt: bool | None
    continue_final_message: bool | None
    template_arguments: Mapping[str, Any] | str | None
    """For a conversation: additional named values for the chat template, as an object or JSON text.
    """

    model: str | None
    """The intended model, by name or alias. A server without it refuses the request."""
    labels: Mapping[str, str] | None
    """Labels for accounting, at most 16, which appear in the server's logs and traces."""


class GenerationOptions(TurnOptions, total=False):
    """The options of one request; each is optional."""

    request_id: str | None
    """The request's id, 1 to 128 characters of `[A-Za-z0-9._:/-]`; generated if omitted."""
    n: int | None
    """The number of independent continuations to generate; the default is 1."""
    tools: Sequence[Tool | Mapping[str, Any]] | None
    """For a conversation: the functions that the model may call."""
    raw_text: bool | None
    """For a conversation: leave reasoning and tool calls in the text, as the model wrote them."""


@dataclass(frozen=True, slots=True, init=False)
class Request:
    """A prompt with its own options, for `batch`."""

    prompt: Prompt
    options: GenerationOptions

    def __init__(self, prompt: Prompt, **options: Unpack[GenerationOptions]) -> None:
        object.__setattr__(self, "prompt", prompt)
        object.__setattr__(self, "options", options)


OPTION_NAMES = frozenset(GenerationOptions.__annotations__)
"""The names of all options."""
TURN_OPTION_NAMES = frozenset(TurnOptions.__annotations__)
"""The names of the options that can also be used in a tool run."""

_CHAT_OPTIONS = ("tools", "add_generation_prompt", "continue_final_message", "template_arguments")
_CHOICE_OPTIONS = ("tool_choice", "parallel_tool_calls")
_FORMATS = ("json_schema", "json_object", "regex", "grammar", "choices", "structural_tag")

# Where an option goes: the part of the spec, and the field there if it has another name.
_PLACES: dict[str, tuple[str, str]] = {
    **{
        name: ("sampling", name)
        for name in (
            "temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty",
            "presence_penalty", "frequency_penalty", "no_repeat_ngram_size", "logit_bias",
            "allowed_token_ids", "banned_token_ids", "seed",
        )
    },
    **{
        name: ("stop", name)
        for name in (
            "max_tokens", "min_tokens", "stop_token_ids", "eos_token_ids", "ignore_eos",
            "include_stop", "max_reasoning_tokens",
        )
    },
    **{
        name: ("output", name)
        for name in (
            "min_tokens_per_delta", "logprobs", "prompt_logprobs", "logprob_token_ids", "echo",
            "token_details", "record_timestamps", "skip_special_tokens", "omit_text", "raw_text",
        )
    },
    "stop": ("stop", "stop_strings"),
    "delivery": ("output", "delivery"),
    "json_schema": ("structured_output", "json_schema"),
    "regex": ("structured_output", "regex"),
    "grammar": ("structured_output", "grammar"),
    "structural_tag": ("structured_output", "structural_tag"),
    "flexible_whitespace": ("structured_output", "flexible_whitespace"),
    "priority": ("scheduling", "priority"),
    "cache_salt": ("cache", "salt"),
    "bypass_prefix_cache": ("cache", "bypass_prefix_cache"),
    "truncate_prompt_to": ("truncation", "max_prompt_tokens"),
    "truncation_side": ("truncation", "side"),
}  # fmt: skip
_OTHER_NAMES = {
    "max_completion_tokens": "max_tokens",
    "max_new_tokens": "max_tokens",
    "max_length": "max_tokens",
    "response_format": "json_schema",
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choices",
    "guided_grammar": "grammar",
    "stop_sequences": "stop",
    "num_return_sequences": "n",
    "top_logprobs": "logprobs",
    "functions": "tools",
    "function_call": "tool_choice",
    "user": "labels",
    "timeout": "time_limit, or the timeout of the call itself",
}
"""Names of options in other libraries, with their names here."""
_ENUMS: dict[str, dict[str, int]] = {
    "delivery": {"stream": pb.DELIVERY_STREAM, "final": pb.DELIVERY_FINAL},
    "truncation_side": {"left": pb.TRUNCATION_SIDE_LEFT, "right": pb.TRUNCATION_SIDE_RIGHT},
}


def build_spec(prompt: Prompt, options: GenerationOptions | None = None) -> pb.GenerationSpec:
    """Returns the contract's message for a prompt and its options.

    A `GenerationSpec` is copied, and the options are set on the copy.

    Raises:
        TypeError: there is no option with this name, or the prompt has an unsupported type.
        InvalidArgumentError: a value cannot be put in the message (it is out of the field's range
            or type).
    """
    given = {name: value for name, value in (options or {}).items() if value is not None}
    if given.get("json_object") is False:  # no form, which is not a form that is off
        del given["json_object"]
    check_names(given, OPTION_NAMES, "generation option")
    spec = pb.GenerationSpec()
    if isinstance(prompt, pb.GenerationSpec):
        spec.CopyFrom(prompt)
    else:
        set_input(spec, prompt)
    for name, value in given.items():
        try:
            _apply(spec, name, value)
        except HeadraceError:
            raise
        except (TypeError, ValueError, OverflowError, AttributeError) as error:
            raise invalid_argument(name, f"{value!r} does not fit: {error}") from None
    _apply_tool_choice(spec, given)
    formats = [name for name in _FORMATS if given.get(name) not in (None, False)]
    if len(formats) > 1:
        raise invalid_argument(formats[1], f"cannot be combined with {formats[0]}")
    return spec


def check_names(given: Iterable[str], known: Collection[str], what: str) -> None:
    """Refuses unknown option names, suggesting the names that may be meant.

    Raises:
        TypeError: there is no `what` with such a name.
    """
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise TypeError(f"no such {what}: {', '.join(_and_meant(one, known) for one in unknown)}")


def _and_meant(name: str, known: Collection[str]) -> str:
    meant = [_OTHER_NAMES[name]] if name in _OTHER_NAMES else get_close_matches(name, known, 1)
    return f"{name} (is it {meant[0]}?)" if meant else name


def set_input(message: Any, prompt: Prompt) -> None:
    """Puts a prompt in a message that has the fields `text`, `tokens` and `chat`.

    Raises:
        TypeError: the prompt has an unsupported type.
        InvalidArgumentError: the prompt is empty, or contains an invalid value.
    """
    if isinstance(prompt, str):
        try:
            message.text.text = prompt
        except ValueError as error:  # a lone surrogate is no text
            raise invalid_argument("prompt", f"is not valid Unicode text: {error}") from None
        return
    if isinstance(prompt, (bytes, Mapping, pb.GenerationSpec)) or not isinstance(prompt, Iterable):
        raise TypeError(
            "a prompt is a str, a sequence of token ids, or a sequence of messages; "
            f"this is a {type(prompt).__name__}"
        )
    items = list(prompt)
    if not items:
        raise invalid_argument("prompt", "is empty")
    if all(isinstance(item, (Message, Mapping)) for item in items):
        message.chat.messages.extend(
            message_to_proto(cast("Message | MessageDict", item)) for item in items
        )
        return
    if "tokens" not in message.DESCRIPTOR.fields_by_name:
        raise TypeError("token ids are tokenized already")
    try:
        message.tokens.ids.extend(items)
    except (TypeError, ValueError) as error:
        if isinstance(error, TypeError) and not any(isinstance(item, int) for item in items):
            raise TypeError(
                "a prompt that is a sequence holds token ids, or messages (Message or dict)"
            ) from None
        raise invalid_argument("prompt", f"holds what is no token id: {error}") from None


def duration(value: float | timedelta, name: str) -> Duration:
    """Converts seconds or a timedelta to a protobuf Duration.

    Raises:
        InvalidArgumentError: the value is negative or not a finite number.
    """
    seconds = value.total_seconds() if isinstance(value, timedelta) else float(value)
    if not math.isfinite(seconds) or seconds < 0:
        raise invalid_argument(name, f"{value!r} is no length of time")
    whole = math.floor(seconds)
    return Duration(seconds=whole, nanos=min(round((seconds - whole) * 1e9), 999_999_999))


def choices_of(spec: pb.GenerationSpec) -> int:
    """Returns the number of choices of a request."""
    return spec.n if spec.HasField("n") else 1


def _apply(spec: pb.GenerationSpec, name: str, value: Any) -> None:
    if name in _CHOICE_OPTIONS:  # they are one, with the tools
        _require_chat(spec, name)
    elif special := _SPECIAL.get(name):
        special(spec, value)
    elif name in _CHAT_OPTIONS:
        _apply_chat(spec, name, value)
    elif name in ("request_id", "adapter", "n", "model"):
        setattr(spec, name, value)
    elif name == "labels":
        del spec.labels[:]
        spec.labels.extend(pb.Label(name=key, value=item) for key, item in value.items())
    elif name == "prediction":
        _apply_prediction(spec, value)
    elif name == "json_object":
        spec.structured_output.json_object.SetInParent()
    else:
        part, field = _PLACES[name]
        _put(getattr(spec, part), field, _plain(name, value))


def _plain(name: str, value: Any) -> Any:
    """Converts a value to the field's type."""
    if name in _ENUMS:
        if value not in _ENUMS[name]:
            raise invalid_argument(name, f"{value!r} is not one of {', '.join(_ENUMS[name])}")
        return _ENUMS[name][value]
    if name == "stop" and isinstance(value, str):
        return [value]
    if name in ("json_schema", "structural_tag") and not isinstance(value, str):
        return json.dumps(value)
    if name in ("logprobs", "prompt_logprobs") and isinstance(value, bool):
        raise invalid_argument(name, "is a number of candidates; 0 for the token's own only")
    return value


def _put(message: ProtoMessage, field: str, value: Any) -> None:
    kept = getattr(message, field)
    if isinstance(value, Mapping):
        message.ClearField(field)
        kept = getattr(message, field)
        for key, item in value.items():
            kept[int(key)] = item  # JSON has no other keys than strings
    elif hasattr(kept, "extend"):
        message.ClearField(field)
        getattr(message, field).extend(value)
    else:
        setattr(message, field, value)


def _apply_time_limit(spec: pb.GenerationSpec, value: float | timedelta) -> None:
    spec.scheduling.time_limit.CopyFrom(duration(value, "time_limit"))


def _apply_prediction(spec: pb.GenerationSpec, value: str | Sequence[int]) -> None:
    spec.ClearField("prediction")
    if isinstance(value, str):
        spec.prediction.text = value
        return
    try:
        spec.prediction.tokens.ids.extend(value)
    except (TypeError, ValueError) as error:
        raise invalid_argument("prediction", f"is no text, and no token ids: {error}") from None


def _apply_choices(spec: pb.GenerationSpec, value: Sequence[str]) -> None:
    if isinstance(value, str):
        raise invalid_argument("choices", "is a sequence of strings")
    spec.structured_output.choice.choices[:] = value


def _apply_add_special_tokens(spec: pb.GenerationSpec, value: bool) -> None:
    if spec.WhichOneof("input") != "text":
        raise invalid_argument("add_special_tokens", "belongs to a text prompt")
    spec.text.add_special_tokens = value


def _apply_chat(spec: pb.GenerationSpec, name: str, value: Any) -> None:
    _require_chat(spec, name)
    set_chat_option(spec.chat, name, value)


def _require_chat(spec: pb.GenerationSpec, name: str) -> None:
    if spec.WhichOneof("input") != "chat":
        raise invalid_argument(name, "belongs to a prompt of messages")


def _apply_tool_choice(spec: pb.GenerationSpec, given: Mapping[str, Any]) -> None:
    parallel = given.get("parallel_tool_calls")
    choice = choice_to_proto(given.get("tool_choice"), given.get("tools", ()), parallel)
    if choice is None:
        return
    if given.get("tool_choice") is None and spec.chat.HasField("tool_choice"):  # of a raw spec
        if parallel is not None:
            spec.chat.tool_choice.parallel_calls = parallel
    else:
        spec.chat.tool_choice.CopyFrom(choice)


def set_chat_option(chat: pb.ChatInput, name: str, value: Any) -> None:
    """Sets an option that affects a conversation's prompt.

    Raises:
        TypeError: there is no such option.
        InvalidArgumentError: the value is invalid.
    """
    if name not in _CHAT_OPTIONS:
        raise TypeError(f"no such option of a conversation: {name}")
    if name == "tools":
        tools = tools_to_proto(value)
        del chat.tools[:]
        chat.tools.extend(tools)
    elif name == "template_arguments":
        chat.template_arguments_json = json_text(value, name)
    else:
        setattr(chat, name, value)


_SPECIAL: dict[str, Callable[[pb.GenerationSpec, Any], None]] = {
    "time_limit": _apply_time_limit,
    "choices": _apply_choices,
    "add_special_tokens": _apply_add_special_tokens,
}
