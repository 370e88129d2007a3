"""Translates the gateway's `GenerateRequest` to a request in our own contract.

As in our contract, an omitted field keeps the model's default. For fields that the protocol cannot
leave absent, the meaningless value (0 for top_p or a repetition penalty) counts as omitted.
`service.convert` checks everything as usual. This module only makes the checks that must come
before a list is copied, and checks the fields that our contract lacks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.v1 import generation_pb2, generation_service_pb2

from engine.contract.sampling_params import MAX_LOGIT_BIAS, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS
from service.convert.sampling import MAX_CHOICE_STRINGS
from service.errors.call_errors import FieldError, UnsupportedFieldError

_SEED_BITS = 0xFFFF_FFFF
_NOT_HERE = (
    ("mm_inputs", "images, audio and video are not supported by this server"),
    ("media_refs", "images, audio and video are not supported by this server"),
    ("kv_transfer_params", "this server neither sends its KV cache to others nor takes theirs"),
    (
        "kv_transfer_params_json",
        "this server neither sends its KV cache to others nor takes theirs",
    ),
)


def generation(
    request: Any, max_context_tokens: int
) -> generation_service_pb2.GenerateStreamRequest:
    """Convert a gateway request to our contract.

    Args:
        request: a `vllm.grpc.engine.GenerateRequest`.
        max_context_tokens: the model's context length; at most this many token ids are copied.

    Raises:
        FieldError: a field is wrong or asks for something that is not supported. The error uses the
            field's name in the gateway's protocol.
    """
    _refuse_unsupported(request)
    params = request.sampling_params
    message = generation_service_pb2.GenerateStreamRequest()
    spec = message.spec
    spec.request_id = request.request_id
    most = _most_prompt_tokens(params, max_context_tokens)
    match request.WhichOneof("input"):
        case "tokenized":
            ids = request.tokenized.input_ids
            first = 0 if most is None else max(0, len(ids) - most)
            if len(ids) - first > max_context_tokens:
                raise FieldError(
                    "tokenized.input_ids",
                    f"comes to {len(ids) - first} tokens; the model's context has "
                    f"{max_context_tokens} (GetModelInfoResponse.max_context_length): shorten it, "
                    "or set sampling_params.truncate_prompt_tokens",
                )
            spec.tokens.ids.extend(ids[first:])
        case "text":
            spec.text.text = request.text
            if most is not None:
                spec.truncation.max_prompt_tokens = most
                spec.truncation.side = generation_pb2.TRUNCATION_SIDE_LEFT
        case _:
            raise FieldError("input", "is missing; set one of tokenized and text")
    if request.HasField("sampling_params"):
        _set_sampling(params, spec.sampling)
        _set_stop(params, spec.stop)
        if params.n:
            spec.n = params.n
        _set_form(params, spec)
    _set_output(request, spec.output)
    return message


def _refuse_unsupported(request: Any) -> None:
    for name, why in _NOT_HERE:
        if request.HasField(name):
            raise UnsupportedFieldError(name, f"{why}; leave it out")
    if request.extra_mm_inputs:
        raise UnsupportedFieldError("extra_mm_inputs", f"{_NOT_HERE[0][1]}; leave it out")
    if request.data_parallel_rank:
        raise FieldError(
            "data_parallel_rank",
            f"is {request.data_parallel_rank}; this server has one rank, which is 0",
        )


def _most_prompt_tokens(params: Any, max_context_tokens: int) -> int | None:
    """Return how many of the prompt's last tokens to keep; None if the whole prompt must fit."""
    if not params.HasField("truncate_prompt_tokens"):
        return None
    most: int = params.truncate_prompt_tokens
    if most == -1:
        return max_context_tokens - 1  # room for one token of output
    if most < 1:
        raise FieldError(
            "sampling_params.truncate_prompt_tokens",
            f"is {most}; it must be 1 or more, or -1 for as many as fit",
        )
    return most


def _set_sampling(params: Any, sampling: generation_pb2.SamplingOptions) -> None:
    if params.HasField("temperature"):
        sampling.temperature = params.temperature
    if params.top_p:
        sampling.top_p = params.top_p
    if params.repetition_penalty:
        sampling.repetition_penalty = params.repetition_penalty
    sampling.top_k = params.top_k
    sampling.min_p = params.min_p
    sampling.presence_penalty = params.presence_penalty
    sampling.frequency_penalty = params.frequency_penalty
    if params.HasField("seed"):
        sampling.seed = params.seed & _SEED_BITS  # our seeds are not negative
    _bound("sampling_params.logit_bias", params.logit_bias, MAX_LOGIT_BIAS)
    for token_id, bias in params.logit_bias.items():
        if token_id < 0:
            raise FieldError(
                f"sampling_params.logit_bias[{token_id}]", "is not a token id; they begin at 0"
            )
        sampling.logit_bias[token_id] = bias


def _set_stop(params: Any, stop: generation_pb2.StopOptions) -> None:
    if params.HasField("max_tokens"):
        stop.max_tokens = params.max_tokens
    stop.min_tokens = params.min_tokens
    stop.ignore_eos = params.ignore_eos
    _bound("sampling_params.stop", params.stop, MAX_STOP_STRINGS)
    stop.stop_strings.extend(params.stop)
    _bound("sampling_params.stop_token_ids", params.stop_token_ids, MAX_STOP_TOKEN_IDS)
    stop.stop_token_ids.extend(params.stop_token_ids)
    # It is about text, which this protocol carries none of; without stop strings it asks nothing.
    stop.include_stop = params.include_stop_str_in_output and bool(params.stop)


def _set_form(params: Any, spec: generation_pb2.GenerationSpec) -> None:
    form = spec.structured_output
    match params.WhichOneof("constraint"):
        case "json_schema":
            form.json_schema = params.json_schema
        case "regex":
            form.regex = params.regex
        case "grammar":
            form.grammar = params.grammar
        case "structural_tag":
            form.structural_tag = params.structural_tag
        case "json_object":
            if not params.json_object:
                raise FieldError("sampling_params.json_object", "is false; leave it out")
            form.json_object.SetInParent()
        case "choice":
            choices = params.choice.choices
            _bound("sampling_params.choice", choices, MAX_CHOICE_STRINGS)
            form.choice.choices.extend(choices)
        case _:
            spec.ClearField("structured_output")


def _set_output(request: Any, output: generation_pb2.OutputOptions) -> None:
    params = request.sampling_params
    if not request.stream:
        output.delivery = generation_pb2.DELIVERY_FINAL
    for name in ("logprobs", "prompt_logprobs"):
        if params.HasField(name):
            count = getattr(params, name)
            if count < 0:
                raise FieldError(
                    f"sampling_params.{name}",
                    f"is {count}; say how many candidates each token shall have (0 or more): the "
                    "whole vocabulary is not sent",
                )
            setattr(output, name, count)
    # The text is made for stop strings alone: the gateway makes its own.
    output.omit_text = not params.stop
    if params.stop:
        output.skip_special_tokens = params.skip_special_tokens


def _bound(field: str, listed: Sequence[object], most: int) -> None:
    """Refuse a list that is too long before it is copied."""
    if len(listed) > most:
        raise FieldError(field, f"has {len(listed)} entries; at most {most} are allowed")
