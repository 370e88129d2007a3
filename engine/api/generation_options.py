"""Converts transformers-style generation configs and keyword options to the engine's parameters.

Fields that a generation config leaves open (None) come from the model's own config, then from
transformers' defaults, as for `model.generate`. Generation configs are read by attribute, so
neither torch nor transformers is imported here. `drop_unsupported_processors` decides whether an
option that this engine does not support is dropped with a warning or refused. An unknown keyword is
always refused.
"""

from __future__ import annotations

import itertools
import logging
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from engine.contract.errors import InvalidRequestError, UnsupportedFeatureError
from engine.contract.request import GenerationRequest
from engine.contract.sampling_params import (
    DEFAULT_TOP_K,
    MAX_CHOICES,
    SCALARS,
    GrammarParams,
    LogprobParams,
    SamplingParams,
    StopParams,
    check_stop_strings,
)
from engine.contract.token_ids import TokenIds, TokenValues
from engine.contract.types import NO_CALLER, CallerKey, RequestId, TokenId
from engine.sampling.random import derived_seed

logger = logging.getLogger(__name__)

DEFAULT_MAX_NEW_TOKENS = 20
"""The number of tokens transformers generates by default."""

_NEUTRAL: dict[str, tuple[object, ...]] = {
    # options of a generation config that change the output and that this engine does not support,
    # with their neutral values
    "num_beams": (None, 1),
    "epsilon_cutoff": (None, 0.0),
    "eta_cutoff": (None, 0.0),
    "top_h": (None,),
    "encoder_repetition_penalty": (None, 1.0),
    "encoder_no_repeat_ngram_size": (None, 0),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "force_words_ids": (None, []),
    "constraints": (None, []),
    "begin_suppress_tokens": (None, []),
    "sequence_bias": (None, {}, []),
    "exponential_decay_length_penalty": (None,),
    "guidance_scale": (None, 1.0),
    "watermarking_config": (None,),
    "penalty_alpha": (None, 0.0),
    "dola_layers": (None,),
    "token_healing": (None, False),
    "max_time": (None,),
    # With it, `generate` goes on if a model returns NaN; here such a request fails.
    "remove_invalid_values": (None, False),
}
# renormalize_logits is not among them: shifted logits draw the same tokens, and log-probabilities
# are reported before any processing.

_CONFIG_KEYS = frozenset(
    {
        "do_sample", *SCALARS, "logit_bias", "seed", "suppress_tokens", "bad_words_ids",
        "num_return_sequences", "min_new_tokens", "stop_strings", "stop_token_ids", "ignore_eos",
        "logprobs",
    }
)  # fmt: skip
"""Options that can be set both in a generation config and for a single request."""
REQUEST_KEYS = _CONFIG_KEYS | {
    "allowed_token_ids", "banned_token_ids", "logprob_token_ids", "prompt_logprobs", "n", "grammar",
    "priority", "time_limit_s", "cache_salt", "bypass_prefix_cache", "caller", "weight", "adapter",
}  # fmt: skip
"""The keywords allowed for a single request."""
_CHOICES_KEYS = ("n", "num_return_sequences")
_LENGTH_KEYS = ("max_new_tokens", "max_length", "min_length", "eos_token_id")


