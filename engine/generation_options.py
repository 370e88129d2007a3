"""From generation configs and keyword options, as users of transformers know them, to the engine's
parameters.

A generation config is read by attribute, so that neither torch nor transformers is needed here. An
option that this engine does not do is dropped with a warning or refused, as
`drop_unsupported_processors` says; an unknown keyword is always refused.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from engine.errors import InvalidRequestError, UnsupportedFeatureError
from engine.sampling_params import (
    LogprobParams,
    SamplingParams,
    StopParams,
    check_stop_strings,
)
from engine.types import TokenId

logger = logging.getLogger(__name__)

DEFAULT_MAX_NEW_TOKENS = 20
"""What transformers generates when nothing says how much."""

_NEUTRAL: dict[str, tuple[object, ...]] = {
    # options of a generation config that change the output and that this engine does not do: their
    # neutral values
    "num_beams": (None, 1),
    "num_return_sequences": (None, 1),
    "typical_p": (None, 1.0),
    "epsilon_cutoff": (None, 0.0),
    "eta_cutoff": (None, 0.0),
    "top_h": (None,),
    "no_repeat_ngram_size": (None, 0),
    "encoder_repetition_penalty": (None, 1.0),
    "encoder_no_repeat_ngram_size": (None, 0),
    "bad_words_ids": (None, []),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "suppress_tokens": (None, []),
    "begin_suppress_tokens": (None, []),
    "sequence_bias": (None, {}),
    "exponential_decay_length_penalty": (None,),
    "guidance_scale": (None, 1.0),
    "watermarking_config": (None,),
    "penalty_alpha": (None, 0.0),
    "dola_layers": (None,),
    "max_time": (None,),
    "remove_invalid_values": (None, False),
    "renormalize_logits": (None, False),
}

_SAMPLING_KEYS = frozenset(
    {
        "do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty",
        "presence_penalty", "frequency_penalty", "logit_bias", "seed",
    }
)  # fmt: skip
_STOP_KEYS = frozenset(
    {"min_new_tokens", "stop_strings", "stop_token_ids", "ignore_eos", "logprobs"}
)
REQUEST_KEYS = _SAMPLING_KEYS | _STOP_KEYS
"""The keywords that a single request may set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """One request's parameters, complete, and its stop strings, which are matched where the text is
    made.
    """

    sampling: SamplingParams
    stop: StopParams
    logprobs: LogprobParams | None
    stop_strings: tuple[str, ...]


