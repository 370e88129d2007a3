"""Converts `SamplingOptions` and `StructuredOutput` to the engine's `SamplingParams` and
`GrammarParams`.

An absent field takes the value of the model's generation config.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from headrace.v1 import generation_pb2

from engine.contract.engine_client import ModelInfo
from engine.contract.sampling_params import (
    MAX_LOGIT_BIAS,
    SCALARS,
    GrammarKind,
    GrammarParams,
    SamplingParams,
    StopParams,
)
from engine.contract.token_ids import TokenIds, TokenValues
from service.convert.values import check_ids
from service.errors.call_errors import FieldError

MAX_CHOICE_STRINGS = 16_384
"""The most strings in StructuredOutput.choice."""

_TEXT_FORMATS = {
    "json_schema": GrammarKind.JSON_SCHEMA,
    "regex": GrammarKind.REGEX,
    "grammar": GrammarKind.LARK,
    "structural_tag": GrammarKind.STRUCTURAL_TAG,
}


def sampling_params(options: generation_pb2.SamplingOptions, info: ModelInfo) -> SamplingParams:
    """Return the effective parameters. A field that is not set takes its value from the model's
    generation config.

    Raises:
        FieldError: a value is out of bounds, or no token could ever be chosen.
    """
    default = info.default_sampling
    if len(options.logit_bias) > MAX_LOGIT_BIAS:  # before they are looked at
        raise FieldError(
            "sampling.logit_bias",
            f"has {len(options.logit_bias)} entries; at most {MAX_LOGIT_BIAS} are allowed "
            "(limits.max_logit_bias)",
        )
    bias: list[tuple[int, float]] = []
    for token_id, value in options.logit_bias.items():
        if token_id >= info.vocab_size:
            raise FieldError(
                f"sampling.logit_bias[{token_id}]",
                f"is not a token id; token ids are below {info.vocab_size}",
            )
        bias.append((token_id, value))

    given: Any = options.HasField  # its stubs want literal names
    scalars: dict[str, Any] = {
        name: getattr(options if given(name) else default, name) for name in SCALARS
    }

    def ids(name: str) -> TokenIds:
        listed: Sequence[int] = getattr(options, name)
        taken = check_ids(listed, f"sampling.{name}", info.vocab_size)
        inherited: TokenIds = getattr(default, name)
        return TokenIds.set_of(taken) or inherited

    params = SamplingParams(
        **scalars,
        logit_bias=TokenValues.of(bias) or default.logit_bias,
        allowed_token_ids=ids("allowed_token_ids"),
        banned_token_ids=ids("banned_token_ids"),
        seed=options.seed if options.HasField("seed") else secrets.randbits(63),
    )
    _check_something_is_left(params, info.vocab_size)
    return params


def _check_something_is_left(params: SamplingParams, vocab_size: int) -> None:
    allowed, banned = params.allowed_token_ids, params.banned_token_ids
    if allowed:
        if not allowed.without(banned):
            raise FieldError(
                "sampling.allowed_token_ids",
                "are all among banned_token_ids, so that no token could be generated; "
                "take one of them out there",
            )
    elif len(banned) >= vocab_size:
        raise FieldError(
            "sampling.banned_token_ids",
            "are the whole vocabulary, so that no token could be generated; leave one out",
        )


def check_min_tokens(sampling: SamplingParams, stop: StopParams) -> None:
    """Check that a token can be chosen before min_tokens, while ids that end the output are
    forbidden.

    Raises:
        FieldError: no token can be chosen.
    """
    if not stop.min_tokens:
        return
    allowed = sampling.allowed_token_ids.without(sampling.banned_token_ids)
    if allowed and stop.ending_token_ids.issuperset(allowed):
        raise FieldError(
            "stop.min_tokens",
            f"is {stop.min_tokens}, and sampling.allowed_token_ids are all ids that end the "
            "output, so that no token could be generated; allow another id, or set it to 0",
        )


def grammar_params(output: generation_pb2.StructuredOutput) -> GrammarParams:
    """Return the requested grammar. The engine checks whether a schema, expression or grammar is
    valid.

    Raises:
        FieldError: no grammar is set, or its text is empty or too long.
    """
    kind = output.WhichOneof("format")
    if output.flexible_whitespace and kind not in ("json_schema", "json_object", "structural_tag"):
        raise FieldError(
            "structured_output.flexible_whitespace",
            "is for json_schema, json_object and structural_tag alone",
        )
    match kind:
        case "json_schema" | "regex" | "grammar" | "structural_tag":
            return GrammarParams(
                kind=_TEXT_FORMATS[kind],
                text=getattr(output, kind),
                flexible_whitespace=output.flexible_whitespace,
            )
        case "json_object":
            return GrammarParams(
                kind=GrammarKind.JSON_OBJECT, flexible_whitespace=output.flexible_whitespace
            )
        case "choice":
            choices = output.choice.choices
            if len(choices) > MAX_CHOICE_STRINGS:  # before they are looked at
                raise FieldError(
                    "structured_output.choice",
                    f"has {len(choices)} strings; at most {MAX_CHOICE_STRINGS} are allowed",
                )
            return GrammarParams(kind=GrammarKind.CHOICE, choices=tuple(choices))
        case _:
            raise FieldError(
                "structured_output",
                "has no format; set one of json_schema, json_object, regex, grammar, choice and "
                "structural_tag",
            )