class GenerationDefaults:
    """The default parameters of requests, read once from generation configs."""

    def __init__(
        self,
        generation_config: object | None,
        model_eos_token_ids: tuple[TokenId, ...],
        *,
        drop_unsupported: bool,
        return_logprobs: bool,
        model_generation_config: object | None = None,
        vocab_size: int | None = None,
        seed: int | None = None,
    ) -> None:
        """Read generation configs.

        Args:
            generation_config: the caller's config, or None to set nothing.
            model_generation_config: the model's own config, for fields that the first one leaves
                open; None if it has none.
            model_eos_token_ids: used if neither config has any.
            drop_unsupported, return_logprobs: see ContinuousBatchingConfig.
            vocab_size: end-of-sequence and banned ids in the generation config that are not below
                this value are ignored, because they can never be generated and the request did not
                set them. If None, all are kept.
            seed: the seed from which requests without a seed get theirs, in order. If None, the
                generation config's seed is used; if that is not set either, the system's
                randomness.

        Raises:
            UnsupportedFeatureError: the engine does not support an option, and unsupported options
                are not dropped.
            InvalidRequestError: num_return_sequences is out of bounds.
        """

        def value_of(name: str) -> Any:
            value = getattr(generation_config, name, None)
            return getattr(model_generation_config, name, None) if value is None else value

        self._values: dict[str, Any] = {
            name: value_of(name) for name in (*_CONFIG_KEYS, *_LENGTH_KEYS)
        }
        own_seed = self._values.pop("seed")
        if seed is None and own_seed is not None:
            seed = _integer("seed", own_seed)
        self._seed = seed
        self._seed_indices = itertools.count()
        self._drop_unsupported = drop_unsupported
        self._vocab_size = vocab_size
        self._eos_token_ids = model_eos_token_ids
        if self._values["eos_token_id"] is not None:
            self._eos_token_ids = self._in_vocabulary("eos_token_id")
        self._values["suppress_tokens"] = self._in_vocabulary("suppress_tokens")
        self._values["bad_words_ids"] = self._single_bad_words()
        self.num_return_sequences = self._values["num_return_sequences"] or 1
        self._return_logprobs = return_logprobs
        for name, neutral in _NEUTRAL.items():
            value = value_of(name)
            if not any(value is entry or value == entry for entry in neutral):
                self._drop(name, f"is {value!r}; this engine does not do it")

    @property
    def num_return_sequences(self) -> int:
        """The number of choices for requests that do not set it.

        Raises:
            InvalidRequestError: it is set to a value outside 1 to MAX_CHOICES.
        """
        return self._num_return_sequences

    @num_return_sequences.setter
    def num_return_sequences(self, number: int) -> None:
        if not 1 <= _integer("num_return_sequences", number) <= MAX_CHOICES:
            raise InvalidRequestError(
                "num_return_sequences", f"is {number}; it must be between 1 and {MAX_CHOICES}"
            )
        self._num_return_sequences = number

    def _drop(self, name: str, message: str) -> None:
        if not self._drop_unsupported:
            raise UnsupportedFeatureError(
                name, message + "; remove it, or set drop_unsupported_processors=True"
            )
        logger.warning("generation config: %s %s; it is dropped", name, message)

    def _in_vocabulary(self, name: str) -> tuple[TokenId, ...]:
        return tuple(
            token
            for token in _ids(name, self._values[name])
            if token >= 0 and (self._vocab_size is None or token < self._vocab_size)
        )

    def _single_bad_words(self) -> list[list[TokenId]]:
        words = _bad_words(self._values["bad_words_ids"])
        longer = [word for word in words if len(word) > 1]
        if longer:
            self._drop("bad_words_ids", f"has {longer[0]!r}; this engine bans single tokens only")
        single = [word for word in words if len(word) == 1]
        return [
            word for word in single if self._vocab_size is None or 0 <= word[0] < self._vocab_size
        ]

    def resolve(
        self,
        request_id: str,
        prompt: tuple[TokenId, ...],
        *,
        max_new_tokens: int | None,
        eos_token_id: int | Iterable[int] | None,
        overrides: Mapping[str, Any],
    ) -> tuple[GenerationRequest, tuple[str, ...]]:
        """Complete one request's parameters. A keyword set to None counts as omitted.

        Returns:
            The request, whose bounds are checked at admission, and its stop strings, which the
                detokenizer matches.

        Raises:
            InvalidRequestError: a keyword is unknown, or a value is out of bounds.
            UnsupportedFeatureError: the engine knows a keyword but does not support it.
        """
        _check_keys(overrides)
        overrides = {name: value for name, value in overrides.items() if value is not None}
        values = {**dict.fromkeys(REQUEST_KEYS), **self._values, **overrides}
        if "temperature" in overrides and "do_sample" not in overrides:
            values["do_sample"] = overrides["temperature"] != 0
        eos = self._eos(eos_token_id)
        limit = self._max_tokens(len(prompt), max_new_tokens)
        stop_strings = values["stop_strings"] or ()
        stop_strings = (stop_strings,) if isinstance(stop_strings, str) else tuple(stop_strings)
        check_stop_strings(stop_strings)
        stop = StopParams(
            max_tokens=limit,
            min_tokens=self._min_tokens(len(prompt), limit, overrides),
            stop_token_ids=_packed("stop_token_ids", values),
            eos_token_ids=TokenIds.of(eos, "eos_token_id"),
            ignore_eos=bool(values["ignore_eos"]),
        )
        spec = GenerationRequest(
            request_id=RequestId(request_id),
            prompt=TokenIds.of(prompt, "prompt"),
            sampling=_sampling(values, eos),
            stop=stop,
            logprobs=self._logprobs(values),
            prompt_logprobs=_optional_integer("prompt_logprobs", values["prompt_logprobs"]),
            grammar=_grammar(values["grammar"]),
            adapter=_adapter(values["adapter"]),
            n=_choices(overrides, self.num_return_sequences),
            priority=_optional_integer("priority", values["priority"]) or 0,
            cache_salt=_salt(values["cache_salt"]),
            bypass_prefix_cache=_switch("bypass_prefix_cache", values["bypass_prefix_cache"]),
            time_limit_s=_time_limit(values["time_limit_s"]),
            caller=_caller(values["caller"]),
            weight=_number("weight", values["weight"], 1.0),
        )
        if values.get("seed") is None:
            # Drawn last, so that a request that is refused above uses up no seed.
            spec = replace(spec, sampling=replace(spec.sampling, seed=self._draw_seed()))
        return spec, stop_strings

    def _draw_seed(self) -> int:
        if self._seed is None:
            return secrets.randbits(64)
        return derived_seed(self._seed, next(self._seed_indices))

    def _logprobs(self, values: Mapping[str, Any]) -> LogprobParams | None:
        top_n = _optional_integer("logprobs", values["logprobs"])
        token_ids = _packed("logprob_token_ids", values)
        if top_n is None and not self._return_logprobs and not token_ids:
            return None
        return LogprobParams(top_n=top_n or 0, token_ids=token_ids)

    def _eos(self, eos_token_id: int | Iterable[int] | None) -> tuple[TokenId, ...]:
        if eos_token_id is None:
            return self._eos_token_ids
        ids = _ids("eos_token_id", eos_token_id)
        return tuple(token for token in ids if token >= 0)  # −1 means none

    def _max_tokens(self, num_prompt_tokens: int, max_new_tokens: int | None) -> int:
        limit = max_new_tokens if max_new_tokens is not None else self._values["max_new_tokens"]
        if limit is not None:
            return _integer("max_new_tokens", limit)
        max_length = self._values["max_length"]
        if max_length is not None and max_length > num_prompt_tokens:
            return _integer("max_length", max_length) - num_prompt_tokens
        return DEFAULT_MAX_NEW_TOKENS

    def _min_tokens(self, num_prompt_tokens: int, limit: int, overrides: Mapping[str, Any]) -> int:
        """Return the request's own min_tokens, or the generation config's, which is capped at the
        request's max_tokens.
        """
        if "min_new_tokens" in overrides:
            return _integer("min_new_tokens", overrides["min_new_tokens"])
        least = self._values["min_new_tokens"]
        if least is None and self._values["min_length"] is not None:
            # min_new_tokens takes precedence, as in `generate`.
            least = max(_integer("min_length", self._values["min_length"]) - num_prompt_tokens, 0)
        return min(_integer("min_new_tokens", least or 0), max(limit, 0))


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