class GenerationDefaults:
    """The parameters that requests have unless they say otherwise, read from a generation config
    once.
    """

    def __init__(
        self,
        generation_config: object | None,
        model_eos_token_ids: tuple[TokenId, ...],
        *,
        drop_unsupported: bool,
        return_logprobs: bool,
        vocab_size: int | None = None,
    ) -> None:
        """Read a generation config.

        Args:
            generation_config: None: nothing is set.
            model_eos_token_ids: where the generation config names none.
            drop_unsupported, return_logprobs: see ContinuousBatchingConfig.
            vocab_size: end-of-sequence ids of the generation config from here on are left out: they
                cannot be generated, and no request is to blame for them. None: all are kept.
        """
        self._values = {
            name: getattr(generation_config, name, None)
            for name in (*REQUEST_KEYS, "max_new_tokens", "max_length", "eos_token_id")
        }
        self._eos_token_ids = model_eos_token_ids
        if self._values["eos_token_id"] is not None:
            ids = _ids("eos_token_id", self._values["eos_token_id"])
            self._eos_token_ids = tuple(
                token for token in ids if token >= 0 and (vocab_size is None or token < vocab_size)
            )
        self._return_logprobs = return_logprobs
        for name, neutral in _NEUTRAL.items():
            value = getattr(generation_config, name, None)
            if any(value is entry or value == entry for entry in neutral):
                continue
            message = f"is {value!r}; this engine does not do it"
            if not drop_unsupported:
                raise UnsupportedFeatureError(
                    name, message + "; remove it, or set drop_unsupported_processors=True"
                )
            logger.warning("generation config: %s %s; it is dropped", name, message)

    def resolve(
        self,
        num_prompt_tokens: int,
        *,
        max_new_tokens: int | None,
        eos_token_id: int | Iterable[int] | None,
        overrides: Mapping[str, Any],
    ) -> RequestOptions:
        """One request's parameters.

        Raises:
            InvalidRequestError: an unknown keyword, or a value out of its bounds.
            UnsupportedFeatureError: a keyword that this engine knows and does not do.
        """
        _check_keys(overrides)
        overrides = {name: value for name, value in overrides.items() if value is not None}
        values = {**self._values, **overrides}
        if "temperature" in overrides and "do_sample" not in overrides:
            values["do_sample"] = overrides["temperature"] != 0
        eos = self._eos(eos_token_id)
        limit = self._max_tokens(num_prompt_tokens, max_new_tokens)
        min_tokens = _integer("min_new_tokens", values["min_new_tokens"] or 0)
        stop_strings = values["stop_strings"] or ()
        stop_strings = (stop_strings,) if isinstance(stop_strings, str) else tuple(stop_strings)
        check_stop_strings(stop_strings)
        stop = StopParams(
            max_tokens=limit,
            min_tokens=min_tokens
            if "min_new_tokens" in overrides
            else min(min_tokens, max(limit, 0)),
            stop_token_ids=_ids("stop_token_ids", values["stop_token_ids"]),
            eos_token_ids=eos,
            ignore_eos=bool(values["ignore_eos"]),
        )
        top_n = values["logprobs"]
        if top_n is None and self._return_logprobs:
            top_n = 0
        logprobs = None if top_n is None else LogprobParams(top_n=_integer("logprobs", top_n))
        return RequestOptions(
            sampling=_sampling(values), stop=stop, logprobs=logprobs, stop_strings=stop_strings
        )

    def _eos(self, eos_token_id: int | Iterable[int] | None) -> tuple[TokenId, ...]:
        if eos_token_id is None:
            return self._eos_token_ids
        ids = _ids("eos_token_id", eos_token_id)
        return tuple(token for token in ids if token >= 0)  # −1 is a way to say "none"

    def _max_tokens(self, num_prompt_tokens: int, max_new_tokens: int | None) -> int:
        limit = max_new_tokens if max_new_tokens is not None else self._values["max_new_tokens"]
        if limit is not None:
            return _integer("max_new_tokens", limit)
        max_length = self._values["max_length"]
        if max_length is not None and max_length > num_prompt_tokens:
            return _integer("max_length", max_length) - num_prompt_tokens
        return DEFAULT_MAX_NEW_TOKENS


def _check_keys(overrides: Mapping[str, Any]) -> None:
    for name, value in overrides.items():
        if name in REQUEST_KEYS:
            continue
        if name in _NEUTRAL:
            if not any(value is entry or value == entry for entry in _NEUTRAL[name]):
                raise UnsupportedFeatureError(name, f"is {value!r}; this engine does not do it yet")
            continue
        raise InvalidRequestError(
            name,
            f"is not an option of a request; the options are {', '.join(sorted(REQUEST_KEYS))}",
        )


def _sampling(values: Mapping[str, Any]) -> SamplingParams:
    sampled = bool(values["do_sample"])
    bias = values["logit_bias"] or {}
    if not isinstance(bias, Mapping):
        raise InvalidRequestError("logit_bias", "must map token ids to numbers")
    seed = values["seed"]
    temperature = _number("temperature", values["temperature"], 1.0)
    return SamplingParams(
        temperature=temperature if sampled else 0.0,
        top_k=_integer("top_k", values["top_k"] or 0),
        top_p=_number("top_p", values["top_p"], 1.0),
        min_p=_number("min_p", values["min_p"], 0.0),
        repetition_penalty=_number("repetition_penalty", values["repetition_penalty"], 1.0),
        presence_penalty=_number("presence_penalty", values["presence_penalty"], 0.0),
        frequency_penalty=_number("frequency_penalty", values["frequency_penalty"], 0.0),
        logit_bias=tuple(
            (TokenId(_integer("logit_bias", token)), _number(f"logit_bias[{token}]", value, 0.0))
            for token, value in bias.items()
        ),
        seed=secrets.randbits(64) if seed is None else _integer("seed", seed),
    )


def _number(name: str, value: object, neutral: float) -> float:
    if value is None:
        return neutral
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidRequestError(name, f"is {value!r}; it must be a number")
    return float(value)


def _integer(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(name, f"is {value!r}; it must be a whole number")
    return value


def _ids(name: str, value: object) -> tuple[TokenId, ...]:
    if value is None:
        return ()
    if isinstance(value, int):
        return (TokenId(value),)
    if isinstance(value, Iterable) and not isinstance(value, str):
        return tuple(TokenId(_integer(f"{name}[{i}]", entry)) for i, entry in enumerate(value))
    raise InvalidRequestError(name, f"is {value!r}; it must be a token id or a list of them")