def _sampling(values: Mapping[str, Any], eos: tuple[TokenId, ...]) -> SamplingParams:
    """Return a request's sampling parameters. The seed is 0 if the request has none."""
    sampled = bool(values["do_sample"])
    bias = values["logit_bias"] or {}
    if not isinstance(bias, Mapping):
        raise InvalidRequestError("logit_bias", "must map token ids to numbers")
    temperature = _number("temperature", values["temperature"], 1.0)
    top_k = values["top_k"]
    if top_k is None:
        top_k = DEFAULT_TOP_K if sampled else 0
    scalars: dict[str, Any] = {
        name: (
            _number(name, values[name], neutral)
            if isinstance(neutral, float)
            else _integer(name, values[name] or neutral)
        )
        for name, neutral in SCALARS.items()
        if name not in ("temperature", "top_k")
    }
    return SamplingParams(
        temperature=temperature if sampled else 0.0,
        top_k=_integer("top_k", top_k),
        **scalars,
        logit_bias=TokenValues.of(
            (
                (_integer("logit_bias", token), _number(f"logit_bias[{token}]", value, 0.0))
                for token, value in bias.items()
            ),
            "logit_bias",
        ),
        allowed_token_ids=_allowed(values),
        banned_token_ids=TokenIds.of(_banned(values, eos), "banned_token_ids"),
        seed=_integer("seed", values.get("seed") or 0),
    )


def _allowed(values: Mapping[str, Any]) -> TokenIds:
    """Return the allowed token ids, or an empty value if all ids are allowed."""
    allowed = _packed("allowed_token_ids", values)
    if values["allowed_token_ids"] is not None and not allowed:
        raise InvalidRequestError(
            "allowed_token_ids",
            "is empty, so that no token could be generated; list at least one id, or leave it out "
            "to allow all",
        )
    return allowed


def _banned(values: Mapping[str, Any], eos: tuple[TokenId, ...]) -> tuple[TokenId, ...]:
    """Return the union of banned_token_ids, suppress_tokens and the bad words.

    Bad words that are end-of-sequence ids are left out, because `generate` ignores them too.
    """
    words = _bad_words(values["bad_words_ids"])
    for word in words:
        if len(word) != 1:
            raise UnsupportedFeatureError(
                "bad_words_ids", f"has {word!r}; this engine bans single tokens only"
            )
    listed = (
        *_ids("banned_token_ids", values["banned_token_ids"]),
        *_ids("suppress_tokens", values["suppress_tokens"]),
        *(word[0] for word in words if word[0] not in eos),
    )
    return tuple(dict.fromkeys(listed))


def _bad_words(value: object) -> list[list[TokenId]]:
    if value is None:
        return []
    if not isinstance(value, Iterable):
        raise InvalidRequestError("bad_words_ids", f"is {value!r}; it must be lists of token ids")
    words: list[list[TokenId]] = []
    for index, word in enumerate(value):
        name = f"bad_words_ids[{index}]"
        if isinstance(word, int) or word is None:
            raise InvalidRequestError(name, f"is {word!r}; it must be a list of token ids")
        words.append(list(_ids(name, word)))
        if not words[-1]:
            raise InvalidRequestError(name, "is empty; it must have at least one token id")
    return words


def _choices(overrides: Mapping[str, Any], default: int) -> int:
    """Return the number of choices, which may be given as n or as transformers'
    num_return_sequences.
    """
    given = {_integer(name, overrides[name]) for name in _CHOICES_KEYS if name in overrides}
    if len(given) > 1:
        raise InvalidRequestError(
            "n", "and num_return_sequences differ; they are the same option, give one"
        )
    return given.pop() if given else default


def _grammar(value: object) -> GrammarParams | None:
    if value is not None and not isinstance(value, GrammarParams):
        raise InvalidRequestError("grammar", f"is {value!r}; it must be a GrammarParams")
    return value


def _adapter(value: object) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    raise InvalidRequestError("adapter", f"is {value!r}; it must be an adapter's name")


def _salt(value: object) -> bytes:
    if isinstance(value, bytes):
        return value
    if value is None or isinstance(value, str):
        return (value or "").encode("utf-8", "surrogatepass")
    raise InvalidRequestError("cache_salt", f"is {value!r}; it must be text or bytes")


def _caller(value: object) -> CallerKey:
    if value is None:
        return NO_CALLER
    if not isinstance(value, str):
        raise InvalidRequestError("caller", f"is {value!r}; it must be text")
    return CallerKey(value)


def _switch(name: str, value: object) -> bool:
    if value is not None and not isinstance(value, bool):
        raise InvalidRequestError(name, f"is {value!r}; it must be True or False")
    return bool(value)


def _time_limit(value: object) -> float | None:
    if value is None:
        return None
    seconds = _number("time_limit_s", value, 0.0)
    if not seconds > 0:
        raise InvalidRequestError("time_limit_s", f"is {value!r}; it must be above zero")
    return seconds


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


def _optional_integer(name: str, value: object) -> int | None:
    return None if value is None else _integer(name, value)


def _packed(name: str, values: Mapping[str, Any]) -> TokenIds:
    return TokenIds.of(_ids(name, values[name]), name)


def _ids(name: str, value: object) -> tuple[TokenId, ...]:
    if value is None:
        return ()
    if isinstance(value, int):
        return (TokenId(_integer(name, value)),)
    if isinstance(value, Iterable) and not isinstance(value, (str, bytes)):
        ids = tuple(value)
        if set(map(type, ids)) <= {int}:  # fast: lists may be long
            return ids
        return tuple(TokenId(_integer(f"{name}[{i}]", entry)) for i, entry in enumerate(ids))
    raise InvalidRequestError(name, f"is {value!r}; it must be a token id or a list of them")
